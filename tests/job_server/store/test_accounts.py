from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from job_server.conftest import ManualClock
from pydantic import ValidationError
from support.present import present

from distkeras.job_server.errors import ForbiddenError, NotFoundError, StateError
from distkeras.job_server.server.endpoints import UserRequest
from distkeras.job_server.store.accounts import Account, Accounts
from distkeras.job_server.store.tables import open_database
from distkeras.ps.errors import ConfigurationError


def token_id(token: str) -> str:
    return token.split("_")[1]


def test_a_token_authenticates_its_user(accounts: Accounts) -> None:
    accounts.add_user("ann")
    token = accounts.add_token("ann", "laptop")
    assert accounts.authenticate(token) == Account(1, "ann", "user", token=token.split("_")[1])


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
    with pytest.raises(StateError, match="no administrator would have a valid token"):
        accounts.remove_user("admin")
    assert accounts.authenticate(accounts.add_token("admin")) is not None
    with pytest.raises(NotFoundError):
        accounts.remove_user("nobody")


def test_the_last_valid_token_of_an_administrator_cannot_be_revoked(
    accounts: Accounts, people: dict[str, Account], clock: ManualClock
) -> None:
    admin, expiring = people["admin"], accounts.add_token("admin", expires=clock.now + 10)
    clock.now += 20
    with pytest.raises(StateError, match="no administrator would have a valid token"):
        accounts.revoke(admin, present(admin.token))
    accounts.add_user("eve", "admin")
    other = present(accounts.authenticate(accounts.add_token("eve")))
    accounts.revoke(other, present(admin.token))
    assert accounts.authenticate(expiring) is None
    accounts.remove_user("admin")


def test_a_revoked_token_ends_the_tokens_that_it_has_made(accounts: Accounts, people: dict[str, Account]) -> None:
    made = accounts.add_token("ann", parent=people["ann"].token)
    of_made = accounts.add_token("ann", parent=made.split("_")[1])
    other = accounts.add_token("ann")
    accounts.revoke(people["ann"], present(people["ann"].token), alone=True)
    assert [accounts.authenticate(token) is not None for token in (made, of_made, other)] == [True, True, True]
    accounts.revoke(people["ann"], present(people["ann"].token))
    assert [accounts.authenticate(token) is not None for token in (made, of_made, other)] == [False, False, True]


def test_a_removed_user_is_reinstated_without_the_old_tokens(accounts: Accounts, people: dict[str, Account]) -> None:
    token = accounts.add_token("ann")
    accounts.remove_user("ann")
    accounts.reinstate_user("ann")
    assert accounts.authenticate(token) is None
    assert present(accounts.authenticate(accounts.add_token("ann"))).id == people["ann"].id
    with pytest.raises(NotFoundError):
        accounts.reinstate_user("nobody")


def test_a_lost_administrator_is_replaced(accounts: Accounts) -> None:
    first = present(accounts.authenticate(accounts.rescue()))
    assert (first.name, first.is_admin) == ("admin", True)
    accounts.add_user("eve", "admin")
    accounts.add_token("eve")
    accounts.remove_user("admin")
    second = present(accounts.authenticate(accounts.rescue()))
    assert (second.id, second.is_admin) == (first.id, True)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "é", "a" * 65, "../a"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        UserRequest(name=name)


def test_a_role_is_known_and_a_name_is_free(accounts: Accounts) -> None:
    with pytest.raises(ValidationError, match="role"):
        UserRequest.model_validate({"name": "ben", "role": "root"})
    accounts.add_user("ann")
    with pytest.raises(StateError):
        accounts.add_user("ann")


def test_the_first_administrator_is_created_once(accounts: Accounts) -> None:
    token = present(accounts.bootstrap())
    assert present(accounts.authenticate(token)).is_admin
    assert accounts.bootstrap() is None


def test_a_role_is_required(people: dict[str, Account]) -> None:
    people["admin"].require("admin")
    with pytest.raises(ForbiddenError, match="admin"):
        people["ann"].require("admin")


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
