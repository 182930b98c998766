"""A job's folder: what lies where, and how a driver and the server tell each other by it."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import stat
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup

#: Bytes of progress that one answer has at most.
PIECE_MAX = 1 << 20
#: Seconds after which a folder without a job is removed.
_STRAY = 86400.0


@dataclass(frozen=True)
class JobFolder:
    """One job's files.

    Args:
        path: of the folder.
    """

    path: Path

    @property
    def sent_model(self) -> Path:
        """The archive that was submitted."""
        return self.path / "sent.keras"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.keras"

    @property
    def history(self) -> Path:
        """A row a mini-batch, as Parquet."""
        return self.path / "history.parquet"

    @property
    def commits(self) -> Path:
        """A row a commit, as Parquet."""
        return self.path / "commits.parquet"

    @property
    def fence(self) -> Path:
        """The number of the first attempt that may still work."""
        return self.path / "fence"

    def beat(self, attempt: int) -> Path:
        """The sign of life of a driver."""
        return self.path / f"beat-{attempt}"

    @property
    def log(self) -> Path:
        """What the drivers and Spark print."""
        return self.path / "driver.log"

    @property
    def progress(self) -> Path:
        """A line of JSON for each look at the job, and for each event; of all attempts."""
        return self.path / "progress.jsonl"

    @property
    def journal(self) -> Path:
        """What a page of the job follows: see `distkeras.dashboard.journal`."""
        return self.path / "journal.jsonl"

    @property
    def begun(self) -> Path:
        """There once a predict job may write to its output, where nothing was before."""
        return self.path / "begun"

    @property
    def checkpoint(self) -> Path:
        """What an attempt goes on from."""
        return self.path / "checkpoint"

    def order(self, attempt: int) -> Path:
        """What the driver of an attempt is to do."""
        return self.path / f"order-{attempt}.json"

    def result(self, attempt: int) -> Path:
        """What became of an attempt; there as soon as the driver knows, and whole."""
        return self.path / f"result-{attempt}.json"

    def read_result(self, attempt: int) -> dict[str, Any] | None:
        """Return the result of an attempt; None where its driver has not written one."""
        try:
            result = json.loads(self.result(attempt).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def cut_log(self, most: int) -> None:
        """Leaves of a log with more bytes than ``most`` its latest half of so many; drivers go on at its end."""
        try:
            with self.log.open("rb") as file:
                if file.seek(0, os.SEEK_END) <= most:
                    return
                file.seek(-(most // 2), os.SEEK_END)
                latest = file.read().partition(b"\n")[2]
        except FileNotFoundError:
            return
        os.truncate(self.log, 0)
        with self.log.open("ab") as file:
            file.write("… what came before was left out\n".encode() + latest)

    def size(self) -> int:
        """Bytes of all files."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += Path(folder, name).lstat().st_size
                except FileNotFoundError:
                    continue  # a snapshot that was replaced meanwhile
        return total


class JobFiles:
    """The folders of all jobs, below one that servers of one database share.

    Args:
        root: which is made if it is not there; no other user may read it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        for folder in (self.root, self._jobs, self._incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(stat.S_IRWXU)

    @property
    def _jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def _incoming(self) -> Path:
        return self.root / "incoming"

    def of(self, job_id: str) -> JobFolder:
        """The folder of a job."""
        return JobFolder(self._jobs / job_id)

    def incoming(self) -> JobFolder:
        """A new folder, of a job that is being submitted."""
        folder = JobFolder(self._incoming / uuid.uuid4().hex)
        folder.path.mkdir(mode=0o700)
        return folder

    def accept(self, folder: JobFolder, job_id: str) -> JobFolder:
        """Makes a folder of `incoming` that of a job."""
        accepted = self.of(job_id)
        folder.path.rename(accepted.path)
        return accepted

    def remove(self, folder: JobFolder) -> None:
        """Removes a job's files, if they are there."""
        shutil.rmtree(folder.path, ignore_errors=True)

    def temporary(self) -> Path:
        """Where what is being sent may wait, on the same disk."""
        return self._incoming

    def free(self) -> int:
        """Bytes that the file system has left."""
        return shutil.disk_usage(self.root).free

    def strays(self) -> list[JobFolder]:
        """Return folders that have not changed for a day; those below `incoming` belong to no job."""
        limit = time.time() - _STRAY
        folders = [path for parent in (self._incoming, self._jobs) for path in parent.iterdir()]
        return [JobFolder(path) for path in folders if path.lstat().st_mtime < limit]


def write_whole(path: Path, value: Any) -> None:
    """Write JSON so that a reader finds all of the file or none, also after the machine stopped."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_progress(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from byte ``offset`` on, at most `PIECE_MAX` of bytes, and the byte to go on from."""
    try:
        with path.open("rb") as file:
            # Some file systems refuse a place that no file of theirs reaches.
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
            continue  # cut short where a driver died
        if isinstance(row, dict):
            rows.append(row)
    return rows, offset + end


#: Seconds from one look at the job to the next.
_EVERY = 1.0


class ProgressLines(Callback):
    """Writes a line when training begins, one every second while there is news, and one at its end.

    Args:
        path: of the file, which is gone on with.
        attempt: which driver of the job this is.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__(every_seconds=_EVERY)
        self._path = path
        self._attempt = attempt
        self._clock = -1

    def on_begin(self, setup: TrainingSetup) -> None:
        """Tells that the job is about to train."""
        append(self._path, {"kind": "training", "attempt": self._attempt, "metrics": list(setup.metrics)})

    def on_center(self, context: CallbackContext) -> None:
        """Tells how it gets on."""
        if context.status.clock != self._clock:
            self._tell(context)

    def on_end(self, context: CallbackContext) -> None:
        """Tells how it ended."""
        self._tell(context)

    def _tell(self, context: CallbackContext) -> None:
        status = context.status
        self._clock = status.clock
        names = ("clock", "batches", "samples", "loss", "staleness", "joined", "finished", "epochs")
        row = {name: getattr(status, name) for name in names}
        append(self._path, {"kind": "status", "seconds": context.seconds, "final": context.final} | row)


class EventLines(logging.Handler):
    """Writes a line for each event of the trainer and of its parameter server; see `distkeras.ps.events`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, if it is an event."""
        kind = getattr(record, "event", None)
        if kind is not None:
            about = {name: getattr(record, name, None) for name in ("worker", "attempt")}
            append(self._path, {"kind": "event", "event": kind, "text": record.getMessage()} | about)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line in one piece, even while other processes add lines."""
    row = {"time": time.time()} | {name: _finite(value) for name, value in row.items()}
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(row).encode() + b"\n")
    finally:
        os.close(file)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
