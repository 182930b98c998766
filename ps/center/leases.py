"""The leases of partitions, and the ledger of their mini-batches.

Rules:

1. A partition's lease has one holder, an attempt of a Spark task; the requests of other attempts are refused.
2. A commit must be the next one of its partition: sequence numbers rise by one, and its mini-batches begin where those
   of the previous commit ended. So no mini-batch is left out, and none counts twice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.errors import LeaseLostError, LedgerError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.loop import OptimizerState
from distkeras.ps.protocol.messages import Commit, KeepOptimizer
from distkeras.ps.rules.base import Vector
from distkeras.ps.world.world import REAL, World

#: Bytes of memory for the optimizer states of all partitions; a state above its partition's share is kept in a file.
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state of a worker's optimizer, and the commit after which it was taken; a later attempt begins with it.

    Most rules need it for quality only, not for the ledger: a state that is damaged, or too large to store, is
    discarded. The server does not interpret its content.

    Under a rule with peers it is a member's entire state. It arrives before the commit to which it belongs, and the
    previous state is retained until that commit. If a member's state is missing, the job ends with an error
    (`worker.daso`).

    Args:
        sequence: the commit after which it was taken.
        kept_at: when it arrived, seconds since the epoch.
    """

    state: OptimizerState
    attempt: int
    sequence: int
    kept_at: float


class StateMemory:
    """Allocates optimizer states, in memory (each of n workers 1/n of `MEMORY_BYTES`) or in unnamed temporary files."""

    def __init__(self, workers: int, world: World = REAL) -> None:
        self._most = MEMORY_BYTES // workers
        self._world = world

    def array(self, size: int) -> np.ndarray:
        """Return ``size`` bytes for a state. If the disk is full, they are in memory, and `holds` returns False."""
        if size > self._most:
            try:
                return np.frombuffer(self._world.scratch(size), np.uint8)
            except OSError:
                pass  # the state must still be received; the caller discards it, and reports that
        return np.empty(size, np.uint8)

    def holds(self, array: np.ndarray) -> bool:
        """Return whether ``array`` may be retained: it is small, or in a file."""
        return array.nbytes <= self._most or not array.flags.owndata


#: The holder of a lease that the next attempt that joins may take.
NO_ATTEMPT = -1
#: The shortest duration of a window that is assumed, in seconds, so that speeds are finite.
_SHORTEST = 1e-9


class LeaseState(enum.Enum):
    """The states of a partition's lease."""

    #: Its attempt is connected.
    HELD = "held"
    #: Its attempt is disconnected: it may connect again, or a later attempt may take over.
    FREE = "free"
    #: The partition's data has ended.
    FINISHED = "finished"


#: The allowed transitions. FINISHED is left only for a stream's next micro-batch or a job resumed with more epochs.
TRANSITIONS: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.HELD: frozenset({LeaseState.FREE, LeaseState.FINISHED}),
    LeaseState.FREE: frozenset({LeaseState.HELD, LeaseState.FINISHED}),
    LeaseState.FINISHED: frozenset({LeaseState.FREE}),
}


@dataclass
class PartitionLease:
    """The lease of a partition, and the partition's progress."""

    attempt: int
    state: LeaseState = LeaseState.HELD
    sequence: int = 0
    epoch: int = 0
    batch: int = 0
    #: Checksum of the rows that were committed; -1 before the first commit.
    checksum: int = -1
    #: Clock when the worker was last sent the center (pull-first rules: when its window began). None: not yet.
    released: int | None = None
    #: The time of that, in seconds (monotonic).
    released_at: float = 0.0
    #: Steps per second of this attempt's last applied window, including the exchange. None: none was applied yet.
    speed: float | None = None
    #: `released` before the last commit: an overlapped window, computed while that commit was in flight, began there.
    previous_released: int | None = None
    steps: int = 0
    #: Whether the last commit was skipped for a NaN or infinity.
    skipped: bool = False
    #: How many times in a row the window was refused; 0: the last commit was not refused.
    refusals: int = 0
    #: The completed share of ``epoch``, as reported by the worker.
    passed: float = 0.0
    #: Time of the last commit, or of the attempt's join if that was later; seconds since the epoch.
    active_at: float = 0.0
    #: The version that the worker was sent before its window, if retained; and what it pulled since (pull-first rules).
    sent: Buffer | None = None
    pulled: Buffer | None = None
    vectors: tuple[Vector, ...] = ()
    #: The latest optimizer state that the worker sent; None: it sent none.
    optimizer: KeptState | None = None
    #: The optimizer state after the next commit, if it was sent ahead; that commit makes it the latest one.
    next_optimizer: KeptState | None = None

    @property
    def connected(self) -> bool:
        return self.state is LeaseState.HELD

    @property
    def finished(self) -> bool:
        return self.state is LeaseState.FINISHED

    def move(self, state: LeaseState) -> None:
        """Change the state, or keep it; raise LocalProtocolError if `TRANSITIONS` does not allow the transition."""
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise LocalProtocolError(f"a lease that is {self.state.value} cannot become {state.value}")
        self.state = state

    def require_next(self, commit: Commit) -> None:
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
        """Return the number of commits applied since the clock at which the window began, under every rule and pace.

        A window begins at the clock of the version that the worker was sent before it (`released`). So the earlier
        commits of a round count: 0, 1, 2 …. For an overlapped commit, the worker's own previous commit counts too,
        because that version did not contain it.
        """
        overlapped = commit.overlapped and self.previous_released is not None
        since = self.previous_released if overlapped else self.released
        assert since is not None
        return clock - since

    def advance(self, commit: Commit, now: float) -> None:
        """Record that ``commit`` was applied at ``now``, seconds since the epoch."""
        self.sequence, self.checksum = commit.sequence, commit.checksum
        self.epoch, self.batch = (commit.epoch + 1, 0) if commit.epoch_end else (commit.epoch, commit.last + 1)
        self.passed = commit.passed if 0.0 < commit.passed <= 1.0 and not commit.epoch_end else 0.0
        self.skipped, self.active_at, self.previous_released = False, now, self.released
        self.refusals = 0
        ahead, self.next_optimizer = self.next_optimizer, None
        if ahead is not None and ahead.sequence == commit.sequence:
            self.optimizer = ahead

    def refuse(self, commit: Commit, now: float) -> None:
        """Record that ``commit`` was refused at ``now``: the worker must pull and commit these mini-batches again."""
        self.sequence, self.active_at, self.skipped = commit.sequence, now, False
        self.refusals += 1
        self.require_pull()

    def keep_sent(self, version: Buffer, *, within_window: bool) -> None:
        """Retain the version that the worker is sent.

        After a pull ``within_window``, `sent` stays the version with which the window began, until its commit.
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
        """Keep the state of the holder's optimizer after its latest commit, or, ``ahead``, after the next one."""
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
        """Begin the next window at ``clock``; ``at`` is the time, in seconds (monotonic)."""
        self.released, self.released_at = clock, at

    def measure(self, steps: int, arrived: float) -> None:
        """Set the worker's speed at its commit of ``steps`` steps; ``arrived`` is the time, in seconds (monotonic)."""
        self.speed = steps / max(arrived - self.released_at, _SHORTEST)

    def begin_window(self, clock: int, at: float) -> None:
        """Begin the next window of a pull-first rule at ``clock``, with the version pulled last; see `release`."""
        self.release(clock, at)
        if self.pulled is not None:
            if self.sent is not None:
                self.sent.drop()
            self.sent, self.pulled = self.pulled, None

    def require_pull(self) -> None:
        """Require the worker to pull before it commits again; its next window begins with that pull."""
        self.released = self.previous_released = None
        for buffer in (self.sent, self.pulled):
            if buffer is not None:
                buffer.drop()
        self.sent = self.pulled = None


class MicroBatch(NamedTuple):
    """The micro-batch of a stream to which the leases belong, and how many commits were ``skipped`` before it began."""

    stream: str
    number: int
    skipped: int


class Leases(dict[int, PartitionLease]):
    """The leases of the partitions that a worker has joined, by number; ``make_vectors`` returns a worker's."""

    def __init__(self, workers: int, make_vectors: Callable[[], tuple[Vector, ...]], now: Callable[[], float]) -> None:
        super().__init__()
        self._workers = workers
        self.make_vectors = make_vectors
        self._now = now

    def states(self) -> dict[int, KeptState]:
        """Return the kept states of the workers' optimizers, by partition."""
        return {worker: lease.optimizer for worker, lease in self.items() if lease.optimizer is not None}

    def add(self, worker: int, attempt: int) -> PartitionLease:
        """Add a lease for ``worker``'s partition, at the beginning of its data."""
        lease = self[worker] = PartitionLease(attempt, active_at=self._now(), vectors=self.make_vectors())
        return lease

    def join(self, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        """Grant ``attempt`` the lease of ``worker``'s partition and return it, or None if it must wait.

        A later attempt takes over once the holder is disconnected: Spark has given the holder up, or speculates. Any
        attempt, even an earlier one, takes over once the lease has ``expired``, because Spark may still rely on it. If
        the partition's data has ended, every attempt is returned the finished lease.
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
        """Free the lease if ``attempt`` holds it: its connection is lost, and a waiting attempt may take over."""
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
