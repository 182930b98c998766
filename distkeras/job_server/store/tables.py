"""The tables of the database, and the connection to it."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    insert,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError

from distkeras.ps.errors import ConfigurationError

#: The version of the tables below; a database with another one is refused.
VERSION = 5
#: Seconds that a writer of SQLite waits for another one.
_BUSY = 30.0

METADATA = MetaData()

#: Times are seconds since the epoch.
META = Table("distkeras_meta", METADATA, Column("version", Integer, primary_key=True, autoincrement=False))
USERS = Table(
    "distkeras_users",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("active", Boolean, nullable=False),
    Column("created", Double, nullable=False),
    sqlite_autoincrement=True,
)
TOKENS = Table(
    "distkeras_tokens",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("user_id", ForeignKey(USERS.c.id), nullable=False, index=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("note", String(200), nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),
    Column("revoked", Double),
)
JOBS = Table(
    "distkeras_jobs",
    METADATA,
    Column("number", Integer, primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("user_id", ForeignKey(USERS.c.id), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("name", String(200), nullable=False),
    Column("tags", Text, nullable=False, default=""),
    Column("state", String(16), nullable=False),
    Column("description", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("attempt", Integer, nullable=False),
    Column("server", String(200)),
    Column("renewal", Integer, nullable=False, default=0),
    Column("driver", String(64)),
    Column("cancel", Double),
    Column("error", Text),
    Column("webhook", Text),
    Column("tries", Integer, nullable=False, default=0),
    Column("notify", Double),
    Column("bytes", BigInteger, nullable=False),
    Index("distkeras_jobs_by_user", "user_id", "number"),
    Index("distkeras_jobs_by_state", "state", "number"),
    sqlite_autoincrement=True,
)
ATTEMPTS = Table(
    "distkeras_attempts",
    METADATA,
    Column("job", ForeignKey(JOBS.c.number, ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("outcome", Text),
)
AUDIT = Table(
    "distkeras_audit",
    METADATA,
    Column("number", Integer, primary_key=True),
    Column("time", Double, nullable=False),
    Column("user", String(64), nullable=False),
    Column("address", String(64), nullable=False),
    Column("action", String(32), nullable=False),
    Column("subject", String(200), nullable=False),
    sqlite_autoincrement=True,
)


def open_database(url: str) -> Engine:
    """Open a database, and create its tables if there are none.

    Args:
        url: of SQLAlchemy, such as ``sqlite:////var/lib/distkeras/jobs.sqlite`` or ``postgresql+psycopg://host/name``.

    Raises:
        ConfigurationError: it cannot be opened, or its tables are of another version.
    """
    try:
        parsed = make_url(url)
        url_shown = parsed.render_as_string(hide_password=True)
    except ArgumentError:
        raise ConfigurationError("`database` must be a URL of SQLAlchemy. Received: something else") from None
    try:
        if parsed.get_backend_name() == "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise ConfigurationError(f"`database` must be a file, because threads share it. Received: {url_shown}")
            # Other users must not read it: it has everyone's jobs.
            os.close(os.open(Path(parsed.database), os.O_CREAT | os.O_RDWR, 0o600))
            engine = create_engine(parsed, connect_args={"timeout": _BUSY})
            event.listen(engine, "connect", _prepare_sqlite)
        else:
            engine = create_engine(parsed, pool_pre_ping=True)
        version = _create_tables(engine)
    except (OSError, SQLAlchemyError, ImportError) as error:
        text = str(error).partition("\n")[0]
        raise ConfigurationError(f"`database` must be one that opens. Received: {url_shown}: {text}") from error
    if version != VERSION:
        engine.dispose()
        raise ConfigurationError(
            f"`database` must have tables of version {VERSION}. Received: {version}, in {url_shown}"
        )
    return engine


def _create_tables(engine: Engine) -> int:
    """Create missing tables, perhaps at the same time as another server, and return the version of the tables."""
    try:
        METADATA.create_all(engine)
    except DBAPIError:
        METADATA.create_all(engine)  # the other server has created them, or this raises the error
    try:
        with engine.begin() as connection:
            if connection.execute(select(META.c.version)).first() is None:
                connection.execute(insert(META).values(version=VERSION))
    except IntegrityError:
        pass  # the other server was first
    with engine.connect() as connection:
        return int(connection.execute(select(META.c.version)).scalar_one())


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    """Allow readers and a writer at the same time, and make commits durable in a crash of the machine."""
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()
