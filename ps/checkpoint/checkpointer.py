"""Snapshots while the server runs: when they are taken, and which commits they cover."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from distkeras.ps.center.center import Center
from distkeras.ps.center.commit_log import BLOCK_COMMITS, COMMIT, LogRows, joined
from distkeras.ps.center.leases import KeptState
from distkeras.ps.checkpoint.parts import PartFile
from distkeras.ps.checkpoint.snapshots import LogFiles, Saved, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.checkpoint.store import SavePlace
from distkeras.ps.checkpoint.table_files import TableFiles
from distkeras.ps.errors import ConfigurationError, DeadlineError, DistkerasError, OwnershipLostError, SnapshotError
from distkeras.ps.events import report
from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.validate import require_boolean
from distkeras.ps.world.world import REAL, Condition, World

log = logging.getLogger(__name__)

#: The share of the time that writing states may take; it is not enforced for writes up to ``_FREE_SECONDS``.
SHARE, _FREE_SECONDS = 0.1, 5.0


class OptimizerFiles:
    """Writes each optimizer state of ``center`` once; ``files`` are those from which it was restored."""

    def __init__(self, directory: SnapshotDirectory, center: Center, files: Mapping[int, str], world: World) -> None:
        self._directory, self._now = directory, world.monotonic
        #: Whether a snapshot needs the current states: under a rule with peers, they are the trained model.
        self._exact = center.traits.peers
        kept = {worker: lease.optimizer for worker, lease in center.leases.items()}
        #: By partition, the state that was saved last and its file.
        self._saved = {worker: (kept[worker], file) for worker, file in files.items() if kept.get(worker) is not None}
        self._due = 0.0

    def behind(self, states: Mapping[int, KeptState]) -> bool:
        """Return whether one of ``states`` has no file, so that the latest snapshot names that of an older one."""
        return any(self._saved.get(worker, (None,))[0] is not kept for worker, kept in states.items())

    def save(self, states: Mapping[int, KeptState], *, now: bool) -> dict[int, str]:
        """Write those of ``states`` that have no file, if they are due or ``now``; return the files by partition.

        Large states would delay the snapshots. So after a slow write, the next states are due when writing has taken
        only a small share of the time; until then, snapshots name the files of older states.
        """
        began = self._now()
        new = {worker: kept for worker, kept in states.items() if self._saved.get(worker, (None,))[0] is not kept}
        if new and (now or self._exact or began >= self._due):
            try:
                for worker, kept in new.items():
                    self._saved[worker] = kept, self._directory.save_optimizer(worker, kept)
            except SnapshotError as error:  # the snapshot itself may still succeed
                if self._exact:
                    raise
                report(log, "optimizer", "the optimizer's state of a partition could not be saved: %s", error)
            seconds = self._now() - began
            self._due = self._now() + (seconds / SHARE if seconds > _FREE_SECONDS else 0.0)
        # A state that was discarded must not be restored.
        self._saved = {worker: saved for worker, saved in self._saved.items() if worker in states}
        return {worker: file for worker, (_, file) in self._saved.items()}


#: Pauses before a snapshot that could not be written is tried again, in seconds: the disk may be full for a while.
_RETRY_FIRST, _RETRY_MOST = 0.2, 10.0
#: The log's words for such a snapshot, and for the next one that was written.
SNAPSHOT_FAILED, SNAPSHOTS_RESUMED = "a snapshot could not be written", "snapshots are written again"
#: How long the thread sleeps when nothing is due, in seconds; it is woken when something is.
_IDLE = 60.0
#: Attempts to write the last snapshot, when the server ends.
_LAST_ATTEMPTS = 4
#: Commits that are written to one file at most, because they are read into memory.
_FILE_COMMITS_MAX = 4 * BLOCK_COMMITS


@dataclass(frozen=True)
class Checkpoint(SavePlace):
    """Where and how often the server's state is saved.

    Args:
        uri: a directory, or a URI that Arrow's filesystems open; only one job may use it.
        every: commits from one snapshot to the next, at least 1.
        keep: number of snapshots to keep, at least 1.

    Raises:
        ConfigurationError: ``uri`` is not a text, or a number is not positive.
    """

    every: int = 100


def checkpoint_of(checkpoint: str | os.PathLike[str] | Checkpoint | None, resume: bool) -> Checkpoint | None:
    """Return the `Checkpoint` for a caller's arguments; raise ConfigurationError if one is invalid."""
    if require_boolean("resume", resume) and checkpoint is None:
        raise ConfigurationError("`resume` needs a `checkpoint` to resume from. Received: resume=True, checkpoint=None")
    return Checkpoint.of("checkpoint", checkpoint)


@dataclass(frozen=True)
class StartMode:
    """The start mode of a server, if an earlier one may have left snapshots.

    A server that replaces another one has the same mode except for ``epoch`` and ``after``, because the snapshot that
    it finds may still be that of a resumed job: the first server may have died before it saved anything, or its own
    snapshots are damaged. Which values apply depends on the job that took the snapshot (see `build_server`).

    Args:
        fresh: the job begins: there must be no snapshots. Those of other jobs that appear later are ignored.
        epoch: of the job's claims to the checkpoint; 0: it has none yet.
        after: incarnation of the previous server, as known to its driver; it may have saved nothing.
        same_attempts: the tasks of the resumed job are still running and keep their leases; else any task may take
            them. In a snapshot of this job, tasks always keep them.
        epochs: of the job; if it was raised, partitions that had ended in the resumed job have more data. None: it was
            not raised. In a snapshot of this job, a partition that has ended has no more data.
    """

    fresh: bool = False
    epoch: int = 0
    after: int = 0
    same_attempts: bool = True
    epochs: int | None = None


class SavedParts(Protocol):
    """Lets the shards of a center save their elements."""

    def begin(self) -> int:
        """Begin to save the present elements; the caller holds the lock. Return a number for `files`."""

    def files(self, marker: int) -> Sequence[PartFile]:
        """Return the files once all shards have written them; raise a SnapshotError if one cannot."""


class Checkpointer:
    """Saves one center, in a separate thread between `start` and `close`.

    Args:
        changed: guards the center, and is notified of each snapshot.
        saved: the snapshot that the center was restored from; None: it is new.
        fail: called with the error when another server owns the directory; ends the job.
        parts: saves the vectors, if the center is divided among shards.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: SnapshotDirectory,
        center: Center,
        changed: Condition,
        saved: Saved | None = None,
        world: World = REAL,
        fail: Callable[[DistkerasError], None] = lambda error: None,
        parts: SavedParts | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._fail, self._parts = fail, parts
        self._directory = directory
        self._center, self._changed, self._world = center, changed, world
        self._log_files = LogFiles() if saved is None else saved.log_files
        self._optimizer_files = OptimizerFiles(directory, center, {} if saved is None else saved.optimizer_files, world)
        #: None where the center has no tables.
        self._table_files: TableFiles | None = None
        if center.tables:
            self._table_files = TableFiles(directory, center, changed, () if saved is None else saved.row_files)
        #: For each worker, the number of its last commit that a snapshot of this server covers. The snapshot that was
        #: restored does not count, because it may be lost again.
        self.durable: dict[int, int] = {}
        #: The error of the last attempt; None: it succeeded.
        self.failure: Exception | None = None
        #: The clock of this server's latest snapshot, and when it was taken (monotonic); None: none yet.
        self.saved: tuple[int, float] | None = None
        self._covered, self._wanted = -1, 0
        self._next = 0
        self._wake, self._closing = world.event(), world.event()
        self._thread = world.thread(self._run, "ps-checkpointer")

    def start(self) -> None:
        """Save the center at once, and from now on."""
        self._wake.set()
        self._thread.start()

    def committed(self, clock: int) -> None:
        """Take a snapshot if one is due at ``clock``; the caller holds the lock."""
        if clock >= self._next:
            self._wake.set()

    def covers(self, mark: int) -> bool:
        """Return whether a snapshot covers everything up to ``mark``; if not, request one."""
        if self._covered >= mark:
            return True
        self._wanted = max(self._wanted, mark)
        self._wake.set()
        return False

    def mark(self) -> int:
        """Return a number that rises with every change that must be saved; the caller holds the lock."""
        center = self._center
        return center.clock + center.log.skipped + center.ends + center.values.current.version + center.edits

    def close(self, timeout: float) -> None:
        """Take a last snapshot, if anything has changed, and end the thread; raise DeadlineError if it does not end."""
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(
                f"waited {timeout:g} s for the last snapshot to be written (thread {self._thread.name})"
            )

    def _run(self) -> None:
        backoff: Backoff | None = None
        last_tries = _LAST_ATTEMPTS
        while last_tries:
            idle = not self._wake.wait(_IDLE)
            closing = self._closing.is_set()  # a later request sets `_wake` for the next turn
            self._wake.clear()
            if closing and last_tries == _LAST_ATTEMPTS:
                backoff = None  # begin with short pauses again
            last_tries -= closing
            try:
                if self._try_turn(closing, idle):
                    if closing:
                        return
                    backoff = None
                    continue
            except OwnershipLostError as error:
                self.failure = error
                self._fail(error)
                return
            backoff = backoff or Backoff(first=_RETRY_FIRST, longest=_RETRY_MOST, sleep=self._pause, world=self._world)
            backoff.pause()
            self._wake.set()

    def _pause(self, seconds: float) -> None:
        if self._closing.is_set():
            self._world.sleep(seconds)
        else:
            self._closing.wait(seconds)

    def _try_turn(self, closing: bool, idle: bool) -> bool:
        """Save once; return False if that failed and must be tried again."""
        try:
            if self._covered < 0:
                self._directory.sweep()
            complete = self._save(closing)
        except OwnershipLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the next try may succeed; waits for a snapshot have deadlines
            if self.failure is None:
                what = error if isinstance(error, SnapshotError) else traceback.format_exc()
                report(log, "snapshot", f"{SNAPSHOT_FAILED}, and will be tried again: %s", what)
            self.failure = error
            self._try_require_kept()  # a lost ownership may be the reason
            return False
        return complete and (not idle or self._try_require_kept())

    def _try_require_kept(self) -> bool:
        """Raise an OwnershipLostError if there is a higher claim; return False if the directory cannot be read."""
        try:
            self._directory.require_kept()
        except OwnershipLostError:
            raise
        except Exception:  # noqa: BLE001 - the next try may succeed
            return False
        return True

    def _save(self, closing: bool) -> bool:
        """Take a snapshot if one is due; return False if it is the last one and names an older optimizer state."""
        while True:
            with self._changed:
                center, clock, mark = self._center, self._center.clock, self.mark()
                due = closing or clock >= self._next or self._covered < self._wanted
                # The request may have come while the previous snapshot, which covers it, was being written.
                saved = mark == self._covered and not (closing and self._optimizer_files.behind(center.leases.states()))
                if saved or not due or center.corrupt:
                    return True
                rows = center.log.read(self._log_files.commits, _FILE_COMMITS_MAX)
                if self._log_files.commits + len(rows.commits) == len(center.log):
                    if self._table_files is not None:
                        self._table_files.begin()
                    state, durable, taken = capture(center), _sequences(center), self._world.monotonic()
                    marker = 0 if self._parts is None else self._parts.begin()
                    break
            self._log_files = self._directory.save_log(rows, self._log_files)
        try:
            self._log_files = self._directory.save_log(rows, self._log_files)
            files = self._optimizer_files.save(state.optimizers, now=closing)
            rows_saved = () if self._table_files is None else self._table_files.save()
            parts = () if self._parts is None else self._parts.files(marker)
            self._directory.save(state, self._log_files, files, rows_saved, parts)
        finally:
            state.drop()
            if self._table_files is not None:
                self._table_files.end()
        names = self._directory.require_kept()
        if self.failure is not None:
            report(log, "snapshot", SNAPSHOTS_RESUMED)
        with self._changed:
            self.durable, self.failure, self._covered = durable, None, mark
            self.saved, self._next = (clock, taken), clock + self._checkpoint.every
            self._changed.notify_all()
        self._directory.prune(self._checkpoint.keep, self._log_files, names)
        if not closing:
            self._merge()
            if self._table_files is not None:
                self._table_files.merge()
        return not (closing and self._optimizer_files.behind(state.optimizers))

    def _merge(self) -> None:
        """Merge the latest log files into one, if that is due; the next snapshot names it instead of them."""
        replaced = self._log_files.due()
        if not replaced:
            return
        merged = self._log_files.files[-replaced:]
        end = self._log_files.commits
        first, pieces = end - sum(file.commits for file in merged), list[LogRows]()
        while first < end:
            with self._changed:
                pieces.append(self._center.log.read(first, min(BLOCK_COMMITS, end - first)))
            first += len(pieces[-1].commits)
        self._log_files = self._directory.save_log(joined(pieces, COMMIT), self._log_files, replaced=replaced)


def _sequences(center: Center) -> dict[int, int]:
    return {worker: lease.sequence for worker, lease in center.leases.items()}
