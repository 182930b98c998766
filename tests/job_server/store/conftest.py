"""The tests of the store run on SQLite, and as slow ones on PostgreSQL."""

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
    """The database's files, where it is SQLite's."""
    if engine.dialect.name != "sqlite":
        pytest.skip("of SQLite")
    return [path for path in tmp_path.iterdir() if path.name.startswith("jobs.sqlite")]
