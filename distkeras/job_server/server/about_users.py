"""Endpoints about users, their tokens, and the audit log."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from flask import g
from pydantic import BaseModel, Field, create_model

from distkeras.job_server.description import Line, Submitted
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.server.endpoints import audit, endpoints, services
from distkeras.job_server.store.accounts import ADMIN, NAME, AuditEntry, TokenInfo, UserInfo

account_api, admin_api = endpoints("account"), endpoints("admin")

UserName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


MeView = create_model("MeView", name=(str, ...), role=(str, ...))
TokensView = create_model("TokensView", tokens=(list[TokenInfo], ...))
NewTokenView = create_model("NewTokenView", token=(str, ...))
UsersView = create_model("UsersView", users=(list[UserInfo], ...))
#: One page of the audit log; ``next`` is the ``before`` of the next page.
AuditView = create_model("AuditView", entries=(list[AuditEntry], ...), next=(int | None, ...))


class TokenPath(BaseModel):
    """The path of a token."""

    token: str = Field(description="The id of the token.")


class UserPath(BaseModel):
    """The path of a user."""

    user: str = Field(description="The name of the user.")


class TokenRequest(Submitted):
    """A token to make."""

    user: UserName | None = Field(None, description="The user of the token. Default: the caller.")
    note: Line = ""
    days: float | None = Field(
        None, gt=0, le=36_500, description="The days of validity. Default: as long as the caller's own token."
    )


class UserRequest(Submitted):
    """A user to add."""

    name: UserName
    role: Literal["user", "admin", "metrics"] = "user"


class AuditQuery(BaseModel):
    """Which part of the audit log to read."""

    before: int | None = Field(None, ge=1, le=2**53, description="Only entries with a smaller number.")
    limit: int = Field(100, ge=1, le=1000)


class RevokeQuery(BaseModel):
    """What to revoke."""

    alone: bool = Field(False, description="Keep the tokens that this token has made.")


@admin_api.before_request
def _require_admin() -> None:
    g.account.require(ADMIN)


@account_api.get("/me", responses={200: MeView})
def show_me() -> Any:
    """Show the caller's name and role."""
    return {"name": g.account.name, "role": g.account.role}


@account_api.get("/tokens", responses={200: TokensView})
def list_tokens() -> Any:
    """List your tokens. An administrator sees all tokens."""
    return TokensView(tokens=services().accounts.tokens(g.account)).model_dump()


@account_api.post("/tokens", responses={201: NewTokenView})
def make_token(body: TokenRequest) -> Any:
    """Make a token, which only this answer shows. An administrator may make tokens of other users."""
    user = body.user or g.account.name
    if user != g.account.name:
        g.account.require(ADMIN)
    limit = g.account.expires
    expires = limit if body.days is None else time.time() + body.days * 86400.0
    if limit is not None and expires > limit:
        raise DescriptionError(
            f"`days` must not exceed those of the caller's own token. Received: days={body.days:g}", "days"
        )
    token = services().accounts.add_token(user, body.note, expires, parent=g.account.token)
    audit("make token", f"{token.split('_')[1]} of {user}")
    return {"token": token}, 201


@account_api.delete("/tokens/<token>", responses={204: None})
def revoke_token(path: TokenPath, query: RevokeQuery) -> Any:
    """Revoke a token, and the tokens that it has made."""
    services().accounts.revoke(g.account, path.token, alone=query.alone)
    audit("revoke token", path.token)
    return "", 204


@admin_api.get("/users", responses={200: UsersView})
def list_users() -> Any:
    """List users. Only for administrators."""
    return UsersView(users=services().accounts.users()).model_dump()


@admin_api.post("/users", responses={201: UserInfo})
def make_user(body: UserRequest) -> Any:
    """Add a user, without a token. Only for administrators."""
    user = services().accounts.add_user(body.name, body.role)
    audit("add user", f"{user.name}, {user.role}")
    return user.model_dump(), 201


@admin_api.delete("/users/<user>", responses={204: None})
def remove_user(path: UserPath) -> Any:
    """Revoke all tokens of a user, whose jobs stay. Only for administrators."""
    services().accounts.remove_user(path.user)
    audit("remove user", path.user)
    return "", 204


@admin_api.post("/users/<user>/reinstate", responses={204: None})
def reinstate_user(path: UserPath) -> Any:
    """Let a removed user have tokens again; the old ones stay revoked. Only for administrators."""
    services().accounts.reinstate_user(path.user)
    audit("reinstate user", path.user)
    return "", 204


@admin_api.get("/audit", responses={200: AuditView})
def read_audit(query: AuditQuery) -> Any:
    """Read the audit log, the latest entries first. Only for administrators."""
    entries = services().accounts.audit(query.before, query.limit)
    more = len(entries) == query.limit
    return AuditView(entries=entries, next=entries[-1].number if more else None).model_dump()
