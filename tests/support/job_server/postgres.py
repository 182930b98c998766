"""A temporary PostgreSQL server, if one is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.patience import patience, until


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of an empty database on loopback, with a password."""
    pytest.importorskip("psycopg")
    path = os.pathsep.join([os.environ["PATH"], *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin")))])
    programs = {name: shutil.which(name, path=path) for name in ("initdb", "postgres")}
    if None in programs.values():
        pytest.skip("no PostgreSQL is installed")
    other: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="distkeras-postgres-"))
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root.
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("no user for PostgreSQL")
        os.chown(folder, user.pw_uid, user.pw_gid)
        other = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    (folder / "password").write_text("secret")
    (folder / "password").chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = ["-D", str(folder / "data")]
    how = ["-U", "ann", "-A", "scram-sha-256", f"--pwfile={folder / 'password'}", "--no-sync"]
    quiet: dict[str, Any] = {"cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | other
    subprocess.run([str(programs["initdb"]), *place, *how], check=True, timeout=patience(120), **quiet)
    server = subprocess.Popen(
        [str(programs["postgres"]), *place, "-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-F"], **quiet
    )
    try:
        until(lambda: _accepts(f"postgresql://ann:secret@127.0.0.1:{port}/postgres"))
        yield f"postgresql+psycopg://ann:secret@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)  # ends also what a query still does
        server.wait(patience(60))
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(url: str) -> bool:
    """Return whether the server accepts connections: its port listens before it does."""
    psycopg = pytest.importorskip("psycopg")
    try:
        psycopg.connect(url, connect_timeout=int(patience(5))).close()
    except psycopg.OperationalError:
        return False
    return True
