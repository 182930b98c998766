"""``distkeras serve``: the process of the job server, and its command line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import stat
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

from distkeras.job_server.connection import is_loopback
from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.runner.processes import machine_memory
from distkeras.job_server.runner.runner import JobRunner, RunnerSettings
from distkeras.job_server.server.app import create_app
from distkeras.job_server.server.listener import HttpListener
from distkeras.job_server.server.services import Services, ServiceSettings, data_roots
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore, Quota
from distkeras.job_server.store.tables import database_id, open_database
from distkeras.ps.errors import ConfigurationError

log = logging.getLogger(__name__)

PORT = 8571
#: The environment variable with the database's URL: other users could read a password on the command line.
DATABASE = "DISTKERAS_JOBS_DATABASE"
_LOG_LINE = "%(asctime)s %(levelname)s %(message)s"
_MEGABYTE, _HOUR, _DAY = 1 << 20, 3600.0, 86400.0
#: The signals that end the server.
_ENDING = (signal.SIGTERM, signal.SIGINT)
#: Seconds that the check of the jobs in progress may take to end.
_LAST_CHECK_SECONDS = 30.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve`."""
    add = parser.add_argument

    def several(flag: str, metavar: str, text: str) -> None:
        add(flag, action="append", default=[], metavar=metavar, help=f"{text}; repeatable")

    add(
        "--folder",
        type=Path,
        default=Path("distkeras-jobs"),
        help="the server's folder, with database, files and first token (%(default)s)",
    )
    several("--data", "PLACE", "folder or URI that jobs may read")
    several("--output", "PLACE", "folder or URI that predict jobs may write to")
    add("--master", default="local[*,4]", help="Spark's master (default: %(default)s)")
    several("--conf", "NAME=VALUE", "Spark setting for all jobs")
    add("--slots", type=int, default=1, help="number of jobs that run at a time (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    add("--port", type=int, default=PORT, help="port to bind; 0: any free port (default: %(default)s)")
    add(
        "--trusted-proxy",
        metavar="ADDRESS",
        help="address of the reverse proxy that adds TLS and forwards the caller's address",
    )
    add("--plain-http", action="store_true", help="allow an address that other machines can reach, without TLS")
    add("--database", metavar="URL", help=f"SQLAlchemy URL (default: {DATABASE}, or a SQLite file in --folder)")
    add("--files", type=Path, help="folder of the jobs' files, for all servers of a database (default: in --folder)")
    add("--attempts", type=int, default=3, metavar="N", help="most drivers that are started for one job (default: 3)")
    add("--log-format", choices=["text", "json"], default="text", help="form of the server's own log (%(default)s)")
    add(
        "--new-admin-token",
        action="store_true",
        help="write a new token of the user admin, who becomes an administrator, to admin.token in --folder, and end",
    )
    _add_limits(parser.add_argument_group("limits"))


def _add_limits(limits: Any) -> None:
    add = limits.add_argument
    add("--upload-max", type=int, default=512, metavar="MB", help="largest size of a model (default: %(default)s)")
    add(
        "--user-max",
        type=int,
        default=20_480,
        metavar="MB",
        help="largest size of a user's jobs (default: %(default)s)",
    )
    add("--queued-max", type=int, default=1000, metavar="N", help="most waiting jobs of a user (default: %(default)s)")
    add(
        "--disk-reserve",
        type=int,
        default=1024,
        metavar="MB",
        help="free disk space required to accept or start a job (1024)",
    )
    add("--hours-max", type=float, metavar="N", help="longest run of one driver (default: no limit)")
    add(
        "--memory-max",
        type=int,
        metavar="MB",
        help="largest memory of one job's processes on this machine (default: 3/4 of the memory, divided by the slots)",
    )
    add(
        "--log-max",
        type=int,
        default=64,
        metavar="MB",
        help="largest size of a job's log; the latest output is kept (%(default)s)",
    )
    add("--retention-days", type=float, metavar="N", help="days to keep an ended job (default: no limit)")


class JobServer:
    """The job server. The constructor binds its port; `run` serves until a signal ends it."""

    def __init__(self, options: argparse.Namespace) -> None:
        if not (is_loopback(options.host) or options.trusted_proxy or options.plain_http):
            raise ConfigurationError(
                "`--host` must be a loopback address, unless a reverse proxy adds TLS (`--trusted-proxy`), or "
                f"`--plain-http` allows unencrypted tokens. Received: --host {options.host}"
            )
        runner = RunnerSettings(
            slots=options.slots,
            master=options.master,
            config=_config(options.conf),
            attempts_max=options.attempts,
            run_max=None if options.hours_max is None else options.hours_max * _HOUR,
            log_max=options.log_max * _MEGABYTE,
            retention=None if options.retention_days is None else options.retention_days * _DAY,
            reserve=options.disk_reserve * _MEGABYTE,
            memory_max=_memory_max(options),
        )
        settings = ServiceSettings(
            data=data_roots(options.data),
            output=data_roots(options.output),
            upload_max=options.upload_max * _MEGABYTE,
            reserve=options.disk_reserve * _MEGABYTE,
            quota=Quota(options.user_max * _MEGABYTE, options.queued_max),
            private=[options.folder.absolute()],
        )
        self._folder = _private(options.folder)
        self._engine = open_database(_database_of(options, self._folder))
        files = JobFiles(options.files or self._folder / "files")
        files.bind(database_id(self._engine), JobStore(self._engine).is_known)
        tempfile.tempdir = str(files.temporary())  # uploads are received on the disk of the jobs' files
        jobs = JobStore(self._engine)
        self._runner = JobRunner(jobs, files, runner)
        services = Services(Accounts(self._engine), jobs, files, settings, self._runner.silence)
        _write_token(self._folder, services.accounts.bootstrap())
        self._host = options.host
        self._http = HttpListener(
            create_app(services),
            options.host,
            options.port,
            upload_max=settings.upload_max + _MEGABYTE * 2,
            trusted_proxy=options.trusted_proxy,
        )
        self._stop = Event()

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._http.port}"

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
    handler.setFormatter(_JsonLines() if options.log_format == "json" else logging.Formatter(_LOG_LINE))
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
    """Formats each record as a line of JSON."""

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


def _write_token(folder: Path, token: str | None) -> None:
    """Write an administrator's token to a file that only this process' user can read; None: there is none to write."""
    if token is None:
        return
    path = folder / "admin.token"
    path.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    path.write_text(token + "\n")
    log.info("an administrator's token is in %s", path)


def _database_of(options: argparse.Namespace, folder: Path) -> str:
    return str(options.database or os.environ.get(DATABASE) or f"sqlite:///{folder / 'jobs.sqlite'}")


def _memory_max(options: argparse.Namespace) -> int:
    megabytes: int | None = options.memory_max
    return machine_memory() * 3 // 4 // max(1, options.slots) if megabytes is None else megabytes * _MEGABYTE


def _private(folder: Path) -> Path:
    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"`--folder` must be a folder to write to. Received: {folder}: {error}") from error
    if not any(folder.iterdir()):
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")  # the folder has a token, and may be in a checkout
    return folder


def _config(pairs: Sequence[str]) -> dict[str, str]:
    config: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"`--conf` must be NAME=VALUE. Received: --conf {pair}")
        config[name] = value
    return config
