"""Snapshots while the server runs: when they are taken, and what they cover."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.directory import LogFiles, Saved, SnapshotDirectory, take
from distkeras.ps.errors import DeadlineError, SnapshotError
from distkeras.ps.events import report
from distkeras.ps.transport.backoff import Backoff
from distkeras.ps.validate import require_integer
from distkeras.ps.world.world import REAL, Condition, World

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
            object.__setattr__(self, name, require_integer(name, getattr(self, name)))


@dataclass(frozen=True)
class StartMode:
    """How a server begins where an earlier one may have left snapshots.

    Args:
        fresh: there must be none.
        after: incarnation of the server before, as far as its driver knows: it may not have come to save anything.
        same_attempts: the tasks of the server before still run, and hold their leases; else anybody may take them.
        epochs: of the job: partitions that had ended have more data to come if it was raised. None: as it was.
    """

    fresh: bool = False
    after: int = 0
    same_attempts: bool = True
    epochs: int | None = None


class Checkpointer:
    """Saves one center, in a thread of its own between `start` and `close`.

    Args:
        checkpoint: how often, how many.
        directory: where.
        center: what is saved.
        changed: guards the center, and is told of each snapshot.
        saved: the snapshot that the center was restored from; None: it is new.
        world: its threads and its clock.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: SnapshotDirectory,
        center: Center,
        changed: Condition,
        saved: Saved | None = None,
        world: World = REAL,
    ) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._center, self._changed, self._world = center, changed, world
        self._log_files = LogFiles() if saved is None else saved.log_files
        #: For each worker, the number of its last commit that a snapshot covers.
        self.durable = {} if saved is None else _sequences(center)
        #: Why the last try failed; None when it did not.
        self.failure: SnapshotError | None = None
        self._covered, self._wanted = -1, 0
        self._next = 0
        self._wake, self._closing = world.event(), world.event()
        self._thread = world.thread(self._run, "ps-checkpointer")

    def start(self) -> None:
        """Saves the center from now on, and at once."""
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
        return self._center.clock + skipped + sum(lease.finished for lease in self._center.leases.values())

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
                    self._directory.sweep()
                self._save(closing)
                backoff = None
            except SnapshotError as error:
                if self.failure is None:
                    report(log, "snapshot", "a snapshot failed, and is tried again: %s", error)
                self.failure = error
                backoff = backoff or Backoff(
                    first=_RETRY_FIRST, longest=_RETRY_MOST, sleep=self._closing.wait, world=self._world
                )
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
            if center.corrupt:
                return
            snapshot, durable, clock = take(center, self._log_files), _sequences(center), center.clock
        try:
            self._directory.save(snapshot)
        finally:
            snapshot.state.drop()
        self._log_files = snapshot.log_files
        if self.failure is not None:
            report(log, "snapshot", "snapshots succeed again")
        with self._changed:
            self.durable, self.failure, self._covered = durable, None, mark
            self._next = clock + self._checkpoint.every
            self._changed.notify_all()
        self._directory.prune(self._checkpoint.keep, self._log_files.names)


def _sequences(center: Center) -> dict[int, int]:
    return {worker: lease.sequence for worker, lease in center.leases.items()}
