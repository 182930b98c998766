from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from job_server.conftest import ManualClock
from sqlalchemy import Engine, update
from support.present import present

from distkeras.job_server.errors import DescriptionError, ForbiddenError, NotFoundError, StateError
from distkeras.job_server.store.accounts import Account, Accounts
from distkeras.job_server.store.tables import META, VERSION, open_database
from distkeras.ps.errors import ConfigurationError


def token_id(token: str) -> str:
    return token.split("_")[1]


def test_a_token_authenticates_its_user(accounts: Accounts) -> None:
    accounts.add_user("ann")
    token = accounts.add_token("ann", "laptop")
    assert accounts.authenticate(token) == Account(1, "ann", "user")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda token: "",
        lambda token: token[:-1],
        lambda token: token + "x",
        lambda token: token[:-1] + ("a" if token[-1] != "a" else "b"),
        lambda token: token.replace(token_id(token), "0" * 16),
        lambda token: token.upper(),
        lambda token: token.replace("_", "-"),
        lambda token: f" {token}",
        lambda token: f"dk_{token_id(token)}_{'é' * 43}",
        lambda token: f"dk_{token_id(token)}_",
    ],
)
def test_an_unknown_token_is_refused(accounts: Accounts, spoil: Callable[[str], str]) -> None:
    accounts.add_user("ann")
    assert accounts.authenticate(spoil(accounts.add_token("ann"))) is None


def test_the_database_contains_no_secret(accounts: Accounts, sqlite_files: list[Path]) -> None:
    accounts.add_user("ann")
    secret = accounts.add_token("ann").split("_", 2)[2]
    files = b"".join(path.read_bytes() for path in sqlite_files)
    assert hashlib.sha256(secret.encode()).digest() in files
    assert secret.encode() not in files


def test_only_the_owner_may_read_the_database(accounts: Accounts, sqlite_files: list[Path]) -> None:
    accounts.add_user("ann")
    assert sqlite_files
    assert [path.name for path in sqlite_files if path.stat().st_mode & 0o077] == []


def test_an_expired_token_is_refused(accounts: Accounts, clock: ManualClock) -> None:
    accounts.add_user("ann")
    token = accounts.add_token("ann", expires=clock.now + 10)
    clock.now += 9.9
    assert accounts.authenticate(token) is not None
    clock.now += 0.1
    assert accounts.authenticate(token) is None


def test_the_owner_or_an_administrator_may_revoke_a_token(accounts: Accounts, people: dict[str, Account]) -> None:
    token = accounts.add_token("ann")
    with pytest.raises(NotFoundError):
        accounts.revoke(people["ben"], token_id(token))
    assert accounts.authenticate(token) is not None
    accounts.revoke(people["ann"], token_id(token))
    assert accounts.authenticate(token) is None
    another = accounts.add_token("ann")
    accounts.revoke(people["admin"], token_id(another))
    assert accounts.authenticate(another) is None


def test_users_see_their_own_tokens_and_administrators_all(accounts: Accounts, people: dict[str, Account]) -> None:
    assert {token.user for token in accounts.tokens(people["ann"])} == {"ann"}
    assert {token.user for token in accounts.tokens(people["admin"])} == {"admin", "ann", "ben"}


def test_a_removed_users_tokens_are_invalid_and_none_is_created(accounts: Accounts, people: dict[str, Account]) -> None:
    token = accounts.add_token("ann")
    accounts.remove_user("ann")
    assert accounts.authenticate(token) is None
    with pytest.raises(NotFoundError):
        accounts.add_token("ann")
    assert [user.active for user in accounts.users()] == [True, False, True]


def test_the_last_administrator_cannot_be_removed(accounts: Accounts, people: dict[str, Account]) -> None:
    with pytest.raises(StateError, match="is the last administrator"):
        accounts.remove_user("admin")
    assert accounts.authenticate(accounts.add_token("admin")) is not None
    with pytest.raises(NotFoundError):
        accounts.remove_user("nobody")


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "é", "a" * 65, "../a"])
def test_an_invalid_name_is_refused(accounts: Accounts, name: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        accounts.add_user(name)
    assert caught.value.field == "name"
    assert pickle.loads(pickle.dumps(caught.value)).field == "name"


def test_a_name_and_a_role_are_checked(accounts: Accounts) -> None:
    accounts.add_user("ann")
    with pytest.raises(StateError):
        accounts.add_user("ann")
    with pytest.raises(DescriptionError, match="role"):
        accounts.add_user("ben", "root")


def test_the_first_administrator_is_created_once(accounts: Accounts) -> None:
    token = present(accounts.bootstrap())
    assert present(accounts.authenticate(token)).is_admin
    assert accounts.bootstrap() is None


def test_a_role_is_required(people: dict[str, Account]) -> None:
    people["admin"].require_admin()
    with pytest.raises(ForbiddenError, match="admin"):
        people["ann"].require_admin()


def test_the_audit_log_is_paged_with_the_latest_entry_first(accounts: Accounts) -> None:
    for place in range(5):
        accounts.record("ann", "127.0.0.1", "submit", str(place))
    first = accounts.audit(limit=3)
    assert [entry.subject for entry in first] == ["4", "3", "2"]
    assert [entry.subject for entry in accounts.audit(first[-1].number, 3)] == ["1", "0"]


def test_a_long_text_is_recorded_in_the_audit_log(accounts: Accounts) -> None:
    accounts.record("u" * 1000, "a" * 1000, "x" * 1000, "s" * 1000)
    assert len(accounts.audit()[0].subject) == 200


@pytest.mark.parametrize("url", ["nothing", "sqlite://", "sqlite:///:memory:", "sqlite:////nowhere/at/all/x.sqlite"])
def test_an_unreachable_database_is_an_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="database"):
        open_database(url)


def test_a_refused_database_does_not_show_its_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_database("postgresql+nothing://ann:secret@127.0.0.1/jobs")
    assert "secret" not in str(caught.value)


def test_a_database_of_another_version_is_refused(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(update(META).values(version=99))
    with pytest.raises(ConfigurationError, match=re.escape(f"version {VERSION}. Received: 99")):
        open_database(engine.url.render_as_string(hide_password=False))
