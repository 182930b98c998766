"""The tables of the database, and the connection to it."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
import uuid
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Column, ForeignKey, Index, Table
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from distkeras.ps.errors import ConfigurationError

#: What releases before 0.4.0 compare, so that they refuse the tables below: Alembic's revision counts since then.
VERSION = 6
#: The revisions of the tables of earlier releases, by what they wrote into ``distkeras_meta``.
_REVISIONS = {2: "base", 5: "0002"}
_MIGRATIONS = Path(__file__).with_name("migrations")
#: Seconds that a writer of SQLite waits for another one; that a database may take to answer, and all work in one
#: transaction; and that a caller waits for a free connection.
_BUSY, _ANSWER_SECONDS, _POOL_SECONDS = 30.0, 30.0, 15.0
#: The lock of PostgreSQL under which one server at a time changes tables.
_LOCK = 0x646B6A6F6273

METADATA = sa.MetaData()

#: Times are seconds since the epoch. ``id`` names this database: `JobFiles.bind`.
META = Table(
    "distkeras_meta",
    METADATA,
    Column("version", sa.Integer, primary_key=True, autoincrement=False),
    Column("id", sa.String(32), nullable=False),
)
USERS = Table(
    "distkeras_users",
    METADATA,
    Column("id", sa.Integer, primary_key=True),
    Column("name", sa.String(64), nullable=False, unique=True),
    Column("role", sa.String(16), nullable=False),
    Column("active", sa.Boolean, nullable=False),
    Column("created", sa.Double, nullable=False),
    sqlite_autoincrement=True,
)
#: ``parent`` is the token that made this one, and ends it when it is revoked.
TOKENS = Table(
    "distkeras_tokens",
    METADATA,
    Column("id", sa.String(16), primary_key=True),
    Column("user_id", ForeignKey(USERS.c.id), nullable=False, index=True),
    Column("digest", sa.LargeBinary(32), nullable=False),
    Column("note", sa.String(200), nullable=False),
    Column("created", sa.Double, nullable=False),
    Column("expires", sa.Double),
    Column("revoked", sa.Double),
    Column("parent", sa.String(16)),
)
#: ``summary`` is JSON: the numbers of a job that has ended.
JOBS = Table(
    "distkeras_jobs",
    METADATA,
    Column("number", sa.Integer, primary_key=True),
    Column("id", sa.String(32), nullable=False, unique=True),
    Column("user_id", ForeignKey(USERS.c.id), nullable=False),
    Column("kind", sa.String(16), nullable=False),
    Column("name", sa.String(200), nullable=False),
    Column("tags", sa.Text, nullable=False, default=""),
    Column("state", sa.String(16), nullable=False),
    Column("description", sa.Text, nullable=False),
    Column("created", sa.Double, nullable=False),
    Column("started", sa.Double),
    Column("ended", sa.Double),
    Column("attempt", sa.Integer, nullable=False),
    Column("server", sa.String(200)),
    Column("renewal", sa.Integer, nullable=False, default=0),
    Column("driver", sa.String(64)),
    Column("cancel", sa.Double),
    Column("error", sa.Text),
    Column("summary", sa.Text),
    Column("mlflow_run", sa.Text),
    Column("bytes", sa.BigInteger, nullable=False),
    Index("distkeras_jobs_by_user", "user_id", "number"),
    Index("distkeras_jobs_by_state", "state", "number"),
    sqlite_autoincrement=True,
)
ATTEMPTS = Table(
    "distkeras_attempts",
    METADATA,
    Column("job", ForeignKey(JOBS.c.number, ondelete="CASCADE"), primary_key=True),
    Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    Column("started", sa.Double, nullable=False),
    Column("ended", sa.Double),
    Column("outcome", sa.Text),
)
AUDIT = Table(
    "distkeras_audit",
    METADATA,
    Column("number", sa.Integer, primary_key=True),
    Column("time", sa.Double, nullable=False),
    Column("user", sa.String(64), nullable=False),
    Column("address", sa.String(64), nullable=False),
    Column("action", sa.String(32), nullable=False),
    Column("subject", sa.String(200), nullable=False),
    sqlite_autoincrement=True,
)


def open_database(url: str) -> sa.Engine:
    """Open a database, and create its tables, or change those of an earlier release."""
    try:
        parsed = sa.make_url(url)
        url_shown = parsed.render_as_string(hide_password=True)
    except ArgumentError:
        raise ConfigurationError(
            f"`database` must be a URL of SQLAlchemy. Received: {len(url)} characters without a scheme, such as sqlite://"
        ) from None
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError(f"`database` must be a file, because threads share it. Received: {url_shown}")
    options: dict[str, Any] = {"timeout": _BUSY} if is_sqlite else {}
    if "psycopg" in parsed.drivername:
        options = {"connect_timeout": int(_ANSWER_SECONDS)}
    try:
        if is_sqlite:  # other users must not read it: it has everyone's jobs
            os.close(os.open(str(parsed.database), os.O_CREAT | os.O_RDWR, 0o600))
        engine = sa.create_engine(parsed, connect_args=options, pool_timeout=_POOL_SECONDS)
        if is_sqlite:
            sa.event.listen(engine, "connect", _prepare_sqlite)
        else:
            sa.event.listen(engine, "checkout", _begin_deadline)
            sa.event.listen(engine, "checkin", lambda _connection, record: record.info.pop("deadline").cancel())
        try:
            with engine.begin() as connection:
                _prepare_tables(connection)
        except BaseException:
            engine.dispose()
            raise
    except (OSError, SQLAlchemyError, ImportError, CommandError) as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(f"`database` must be one that opens. Received: {url_shown}: {text}") from error
    return engine


def database_id(engine: sa.Engine) -> str:
    """Return the name that the database was given when its tables were created."""
    with engine.connect() as connection:
        return str(connection.execute(sa.select(META.c.id)).scalar_one())


def _prepare_tables(connection: sa.Connection) -> None:
    """Create the tables, or migrate them, while other servers that start wait."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    elif connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    if not sa.inspect(connection).has_table(META.name):
        METADATA.create_all(connection)
        connection.execute(sa.insert(META).values(version=VERSION, id=uuid.uuid4().hex))
        command.stamp(config, "head")
        return
    version = connection.execute(sa.select(META.c.version)).scalar_one()
    if version in _REVISIONS:
        command.stamp(config, _REVISIONS[version])
    elif version != VERSION:
        raise CommandError(f"tables of version {version}, which no release of distkeras up to this one has")
    command.upgrade(config, "head")


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    """Allow readers and a writer at the same time, and make commits durable in a crash of the machine."""
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_deadline(connection: Any, record: Any, _proxy: Any) -> None:
    """Let a connection that is used end: no driver limits how long it waits for the answer of a database that hangs."""
    timer = threading.Timer(_ANSWER_SECONDS, _cut, [connection])
    timer.daemon = True
    timer.start()
    record.info["deadline"] = timer


def _cut(connection: Any) -> None:
    """Shut down a connection's socket, so that the wait for an answer ends with an error of the driver."""
    # The driver may have closed it already, or its connections have no `fileno`.
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
