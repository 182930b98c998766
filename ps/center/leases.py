"""The leases of partitions, and the ledger of their mini-batches.

Rules:

1. A partition's lease has one holder, an attempt of a Spark task; the requests of other attempts are refused.
2. A commit must be the next one of its partition: sequence numbers rise by one, and its mini-batches begin where those
   of the previous commit ended. So no mini-batch is left out, and none counts twice.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.errors import LeaseLostError, LedgerError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.loop import OptimizerState, Position
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
#: Seconds for which a loan is kept for the worker to which it was promised.
PROMISE_SECONDS = 10.0
#: A quotient that is below a whole number by at most this share is rounded up: times are sums of rounded numbers.
_ROUNDING = 1e-9
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
    """The lease of a partition, or of a part of it that is lent (`loans`), and its progress."""

    attempt: int
    state: LeaseState = LeaseState.HELD
    #: The partition of its mini-batches, and the worker that trains them, by the number of its own partition.
    partition: int = 0
    holder: int = 0
    #: The position at which it ends; None: with the partition's data. And the epochs of the partition before its first.
    end: Position | None = None
    before: float = 0.0
    #: Checksum of all rows of the partition whose own lease this is, once some were lent; -1: none were.
    rows_checksum: int = -1
    #: When a loan was promised to a worker that has not joined yet, in seconds (monotonic); None: it was not.
    promised_at: float | None = None
    #: Steps of this attempt after its first commit, and the times of that and of its latest one, seconds (monotonic).
    paced_steps: int = 0
    paced_since: float | None = None
    paced_until: float = 0.0
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
        if self.end is not None and (commit.epoch, commit.last) >= self.end:
            raise LedgerError(
                f"a commit of mini-batches {commit.first}-{commit.last} of epoch {commit.epoch} goes beyond mini-batch "
                f"{self.end[1]} of epoch {self.end[0]}, from which on they are lent to another worker",
                worker=commit.worker,
                step=commit.first,
            )

    def promised(self, now: float) -> bool:
        """Return whether the lease is kept for a worker that will join."""
        return self.promised_at is not None and now - self.promised_at < PROMISE_SECONDS

    def keep_pace(self, steps: int, now: float) -> None:
        """Note that a commit of ``steps`` steps was applied at ``now``, in seconds (monotonic)."""
        if self.paced_since is None:  # before the first commit, the model was compiled
            self.paced_since = now
        else:
            self.paced_steps += steps
        self.paced_until = now

    def pace(self, now: float | None = None) -> float | None:
        """Return this attempt's mini-batches per second until ``now``, or until its latest commit.

        It is None until the attempt has committed twice.
        """
        if self.paced_since is None or not self.paced_steps:
            return None
        return self.paced_steps / max((self.paced_until if now is None else now) - self.paced_since, _SHORTEST)

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
        lease = self[worker] = PartitionLease(
            attempt, partition=worker, holder=worker, active_at=self._now(), vectors=self.make_vectors()
        )
        return lease

    def cut(self, number: int, at: Position, *, before: float) -> int:
        """Cut lease ``number`` at a position before its end; return the number of the loan from there on.

        ``before``: the epochs of the partition before that position. The loan has no holder.
        """
        lease, loan = self[number], 1 + max(self._workers - 1, max(self))
        part = self.add(loan, NO_ATTEMPT)
        part.state, part.partition, part.end, (part.epoch, part.batch) = LeaseState.FREE, lease.partition, lease.end, at
        part.before, part.passed = before, before - at[0]
        lease.end = at
        return loan

    def loans(self) -> Iterator[tuple[int, PartitionLease]]:
        """Yield the numbers of the loans, and their leases."""
        return ((number, lease) for number, lease in self.items() if number >= self._workers)

    def partitions(self) -> Iterator[tuple[int, PartitionLease]]:
        """Yield the partitions that a worker has joined, and their own leases."""
        return ((number, lease) for number, lease in self.items() if number < self._workers)

    def owes(self, partition: int) -> bool:
        """Return whether a loan of ``partition`` has mini-batches left, whose rows its task must send."""
        return any(not lease.finished for _, lease in self.loans() if lease.partition == partition)

    @property
    def complete(self) -> bool:
        """Whether all partitions have been joined, and all leases have ended."""
        return sum(1 for _ in self.partitions()) == self._workers and all(lease.finished for lease in self.values())

    def lend(self, number: int, holder: int, attempt: int, now: float) -> PartitionLease:
        """Promise a loan without a holder to ``attempt``, of the worker ``holder``, at ``now`` (monotonic)."""
        lease = self[number]
        if lease.connected:
            lease.move(LeaseState.FREE)
        if attempt != lease.attempt:
            self._take_over(lease, attempt)
        lease.holder, lease.promised_at = holder, now
        return lease

    def join(self, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        """Grant ``attempt`` the lease of ``worker``'s partition and return it, or None if it must wait.

        A later attempt takes over once the holder is disconnected: Spark has given the holder up, or speculates. Any
        attempt, even an earlier one, takes over once the lease has ``expired``, because Spark may still rely on it. If
        the partition's data has ended, every attempt is returned the finished lease.
        """
        lease = self.get(worker)
        if not 0 <= worker < self._workers:
            return self._join_loan(worker, lease, attempt)
        if lease is None:
            lease = self.add(worker, attempt)
        elif lease.finished:
            return lease
        elif attempt != lease.attempt:
            if not expired and (attempt < lease.attempt or lease.connected):
                return None
            self._take_over(lease, attempt)
        lease.move(LeaseState.HELD)
        return lease

    def _take_over(self, lease: PartitionLease, attempt: int) -> None:
        lease.attempt, lease.active_at, lease.speed = attempt, self._now(), None
        lease.paced_since, lease.paced_steps = None, 0
        lease.require_pull()

    def _join_loan(self, number: int, lease: PartitionLease | None, attempt: int) -> PartitionLease:
        """Grant the loan that was promised to ``attempt``."""
        if lease is None:
            # A restarted server may not know it. Another loan may have this number then, but not for this attempt: it
            # asks for one only when it has none.
            raise LeaseLostError("the server has no such loan", worker=number)
        if lease.attempt != attempt:
            raise LeaseLostError(f"the loan was promised to attempt {lease.attempt}, not to {attempt}", worker=number)
        if not lease.finished:
            lease.promised_at = None
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
        if lease.finished and worker >= self._workers:
            raise LeaseLostError("the loan has ended, because the job ends early", worker=worker)
        return lease


def window_by_speed(longest: int, speed: float | None, speeds: Iterable[float | None]) -> int:
    r"""Return the steps of a worker's next window: :math:`H_k = \max(1, \lfloor H v_k / v_{\max} \rfloor)`.

    Args:
        longest: H, the window of the fastest worker.
        speed: v_k, the worker's speed, steps per second; None: it is not measured yet, and the window is H.
        speeds: the speeds of all active workers, including this one.

    Reference:
        Liu et al. 2024 (arXiv 2401.09135), Equation 6: dynamic local updates (DyLU).
    """
    if speed is None:
        return longest
    fastest = max(other for other in speeds if other is not None)
    return max(1, math.floor(longest * (speed / fastest) * (1 + _ROUNDING)))
