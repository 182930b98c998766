"""The center variable, the server half of its rule, and the ledger: a plain state machine.

No threads, no sockets, no clocks of its own; whoever drives it holds one lock around every call. What it keeps true:

1. A commit is applied whole or not at all, and at most once: it must come from the holder of its partition's lease,
   carry the next sequence number, and continue the mini-batches where the last commit ended.
2. The clock ticks once per applied commit, under the same lock as the arithmetic.
3. A published version of the center never changes. For rules that send the center itself, the payload's buffer
   becomes the next version; rules with a view work in place and send a buffer that the view was written to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.center.buffers import Buffer, Pool
from distkeras.ps.center.commit_log import CommitLog
from distkeras.ps.center.schedulers import Scheduler, Synchronous, scheduler_for
from distkeras.ps.errors import ConfigurationError, LeaseLostError, LedgerError, RemoteProtocolError
from distkeras.ps.protocol.messages import NO_FLOATS, Commit
from distkeras.ps.rules.base import BLOCK, Chunk, Context, Rule, Scalars, Vector
from distkeras.ps.rules.schedules import Schedule, schedule_of


@dataclass
class PartitionLease:
    """A partition's standing: who holds its lease, and how far it has come."""

    attempt: int
    connected: bool = True
    finished: bool = False
    sequence: int = 0
    epoch: int = 0
    batch: int = 0
    #: Of the rows behind what was committed; -1 before the first commit.
    checksum: int = -1
    #: Clock when the worker was last sent the center (pull-first rules: when its window began). None: not yet.
    released: int | None = None
    #: The same before its last commit: what a window started from that was computed while that commit travelled.
    before: int | None = None
    steps: int = 0
    #: Whether its last commit was left out for its numbers.
    skipped: bool = False
    #: Time of its last commit, or of when the attempt joined; seconds since the epoch.
    since: float = 0.0
    sent: Buffer | None = None
    vectors: tuple[Vector, ...] = ()


@dataclass
class Round:
    """A synchronous rule's round: what has been contributed, and when it and the one before it began."""

    moving_statistics: np.ndarray
    total: Buffer | None = None
    steps: int = 0
    #: Contributions that were left out for their numbers: their workers have arrived.
    skipped: int = 0
    began: int = 0
    previous_began: int = 0


class Released(NamedTuple):
    """What a worker is sent. The receiver of this drops ``buffer`` when the bytes are out."""

    buffer: Buffer
    clock: int
    sequence: int
    learning_rate: float
    moving_statistics: np.ndarray = NO_FLOATS


class Center:
    """The shared parameters under one rule.

    Args:
        rule: the update rule.
        vector: initial parameters, shape ``(size,)``, float32 (float64 in simulations); copied.
        workers: number of workers of the job, n.
        learning_rate: the server's eta, a number or a schedule over the clock; gradient rules only.
        scheduler: when replies are released; None: what the rule needs.
        moving_statistics: the initial ones (BatchNormalization), averaged by step count, never through the rule.
        measure_gap: record ``||center - sent|| / sqrt(size)`` at each commit, for one more pass over the vector.
        incarnation: which life of the server this is.
        block: elements of one chunk.
        now: clock for the records, seconds since the epoch.

    Raises:
        ConfigurationError: a gradient rule without a learning rate, or no worker.
    """

    def __init__(
        self,
        rule: Rule,
        vector: Vector,
        *,
        workers: int,
        learning_rate: float | Schedule | None = None,
        scheduler: Scheduler | None = None,
        moving_statistics: np.ndarray = NO_FLOATS,
        measure_gap: bool = False,
        incarnation: int = 1,
        block: int = BLOCK,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.traits = rule.traits
        if workers < 1:
            raise ConfigurationError(f"`workers` must be at least 1. Received: workers={workers}")
        if self.traits.gradient and learning_rate is None:
            raise ConfigurationError(
                f"`learning_rate` must be given: rule {rule.name!r} takes its steps at the server. Received: None"
            )
        if scheduler is None:
            scheduler = scheduler_for(rule, workers)
        if self.traits.synchronous and not isinstance(scheduler, Synchronous):
            raise ConfigurationError(
                f"rule {rule.name!r} must run in rounds. Received: scheduler={type(scheduler).__name__}"
            )
        self.rule = rule
        self.workers = workers
        self.schedule = None if learning_rate is None else schedule_of(learning_rate)
        self.scheduler = scheduler
        self.moving_statistics = np.array(moving_statistics)
        self.incarnation = incarnation
        self.clock = 0
        #: Why the job ends early, if it does; then everybody who asks is told to leave.
        self.stopping: str | None = None
        self.counters: dict[str, int] = {}
        self.log = CommitLog()
        self.members: dict[int, PartitionLease] = {}
        self.pool = Pool(vector.size, vector.dtype)
        self.current = self.pool.take()
        self.current.array[...] = vector
        self.model = tuple(np.zeros_like(vector) for _ in self.traits.model_vectors)
        self._now = now
        # Each call of numpy gives another thread its turn at the interpreter's lock: not for what fits a cache whole.
        self._block = block if vector.size > 2 * block else max(block, vector.size)
        self._measure_gap = measure_gap
        self._keeps_sent = self.traits.keeps_sent or measure_gap
        self._chunk = Chunk()
        self._scratch = np.empty(min(max(self._block, BLOCK), vector.size), vector.dtype)
        self.round = Round(np.zeros_like(self.moving_statistics))

    def rate(self, clock: int) -> float:
        """The server's eta for the commit that finds the clock at ``clock``; 0 for rules that step at the workers."""
        return 0.0 if self.schedule is None else self.schedule(max(0, clock))

    @property
    def size(self) -> int:
        """Elements of the center."""
        return self.pool.size

    # ---- leases -----------------------------------------------------------------------------------------------

    def new_member(self, attempt: int) -> PartitionLease:
        """A member at the beginning of its data, not yet one of `members`."""
        vectors = tuple(np.zeros_like(self.current.array) for _ in self.traits.worker_vectors)
        return PartitionLease(attempt, since=self._now(), vectors=vectors)

    def join(self, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        """Gives ``attempt`` the lease of ``worker``'s partition, or None where it has to wait for it.

        A later attempt takes over once the holder's connection is gone: Spark started it because it gave the holder up,
        or to race it. Any attempt takes over once the lease has expired, an earlier one too: Spark may still count on
        it. A partition whose data has ended has no holder any more, and everybody is told.

        Args:
            worker: the partition.
            attempt: Spark's task attempt id, at least 0.
            expired: the holder has given no sign of life for as long as a lease lasts.

        Raises:
            RemoteProtocolError: no such worker.
        """
        if not 0 <= worker < self.workers:
            raise RemoteProtocolError(f"`worker` must be in [0, {self.workers}). Received: worker={worker}")
        member = self.members.get(worker)
        if member is None:
            member = self.members[worker] = self.new_member(attempt)
        elif member.finished:
            return member
        elif attempt != member.attempt:
            if not expired and (attempt < member.attempt or member.connected):
                return None
            member.attempt, member.since = attempt, self._now()
            member.released = member.before = None
        member.connected = True
        self.scheduler.joined(worker)
        return member

    def disconnected(self, worker: int, attempt: int) -> None:
        """The connection of ``attempt`` is gone: a waiting newcomer may take over."""
        member = self.members.get(worker)
        if member is not None and member.attempt == attempt:
            member.connected = False

    def leave(self, worker: int, attempt: int) -> None:
        """The partition's data has ended."""
        member = self.members.get(worker)
        if member is None or not member.finished:
            member = self.held(worker, attempt)
            member.finished = True
            self.rule.leave(self.model, member.vectors)
            self.scheduler.left(worker)
        self._end_round_if_complete()

    def finish(self, reason: str) -> None:
        """Ends the job early: nobody waits for those who have not joined, and everybody is told to leave."""
        self.stopping = self.stopping or reason
        self.scheduler.gather = False  # those who have joined are all there will be

    def held(self, worker: int, attempt: int) -> PartitionLease:
        """The member, if ``attempt`` holds its lease.

        Raises:
            LeaseLostError: it does not.
        """
        member = self.members.get(worker)
        if member is None or member.attempt != attempt:
            holder = "nobody" if member is None else f"attempt {member.attempt}"
            raise LeaseLostError(f"{holder} holds the lease. Received: attempt {attempt}", worker=worker)
        return member

    # ---- commits ----------------------------------------------------------------------------------------------

    def commit(self, commit: Commit, parts: Sequence[Buffer]) -> bool:
        """Applies ``commit``; its payload stands in ``parts``, which the center takes over.

        Returns:
            False if this commit had been applied before (its reply was lost), and nothing was done.

        Raises:
            LeaseLostError: the sender does not hold the lease.
            LedgerError: the mini-batches do not continue where the partition's last commit ended.
            RemoteProtocolError: another incarnation, a gap in the sequence, or a wrong number of parts.
        """
        member = self._due(commit, len(parts))
        if member is None:
            return False
        staleness = self._staleness(member, commit)
        rounds = self.scheduler if isinstance(self.scheduler, Synchronous) else None
        context = Context(
            workers=self.workers,
            worker=commit.worker,
            clock=self.clock,
            staleness=staleness,
            steps=commit.steps,
            learning_rate=self.rate(self.clock) if self.traits.gradient else commit.learning_rate,
            previous_learning_rate=self.rate(self.clock - 1) if self.traits.gradient else commit.learning_rate,
            waiting=len(rounds.arrived) - self.round.skipped if rounds else 0,
        )
        scalars = self.rule.accept(context, self.counters)
        gap = self._gap(member) if self._measure_gap else math.nan
        total: float | None = None
        if self.traits.synchronous:
            self._contribute(parts[0])
        else:
            total = self._apply(member, parts, scalars)
        self._blend_moving_statistics(commit, member)
        scale = commit.scale if total is None else total / self.size
        now = self._now()
        self.log.add(
            commit,
            clock=self.clock,
            staleness=staleness,
            timestamp=now,
            eta=context.learning_rate,
            gap=gap,
            scale=scale,
        )
        self.clock += 1
        member.steps = commit.steps
        self._advance(member, commit, now)
        if not commit.wants_center:
            member.released = self.clock
        self.scheduler.committed(commit.worker)
        self._end_round_if_complete()
        return True

    def skip(self, commit: Commit) -> bool:
        """Leaves ``commit`` out, for its numbers: its mini-batches are done with, and nothing else has changed.

        Its worker must pull before it goes on. A round counts it as arrived, with nothing contributed.

        Returns:
            False if it had been left out before, and only the reply was lost.

        Raises:
            LeaseLostError, LedgerError, RemoteProtocolError: as for `commit`.
        """
        member = self._due(commit, len(commit.parts))
        if member is None:
            return False
        now = self._now()
        self.log.add(
            commit,
            clock=self.clock,
            staleness=self._staleness(member, commit),
            timestamp=now,
            eta=commit.learning_rate,
            gap=math.nan,
            scale=0.0,
            skipped=True,
        )
        self._advance(member, commit, now)
        member.skipped, member.released, member.before = True, None, None
        self.scheduler.committed(commit.worker)
        if isinstance(self.scheduler, Synchronous):
            self.round.skipped += 1
        self._end_round_if_complete()
        return True

    def _due(self, commit: Commit, parts: int) -> PartitionLease | None:
        """The member that ``commit`` is the next one of; None where it is the last one, sent again."""
        member = self.held(commit.worker, commit.attempt)
        if commit.incarnation != self.incarnation:
            raise RemoteProtocolError(
                f"`incarnation` must be {self.incarnation}. Received: incarnation={commit.incarnation}",
                worker=commit.worker,
            )
        if commit.sequence == member.sequence and commit.sequence > 0:
            return None
        self._check(commit, member, parts)
        if member.released is None:
            raise RemoteProtocolError("a worker must pull before it commits. Received: a commit", worker=commit.worker)
        return member

    def _staleness(self, member: PartitionLease, commit: Commit) -> int:
        """Of an overlapped commit, the one before it counts as well: what its sender was sent lacked it."""
        since = member.before if commit.overlapped and member.before is not None else member.released
        assert since is not None
        return 0 if self.traits.synchronous else self.clock - since

    @staticmethod
    def _advance(member: PartitionLease, commit: Commit, now: float) -> None:
        member.sequence, member.checksum = commit.sequence, commit.checksum
        member.epoch, member.batch = (commit.epoch + 1, 0) if commit.epoch_end else (commit.epoch, commit.last + 1)
        member.skipped, member.since, member.before = False, now, member.released

    def _check(self, commit: Commit, member: PartitionLease, parts: int) -> None:
        if parts != self.traits.parts or commit.sequence != member.sequence + 1:
            raise RemoteProtocolError(
                f"commit must have {self.traits.parts} parts and sequence {member.sequence + 1}. "
                f"Received: {parts} parts, sequence {commit.sequence}",
                worker=commit.worker,
            )
        if (commit.epoch, commit.first) != (member.epoch, member.batch) or commit.last < commit.first:
            raise LedgerError(
                f"commit must begin at mini-batch {member.batch} of epoch {member.epoch}. "
                f"Received: mini-batches {commit.first}-{commit.last} of epoch {commit.epoch}",
                worker=commit.worker,
                step=commit.first,
            )

    def _apply(self, member: PartitionLease, parts: Sequence[Buffer], scalars: Scalars) -> float | None:
        payload = tuple(part.array for part in parts)
        center = self.current.array
        in_place = self.traits.view
        out = center if in_place else payload[0]
        sent = member.sent.array if self.traits.keeps_sent and member.sent else center
        vectors = (out, center, payload, self.model, member.vectors, sent)
        if self.traits.reduction:
            total = math.fsum(self.rule.partial(chunk, scalars) for chunk in self._chunks(BLOCK, *vectors))
            scalars = self.rule.reduced(scalars, total)
        scale: float | None = None
        for chunk in self._chunks(self._block, *vectors):
            share = self.rule.apply(chunk, scalars)
            if share is not None:
                scale = share if scale is None else scale + share
        if in_place:
            parts[0].drop()
        else:
            self._publish(parts[0])
        for extra in parts[1:]:
            extra.drop()
        return scale

    def _publish(self, version: Buffer) -> None:
        self.current.drop()
        self.current = version

    def _chunks(
        self,
        block: int,
        out: Vector,
        center: Vector,
        payload: tuple[Vector, ...],
        model: tuple[Vector, ...],
        worker: tuple[Vector, ...],
        sent: Vector,
    ) -> Iterator[Chunk]:
        """The same `Chunk` object, moved over consecutive stretches of the vectors."""
        chunk, size = self._chunk, self.size
        if 0 < size <= block:
            chunk.out, chunk.center, chunk.payload, chunk.model = out, center, payload, model
            chunk.worker, chunk.sent, chunk.scratch = worker, sent, self._scratch[:size]
            yield chunk
            return
        for start in range(0, size, block):
            stretch = slice(start, min(start + block, size))
            chunk.out = out[stretch]
            chunk.center = center[stretch]
            chunk.payload = tuple([vector[stretch] for vector in payload])
            chunk.model = tuple([vector[stretch] for vector in model])
            chunk.worker = tuple([vector[stretch] for vector in worker])
            chunk.sent = sent[stretch]
            chunk.scratch = self._scratch[: stretch.stop - start]
            yield chunk

    def _gap(self, member: PartitionLease) -> float:
        if member.sent is None:
            return math.nan
        total, center, sent = 0.0, self.current.array, member.sent.array
        for start in range(0, self.size, BLOCK):
            stretch = slice(start, min(start + BLOCK, self.size))
            moved = np.subtract(center[stretch], sent[stretch], out=self._scratch[: stretch.stop - start])
            total += float(np.square(moved, dtype=np.float64).sum())
        return math.sqrt(total / self.size)

    # ---- rounds -----------------------------------------------------------------------------------------------

    def _contribute(self, part: Buffer) -> None:
        if self.round.total is None:
            self.round.total = part
        else:
            self.round.total.array += part.array
            part.drop()

    def _end_round_if_complete(self) -> None:
        """A rule without rounds of its own has moved the center at each arrival; its workers are only let go."""
        if not isinstance(self.scheduler, Synchronous) or not self.scheduler.round_complete():
            return
        if self.round.total is not None:
            self._take_round(self.round.total, len(self.scheduler.arrived) - self.round.skipped)
        self.round.skipped = 0
        self.scheduler.next_round()

    def _take_round(self, total: Buffer, contributions: int) -> None:
        scalars = self.rule.release(self._view_context(-1, self.round.began, self.round.previous_began), self.counters)
        center = self.current.array
        for chunk in self._chunks(self._block, total.array, center, (total.array,), self.model, (), center):
            self.rule.round_end(chunk, contributions, scalars)
        self._publish(total)
        self.round.total = None
        if self.moving_statistics.size:
            self.moving_statistics = self.round.moving_statistics / self.round.steps
            self.round.moving_statistics = np.zeros_like(self.moving_statistics)
            self.round.steps = 0
        self.round.previous_began, self.round.began = self.round.began, self.clock

    def _blend_moving_statistics(self, commit: Commit, member: PartitionLease) -> None:
        if not self.moving_statistics.size:
            return
        if self.traits.synchronous:
            self.round.moving_statistics += commit.moving_statistics * commit.steps
            self.round.steps += commit.steps
            return
        # Each active worker's share of the average is its share of the latest steps; one worker's is all of it.
        others = (self.members[other] for other in self.scheduler.active)
        steps = commit.steps + sum(other.steps for other in others if other is not member)
        self.moving_statistics = self.moving_statistics + (commit.moving_statistics - self.moving_statistics) * (
            commit.steps / steps
        )

    # ---- releases ---------------------------------------------------------------------------------------------

    def ready(self, worker: int) -> bool:
        """Whether ``worker`` may be sent the center now."""
        return self.scheduler.ready(worker)

    def release(self, worker: int, attempt: int) -> Released:
        """What ``worker`` is sent now: a write, for it sets where the worker's staleness counts from.

        Raises:
            LeaseLostError: ``attempt`` does not hold the lease.
        """
        member = self.held(worker, attempt)
        if self.traits.view:
            version = self.pool.take()
            # A view uses the eta of the commit that it follows.
            scalars = self.rule.release(self._view_context(worker, self.clock - 1, self.clock - 2), self.counters)
            center = self.current.array
            for chunk in self._chunks(self._block, version.array, center, (), self.model, member.vectors, center):
                self.rule.view(chunk, scalars)
        else:
            version = self.current.hold()
        if self._keeps_sent:
            if member.sent is not None:
                member.sent.drop()
            member.sent = version.hold()
        if not self.traits.pull_first or member.released is None:
            member.released = self.clock
        return Released(version, self.clock, member.sequence, self.rate(self.clock), self.moving_statistics)

    def inspect(self) -> Released:
        """The center itself, for nobody's account."""
        return Released(self.current.hold(), self.clock, 0, self.rate(self.clock), self.moving_statistics)

    def _view_context(self, worker: int, clock: int, previous: int) -> Context:
        return Context(self.workers, worker, self.clock, 0, 0, self.rate(clock), self.rate(previous))
