"""Fixtures of a separate database for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from support.job_server.postgres import postgres
from support.present import present

from distkeras.job_server.store.accounts import Account, Accounts
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import open_database


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url


class ManualClock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = open_database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    yield engine
    engine.dispose()


@pytest.fixture
def accounts(engine: Engine, clock: ManualClock) -> Accounts:
    return Accounts(engine, clock)


@pytest.fixture
def store(engine: Engine, clock: ManualClock) -> JobStore:
    return JobStore(engine, clock)


@pytest.fixture
def people(accounts: Accounts) -> dict[str, Account]:
    """Return the accounts of an administrator and of two users."""
    for name, role in (("admin", "admin"), ("ann", "user"), ("ben", "user")):
        accounts.add_user(name, role)
    return {name: present(accounts.authenticate(accounts.add_token(name))) for name in ("admin", "ann", "ben")}
