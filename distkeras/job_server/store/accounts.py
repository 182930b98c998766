"""Users, their tokens, and the audit log.

A token is ``dk_ID_SECRET``. The database has only the secret's SHA-256: the secret is 256 random bits, which no search
finds, so that a slow hash would add nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError

from distkeras.job_server.errors import ForbiddenError, NotFoundError, StateError
from distkeras.job_server.store.tables import AUDIT, TOKENS, USERS

#: ``metrics`` may read the server's numbers and nothing else.
USER, ADMIN, METRICS = "user", "admin", "metrics"
#: The valid names of users.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

_TOKEN = re.compile(r"dk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_Info = TypeVar("_Info", bound=BaseModel)


@dataclass(frozen=True)
class Account:
    """The user of a request."""

    id: int  # in the database
    name: str
    role: str
    expires: float | None = None  # when their token expires, in seconds since the epoch; None: never
    token: str | None = None  # the id of their token

    @property
    def is_admin(self) -> bool:
        """Return whether the user may see and cancel all jobs."""
        return self.role == ADMIN

    def require(self, *roles: str) -> None:
        """Raise ForbiddenError unless the account has one of these roles."""
        if self.role not in roles:
            raise ForbiddenError(f"this is for the roles {' and '.join(roles)}. Received: {self.role}")


class TokenInfo(BaseModel, frozen=True):
    """A token without its secret; times are seconds since the epoch."""

    id: str
    user: str
    note: str
    created: float
    expires: float | None
    revoked: float | None


class UserInfo(BaseModel, frozen=True):
    """The public facts about a user."""

    name: str
    role: str
    active: bool
    created: float


class AuditEntry(BaseModel, frozen=True):
    """An entry of the audit log: user, action and address; ``number`` rises."""

    number: int
    time: float
    user: str
    address: str
    action: str
    subject: str


class Accounts:
    """Users, tokens and the audit log; thread-safe. ``clock`` returns seconds since the epoch."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._clock = engine, clock

    def bootstrap(self) -> str | None:
        """Create a first administrator if there is no user yet, and return their token; else return None."""
        if self.users():
            return None
        try:
            self.add_user(ADMIN, ADMIN)
        except StateError:
            return None  # another server was first
        return self.add_token(ADMIN, "first token")

    def rescue(self) -> str:
        """Return a new token of the user `ADMIN`, who is an administrator from now on."""
        with contextlib.suppress(StateError):
            self.add_user(ADMIN, ADMIN)
        with self._engine.begin() as connection:
            connection.execute(sa.update(USERS).where(USERS.c.name == ADMIN).values(active=True, role=ADMIN))
        return self.add_token(ADMIN, "made on the server's machine")

    def add_user(self, name: str, role: str = USER) -> UserInfo:
        """Add a user, without a token; StateError for a taken name. The endpoint checks the arguments."""
        added = UserInfo(name=name, role=role, active=True, created=self._clock())
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(USERS).values(added.model_dump()))
        except IntegrityError:
            raise StateError(f"there is already a user {name}; choose another name") from None
        return added

    def users(self) -> list[UserInfo]:
        """Return all users, by name."""
        return self._read(UserInfo, sa.select(USERS).order_by(USERS.c.name))

    def remove_user(self, name: str) -> None:
        """Revoke a user's tokens; their jobs stay. NotFoundError if unknown, StateError for the last administrator."""
        with self._engine.begin() as connection:
            user = self._set_active(connection, name, active=False)
            self._revoke(connection, TOKENS.c.user_id == user, f"{name} cannot be removed")

    def reinstate_user(self, name: str) -> None:
        """Let a removed user have tokens again; the old ones stay revoked. NotFoundError if unknown."""
        with self._engine.begin() as connection:
            self._set_active(connection, name, active=True)

    def _set_active(self, connection: sa.Connection, name: str, *, active: bool) -> int:
        """Return the id of a user."""
        connection.execute(sa.update(USERS).where(USERS.c.name == name).values(active=active))
        user: int | None = connection.execute(sa.select(USERS.c.id).where(USERS.c.name == name)).scalar()
        if user is None:
            raise NotFoundError(f"there is no user {name}")
        return user

    def _revoke(self, connection: sa.Connection, which: sa.ColumnElement[bool], refusal: str) -> None:
        """Revoke tokens; StateError, which undoes the transaction, if no administrator would have a valid one."""
        now = self._clock()
        connection.execute(sa.update(TOKENS).where(which, TOKENS.c.revoked.is_(None)).values(revoked=now))
        valid = TOKENS.c.revoked.is_(None) & sa.or_(TOKENS.c.expires.is_(None), TOKENS.c.expires > now)
        theirs = sa.select(TOKENS.c.id).join(USERS).where(USERS.c.role == ADMIN, USERS.c.active, valid)
        if connection.execute(theirs.limit(1)).first() is None:
            raise StateError(f"{refusal}: no administrator would have a valid token; make one for another of them")

    def add_token(self, user: str, note: str = "", expires: float | None = None, *, parent: str | None = None) -> str:
        """Return a new token, which is shown only here."""
        token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        values: dict[str, object] = {"id": token_id, "digest": _digest(secret), "note": note[:200], "parent": parent}
        with self._engine.begin() as connection:
            active = sa.select(USERS.c.id).where(USERS.c.name == user, USERS.c.active)
            values |= {"user_id": connection.execute(active).scalar(), "created": self._clock(), "expires": expires}
            if values["user_id"] is None:
                raise NotFoundError(f"there is no user {user}, or they were removed")
            connection.execute(sa.insert(TOKENS).values(values))
        return f"dk_{token_id}_{secret}"

    def tokens(self, viewer: Account) -> list[TokenInfo]:
        """Return the viewer's tokens, or all for an administrator, the oldest first."""
        query = sa.select(TOKENS, USERS.c.name.label("user")).join(USERS).order_by(TOKENS.c.created, TOKENS.c.id)
        return self._read(TokenInfo, query.where(seen_by(viewer, TOKENS)))

    def revoke(self, viewer: Account, token_id: str, *, alone: bool = False) -> None:
        """Revoke a token, and the tokens that it has made, and those that these have made."""
        first = sa.select(TOKENS.c.id).where(TOKENS.c.id == token_id, seen_by(viewer, TOKENS))
        made = first.cte(recursive=True)
        made = made.union(sa.select(TOKENS.c.id).join(made, TOKENS.c.parent == made.c.id))
        with self._engine.begin() as connection:
            ids = list(connection.execute(first if alone else sa.select(made.c.id)).scalars())
            if not ids:
                raise NotFoundError(f"there is no token {token_id}, or it belongs to another user")
            self._revoke(connection, TOKENS.c.id.in_(ids), f"token {token_id} cannot be revoked")

    def authenticate(self, token: str) -> Account | None:
        """Return the user of a token; None if it is not valid."""
        token_id, secret = parts.groups() if (parts := _TOKEN.fullmatch(token)) else ("", "")
        query = sa.select(TOKENS, USERS.c.name, USERS.c.role, USERS.c.active).join(USERS)
        with self._engine.connect() as connection:
            row = connection.execute(query.where(TOKENS.c.id == token_id)).first()
        # The digest of an unknown token is compared too, so that its check takes as long as that of a known one.
        known = hmac.compare_digest(_digest(secret), row.digest if row else _digest(""))
        if row is None or not known or row.revoked is not None or not row.active:
            return None
        if row.expires is not None and row.expires <= self._clock():
            return None
        return Account(row.user_id, row.name, row.role, row.expires, row.id)

    def record(self, user: str, address: str, action: str, subject: str = "") -> None:
        """Add an entry to the audit log."""
        values = {"user": user[:64], "address": address[:64], "action": action[:32], "subject": subject[:200]}
        with self._engine.begin() as connection:
            connection.execute(sa.insert(AUDIT).values(time=self._clock(), **values))

    def audit(self, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """Return entries of the audit log with numbers below ``before``, the latest first."""
        query = sa.select(AUDIT).order_by(AUDIT.c.number.desc()).limit(limit)
        return self._read(AuditEntry, query if before is None else query.where(AUDIT.c.number < before))

    def _read(self, kind: type[_Info], query: sa.Select[tuple[object, ...]]) -> list[_Info]:
        with self._engine.connect() as connection:
            return [kind.model_validate(dict(row)) for row in connection.execute(query).mappings()]


def seen_by(viewer: Account, table: sa.Table) -> sa.ColumnElement[bool]:
    """Return the condition on the rows of ``table`` that the viewer sees: their own, or all for an administrator."""
    return sa.true() if viewer.is_admin else table.c.user_id == viewer.id


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
