"""A job's snapshots in their directory: names, what belongs together, which are kept.

There are ``snapshot-<incarnation>-<clock>`` files and, for the commit log, which only grows, one
``log-<incarnation>-<first>-<end>`` file for what came between two snapshots. A snapshot names the log files before it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.commit_file import LogRows
from distkeras.ps.center.commit_log import COMMIT, CommitLog
from distkeras.ps.checkpoint.snapshot import State, capture, restore
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ConfigurationError, SnapshotError
from distkeras.ps.events import report
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogFiles:
    """How much of a commit log is in files already.

    Args:
        names: of the files, in order.
        commits: in all of them.
    """

    names: tuple[str, ...] = ()
    commits: int = 0


@dataclass(frozen=True)
class Saved:
    """The latest snapshot that could be read, with the log up to it."""

    name: str
    state: State
    log: CommitLog
    job: Mapping[str, Any]
    metrics: str
    log_files: LogFiles


@dataclass(frozen=True)
class Unsaved:
    """What `SnapshotDirectory.save` is to write; taken under the center's lock, written without it."""

    name: str
    state: State
    metrics: str
    log_file: str
    rows: Mapping[str, np.ndarray]
    log_files: LogFiles = field(default_factory=LogFiles)
    totals: Mapping[str, Any] = field(default_factory=dict)


def take(center: Center, log_files: LogFiles) -> Unsaved:
    """A snapshot of ``center``, and its log from the end of ``log_files`` on; the caller holds the lock.

    `State.drop` of its state lets go of the center's version.
    """
    state, commit_log, first, end = capture(center), center.log, log_files.commits, len(center.log)
    log_file = f"log-{center.incarnation:06d}-{first:012d}-{end:012d}"
    commits, lengths, history = commit_log.read(first)
    rows = {"commits": commits.view(np.uint8), "lengths": lengths, "history": history}
    names = (*log_files.names, log_file) if end > first else log_files.names
    name = f"snapshot-{center.incarnation:06d}-{center.clock:012d}"
    return Unsaved(name, state, center.metrics, log_file, rows, LogFiles(names, end), commit_log.totals())


class SnapshotDirectory:
    """The snapshots of one job.

    Args:
        uri: a directory, or a URI that Arrow's filesystems open; made if it is not there.
        job: JSON-ready values that a job which resumes must share.
        world: its files.

    Raises:
        ConfigurationError, SnapshotError: the directory cannot be used.
    """

    def __init__(self, uri: str, job: Mapping[str, Any] | None = None, world: World = REAL) -> None:
        self._job = dict(job or {})
        self._store = Store(uri, world)

    def latest(self, *, fresh: bool = False) -> Saved | None:
        """The latest snapshot; None where there is none. One that is damaged is passed over for the one before it.

        Args:
            fresh: there must be none.

        Raises:
            ConfigurationError: there are some, although there must be none.
            SnapshotError: there are some, and none can be read.
        """
        names = self._snapshots()
        if names and fresh:
            raise ConfigurationError(
                "`checkpoint` must be an empty directory, or the job in it must be resumed. "
                f"Received: {self._store.uri!r} with {names[-1]}"
            )
        for name in reversed(names):
            try:
                return self._load(name)
            except SnapshotError as error:
                report(log, "snapshot", "snapshot passed over: %s", error)
                last = error
        if names:
            raise SnapshotError(f"one of {len(names)} snapshots must be readable. Received: {last.message}") from last
        return None

    def highest_incarnation(self) -> int:
        """Of any file there is, readable or not; 0 for none."""
        return max((_incarnation(name) for name in self._store.names()), default=0)

    def restore(self, center: Center, saved: Saved, *, same_attempts: bool, epochs: int | None = None) -> bool:
        """Puts ``center``, which is new, where ``saved`` was taken: see `snapshot.restore`.

        Raises:
            SnapshotError: the snapshot is another job's.
        """
        for name, value in self._job.items():
            if saved.job.get(name) != value:
                raise SnapshotError(
                    f"`{name}` must be {saved.job.get(name)!r}, as in the job that {self._store.uri!r} holds. "
                    f"Received: {name}={value!r}"
                )
        exact = restore(center, saved.state, same_attempts=same_attempts, epochs=epochs)
        center.log, center.metrics = saved.log, saved.metrics
        return exact

    def save(self, snapshot: Unsaved) -> None:
        """Writes the log's new part, then the snapshot that needs it.

        Raises:
            SnapshotError: one of them cannot be written.
        """
        names = snapshot.log_files.names
        if names and names[-1] == snapshot.log_file:
            self._store.save(snapshot.log_file, {}, snapshot.rows)
        header = {
            "state": snapshot.state.header,
            "job": self._job,
            "metrics": snapshot.metrics,
            "log_files": list(names),
            "log_totals": snapshot.totals,
        }
        self._store.save(snapshot.name, header, snapshot.state.arrays)

    def sweep(self) -> None:
        """Removes what a server that was killed left half-written."""
        self._store.sweep()

    def prune(self, keep: int, log_files: Sequence[str]) -> None:
        """Removes all but the latest ``keep`` snapshots, and the logs of incarnations that no snapshot is left of.

        Args:
            keep: at least 1.
            log_files: needed by the latest one.
        """
        snapshots, needed = self._snapshots(), set(log_files)
        incarnations = {_incarnation(name) for name in snapshots[-keep:]}
        logs = [name for name in self._store.names() if name.startswith("log-") and name not in needed]
        orphans = [name for name in logs if _incarnation(name) not in incarnations]
        self._store.delete([*snapshots[:-keep], *orphans])

    def _snapshots(self) -> list[str]:
        """Oldest first."""
        return [name for name in self._store.names() if name.startswith("snapshot-")]

    def _load(self, name: str) -> Saved:
        header, arrays = self._store.load(name)
        commit_log = CommitLog()
        for log_file in header["log_files"]:
            _, rows = self._store.load(log_file)
            commit_log.extend(LogRows(rows["commits"].view(COMMIT), rows["lengths"], rows["history"]))
        commit_log.restore_totals(header["log_totals"])
        files = LogFiles(tuple(header["log_files"]), len(commit_log))
        return Saved(name, State(header["state"], arrays), commit_log, header["job"], header["metrics"], files)


def _incarnation(name: str) -> int:
    return int(name.split("-")[1])
