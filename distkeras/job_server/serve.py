"""``distkeras serve``: the process of the job server, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import signal
import stat
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

from distkeras.flags import name_and_value
from distkeras.job_server.client import is_loopback
from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.runner.processes import machine_memory
from distkeras.job_server.runner.runner import JobRunner
from distkeras.job_server.server.app import HttpListener, create_app
from distkeras.job_server.server.endpoints import Services
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import database_id, open_database
from distkeras.ps.errors import ConfigurationError

log = logging.getLogger(__name__)

PORT = 8571
#: The environment variable with the database's URL: other users could read a password on the command line.
DATABASE = "DISTKERAS_JOBS_DATABASE"
#: The signals that end the server.
_ENDING = (signal.SIGTERM, signal.SIGINT)
#: Seconds that the check of the jobs in progress may take to end.
_LAST_CHECK_SECONDS = 30.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`. Those of `Settings` have the names of its fields as destinations."""
    add = parser.add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    folder = Path("distkeras-jobs")
    add("--folder", type=Path, default=folder, help="folder with database, files and first token (%(default)s)")
    add("--data", **several, metavar="PLACE", type=_place, help="folder or URI that jobs may read; repeatable")
    add("--output", **several, metavar="PLACE", type=_place, help="one that predict jobs may write to; repeatable")
    add("--master", default="local[*,4]", help="Spark's master (default: %(default)s)")
    add("--conf", **several, dest="config", metavar="NAME=VALUE", type=name_and_value, help="Spark setting; repeatable")
    add("--mlflow", metavar="URI", help="tracking URI of MLflow, to which every training job logs")
    add("--slots", type=int, default=1, help="number of jobs that run at a time (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    add("--port", type=int, default=PORT, help="port to bind; 0: any free port (default: %(default)s)")
    add(
        "--trusted-proxy", metavar="ADDRESS", help="address of the reverse proxy that adds TLS and the caller's address"
    )
    add("--plain-http", action="store_true", help="allow an address that other machines can reach, without TLS")
    add("--database", metavar="URL", help=f"SQLAlchemy URL (default: {DATABASE}, or a SQLite file in --folder)")
    add("--files", type=Path, help="folder of the jobs' files, for all servers of a database (default: in --folder)")
    add(
        "--attempts", dest="attempts_max", type=int, default=3, metavar="N", help="most drivers of one job (default: 3)"
    )
    add("--log-format", choices=["text", "json"], default="text", help="form of the server's own log (%(default)s)")
    text = "write a new token of the user admin, who becomes an administrator, to admin.token in --folder, and end"
    add("--new-admin-token", action="store_true", help=text)
    add = parser.add_argument_group("limits").add_argument
    size: dict[str, Any] = {"type": _times(1 << 20, int), "metavar": "MB"}
    add("--upload-max", **size, default="512", help="largest size of a model (default: %(default)s)")
    add("--user-max", **size, dest="bytes_max", default="20480", help="largest size of a user's jobs (%(default)s)")
    add("--queued-max", type=int, default=1000, metavar="N", help="most waiting jobs of a user (default: %(default)s)")
    text = "free disk space required to accept or start a job (default: %(default)s)"
    add("--disk-reserve", **size, dest="reserve", default="1024", help=text)
    text = "longest run of one driver (default: no limit)"
    add("--hours-max", dest="run_max", type=_times(3600), metavar="N", help=text)
    text = "largest memory of one job's processes on this machine (default: 3/4 of the memory, divided by the slots)"
    add("--memory-max", **size, help=text)
    add("--log-max", **size, default="64", help="largest size of a job's log, whose end is kept (default: %(default)s)")
    text = "days to keep an ended job (default: no limit)"
    add("--retention-days", dest="retention", type=_times(86400), metavar="N", help=text)


def _times(unit: int, kind: type[float] = float) -> Callable[[str], float]:
    """Return the function that reads a number of ``kind``, in units."""

    def read(text: str) -> float:
        try:
            return kind(text) * unit
        except ValueError:
            raise argparse.ArgumentTypeError(f"it must be a number. Received: {text}") from None

    return read


def _place(text: str) -> str:
    """Return a place with an absolute path, which does not depend on a process' working directory."""
    return text if "://" in text else str(Path(text).absolute())


class JobServer:
    """The job server. The constructor binds its port; `run` serves until a signal ends it."""

    def __init__(self, options: argparse.Namespace) -> None:
        if not (is_loopback(options.host) or options.trusted_proxy or options.plain_http):
            raise ConfigurationError(
                "`--host` must be a loopback address, unless a reverse proxy adds TLS (`--trusted-proxy`), or "
                f"`--plain-http` allows unencrypted tokens. Received: --host {options.host}"
            )
        if options.mlflow and importlib.util.find_spec("mlflow") is None:
            raise ConfigurationError(
                "`--mlflow` needs MLflow: pip install 'distkeras[mlflow]'. Received: no such package"
            )
        folder = _private(options.folder)
        files = JobFiles(options.files or folder / "files")
        given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(Settings)}
        given |= {"config": dict(options.config), "private": [folder, files.root]}
        if options.memory_max is None:
            given["memory_max"] = machine_memory() * 3 // 4 // max(1, options.slots)
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        self._engine = open_database(_database_of(options, folder))
        jobs, accounts = JobStore(self._engine), Accounts(self._engine)
        files.bind(database_id(self._engine), jobs.is_known)
        tempfile.tempdir = str(files.uploads)  # uploads are received on the disk of the jobs' files
        self._runner = JobRunner(jobs, files, settings)
        if (token := accounts.bootstrap()) is not None:
            _write_token(folder, token)
        app = create_app(Services(accounts, jobs, files, settings, self._runner.silence))
        largest, proxy = app.config["MAX_CONTENT_LENGTH"], options.trusted_proxy
        self._http = HttpListener(app, options.host, options.port, upload_max=largest, trusted_proxy=proxy)
        self._stop = Event()
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{self._http.port}"

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. The drivers of jobs continue, and the next server takes them over."""
        runner = Thread(target=self._runner.run, args=(self._stop,), name="distkeras-jobs", daemon=True)
        runner.start()
        log.info("the job server listens at %s , its page is %s/dashboard", self.url, self.url)
        try:
            self._http.run()
        finally:
            self._stop.set()
            runner.join(_LAST_CHECK_SECONDS)
            self._engine.dispose()

    def drain(self) -> None:
        """Start no more jobs, and end when none of this server's jobs runs."""
        log.info("no more jobs begin here; the server ends when those that run have ended")
        self._runner.drain(lambda: os.kill(os.getpid(), signal.SIGTERM))


def serve(options: argparse.Namespace) -> int:
    """Run the server, and return the exit status."""
    os.umask(0o077)
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if options.log_format == "json" else text)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("distkeras").setLevel(logging.INFO)
    if options.new_admin_token:
        folder = _private(options.folder)
        engine = open_database(_database_of(options, folder))
        _write_token(folder, Accounts(engine).rescue())
        engine.dispose()
        return 0
    server = JobServer(options)
    signal.signal(signal.SIGUSR1, lambda *_: server.drain())
    for name in _ENDING:
        signal.signal(name, _end)
    server.run()
    return 0


def _end(_signal: int, _frame: FrameType | None) -> None:
    """Make `JobServer.run` return, which then ends what it has begun; further signals are ignored."""
    for name in _ENDING:
        signal.signal(name, signal.SIG_IGN)
    raise SystemExit(0)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return time (UTC, ISO 8601), level, logger and message, and the traceback of an error."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _write_token(folder: Path, token: str) -> None:
    """Write an administrator's token to a file that only this process' user can read."""
    path = folder / "admin.token"
    path.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    path.write_text(token + "\n")
    log.info("an administrator's token is in %s", path)


def _database_of(options: argparse.Namespace, folder: Path) -> str:
    return str(options.database or os.environ.get(DATABASE) or f"sqlite:///{folder / 'jobs.sqlite'}")


def _private(folder: Path) -> Path:
    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"`--folder` must be a folder to write to. Received: {folder}: {error}") from error
    if not any(folder.iterdir()):
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")  # the folder has a token, and may be in a checkout
    return folder
