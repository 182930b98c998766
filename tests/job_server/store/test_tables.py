"""Tests of the database: its tables in each release, and calls that it does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, select, text
from sqlalchemy.exc import OperationalError
from support.patience import brief, patience
from support.present import present

from distkeras.job_server.store import tables
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import META, METADATA, VERSION, database_id, open_database
from distkeras.ps.errors import ConfigurationError

#: The tables of release 0.2.0, as SQLite has them, with a user, their token and an ended job.
RELEASE_0_2 = """
CREATE TABLE distkeras_meta (version INTEGER NOT NULL, PRIMARY KEY (version));
CREATE TABLE distkeras_users (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, name VARCHAR(64) NOT NULL,
    role VARCHAR(16) NOT NULL, active BOOLEAN NOT NULL, created DOUBLE NOT NULL, UNIQUE (name));
CREATE TABLE distkeras_tokens (id VARCHAR(16) NOT NULL, user_id INTEGER NOT NULL, digest BLOB NOT NULL,
    note VARCHAR(200) NOT NULL, created DOUBLE NOT NULL, expires DOUBLE, revoked DOUBLE, PRIMARY KEY (id),
    FOREIGN KEY(user_id) REFERENCES distkeras_users (id));
CREATE INDEX ix_distkeras_tokens_user_id ON distkeras_tokens (user_id);
CREATE TABLE distkeras_jobs (number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, id VARCHAR(32) NOT NULL,
    user_id INTEGER NOT NULL, kind VARCHAR(16) NOT NULL, name VARCHAR(200) NOT NULL, state VARCHAR(16) NOT NULL,
    description TEXT NOT NULL, created DOUBLE NOT NULL, started DOUBLE, ended DOUBLE, attempt INTEGER NOT NULL,
    server VARCHAR(200), driver VARCHAR(64), cancel DOUBLE, error TEXT, bytes BIGINT NOT NULL, UNIQUE (id),
    FOREIGN KEY(user_id) REFERENCES distkeras_users (id));
CREATE INDEX distkeras_jobs_by_state ON distkeras_jobs (state, number);
CREATE INDEX distkeras_jobs_by_user ON distkeras_jobs (user_id, number);
CREATE TABLE distkeras_audit (number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, time DOUBLE NOT NULL,
    "user" VARCHAR(64) NOT NULL, address VARCHAR(64) NOT NULL, action VARCHAR(32) NOT NULL,
    subject VARCHAR(200) NOT NULL);
INSERT INTO distkeras_meta VALUES (2);
INSERT INTO distkeras_users VALUES (1, 'admin', 'admin', 1, 1.5);
INSERT INTO distkeras_tokens VALUES ('0123456789abcdef', 1,
    x'2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b', 'laptop', 1.5, NULL, NULL);
INSERT INTO distkeras_jobs VALUES (1, 'a', 1, 'train', 'first', 'done', '{"rule": "agn"}', 1.5, 2.5, 3.5, 1,
    NULL, NULL, NULL, NULL, 12);
"""


def old_database(folder: Path, release: str) -> str:
    """Make a database of a release; return its URL."""
    url = f"sqlite:///{folder / 'jobs.sqlite'}"
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in filter(str.strip, RELEASE_0_2.split(";")):
            connection.execute(text(statement))
    if release == "0.3.0":
        with engine.begin() as connection:
            config = Config()
            config.set_main_option("script_location", str(Path(tables.__file__).with_name("migrations")))
            config.attributes["connection"] = connection
            command.upgrade(config, "0002")
            connection.execute(text("UPDATE distkeras_meta SET version = 5"))
            connection.execute(text("UPDATE distkeras_jobs SET tags = ' a ', tries = 2"))
            connection.execute(text("DROP TABLE distkeras_revision"))  # which that release did not have
    engine.dispose()
    return url


def differences(engine: Engine) -> list[object]:
    """Return how the tables of a database differ from those of a new one."""
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), METADATA)
    return [change for change in found if "distkeras_revision" not in str(change)]


@pytest.mark.parametrize("release", ["0.2.0", "0.3.0"])
def test_a_database_of_an_earlier_release_keeps_all_that_it_has(tmp_path: Path, release: str) -> None:
    url = old_database(tmp_path, release)
    engine = open_database(url)
    assert not differences(engine)
    assert database_id(engine)
    accounts, store = Accounts(engine), JobStore(engine)
    admin = present(accounts.authenticate(accounts.add_token("admin")))
    token = accounts.tokens(admin)[0]
    assert (token.id, token.user, token.note, token.revoked) == ("0123456789abcdef", "admin", "laptop", None)
    (job,) = store.page(admin)
    tags = ["a"] if release == "0.3.0" else []
    assert (job.id, job.name, job.state, job.tags, job.summary, job.bytes) == ("a", "first", "done", tags, None, 12)
    assert store.attempts(job) == []
    again, before = open_database(url), database_id(engine)
    assert database_id(again) == before
    for opened in (engine, again):
        opened.dispose()


def test_a_new_database_has_the_tables_that_the_migrations_make(engine: Engine) -> None:
    assert not differences(engine)


def test_servers_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    url, names, failures = old_database(tmp_path, "0.2.0"), [], []

    def start() -> None:
        try:
            engine = open_database(url)
            names.append(database_id(engine))
            engine.dispose()
        except Exception as error:  # noqa: BLE001 - any error is a failure of the test
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert not failures
    assert len(names) == 4
    assert len(set(names)) == 1


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda engine: META.update().values(version=99), "version 99"),
        (lambda engine: text("UPDATE distkeras_revision SET version_num = '9999'"), "9999"),
    ],
)
def test_a_database_of_a_later_release_is_refused(
    engine: Engine, change: Callable[[Engine], object], received: str
) -> None:
    with engine.begin() as connection:
        connection.execute(change(engine))  # type: ignore[call-overload]  # one of two kinds of statements
    with pytest.raises(ConfigurationError, match=received):
        open_database(engine.url.render_as_string(hide_password=False))
    with engine.begin() as connection:
        connection.execute(META.update().values(version=VERSION))
        connection.execute(text("UPDATE distkeras_revision SET version_num = '0003'"))


@pytest.mark.slow
def test_a_call_that_the_database_does_not_answer_ends(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_ANSWER_SECONDS", brief(1.0))
    engine = open_database(postgres_url)
    began = time.monotonic()
    with pytest.raises(OperationalError), engine.connect() as connection:
        connection.execute(text("SELECT pg_sleep(600)"))
    assert time.monotonic() - began < patience(30)
    with engine.connect() as connection:  # another connection works
        assert connection.execute(select(1)).scalar_one() == 1
    assert META.name in inspect(engine).get_table_names()
    METADATA.drop_all(engine)
    engine.dispose()
