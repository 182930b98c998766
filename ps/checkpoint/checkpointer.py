"""Snapshots while the server runs: when they are taken, which are kept, and what they cover.

The directory holds ``snapshot-<incarnation>-<clock>`` files and, for the log, which only grows, one
``log-<incarnation>-<first>-<end>`` file for what came between two snapshots. A snapshot names the log files before it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.commit_log import COMMIT, CommitLog
from distkeras.ps.checkpoint.snapshot import State, capture, restore
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ConfigurationError, DeadlineError, SnapshotError
from distkeras.ps.events import report
from distkeras.ps.transport.backoff import Backoff

log = logging.getLogger(__name__)

#: Pauses before a snapshot that could not be written is tried again, in seconds: the disk may be full for a while.
_RETRY_FIRST, _RETRY_MOST = 0.2, 10.0
#: How long the thread sleeps when nothing is due, in seconds; it is woken when something is.
_IDLE = 60.0


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the server's state is saved.

    Args:
        uri: a directory, or a URI that Arrow's filesystems open; of one job alone.
        every: commits from one snapshot to the next, at least 1.
        keep: snapshots to keep, at least 1.

    Raises:
        ConfigurationError: a number that is not positive.
    """

    uri: str
    every: int = 100
    keep: int = 3

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"`{name}` must be a positive integer. Received: {name}={value!r}")


@dataclass(frozen=True)
class StartMode:
    """How a server's life begins where an earlier one may have left snapshots.

    Args:
        fresh: there must be none.
        after: incarnation of the life before, as far as its driver knows: that life may not have come to save anything.
        same_attempts: the tasks of the life before still run, and hold their leases; else anybody may take them.
        epochs: of the job: partitions that had ended have more data to come if it was raised. None: as it was.
    """

    fresh: bool = False
    after: int = 0
    same_attempts: bool = True
    epochs: int | None = None


@dataclass(frozen=True)
class Saved:
    """The latest snapshot that could be read, with the log up to it."""

    name: str
    state: State
    log: CommitLog
    job: dict[str, Any]
    metrics: str
    segments: list[str]


class Checkpointer:
    """A thread that saves one center.

    Args:
        checkpoint: where, how often, how many.
        job: JSON-ready facts that a job which resumes must share.

    Raises:
        ConfigurationError, SnapshotError: the directory cannot be used.
    """

    def __init__(self, checkpoint: Checkpoint, job: dict[str, Any] | None = None) -> None:
        self.checkpoint = checkpoint
        self.job = job or {}
        self.store = Store(checkpoint.uri)
        #: For each worker, the number of its last commit that a snapshot covers.
        self.durable: dict[int, int] = {}
        #: Why the last try failed; None when it did not.
        self.failure: SnapshotError | None = None
        self._covered, self._wanted = -1, 0
        self._next = 0
        self._segments: list[str] = []
        self._logged = 0
        #: The history's column names, as `messages.Records` has them.
        self.metrics = ""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ps-saver", daemon=True)

    # ---- reading

    def load(self, life: StartMode) -> Saved | None:
        """The latest snapshot; None where there is none. One that is damaged is passed over for the one before it.

        Raises:
            ConfigurationError: there are some, although ``life`` is to be a fresh one.
            SnapshotError: there are some, and none can be read.
        """
        names = [name for name in self.store.names() if name.startswith("snapshot-")]
        if names and life.fresh:
            raise ConfigurationError(
                "`checkpoint` must be an empty directory, or the job in it must be resumed. "
                f"Received: {self.store.uri!r} with {names[-1]}"
            )
        for name in reversed(names):
            try:
                return self._read(name)
            except SnapshotError as error:
                report(log, "snapshot", "snapshot passed over: %s", error)
                last = error
        if names:
            raise SnapshotError(f"one of {len(names)} snapshots must be readable. Received: {last.message}") from last
        return None

    def lives(self) -> int:
        """The highest incarnation that any file there is of, readable or not; 0 for none."""
        return max((int(name.split("-")[1]) for name in self.store.names()), default=0)

    def _read(self, name: str) -> Saved:
        header, arrays = self.store.load(name)
        commit_log = CommitLog()
        for segment in header["segments"]:
            _, rows = self.store.load(segment)
            commit_log.extend(rows["commits"].view(COMMIT), rows["lengths"], rows["history"])
        state = State(header["state"], arrays)
        return Saved(name, state, commit_log, header["job"], header["metrics"], header["segments"])

    def resume(self, center: Center, saved: Saved, life: StartMode) -> bool:
        """Puts ``center``, which is new, where ``saved`` was taken: see `snapshot.restore`.

        Raises:
            SnapshotError: the snapshot is another job's.
        """
        for name, value in self.job.items():
            if saved.job.get(name) != value:
                raise SnapshotError(
                    f"`{name}` must be {saved.job.get(name)!r}, as in the job that {self.store.uri!r} holds. "
                    f"Received: {name}={value!r}"
                )
        exact = restore(center, saved.state, same_attempts=life.same_attempts, epochs=life.epochs)
        center.log = saved.log
        self._segments, self._logged, self.metrics = list(saved.segments), len(saved.log), saved.metrics
        self.durable = {worker: member.sequence for worker, member in center.members.items()}
        return exact

    # ---- writing

    def start(self, center: Center, changed: threading.Condition) -> None:
        """Saves ``center`` from now on, and at once; ``changed`` guards it, and is told of each snapshot."""
        self._center, self._changed = center, changed
        self._wake.set()
        self._thread.start()

    def committed(self, clock: int) -> None:
        """A commit was applied; the caller holds the lock."""
        if clock >= self._next:
            self._wake.set()

    def covers(self, mark: int) -> bool:
        """Whether a snapshot covers everything up to ``mark``; if not, one is taken as soon as can be."""
        if self._covered >= mark:
            return True
        self._wanted = max(self._wanted, mark)
        self._wake.set()
        return False

    def mark(self) -> int:
        """A number that rises with everything worth saving; the caller holds the lock."""
        skipped = self._center.log.skipped
        return self._center.clock + skipped + sum(member.finished for member in self._center.members.values())

    def close(self, timeout: float) -> None:
        """Takes a last snapshot, if anything has changed, and ends the thread.

        Raises:
            DeadlineError: it did not end in time.
        """
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(f"waited {timeout} s for thread {self._thread.name} to end")

    def _run(self) -> None:
        backoff: Backoff | None = None
        while True:
            self._wake.wait(_IDLE)
            closing = self._closing.is_set()  # what is asked for after this is seen in the next turn
            self._wake.clear()
            try:
                if self._covered < 0:
                    self.store.sweep()
                self._save(closing)
                backoff = None
            except SnapshotError as error:
                if self.failure is None:
                    report(log, "snapshot", "a snapshot failed, and is tried again: %s", error)
                self.failure = error
                backoff = backoff or Backoff(first=_RETRY_FIRST, longest=_RETRY_MOST, sleep=self._closing.wait)
                backoff.pause()
                self._wake.set()
            except Exception as error:
                self.failure = SnapshotError(f"{type(error).__name__}: {error}")  # who waits for a snapshot says why
                raise
            if closing:
                return

    def _save(self, closing: bool) -> None:
        with self._changed:
            center, mark = self._center, self.mark()
            due = closing or center.clock >= self._next or self._covered < self._wanted
            if mark == self._covered or not due:  # woken while the last one was written, which covers it
                return
            state = capture(center)
            commit_log, first, end = center.log, self._logged, len(center.log)
            segment = f"log-{center.incarnation:06d}-{first:012d}-{end:012d}"
            rows = {
                "commits": commit_log.commits(first).view(np.uint8),
                "lengths": commit_log.lengths(first, end - first),
                "history": commit_log.history(first, end - first),
            }
            durable = {worker: member.sequence for worker, member in center.members.items()}
            metrics, name = self.metrics, f"snapshot-{center.incarnation:06d}-{center.clock:012d}"
        try:
            segments = self._segments
            if end > first:
                self.store.save(segment, {}, rows)
                segments = [*segments, segment]
            header = {"state": state.header, "job": self.job, "metrics": metrics, "segments": segments}
            self.store.save(name, header, state.arrays)
        finally:
            state.drop()
        self._segments, self._logged = segments, end
        if self.failure is not None:
            report(log, "snapshot", "snapshots succeed again")
        with self._changed:
            self.durable, self.failure, self._covered = durable, None, mark
            self._next = state.header["clock"] + self.checkpoint.every
            self._changed.notify_all()
        self._prune(segments)

    def _prune(self, segments: list[str]) -> None:
        """Removes old snapshots, and the logs of lives that no snapshot is left of."""
        names = self.store.names()
        snapshots = [name for name in names if name.startswith("snapshot-")]
        kept = snapshots[-self.checkpoint.keep :]
        lives = {name.split("-")[1] for name in kept}
        needed = set(segments)
        dead = [
            name for name in names if name.startswith("log-") and name not in needed and name.split("-")[1] not in lives
        ]
        self.store.delete([*snapshots[: -self.checkpoint.keep], *dead])
