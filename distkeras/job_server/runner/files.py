"""A job's folder: its files, by which the driver and the server communicate."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.ps.errors import ConfigurationError

log = logging.getLogger(__name__)

#: The most bytes of progress in one answer.
PIECE_MAX = 1 << 20
#: Seconds after which an upload that has not ended is removed.
_STRAY_SECONDS = 86400.0


#: What a reader finds in place of the beginning of a log.
_LEFT_OUT = "… what came before was left out\n".encode()
#: Linux' flags of `fallocate`: keep the size, and free a range.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def _disk_use(info: os.stat_result) -> int:
    """Return the bytes of a file without those that were freed."""
    return min(info.st_size, info.st_blocks * 512)


def _free_start(descriptor: int, end: int) -> bool:
    """Free the disk of a file's bytes up to ``end``, which are zeros then; return whether the system can do that."""
    library = ctypes.CDLL(None)
    fallocate = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if fallocate is None:  # not Linux
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, end) == 0)


class _Within:
    """A descriptor for the path of a file in a job's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: JobFolder, _kind: type[JobFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class JobFolder:
    """The files of one job.

    Attributes:
        sent_model: the archive that was submitted.
        model: the trained model.
        history: Parquet with a row for each mini-batch.
        commits: Parquet with a row for each commit.
        fence: the number of the first attempt that may still work.
        log: the output of the drivers and of Spark.
        progress: a line of JSON for each second of training and each event, of all attempts.
        journal: the events for a page of the job; see `distkeras.dashboard.journal`.
        begun: exists after a predict job has found that its output did not exist.
        checkpoint: the snapshots that an attempt continues from.
    """

    path: Path

    sent_model = _Within("sent.keras")
    model = _Within("model.keras")
    history = _Within("history.parquet")
    commits = _Within("commits.parquet")
    fence = _Within("fence")
    log = _Within("driver.log")
    progress = _Within("progress.jsonl")
    journal = _Within("journal.jsonl")
    begun = _Within("begun")
    checkpoint = _Within("checkpoint")

    def beat(self, attempt: int) -> Path:
        """Return the file of a driver's heartbeat, which changes every second."""
        return self.path / f"beat-{attempt}"

    def order(self, attempt: int) -> Path:
        """Return the file with the order for the driver of an attempt."""
        return self.path / f"order-{attempt}.json"

    def result(self, attempt: int) -> Path:
        """Return the file with the result of an attempt, which its driver writes atomically."""
        return self.path / f"result-{attempt}.json"

    def read_result(self, attempt: int) -> dict[str, Any] | None:
        """Return the result of an attempt; None if its driver has not written one."""
        try:
            result = json.loads(self.result(attempt).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def cut_log(self, most: int) -> None:
        """Free the disk of all but the latest half of a log that takes more than ``most`` bytes.

        The log keeps its length, so nothing is lost that a driver prints meanwhile, and readers continue where they
        were. Where the file system cannot do that, the log gets shorter, and lacks what was printed in that moment.
        """
        try:
            file = self.log.open("r+b")
        except FileNotFoundError:
            return
        with file:
            if _disk_use(os.fstat(file.fileno())) <= most:
                return
            file.seek(-(most // 2), os.SEEK_END)
            file.readline(most // 4)  # a line may be as long as the log
            if _free_start(file.fileno(), file.tell()):
                return
            latest = file.read()
            file.truncate(0)
        with self.log.open("ab") as end:
            end.write(_LEFT_OUT + latest)

    def read_log(self, offset: int) -> tuple[bytes, int]:
        """Return at most `PIECE_MAX` bytes of the log from ``offset`` on, before its end if negative; the next offset.

        Raises:
            FileNotFoundError: nothing has been printed.
        """
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = min(size, max(0, offset if offset >= 0 else size + offset))
            data = os.lseek(file.fileno(), start, os.SEEK_DATA) if start < size and hasattr(os, "SEEK_DATA") else start
            file.seek(data)
            piece = file.read(PIECE_MAX)
            if data > start or piece.startswith(b"\0"):  # from within what was freed
                piece = _LEFT_OUT + piece.lstrip(b"\0")
            return piece, file.tell()

    def size(self) -> int:
        """Return the bytes of all files."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    info = Path(folder, name).lstat()
                    total += _disk_use(info) if name == self.log.name else info.st_size
                except FileNotFoundError:
                    continue  # a replaced snapshot
        return total


class JobFiles:
    """The folders of all jobs, in one folder that the servers of a database share.

    Args:
        root: the folder, which is created if it does not exist; other users cannot read it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._jobs, self._incoming = self.root / "jobs", self.root / "incoming"
        for folder in (self.root, self._jobs, self._incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(stat.S_IRWXU)

    def of(self, job_id: str) -> JobFolder:
        """Return the folder of a job."""
        return JobFolder(self._jobs / job_id)

    def incoming(self) -> JobFolder:
        """Create a folder for a job that is being submitted."""
        folder = JobFolder(self._incoming / uuid.uuid4().hex)
        folder.path.mkdir(mode=0o700)
        return folder

    def accept(self, folder: JobFolder, job_id: str) -> JobFolder:
        """Move a folder from `incoming` to the folders of jobs."""
        accepted = self.of(job_id)
        folder.path.rename(accepted.path)
        return accepted

    def remove(self, folder: JobFolder) -> None:
        """Remove a job's files, if they exist."""
        shutil.rmtree(folder.path, ignore_errors=True)

    def temporary(self) -> Path:
        """Return the folder for uploads that are being received, on the same disk."""
        return self._incoming

    def free(self) -> int:
        """Return the free bytes of the file system."""
        return shutil.disk_usage(self.root).free

    def stray_uploads(self) -> list[JobFolder]:
        """Return folders of uploads that have not changed for a day: their server has died meanwhile."""
        limit = time.time() - _STRAY_SECONDS
        return [JobFolder(path) for path in self._incoming.iterdir() if path.lstat().st_mtime < limit]

    def bind(self, database: str, is_known: Callable[[str], bool]) -> None:
        """Bind this folder to a database, so that no other one is used with the jobs' files.

        Args:
            database: the database's name; see `store.tables.database_id`.
            is_known: returns whether the database has a job of this id.

        Raises:
            ConfigurationError: the folder belongs to another database.
        """
        path, ids = self.root / "database", [folder.name for folder in self._jobs.iterdir()]
        if not path.exists() and (not ids or any(is_known(job_id) for job_id in ids)):
            draft = path.with_name(f"database.{uuid.uuid4().hex}")
            draft.write_text(database, encoding="utf-8")
            with contextlib.suppress(FileExistsError):  # another server was first
                os.link(draft, path)
            draft.unlink()
        owner = path.read_text(encoding="utf-8") if path.exists() else "unknown, with jobs that this one does not have"
        if owner != database:
            raise ConfigurationError(
                f"`database` must be the one of the jobs' files in {self.root}. Received: {database}, where the files "
                f"belong to {owner}; begin with an empty folder, or restore both from one backup"
            )
        unknown = [job_id for job_id in ids if not is_known(job_id)]
        if unknown:
            log.warning(
                "%s has files of %d jobs that the database does not have, such as %s; they stay",
                self._jobs, len(unknown), unknown[0],
            )  # fmt: skip


def write_whole(path: Path, value: Any) -> None:
    """Write JSON atomically: a reader finds all of the file or none, also after a crash of the machine."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_progress(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines from byte ``offset`` on, at most `PIECE_MAX` bytes, and the next offset."""
    try:
        with path.open("rb") as file:
            # Some file systems refuse an offset beyond their largest file.
            file.seek(min(offset, file.seek(0, os.SEEK_END)))
            piece = file.read(PIECE_MAX)
    except FileNotFoundError:
        return [], offset
    end = piece.rfind(b"\n") + 1
    rows = []
    for line in piece[:end].splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a partial line of a driver that died
        if isinstance(row, dict):
            rows.append(row)
    return rows, offset + end


#: Seconds from one status line to the next.
_EVERY = 1.0


class ProgressLines(Callback):
    """Writes a line when training begins, one per second while commits come, and one at the end.

    Args:
        path: of the file, to which the lines are appended.
        attempt: the number of this driver of the job.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__(every_seconds=_EVERY)
        self._path = path
        self._attempt = attempt
        self._clock = -1

    def on_begin(self, setup: TrainingSetup) -> None:
        """Write that training begins."""
        append(self._path, {"kind": "training", "attempt": self._attempt, "metrics": list(setup.metrics)})

    def on_center(self, context: CallbackContext) -> None:
        """Write the status, if there are new commits."""
        if context.status.clock != self._clock:
            self.on_end(context)

    def on_end(self, context: CallbackContext) -> None:
        """Write the status."""
        status = context.status
        self._clock = status.clock
        names = ("clock", "batches", "samples", "loss", "staleness", "joined", "finished", "epochs")
        row = {name: getattr(status, name) for name in names}
        append(self._path, {"kind": "status", "seconds": context.seconds, "final": context.final} | row)


class EventLines(logging.Handler):
    """Writes a line for each event of the trainer and of its parameter server; see `distkeras.ps.events`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, if it is an event."""
        kind = getattr(record, "event", None)
        if kind is not None:
            about = {name: getattr(record, name, None) for name in ("worker", "attempt")}
            append(self._path, {"kind": "event", "event": kind, "text": record.getMessage()} | about)


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a line atomically, even while other processes append lines."""
    row = {"time": time.time()} | {name: _finite(value) for name, value in row.items()}
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(row).encode() + b"\n")
    finally:
        os.close(file)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
