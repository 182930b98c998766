"""The workers' loops and the center of one job in one process, without a clock of their own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center
from distkeras.ps.center.loans import Offer
from distkeras.ps.center.schedulers import Scheduler
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.companions import Companion, join
from distkeras.ps.protocol.loop import CommitRecord, Loop, PullRequest, Reply, Request
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.rules.base import BLOCK, CALL_STEPS_MAX, Rule, Vector, sum_of_squares
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.validate import require_number
from distkeras.ps.worker.loop import work

#: ``gradient(theta, worker)``
Gradient = Callable[[Vector, int], Vector]
#: ``gradient(theta, worker, batch)``, with the number of the worker's mini-batch.
NumberedGradient = Callable[[Vector, int, int], Vector]

_NO_METRICS = np.empty((CALL_STEPS_MAX, 0))
_NO_METRICS_OF_ONE = np.empty(0)


@dataclass(slots=True)
class VirtualBatch:
    """A mini-batch without arrays: the gradient function receives only its number."""

    index: int
    epoch: int = 0
    last: bool = False
    size: int = 1
    checksum: int = 0


class FunctionReplica:
    """Plain SGD on a vector with gradients from a function. A loaded vector is immutable; the first step copies it."""

    def __init__(self, size: int, learning_rate: float, gradient: Callable[[Vector, int], Vector]) -> None:
        self.size = size
        self.learning_rate = learning_rate
        self._gradient = gradient
        self._theta: Vector = np.empty(0)
        self._own = False

    def load(self, vector: Vector) -> None:
        """Use ``vector``, which must not change, as the parameters."""
        self._theta, self._own = vector, False

    def read(self, out: Vector) -> None:
        """Write the parameters into ``out``."""
        out[...] = self._theta

    def moved(self, since: Vector, out: Vector) -> None:
        """Write the parameters minus ``since`` into ``out``."""
        np.subtract(self._theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Do nothing: a function has no moving statistics."""

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """Do nothing: a function has no moving statistics."""

    def set_values(self, values: np.ndarray) -> None:
        """Set the learning rate, which is place 0."""
        self.learning_rate = dict(values.tolist()).get(0, self.learning_rate)

    def train(self, batches: Sequence[Any]) -> np.ndarray:
        """Take one step for each batch."""
        for batch in batches:
            step = self.learning_rate * self._gradient(self._theta, batch.index)
            if self._own:
                self._theta -= step
            else:
                self._theta, self._own = (self._theta - step).astype(self._theta.dtype, copy=False), True
        return _NO_METRICS[: len(batches)]

    def gradient(self, batch: Any, out: Vector) -> np.ndarray:
        """Write the gradient into ``out``."""
        out[...] = self._gradient(self._theta, batch.index)
        return _NO_METRICS_OF_ONE


@dataclass(frozen=True)
class Trace:
    """The course of a simulation, with one entry for each commit, in clock order.

    Args:
        theta: the center at the end. It does not contain the ``buffered`` commits.
        worker: the worker that committed.
        staleness: commits applied since the clock at which the worker's window began, tau.
        time: virtual time at which the commit was applied; under an explicit schedule, the commit's number.
        steps: local steps of the payload.
        scale: mean scale factor.
        trained_by: the worker that trained the mini-batches, which are those of ``worker``.
        gap: ``||center - sent|| / sqrt(size)`` before it was applied; NaN unless measured.
        normalized_gap: gap over the norm of the payload; NaN unless measured.
        centers: the center after each commit, shape ``(commits, size)``, if kept.
        refused: commits that the rule refused, in the order of their arrival: int64 rows of worker, clock and tau.
        buffered: number of the latest commits that are in the rule's buffer at the end (fedbuff, fadas). A job drains
            the buffer when its last worker leaves; in a simulation no worker leaves, so it is not drained.
    """

    theta: Vector
    worker: np.ndarray
    staleness: np.ndarray
    time: np.ndarray
    steps: np.ndarray
    scale: np.ndarray
    trained_by: np.ndarray
    gap: np.ndarray
    normalized_gap: np.ndarray
    centers: np.ndarray | None
    refused: np.ndarray
    buffered: int = 0

    @property
    def clock(self) -> np.ndarray:
        """The numbers of the commits."""
        return np.arange(len(self.worker))


#: Elements of one chunk: twice as many as on a server, to reduce the overhead of Python.
_BLOCK = 2 * BLOCK


class VirtualJob:
    """Workers that have been sent the center at clock 0; the caller decides when each continues.

    Args:
        theta0: initial parameters, shape ``(size,)``.
        gradient: ``gradient(theta, worker, batch)``.
        learning_rate: of the server if the rule steps there; else of the workers' steps.
        batches: the number of mini-batches of each worker, after which it leaves; None: they never end.
        lends: workers without mini-batches train those of others (`center.loans`).
        scheduler: when replies are released.
        keep_centers: keep the center after each commit.

    Attributes:
        now: virtual time; commits are stamped with it.
        pending: the unanswered request of each loop, by the number of its lease: a worker's, or a loan's.
        waiting: leases whose commit is applied, and whose holder may not be sent the center yet.
        begun: loans that a worker has taken since the caller has looked at them.
    """

    def __init__(  # noqa: PLR0913 - independent facts of one simulation, which `simulate` names
        self,
        rule: Rule,
        theta0: Vector,
        gradient: NumberedGradient,
        *,
        workers: int,
        learning_rate: float | Schedule,
        scheduler: Scheduler | None,
        measure_gap: bool,
        keep_centers: bool,
        batches: Sequence[int] | None = None,
        lends: bool = False,
    ) -> None:
        self.now = 0.0
        self.traits = rule.traits
        if not self.traits.gradient:
            learning_rate = require_number("learning_rate", learning_rate)  # a schedule is the server's
        self.center = Center(
            rule,
            theta0,
            workers=workers,
            learning_rate=learning_rate if self.traits.gradient else None,
            scheduler=scheduler,
            measure_gap=measure_gap,
            block=_BLOCK,
            now=lambda: self.now,
            monotonic=lambda: self.now,
            lends=lends,
        )
        self.workers = workers
        self.pending: dict[int, Request] = {}
        self.waiting: set[int] = set()
        self.begun: list[int] = []
        self._measure_gap = measure_gap
        self._norms: list[float] = []
        self._refused: list[tuple[int, int, int]] = []
        self._centers: list[Vector] | None = [] if keep_centers else None
        self._payloads: dict[int, list[Buffer]] = {}
        self._sent: dict[int, Buffer] = {}
        self._loops: dict[int, Loop] = {}
        self._gradient, self._batches = gradient, batches
        self._eta = 0.0 if isinstance(learning_rate, Schedule) else learning_rate
        for worker in range(workers):
            self._begin(worker)
            if self.center.lending is not None and batches is not None and batches[worker]:
                self.center.lending.offer(worker, Offer(batches[worker], 1, "", 0, 0))
        for worker in range(workers):
            self.resume(worker, self._release(worker))
        self.lend()

    def _begin(self, number: int) -> None:
        """Begin the loop of a lease."""
        self.center.join(number, 0)
        lease = self.center.leases[number]
        replica = FunctionReplica(self.center.size, self._eta, partial(self._gradient_of, lease.partition))
        batches = self._batches_of(lease.partition, lease.batch)
        bounded = itertools.takewhile(lambda batch: lease.end is None or (0, batch.index) < lease.end, batches)
        loop = work(self.center.rule, replica, bounded, partial(self._payload, number), now=None)
        self._loops[number], self.pending[number] = loop, next(loop)

    def _gradient_of(self, worker: int, theta: Vector, batch: int) -> Vector:
        value = self._gradient(theta, worker, batch)
        if value.shape != theta.shape:
            raise ConfigurationError(f"`gradient` must return shape {theta.shape}. Received: {value.shape}")
        return value

    def _batches_of(self, worker: int, first: int) -> Iterator[VirtualBatch]:
        if self._batches is None:
            return map(VirtualBatch, itertools.count())  # one epoch that never ends
        count = self._batches[worker]
        return (VirtualBatch(index, last=index == count - 1) for index in range(first, count))

    def _payload(self, number: int) -> tuple[Vector, ...]:
        take = self.center.pool.take
        self._payloads[number] = buffers = [take() for _ in range(self.traits.parts)]
        return tuple([buffer.array for buffer in buffers])

    def _release(self, number: int) -> Reply:
        released = self.center.release(number, 0)
        previous, self._sent[number] = self._sent.get(number), released.buffer
        if previous is not None:
            previous.drop()
        return Reply(released.learning_rate, released.buffer.array, window=released.window)

    def resume(self, number: int, reply: Reply | None) -> Request | None:
        """Answer the pending request of a lease's loop with ``reply``, and run the loop up to its next request.

        Return None if there is none: the lease has ended.
        """
        try:
            self.pending[number] = request = self._loops[number].send(reply)
        except StopIteration:
            del self.pending[number], self._loops[number]
            self._sent.pop(number).drop()
            self.center.leave(number, 0)
            return None
        return request

    def lend(self) -> None:
        """Let workers whose lease has ended take loans, or ask for one; the caller finds them in `begun`."""
        lending, leases = self.center.lending, self.center.leases
        if lending is None:
            return
        for worker in sorted({*range(self.workers)} - {leases[number].holder for number in self._loops}):
            lending.ask(worker, 0)
            loan = lending.free_loan()
            if loan is not None:
                lending.withdraw(worker, 0)
                lending.promise(loan, worker, 0)
                self._begin(loan)
                self.resume(loan, self._release(loan))
                self.begun.append(loan)

    def exchange_group(self, workers: Sequence[int]) -> None:
        """Apply the movements of the ``workers``, whose exchanges are due, as one commit."""
        commits = [self._commit_of(worker, cast("CommitRecord", self.pending[worker])) for worker in workers]
        taken = [self.center.pool.take() for _ in range(self.traits.parts if len(commits) > 1 else 0)]
        own, *others = commits
        whole = join(own, [Companion(0, commit) for commit in others], tuple([part.array for part in taken]))
        parts = taken or self._payloads[own.worker]
        if self._measure_gap:
            self._norms += [math.sqrt(sum_of_squares(whole.parts[0]))] * len(commits)
        self.center.commit(replace(whole, history=own.history), parts, companions=others)
        for worker in workers if taken else ():
            for buffer in self._payloads[worker]:
                buffer.drop()
        if self._centers is not None:
            self._centers += [self.center.current.array.copy() for _ in commits]
        self.waiting |= {*workers}

    def _commit_of(self, worker: int, record: CommitRecord) -> Commit:
        sequence = self.center.leases[worker].sequence + 1
        return Commit.of(record, worker=worker, attempt=0, incarnation=1, sequence=sequence)

    def exchange(self, worker: int, arrived: float | None = None) -> None:
        """Process the worker's due exchange, which reached the server at ``arrived``; None: now."""
        request = self.pending[worker]
        if isinstance(request, PullRequest):
            self.resume(worker, self._release(worker))
            request = self.pending[worker]
        assert isinstance(request, CommitRecord)
        if not self._commit(worker, request, arrived):
            self.resume(worker, self._release(worker)._replace(refused=True))
        elif request.wants_center:
            self.waiting.add(worker)
        else:
            self.resume(worker, Reply(window=self.center.next_window(worker)))

    def release_ready(self) -> list[int]:
        """Send the center to every waiting worker that may be sent it; return these workers, in order."""
        ready = [worker for worker in sorted(self.waiting) if self.center.scheduler.ready(worker)]
        for worker in ready:
            self.waiting.discard(worker)
            self.resume(worker, self._release(worker))
        return [worker for worker in ready if worker in self.pending]

    def _commit(self, worker: int, record: CommitRecord, arrived: float | None) -> bool:
        """Commit ``record``; return whether it was applied, and not refused."""
        lease, norm = self.center.leases[worker], 0.0
        if self._measure_gap:
            norm = math.sqrt(sum_of_squares(record.parts[0]))
        commit = self._commit_of(worker, record)
        staleness = lease.staleness(commit, self.center.clock)
        if not self.center.commit(commit, self._payloads[worker], arrived):
            self._refused.append((worker, self.center.clock, staleness))
            for buffer in self._payloads[worker]:
                buffer.drop()
            return False
        self._norms.append(norm)
        if self._centers is not None:
            self._centers.append(self.center.current.array.copy())
        return True

    def trace(self) -> Trace:
        """Return the trace so far."""
        column = self.center.log.commits()
        norms = np.array(self._norms) if self._measure_gap else np.full(len(column), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            normalized = column["gap"] / norms
        return Trace(
            theta=self.center.current.array.copy(),
            worker=column["worker"],
            staleness=column["staleness"],
            time=column["timestamp"],
            steps=column["steps"],
            scale=column["scale"],
            trained_by=column["trained_by"],
            gap=column["gap"],
            normalized_gap=normalized,
            centers=None if self._centers is None else np.array(self._centers),
            refused=np.array(self._refused, np.int64).reshape(-1, 3),
            buffered=self.center.rule.buffered(self.center.counters),
        )
