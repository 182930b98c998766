"""The leases of partitions, and the ledger of their mini-batches.

Rules:

1. A partition's lease has one holder, an attempt of Spark's; what any other one sends is refused.
2. A commit is the next one of its partition: sequence numbers rise by one, and its mini-batches begin where those of
   the commit before ended. So no mini-batch is left out, and none counts twice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.errors import LeaseLostError, LedgerError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.messages import Commit, KeepOptimizer, OptimizerState
from distkeras.ps.rules.base import Vector
from distkeras.ps.world.world import REAL, World

#: Bytes of memory that all partitions' states may take together; a state above its partition's share is in a file.
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state of a worker's optimizer, and where its partition stood; a later attempt begins with it.

    It decides how well a successor trains, not what the ledger says. So it is kept only as it came, and one that is
    damaged, too large, or without a place is dropped.

    Under a rule with peers it is all that a member has. It comes ahead of the commit that it belongs to, and one is
    kept next to it until then. A job whose member does not find its state ends with an error (`worker.daso`).

    Args:
        state: as the worker sent it.
        attempt: that sent it.
        sequence: its latest commit at that time.
        kept_at: when it came, seconds since the epoch.
    """

    state: OptimizerState
    attempt: int
    sequence: int
    kept_at: float


class StateMemory:
    """Where states are kept: in memory, or in files without a name in the system's folder for temporary files.

    Args:
        workers: number of workers of the job, n: a state in memory has at most a share of 1/n of `MEMORY_BYTES`.
    """

    def __init__(self, workers: int, world: World = REAL) -> None:
        self._most = MEMORY_BYTES // workers
        self._world = world

    def array(self, size: int) -> np.ndarray:
        """Return ``size`` bytes for a state; where the disk has no room, in memory, where it cannot stay: `holds`."""
        if size > self._most:
            try:
                return np.frombuffer(self._world.scratch(size), np.uint8)
            except OSError:
                pass  # the state is received and dropped, which the caller reports
        return np.empty(size, np.uint8)

    def holds(self, array: np.ndarray) -> bool:
        """Return whether ``array`` may be kept: it is small, or in a file."""
        return array.nbytes <= self._most or not array.flags.owndata


#: Holds a lease that the first attempt to come may take.
NO_ATTEMPT = -1
#: The shortest time that a window is taken to have lasted, in seconds: speeds are finite.
_SHORTEST = 1e-9


class LeaseState(enum.Enum):
    """The lease of a partition: the right to send its commits."""

    #: Its attempt, which is connected.
    HELD = "held"
    #: Its attempt, once it connects again; or a later one that joins.
    FREE = "free"
    #: No one: its data has ended.
    FINISHED = "finished"


#: What may follow each state. A partition that has ended goes on only in a job that is resumed with more epochs.
FOLLOWS: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.HELD: frozenset({LeaseState.FREE, LeaseState.FINISHED}),
    LeaseState.FREE: frozenset({LeaseState.HELD, LeaseState.FINISHED}),
    LeaseState.FINISHED: frozenset({LeaseState.FREE}),
}


@dataclass
class PartitionLease:
    """The lease of a partition, and how far the partition has come."""

    attempt: int
    state: LeaseState = LeaseState.HELD
    sequence: int = 0
    epoch: int = 0
    batch: int = 0
    #: Of the rows behind what was committed; -1 before the first commit.
    checksum: int = -1
    #: Clock when the worker was last sent the center (pull-first rules: when its window began). None: not yet.
    released: int | None = None
    #: The moment of that, in seconds (monotonic).
    released_at: float = 0.0
    #: Steps per second of the last window that this attempt had applied, exchange included. None: none was yet.
    speed: float | None = None
    #: The same before its last commit: what a window started from that was computed while that commit travelled.
    previous_released: int | None = None
    steps: int = 0
    #: Whether its last commit was left out for its NaN or infinity.
    skipped: bool = False
    #: How many times in a row its window was refused; 0: its last commit was not.
    refusals: int = 0
    #: The share of ``epoch`` that it has passed, as far as its worker knows.
    passed: float = 0.0
    #: Time of its last commit, or of when the attempt joined; seconds since the epoch.
    active_at: float = 0.0
    #: What the worker was sent before its window, where that is kept; and what it pulled within it (pull-first rules).
    sent: Buffer | None = None
    pulled: Buffer | None = None
    vectors: tuple[Vector, ...] = ()
    #: The latest state of the worker's optimizer, where one was sent.
    optimizer: KeptState | None = None
    #: The state after the commit to come, where it was sent ahead: it is the latest one once that commit is applied.
    next_optimizer: KeptState | None = None

    @property
    def connected(self) -> bool:
        """Return whether its attempt is connected."""
        return self.state is LeaseState.HELD

    @property
    def finished(self) -> bool:
        """Return whether the partition's data has ended."""
        return self.state is LeaseState.FINISHED

    def move(self, state: LeaseState) -> None:
        """Change the state, or keep it; raise LocalProtocolError if `FOLLOWS` does not have that step."""
        if state is not self.state and state not in FOLLOWS[self.state]:
            raise LocalProtocolError(f"a lease that is {self.state.value} cannot become {state.value}")
        self.state = state

    def require_next(self, commit: Commit) -> None:
        """Check that ``commit`` continues where the partition stands.

        Raises:
            RemoteProtocolError: a gap in the sequence.
            LedgerError: its mini-batches do not continue where the last commit ended.
        """
        if commit.sequence != self.sequence + 1:
            raise RemoteProtocolError(
                f"a commit must have sequence {self.sequence + 1}. Received: sequence {commit.sequence}",
                worker=commit.worker,
            )
        if (commit.epoch, commit.first) != (self.epoch, self.batch) or commit.last < commit.first:
            raise LedgerError(
                f"a commit of mini-batches {commit.first}-{commit.last} of epoch {commit.epoch} does not continue its "
                f"partition, which is at mini-batch {self.batch} of epoch {self.epoch}",
                worker=commit.worker,
                step=commit.first,
            )

    def staleness(self, commit: Commit, clock: int) -> int:
        """Commits applied since the clock that the window began from: the one definition, for every rule and pace.

        That is the clock of what the worker was sent before the window (`released`). So in a round the commits before
        it count, 0, 1, 2 …; and of an overlapped commit the worker's own one before it counts as well, which what it
        was sent lacked.
        """
        overlapped = commit.overlapped and self.previous_released is not None
        since = self.previous_released if overlapped else self.released
        assert since is not None
        return clock - since

    def advance(self, commit: Commit, now: float) -> None:
        """The partition stands behind ``commit``; it was applied at ``now``, seconds since the epoch."""
        self.sequence, self.checksum = commit.sequence, commit.checksum
        self.epoch, self.batch = (commit.epoch + 1, 0) if commit.epoch_end else (commit.epoch, commit.last + 1)
        self.passed = commit.passed if 0.0 < commit.passed <= 1.0 and not commit.epoch_end else 0.0
        self.skipped, self.active_at, self.previous_released = False, now, self.released
        self.refusals = 0
        ahead, self.next_optimizer = self.next_optimizer, None
        if ahead is not None and ahead.sequence == commit.sequence:
            self.optimizer = ahead

    def refuse(self, commit: Commit, now: float) -> None:
        """Count ``commit``, refused at ``now``; its mini-batches remain to be committed, after a pull."""
        self.sequence, self.active_at, self.skipped = commit.sequence, now, False
        self.refusals += 1
        self.require_pull()

    def keep_sent(self, version: Buffer, *, within_window: bool) -> None:
        """Holds what the worker is sent.

        Args:
            version: that.
            within_window: a pull before a commit: what the window began with stays `sent` until that is applied.
        """
        if within_window and self.sent is not None:
            if self.pulled is not None:
                self.pulled.drop()
            self.pulled = version.hold()
            return
        if self.sent is not None:
            self.sent.drop()
        self.sent = version.hold()

    def keep_optimizer(self, message: KeepOptimizer, now: float, *, ahead: bool = False) -> None:
        """Keep the state that the holder's optimizer has after its latest commit.

        Args:
            now: seconds since the epoch.
            ahead: the state is that after the commit to come, and takes the place of the kept one with that commit.

        Raises:
            RemoteProtocolError: the state is that after another commit.
        """
        sequence = self.sequence + ahead
        if message.sequence != sequence or not sequence:
            raise RemoteProtocolError(
                f"a state of the optimizer must be that after commit {sequence}. "
                f"Received: that after commit {message.sequence}",
                worker=message.worker,
            )
        state = OptimizerState(message.layout, message.content, message.checksum)
        kept = KeptState(state, message.attempt, message.sequence, now)
        if ahead:
            self.next_optimizer = kept
        else:
            self.optimizer = kept

    def release(self, clock: int, at: float) -> None:
        """The next window begins, at ``clock``; ``at`` is the moment, in seconds (monotonic)."""
        self.released, self.released_at = clock, at

    def measure(self, steps: int, arrived: float) -> None:
        """Note the worker's speed: its commit of ``steps`` steps has ``arrived``, in seconds (monotonic)."""
        self.speed = steps / max(arrived - self.released_at, _SHORTEST)

    def begin_window(self, clock: int, at: float) -> None:
        """The next window of a pull-first rule begins at ``clock``, with what was pulled last; see `release`."""
        self.release(clock, at)
        if self.pulled is not None:
            if self.sent is not None:
                self.sent.drop()
            self.sent, self.pulled = self.pulled, None

    def require_pull(self) -> None:
        """The worker must pull before it commits again; its next window begins with that."""
        self.released = self.previous_released = None
        for buffer in (self.sent, self.pulled):
            if buffer is not None:
                buffer.drop()
        self.sent = self.pulled = None


class Leases(dict[int, PartitionLease]):
    """The lease of each partition that a worker has joined, by its number.

    Args:
        make_vectors: makes what the rule keeps for a worker.
        now: clock, seconds since the epoch.
    """

    def __init__(self, workers: int, make_vectors: Callable[[], tuple[Vector, ...]], now: Callable[[], float]) -> None:
        super().__init__()
        self._workers = workers
        self.make_vectors = make_vectors
        self._now = now

    def add(self, worker: int, attempt: int) -> PartitionLease:
        """Puts ``worker``'s partition at the beginning of its data."""
        lease = self[worker] = PartitionLease(attempt, active_at=self._now(), vectors=self.make_vectors())
        return lease

    def join(self, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        """Gives ``attempt`` the lease of ``worker``'s partition, or None where it has to wait for it.

        A later attempt takes over once the holder's connection is lost: Spark started it because it gave the holder up,
        or to race it. Any attempt takes over once the lease has expired, an earlier one too: Spark may still count on
        it. A partition whose data has ended has no holder any more, and every attempt gets the same answer.

        Args:
            attempt: Spark's task attempt id, at least 0.
            expired: the holder has given no sign of life for as long as a lease lasts.

        Raises:
            RemoteProtocolError: no such worker.
        """
        if not 0 <= worker < self._workers:
            raise RemoteProtocolError(f"`worker` must be in [0, {self._workers}). Received: worker={worker}")
        lease = self.get(worker)
        if lease is None:
            lease = self.add(worker, attempt)
        elif lease.finished:
            return lease
        elif attempt != lease.attempt:
            if not expired and (attempt < lease.attempt or lease.connected):
                return None
            lease.attempt, lease.active_at, lease.speed = attempt, self._now(), None
            lease.require_pull()
        lease.move(LeaseState.HELD)
        return lease

    def disconnected(self, worker: int, attempt: int) -> None:
        """The connection of ``attempt`` is lost: a waiting newcomer may take over."""
        lease = self.get(worker)
        if lease is not None and lease.attempt == attempt and not lease.finished:
            lease.move(LeaseState.FREE)

    def held(self, worker: int, attempt: int) -> PartitionLease:
        """Return the lease; raise LeaseLostError if ``attempt`` does not hold it."""
        lease = self.get(worker)
        if lease is None or lease.attempt != attempt:
            holder = "no attempt" if lease is None else f"attempt {lease.attempt}"
            raise LeaseLostError(
                f"attempt {attempt} has lost its lease: {holder} holds the lease, and this request is refused",
                worker=worker,
            )
        return lease
