"""A job's folder: its files, by which the driver and the server communicate."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.ps.errors import ConfigurationError

log = logging.getLogger(__name__)

#: The most bytes of a log or of progress in one answer.
PIECE_MAX = 1 << 20
#: Seconds after which an upload that has not ended is removed.
_STRAY_SECONDS = 86400.0
#: What a reader finds in place of the beginning of a log.
_LEFT_OUT = "… what came before was left out\n".encode()


class JobFolder:
    """The files of one job in the folder ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent_model = path / "sent.keras"  # the archive that was submitted
        self.model = path / "model.keras"  # the trained model
        self.fence = path / "fence"  # the number of the first attempt that may still work
        self.log = path / "driver.log"  # the output of the drivers and of Spark
        self.progress = path / "progress.jsonl"  # a line for each second of training and each event, of all attempts
        self.journal = path / "journal.jsonl"  # the events for a page of the job: `distkeras.dashboard.watch`
        self.mlflow = path / "mlflow.json"  # the job's run in MLflow, and where it is
        self.begun = path / "begun"  # exists after a predict job has found that its output did not exist
        self.checkpoint = path / "checkpoint"  # the snapshots that an attempt continues from

    def beat(self, attempt: int) -> Path:
        """Return the file of a driver's heartbeat, which changes every second."""
        return self.path / f"beat-{attempt}"

    def order(self, attempt: int) -> Path:
        """Return the file with the order for the driver of an attempt."""
        return self.path / f"order-{attempt}.json"

    def working(self, attempt: int) -> Path:
        """Return the file that exists when the driver of an attempt trains or predicts."""
        return self.path / f"working-{attempt}"

    def result(self, attempt: int) -> Path:
        """Return the file with the result of an attempt, which its driver writes atomically."""
        return self.path / f"result-{attempt}.json"

    def cut_log(self, most: int) -> None:
        """Leave the latest half of a log of more than ``most`` bytes; what is printed at this moment may be lost."""
        try:
            file = self.log.open("r+b")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, os.SEEK_END) <= most:
                return
            file.seek(-(most // 2), os.SEEK_END)
            file.readline(most // 4)  # a line may be as long as the log
            latest = file.read()
            file.truncate(0)
        with self.log.open("ab") as end:  # as the driver writes, whose next line follows
            end.write(_LEFT_OUT + latest)

    def size(self) -> int:
        """Return the bytes of all files."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a replaced snapshot
                    total += Path(folder, name).lstat().st_size
        return total


class JobFiles:
    """The folders of all jobs, in one folder that the servers of a database share and other users cannot read."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._jobs, self.uploads = self.root / "jobs", self.root / "incoming"
        for folder in (self.root, self._jobs, self.uploads):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(stat.S_IRWXU)

    def of(self, job_id: str) -> JobFolder:
        """Return the folder of a job."""
        return JobFolder(self._jobs / job_id)

    def incoming(self) -> JobFolder:
        """Create a folder for a job that is being submitted."""
        folder = JobFolder(self.uploads / uuid.uuid4().hex)
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

    def free(self) -> int:
        """Return the free bytes of the file system."""
        return shutil.disk_usage(self.root).free

    def stray_uploads(self) -> list[JobFolder]:
        """Return folders of uploads that have not changed for a day: their server has died meanwhile."""
        limit = time.time() - _STRAY_SECONDS
        return [JobFolder(path) for path in self.uploads.iterdir() if path.lstat().st_mtime < limit]

    def bind(self, database: str, is_known: Callable[[str], bool]) -> None:
        """Bind this folder to the database of this name; ConfigurationError if it belongs to another one."""
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


def read_whole(path: Path) -> dict[str, Any]:
    """Return what `write_whole` has written; nothing if there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_piece(path: Path, offset: int) -> tuple[bytes, int]:
    """Return at most `PIECE_MAX` bytes from ``offset`` on, before the end if negative, and the offset behind them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)  # some file systems refuse an offset beyond their largest file
            file.seek(min(size, max(0, offset if offset >= 0 else size + offset)))
            return file.read(PIECE_MAX), file.tell()
    except FileNotFoundError:
        return b"", 0


def read_progress(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines from byte ``offset`` on, at most `PIECE_MAX` bytes, and the next offset."""
    piece, _ = read_piece(path, offset)
    end = piece.rfind(b"\n") + 1
    rows = []
    for line in piece[:end].splitlines():
        with contextlib.suppress(ValueError):  # a partial line of a driver that died
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)], offset + end


class ProgressLines(Callback):
    """Writes a line when training begins in this attempt, one per second while commits come, and one at the end."""

    def __init__(self, folder: JobFolder, attempt: int) -> None:
        super().__init__(every_seconds=1.0)
        self._path, self._working = folder.progress, folder.working(attempt)
        self._attempt, self._clock = attempt, -1

    def on_begin(self, setup: TrainingSetup) -> None:
        """Write that training begins."""
        append(self._path, {"kind": "training", "attempt": self._attempt, "metrics": list(setup.metrics)})
        self._working.touch(mode=0o600)

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
