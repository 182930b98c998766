"""Fixtures that run the tests of the store on SQLite, and in slow tests on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from distkeras.job_server.store.tables import METADATA, open_database


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    else:
        url = request.getfixturevalue("postgres_url")
    engine = open_database(url)
    yield engine
    if request.param == "postgresql":
        METADATA.drop_all(engine)
    engine.dispose()


@pytest.fixture
def sqlite_files(engine: Engine, tmp_path: Path) -> list[Path]:
    """Return the database's files, if it is SQLite."""
    if engine.dialect.name != "sqlite":
        pytest.skip("of SQLite")
    return [path for path in tmp_path.iterdir() if path.name.startswith("jobs.sqlite")]
