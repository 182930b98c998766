"""Endpoints about users, their tokens, and what they did."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from distkeras.job_server.server.services import Call
from distkeras.job_server.store.accounts import USER


def show_me(call: Call) -> tuple[Any, int]:
    """Who calls."""
    return {"name": call.account.name, "role": call.account.role}, 200


def list_tokens(call: Call) -> tuple[Any, int]:
    """Tokens, without their secrets."""
    return {"tokens": [dataclasses.asdict(token) for token in call.services.accounts.tokens(call.account)]}, 200


def make_token(call: Call) -> tuple[Any, int]:
    """A new token."""
    user = call.body.get("user", call.account.name)
    if user != call.account.name:
        call.account.require_admin()
    days = call.body.get("days")
    expires = None if days is None else time.time() + days * 86400.0
    token = call.services.accounts.add_token(user, call.body.get("note", ""), expires)
    call.audit("make token", f"{token.split('_')[1]} of {user}")
    return {"token": token}, 201


def revoke_token(call: Call) -> tuple[Any, int]:
    """Ends a token."""
    call.services.accounts.revoke(call.account, call.path["token"])
    call.audit("revoke token", call.path["token"])
    return "", 204


def list_users(call: Call) -> tuple[Any, int]:
    """Everybody."""
    return {"users": [dataclasses.asdict(user) for user in call.services.accounts.users()]}, 200


def make_user(call: Call) -> tuple[Any, int]:
    """A new user."""
    user = call.services.accounts.add_user(call.body["name"], call.body.get("role", USER))
    call.audit("add user", f"{user.name}, {user.role}")
    return dataclasses.asdict(user), 201


def remove_user(call: Call) -> tuple[Any, int]:
    """Ends a user's tokens."""
    call.services.accounts.remove_user(call.path["user"])
    call.audit("remove user", call.path["user"])
    return "", 204


def read_audit(call: Call) -> tuple[Any, int]:
    """Who did what."""
    entries = call.services.accounts.audit(call.query.get("before"), call.query["limit"])
    more = len(entries) == call.query["limit"]
    shown = [dataclasses.asdict(entry) for entry in entries]
    return {"entries": shown, "next": entries[-1].number if more else None}, 200
