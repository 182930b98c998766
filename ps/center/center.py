"""The center variable and the server half of its rule: a plain state machine.

It has no threads, sockets or clocks of its own; its caller holds one lock around every call. Its invariants:

1. A commit is applied whole or not at all, and at most once: it must come from the holder of its partition's lease,
   carry the next sequence number, and continue the mini-batches where the last commit ended. The commit of a group is
   applied for all of its workers, or for none.
2. The clock ticks once per applied commit, under the same lock as the arithmetic; at a group's, once for each worker.
3. A published version of the center never changes. For rules that send the center itself, the payload's buffer
   becomes the next version; rules with a view work in place and send a buffer that the view was written to, the
   payload's own where the reply goes out at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distkeras.ps.center.arithmetic import CheckedArithmetic
from distkeras.ps.center.buffers import Buffer, Chunks, Pool, ViewAhead
from distkeras.ps.center.commit_log import CommitLog, CommitOutcome
from distkeras.ps.center.driver_values import DriverValues
from distkeras.ps.center.leases import Leases, LeaseState, MicroBatch, PartitionLease, window_by_speed
from distkeras.ps.center.living_tables import LivingTable
from distkeras.ps.center.loans import Lending
from distkeras.ps.center.schedulers import Round, Scheduler, Synchronous, scheduler_for
from distkeras.ps.center.tables import Table
from distkeras.ps.errors import ConfigurationError, RelayLostError, RemoteProtocolError
from distkeras.ps.protocol.loop import NO_FLOATS, Position
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.rules.base import BLOCK, Context, Rule, Scalars, Vector
from distkeras.ps.rules.schedules import Schedule, schedule_of


class Released(NamedTuple):
    """The content of a reply to a worker. The caller that sends it drops ``buffer`` once the bytes are sent.

    ``ticket`` is the number of the ticket at which shards have their slices; 0: the center is not divided. ``moved``:
    the row numbers of ``rows``, for a driver.
    """

    buffer: Buffer
    clock: int
    sequence: int
    learning_rate: float
    moving_statistics: np.ndarray = NO_FLOATS
    window: int = 0
    rows: tuple[Vector, ...] = ()
    end: Position | None = None
    ticket: int = 0
    moved: tuple[Ids, ...] = ()


class Center:
    """The shared parameters under one rule: a vector, and tables whose rows commits name.

    Args:
        vector: initial parameters, shape ``(size,)``, float32 (float64 in simulations); copied.
        learning_rate: the server's eta, a number or a schedule over the clock; gradient rules only.
        scheduler: decides when replies are released; None: the rule's default.
        moving_statistics: the initial ones (BatchNormalization), averaged by step count, never through the rule.
        measure_gap: record ``||center - sent|| / sqrt(size)`` at each commit; this costs one more pass.
        check_finite: raise an error at the commit whose arithmetic produces a NaN or infinity from finite numbers.
        now, monotonic: clocks in seconds, for the records (since the epoch) and for the workers' speeds.
        lends: workers that have no work left train mini-batches of others.
    """

    def __init__(  # noqa: PLR0913 - independent facts of one job, which callers name
        self,
        rule: Rule,
        vector: Vector,
        *,
        workers: int,
        learning_rate: float | Schedule | None = None,
        scheduler: Scheduler | None = None,
        moving_statistics: np.ndarray = NO_FLOATS,
        measure_gap: bool = False,
        check_finite: bool = False,
        incarnation: int = 1,
        block: int = BLOCK,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        tables: Sequence[Table] = (),
        lends: bool = False,
    ) -> None:
        self.traits = rule.traits
        if tables:
            require_rows(rule, len(tables))
        if workers < 1:
            raise ConfigurationError(f"`workers` must be at least 1. Received: workers={workers}")
        if self.traits.gradient and learning_rate is None:
            raise ConfigurationError(
                f"`learning_rate` must be given: rule {rule.name!r} takes its steps at the server. Received: None"
            )
        scheduler = scheduler_for(rule, workers) if scheduler is None else scheduler
        if self.traits.synchronous and not isinstance(scheduler, Synchronous):
            raise ConfigurationError(f"rule {rule.name!r} must run in rounds. Received: {type(scheduler).__name__}")
        self.rule, self.workers, self.scheduler = rule, workers, scheduler
        self.schedule = None if learning_rate is None else schedule_of(learning_rate)
        self.moving_statistics = np.array(moving_statistics)
        self.incarnation = incarnation
        self.clock = 0
        #: Clock and epoch at which the current partitions began; not (0, 0) after the number of workers has changed.
        self.began = (0, 0)
        #: Names of the history's columns, in the format of `Records`; empty until a worker has sent them.
        self.metrics = ""
        #: The reason why the job ends early; None: it does not. If set, each reply asks the worker to leave.
        self.stopping: str | None = None
        self.counters: dict[str, int] = {}
        #: The number of refused commits, and of partitions whose data has ended (again for each micro-batch).
        self.refused = self.ends = 0
        #: The number of a driver's requests that have changed what snapshots have of tables.
        self.edits = 0
        #: The micro-batch to which the leases belong; None: the job trains no stream.
        self.micro_batch: MicroBatch | None = None
        self.values = DriverValues()
        self.log = CommitLog()
        self.leases = Leases(workers, self._make_worker_vectors, now)
        self.lending: Lending | None = None
        if lends:
            self.lending = Lending(self.leases, workers, rule, monotonic)
        self.tables = tuple(tables)
        self.pool = Pool(vector.size, vector.dtype)
        self.current = self.pool.take()
        self.current.array[...] = vector
        self.model = tuple(np.zeros_like(vector) for _ in self.traits.model_vectors)
        self._view_ahead, self._now, self._monotonic = ViewAhead(), now, monotonic
        self._longest_window = rule.window_by_speed
        self._chunks = Chunks(vector.size, vector.dtype, block)
        self._measure_gap = measure_gap
        self._arithmetic = CheckedArithmetic(rule.name, enabled=check_finite)
        self._reduces = rule.reduces
        self._keeps_sent = self.traits.keeps_sent or measure_gap
        self.round = Round(np.zeros_like(self.moving_statistics))

    def rate(self, clock: int) -> float:
        """Return the server's learning rate for a commit at ``clock``; 0 for rules that step at the workers."""
        return 0.0 if self.schedule is None else self.values.rate(max(0, clock), self.schedule)

    @property
    def size(self) -> int:
        return self.pool.size

    @property
    def corrupt(self) -> bool:
        """Return whether a commit failed in its arithmetic and may be applied in part; then no snapshot is taken."""
        return self._arithmetic.failed

    @cached_property
    def saved_tables(self) -> tuple[Table, ...]:
        """What snapshots save row by row: the tables, and the marks of those whose rows live and die."""
        return (*self.tables, *(table.marks for table in self.living))

    @cached_property
    def living(self) -> tuple[LivingTable, ...]:
        """The tables whose rows are admitted, expire or can be removed."""
        return tuple(table for table in self.tables if isinstance(table, LivingTable))

    @cached_property
    def table_shapes(self) -> tuple[TableShape, ...]:
        return tuple(table.shape for table in self.tables)

    def _make_worker_vectors(self) -> tuple[Vector, ...]:
        return tuple(np.zeros_like(self.current.array) for _ in self.traits.worker_vectors)

    def join(self, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        """Grant ``attempt`` the lease of ``worker``'s partition and return it, None if it must wait: `Leases.join`."""
        if worker < 0 or (worker >= self.workers and self.lending is None):
            raise RemoteProtocolError(f"`worker` must be in [0, {self.workers}). Received: worker={worker}")
        lease = self.leases.join(worker, attempt, expired=expired)
        if lease is not None and not lease.finished:
            self.scheduler.joined(worker)
        return lease

    def leave(self, worker: int, attempt: int) -> None:
        """Note that the partition's data has ended; the last one's end drains the rule's buffers into the center."""
        lease = self.leases.get(worker)
        if lease is None or not lease.finished:
            lease = self.leases.held(worker, attempt)
        with self._arithmetic.of(worker, None, self.clock):
            if not lease.finished:
                self._view_ahead.forget()  # `rule.leave` may change the vectors from which it was computed
                lease.move(LeaseState.FINISHED)
                self.ends += 1
                self.rule.leave(self.model, lease.vectors, self.counters)
                self.scheduler.finished(worker)
            self._end_round_if_complete()
            if self.leases.complete:
                self._drain(self.workers)

    def take_back(self) -> None:
        """Let the rule count the workers of all partitions that have data left, after some had ended."""
        self.rule.return_all(self.model, self.counters)
        for lease in self.leases.values():
            if lease.finished:
                self.rule.leave(self.model, lease.vectors, self.counters)

    def end_early(self, reason: str) -> None:
        """End the job early: no worker waits for those that have not joined, and replies ask workers to leave.

        Loans end at once: when the tasks of all partitions have ended, a helper must not commit any more.
        """
        self.stopping = self.stopping or reason
        self.scheduler.gather = False
        for number, loan in [*self.leases.loans()]:
            self.leave(number, loan.attempt)

    @property
    def asks_workers_to_leave(self) -> bool:
        """Return whether replies ask workers to leave; under a rule with peers, all replies of a round agree."""
        return self.round.stopping if self.traits.peers else self.stopping is not None

    def commit(
        self,
        commit: Commit,
        parts: Sequence[Buffer],
        arrived: float | None = None,
        companions: Sequence[Commit] = (),
    ) -> bool:
        """Apply ``commit``, whose payload is in ``parts``; the center takes over these buffers.

        The staleness of a group's commit is that of its stalest worker: the number of commits that were applied since
        the oldest version from which a worker of the group began its window. The group's own commits are not counted.

        Args:
            commit: of the right shapes.
            arrived: when it arrived, by the monotonic clock; None: now.
            companions: the other commits whose payloads are in the sum (`Traits.sums`).

        Returns:
            False if the commit is not applied and the caller keeps the parts, because the commit was applied before
            (its reply was lost), or is refused, now or before (its lease's `refusals` is above 0).

        Raises:
            LeaseLostError: the sender does not hold the lease.
            LedgerError: the mini-batches do not continue where the partition's last commit ended.
            RemoteProtocolError: another incarnation, a gap in the sequence, or a wrong number of parts.
            RelayLostError: a commit in the sum was applied before.
            NonFiniteError: with ``check_finite``, the rule's result has a NaN or infinity; the center is `corrupt`.
        """
        lease = self._lease_for(commit, len(parts)) if not companions else self._stalest((commit, *companions))
        if lease is None:
            return False
        staleness = lease.staleness(commit, self.clock)
        context = self._commit_context(commit, staleness)
        if self.rule.refuses(context, lease.refusals):
            lease.refuse(commit, self._now())
            self.refused += 1
            return False
        if self._longest_window is not None:
            lease.measure(commit.steps, self._monotonic() if arrived is None else arrived)
        with self._arithmetic.of(commit.worker, commit.first, self.clock):
            self._accept_commit((commit, *companions), lease, parts, context)
        return True

    def _stalest(self, commits: Sequence[Commit]) -> PartitionLease:
        """Return the lease of a group's stalest worker, if each of ``commits`` is the next of its partition."""
        leases = [self._lease_for(commit, self.traits.parts) for commit in commits]
        known = [lease for lease in leases if lease is not None]
        if len(known) < len(commits):
            text = "none of the commits in a group's sum may be applied yet. Received: an applied one, of workers"
            raise RelayLostError(f"{text} {[commit.worker for commit in commits]}", worker=commits[0].worker)
        return max(known, key=lambda lease: lease.staleness(commits[0], self.clock))

    def _lend(self, commit: Commit, lease: PartitionLease) -> None:
        """Cut ``lease``, if that helps; ``commit`` is its latest one."""
        if self.lending is None:
            return
        lease.keep_pace(commit.steps, self._monotonic())
        if self.stopping is None:
            self.lending.cut(commit.worker)

    def _accept_commit(
        self, commits: Sequence[Commit], lease: PartitionLease, parts: Sequence[Buffer], context: Context
    ) -> None:
        """Apply the payload of ``commits``: the sender's and its companions'; ``lease`` is the stalest worker's."""
        commit, now = commits[0], self._now()
        scalars = self.rule.accept(context, self.counters)
        if self._arithmetic.enabled and not all(map(math.isfinite, scalars)):
            raise ArithmeticError(f"factors {scalars}")
        gap = math.nan
        if self._measure_gap and lease.sent is not None:
            gap = self._chunks.gap(self.current.array, lease.sent.array)
        scale = commit.scale
        if self.traits.synchronous:
            self.round.contribute(parts[0])
        else:
            total = self._apply(lease, parts, scalars, self._view_scalars_ahead(commit))
            if total is not None:
                scale = total / self.size
            if self.tables:
                scale = self._apply_rows(commit, scalars, scale, now)
        if self.moving_statistics.size:
            self._blend_moving_statistics(commits)
        for member in sorted(commits, key=lambda member: member.worker) if len(commits) > 1 else commits:
            self.log.add(
                member,
                CommitOutcome(
                    clock=self.clock,
                    staleness=context.staleness,
                    timestamp=now,
                    learning_rate=member.learning_rate if len(commits) > 1 else context.learning_rate,
                    gap=gap,
                    scale=scale,
                    lease=member.worker,
                    trained_by=self.leases[member.worker].holder,
                ),
                self.leases[member.worker].partition,
            )
            self.clock += 1
            self.leases[member.worker].steps = member.steps
            self.leases[member.worker].advance(member, now)
            self.scheduler.committed(member.worker)
        self._lend(commit, lease)
        if not commit.wants_center:
            lease.begin_window(self.clock, self._monotonic())
        self._end_round_if_complete()

    def skip(self, commit: Commit) -> bool:
        """Skip ``commit``, which has a NaN or infinity, but count its mini-batches; False if that was done before.

        Its worker must pull before its next window. A round counts the worker as arrived, without a contribution.
        """
        lease = self._lease_for(commit, len(commit.parts or commit.packed))
        if lease is None:
            return False
        now = self._now()
        staleness = lease.staleness(commit, self.clock)
        skipped = CommitOutcome(
            self.clock, staleness, now, commit.learning_rate, math.nan, 0.0, True, commit.worker, lease.holder
        )
        with self._arithmetic.of(commit.worker, commit.first, self.clock):
            self.log.add(commit, skipped, lease.partition)
            lease.advance(commit, now)
            lease.optimizer = None  # the state may already contain non-finite numbers
            lease.skipped = True
            lease.require_pull()
            self.scheduler.committed(commit.worker)
            if isinstance(self.scheduler, Synchronous):
                self.round.skipped += 1
            self._end_round_if_complete()
        return True

    def is_next(self, commit: Commit, parts: int) -> bool:
        """Return True for the partition's next commit, False for its last one sent again; raise as `commit` does."""
        return self._lease_for(commit, parts) is not None

    def _lease_for(self, commit: Commit, parts: int) -> PartitionLease | None:
        """Return the lease under which ``commit`` is the next one; None if it is the last one, sent again."""
        lease = self.leases.held(commit.worker, commit.attempt)
        self.require_incarnation(commit.worker, commit.incarnation)
        if commit.sequence == lease.sequence and commit.sequence > 0:
            return None
        if parts != self.traits.parts:
            raise RemoteProtocolError(
                f"a commit must have {self.traits.parts} parts. Received: {parts}", worker=commit.worker
            )
        lease.require_next(commit)
        if lease.released is None:
            raise RemoteProtocolError("a worker must pull before it commits. Received: a commit", worker=commit.worker)
        return lease

    def require_incarnation(self, worker: int, incarnation: int) -> None:
        """Raise RemoteProtocolError unless the message of ``worker`` is for this incarnation of the server."""
        if incarnation != self.incarnation:
            raise RemoteProtocolError(
                f"`incarnation` must be {self.incarnation}. Received: incarnation={incarnation}", worker=worker
            )

    def _commit_context(self, commit: Commit, staleness: int) -> Context:
        at_server = self.traits.gradient
        rounds = self.scheduler if isinstance(self.scheduler, Synchronous) else None
        return Context(
            workers=self.workers,
            worker=commit.worker,
            clock=self.clock,
            staleness=staleness,
            steps=commit.steps,
            learning_rate=self.rate(self.clock) if at_server else commit.learning_rate,
            previous_learning_rate=self.rate(self.clock - 1) if at_server else commit.learning_rate,
            waiting=len(rounds.arrived) - self.round.skipped if rounds else 0,
        )

    def _view_scalars_ahead(self, commit: Commit) -> tuple[int, Scalars] | None:
        """Return worker and scalars of a view to compute along with ``commit``; None: it is computed with the reply."""
        if not (self.traits.view and commit.wants_center and self.scheduler.at_once):
            return None
        return commit.worker, self._view_scalars(commit.worker, self.clock + 1, self.clock, self.clock - 1)

    def _apply(
        self, lease: PartitionLease, parts: Sequence[Buffer], scalars: Scalars, ahead: tuple[int, Scalars] | None
    ) -> float | None:
        payload = tuple(part.array for part in parts)
        center = self.current.array
        in_place = self.traits.view
        out = center if in_place else payload[0]
        sent = lease.sent.array if self.traits.keeps_sent and lease.sent else center
        vectors = out, center, payload, self.model, lease.vectors, sent
        if self._reduces:
            partials = [self.rule.partial(chunk, scalars) for chunk in self._chunks.over(*vectors, block=BLOCK)]
            scalars = self.rule.reduced(scalars, self._total(partials))
        scale: float | None = None
        for chunk in self._chunks.over(*vectors):
            share = self.rule.apply(chunk, scalars)
            if share is not None:
                scale = share if scale is None else scale + share
            if ahead is not None:
                chunk.out = chunk.payload[0]  # the payload is not read any more, so its memory takes the result
                self.rule.view(chunk, ahead[1])
        if ahead is not None:
            self._view_ahead.put(ahead[0], self.clock + 1, parts[0])
        elif in_place:
            parts[0].drop()
        else:
            self._publish(parts[0])
        for extra in parts[1:]:
            extra.drop()
        return scale

    def _total(self, partials: Sequence[float]) -> float:
        """Return the sum of all blocks' shares, which `math.fsum` rounds once, in any order of them."""
        return math.fsum(partials)

    def _apply_rows(self, commit: Commit, scalars: Scalars, scale: float, seconds: float) -> float:
        """Apply the rows of ``commit``, at ``seconds`` since the epoch.

        Return their mean scale factor, or ``scale`` if the center has a vector too.
        """
        total = 0.0
        for table, ids, moved in zip(self.tables, commit.touched, commit.moved, strict=True):
            share = table.apply(ids, moved, lambda chunk: self.rule.apply(chunk, scalars), self.clock + 1)
            total += moved.size if share is None else share
            table.tick(self.clock + 1, seconds)
        elements = sum(moved.size for moved in commit.moved)
        return scale if self.size or not elements else total / elements

    def _publish(self, version: Buffer) -> None:
        self.current.drop()
        self.current = version

    def _end_round_if_complete(self) -> None:
        if not isinstance(self.scheduler, Synchronous) or not self.scheduler.round_complete():
            return
        # A rule that is not synchronous has moved the center at each commit: its rounds only release the workers.
        if self.round.total is not None:
            self._end_round(self.round.total, len(self.scheduler.arrived) - self.round.skipped)
        self.round.skipped = 0
        self.scheduler.next_round()

    def replace_workers(self, contributions: int, workers: int) -> None:
        """End the unfinished round of the previous workers, drain, and reset the rule's counters and model vectors.

        The previous workers do not return: the round, with its ``contributions``, ends as if those missing had left.
        """
        if self.round.total is not None:
            self._end_round(self.round.total, contributions)
        self._drain(workers)
        self.round.skipped = 0
        self.counters = {}
        for vector in self.model:
            vector.fill(0.0)

    def _end_round(self, total: Buffer, contributions: int) -> None:
        scalars = self._view_scalars(-1, self.clock, self.round.began, self.round.previous_began)
        center = self.current.array
        for chunk in self._chunks.over(total.array, center, (total.array,), self.model):
            self.rule.round_end(chunk, contributions, scalars)
        self._publish(total)
        if self.moving_statistics.size:
            self.moving_statistics = self.round.take_moving_statistics()
        self.round.end(self.clock)
        self.round.stopping = self.stopping is not None

    def _drain(self, workers: int) -> None:
        """Apply the commits that the rule has buffered, if any. The clock does not advance."""
        scalars = self.rule.begin_drain(workers, self.counters)
        if scalars is None:
            return
        version = self.pool.take()
        for chunk in self._chunks.over(version.array, self.current.array, (), self.model):
            self.rule.drain(chunk, scalars)
        self._publish(version)

    def _blend_moving_statistics(self, commits: Sequence[Commit]) -> None:
        commit = commits[0]
        if self.traits.synchronous:
            self.round.contribute_moving_statistics(commit)
            return
        # Each active worker's share of the average is its share of the latest steps; a single worker's share is 1.
        own, steps = [member.worker for member in commits], sum(member.steps for member in commits)
        others = sum(self.leases[other].steps for other in self.scheduler.active if other not in own)
        self.moving_statistics = self.moving_statistics + (commit.moving_statistics - self.moving_statistics) * (
            steps / (steps + others)
        )

    def release(
        self, worker: int, attempt: int, wants: Sequence[Ids] = (), outs: Sequence[Vector | None] = ()
    ) -> Released:
        """Return the content of the reply to ``worker``, and record the clock from which its staleness is counted.

        ``wants`` are the rows of each table to send, ``outs`` memory for them; empty: no rows, and new memory.
        """
        lease = self.leases.held(worker, attempt)
        if self.traits.view:
            version = self._view_ahead.take(worker, self.clock) or self._view(worker, lease)
        else:
            version = self.current.hold()
        if self._keeps_sent:
            lease.keep_sent(version, within_window=self.traits.pull_first)
        if not self.traits.pull_first or lease.released is None:
            lease.release(self.clock, self._monotonic())
        rate, window = self.rate(self.clock), self.next_window(worker)
        requests = zip(self.tables, wants, outs or [None] * len(wants), strict=True) if wants else ()
        rows = tuple([table.gather(ids, out) for table, ids, out in requests])
        return Released(version, self.clock, lease.sequence, rate, self.moving_statistics, window, rows, lease.end)

    def release_companions(self, companions: Sequence[Commit], released: Released) -> None:
        """Record that the relay forwards ``released``, which it was just sent, to the workers of ``companions``."""
        for other in companions:
            if self._keeps_sent:
                self.leases[other.worker].keep_sent(released.buffer, within_window=False)
            self.leases[other.worker].release(released.clock, self._monotonic())

    def next_window(self, worker: int) -> int:
        """Return the steps of ``worker``'s next window if windows follow the workers' speeds; else 0."""
        if self._longest_window is None:
            return 0
        speeds = [self.leases[other].speed for other in self.scheduler.active]
        return window_by_speed(self._longest_window, self.leases[worker].speed, speeds)

    def _view(self, worker: int, lease: PartitionLease) -> Buffer:
        """Return the view that the rule sends to ``worker`` instead of the center."""
        version = self.pool.take()
        with self._arithmetic.of(worker, None, self.clock):
            # A view uses the learning rate of the latest commit.
            scalars = self._view_scalars(worker, self.clock, self.clock - 1, self.clock - 2)
            for chunk in self._chunks.over(version.array, self.current.array, (), self.model, lease.vectors):
                self.rule.view(chunk, scalars)
        return version

    def _view_scalars(self, worker: int, clock: int, latest: int, previous: int) -> Scalars:
        context = Context(self.workers, worker, clock, 0, 0, self.rate(latest), self.rate(previous))
        return self.rule.release(context, self.counters)

    def inspect(self, moved: Sequence[Ids] = ()) -> Released:
        """Return the center, and the rows ``moved`` of each table if given, without any change to a lease."""
        rows = tuple([table.gather(ids) for table, ids in zip(self.tables, moved, strict=True)]) if moved else ()
        rate, moved = self.rate(self.clock), tuple(moved)
        return Released(self.current.hold(), self.clock, 0, rate, self.moving_statistics, rows=rows, moved=moved)

    def begin_changes(self, since: int) -> bool:
        """Note that a driver reads the changes since clock ``since``; return whether the `living` tables know them."""
        self.edits += 1  # else a server that ends now, and starts again, would not know the changes
        return all([table.begin_changes(since, self.clock) for table in self.living])

    def remove_rows(self, number: int, ids: Ids) -> None:
        """Remove rows, ascending and in range, of table ``number``, which is one of the `living` ones."""
        table = self.tables[number]
        assert isinstance(table, LivingTable), "only a table whose touches are counted can lose rows"
        table.remove(ids, self.clock + 1)
        self.edits += 1


def partition_of(center: Center | None, number: int | None) -> int | None:
    """Return the partition of a lease, by its number: events and errors name it rather than a loan."""
    lease = None if center is None or number is None else center.leases.get(number)
    return number if lease is None else lease.partition


def require_rows(rule: Rule, tables: int) -> None:
    """Raise a ConfigurationError unless ``tables`` tables may travel by rows under ``rule``."""
    if not rule.traits.rows:
        text = f"rule {rule.name!r}, as it is set, needs whole tables, and not the rows that a window touched"
        raise ConfigurationError(f"`tables` must be empty: {text}. Received: {tables} tables")
