"""Any rule at any scale in one process: a virtual clock drives the worker's loop and the center that servers run.

Nothing runs at the same time here, so a run is a pure function of its arguments, to the bit. Local steps are taken at
the moment when their time is over, from the version that the worker was sent; so memory is the rule's own state, what
was sent to each worker, and what is on its way to the server where that takes time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import Scheduler, scheduler_for
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.messages import NO_FLOATS, Commit
from distkeras.ps.protocol.requests import CommitRequest, Compute, Loop, ProbeRequest, PullRequest, Reply, Request
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import BLOCK, Vector, sum_of_squares
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.simulation.timing import Communication, Timing
from distkeras.ps.validate import invalid, require_number
from distkeras.ps.worker.loop import work

Gradient = Callable[[Vector, int], Vector]
Occupied = Callable[[int, int], bool]

#: Elements of one chunk: twice a server's, for there is one core, and Python's share of each chunk counts.
_BLOCK = 2 * BLOCK


@dataclass(frozen=True)
class Trace:
    """What happened, one entry a commit, in clock order.

    Args:
        theta: the center at the end.
        worker: who committed.
        staleness: commits by others since the worker was last sent the center, tau.
        time: virtual time at which the commit was applied; its number, under an explicit schedule.
        steps: local steps behind it.
        scale: mean scale factor.
        gap: ``||center - sent|| / sqrt(size)`` before it was applied; NaN unless measured.
        normalized_gap: gap over the norm of the payload; NaN unless measured.
        centers: the center after each commit, shape ``(commits, size)``, if kept.
    """

    theta: Vector
    worker: np.ndarray
    staleness: np.ndarray
    time: np.ndarray
    steps: np.ndarray
    scale: np.ndarray
    gap: np.ndarray
    normalized_gap: np.ndarray
    centers: np.ndarray | None

    @property
    def clock(self) -> np.ndarray:
        """The commits' numbers."""
        return np.arange(len(self.worker))


def simulate(
    rule: Rule | str,
    theta0: Vector,
    gradient: Gradient,
    *,
    workers: int,
    learning_rate: float | Schedule,
    schedule: Sequence[int] | None = None,
    timing: Timing | None = None,
    steps: int | None = None,
    seed: int = 0,
    dtype: Any = np.float64,
    communication: Communication | None = None,
    occupied: Occupied | None = None,
    staleness_bound: int | None = None,
    rounds: bool = False,
    measure_gap: bool = False,
    keep_centers: bool = False,
) -> Trace:
    """Runs ``rule`` with virtual workers.

    All workers are sent the center at clock 0. Workers of rules that step locally take plain SGD steps.

    Where a rule asks whether the server is occupied (zealous DOWNPOUR), the question and its answer take the latency of
    `communication` each. The server is occupied while a commit that has arrived there has not been applied: without
    ``service`` never.

    Args:
        rule: an update rule, or its name.
        theta0: initial parameters, shape ``(size,)``.
        gradient: ``gradient(theta, worker)`` gives a gradient, shape ``(size,)``; called once a local step, in the
            order in which the steps end. It must neither change ``theta`` nor keep it.
        workers: number of virtual workers, n.
        learning_rate: eta, of the server or of the workers' steps, whichever the rule has; a schedule for the former.
        schedule: worker ids in the order in which their commits complete. Either this or `timing`.
        timing: how long local steps take.
        steps: commits in all. Default: as many as `schedule` has.
        seed: of `timing`.
        dtype: float32 or float64, of all vectors.
        communication: what an exchange costs in time: the payload's way, the server, the center's way back. Only with
            `timing`. None: nothing.
        occupied: ``occupied(worker, clock)`` answers such a question under an explicit schedule. None: never occupied.
        staleness_bound: iterations that a worker may be ahead of the slowest, for rules whose commits are answered with
            the center.
        rounds: hold a barrier around such a rule that has none.
        measure_gap: fill in the gaps.
        keep_centers: keep the center after each commit.

    Raises:
        ConfigurationError: arguments that cannot work or do not go together, or a schedule that lets a waiting worker
            commit.
    """
    rule = make(rule) if isinstance(rule, str) else rule
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise invalid("dtype", dtype, "float32 or float64")
    theta0 = np.asarray(theta0, dtype)
    if theta0.ndim != 1:
        raise ConfigurationError(f"`theta0` must be one flat vector. Received: shape {theta0.shape}")
    if type(workers) is not int or workers < 1:
        raise invalid("workers", workers, "a positive integer")
    if rule.window is None:
        raise invalid("window", None, "a number of steps in a simulation, which has no epochs")
    if (schedule is None) == (timing is None):
        raise ConfigurationError("either `schedule` or `timing` must be given. Received: both or none")
    if timing is not None and (type(steps) is not int or steps < 0):
        raise invalid("steps", steps, "a number of commits, at least 0, with `timing`")
    if communication is not None and timing is None:
        raise ConfigurationError("`communication` must come with `timing`. Received: a schedule")
    if occupied is not None and schedule is None:
        raise ConfigurationError("`occupied` must come with `schedule`: times tell it otherwise. Received: `timing`")
    simulation = _Simulation(
        rule,
        theta0,
        gradient,
        workers=workers,
        learning_rate=learning_rate,
        scheduler=scheduler_for(rule, workers, staleness_bound, rounds=rounds),
        measure_gap=measure_gap,
        keep_centers=keep_centers,
    )
    if schedule is not None:
        simulation.follow(schedule if steps is None else schedule[:steps], occupied or _never)
    else:
        assert timing is not None
        assert steps is not None
        simulation.run(timing, communication or Communication(), steps, seed)
    return simulation.trace()


@dataclass(slots=True)
class _Step:
    """A mini-batch that the gradient function knows itself."""

    index: int
    epoch: int = 0
    last: bool = False
    size: int = 1
    checksum: int = 0


class FunctionReplica:
    """Plain SGD on a vector with gradients from a function. Loaded vectors are immutable, and copied only if moved."""

    def __init__(self, size: int, learning_rate: float, gradient: Callable[[Vector], Vector]) -> None:
        self.size = size
        self.learning_rate = learning_rate
        self._gradient = gradient
        self._theta: Vector = np.empty(0)
        self._own = False

    def load(self, vector: Vector) -> None:
        """Takes ``vector``, which nobody will change."""
        self._theta, self._own = vector, False

    def read(self, out: Vector) -> None:
        """Writes the parameters into ``out``."""
        out[...] = self._theta

    def moved(self, since: Vector, out: Vector) -> None:
        """Writes the parameters less ``since`` into ``out``."""
        np.subtract(self._theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """A function has none."""

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """A function has none."""

    def train(self, batches: Sequence[Any]) -> np.ndarray:
        """Takes one step a batch."""
        for _ in batches:
            step = self.learning_rate * self._gradient(self._theta)
            if self._own:
                self._theta -= step
            else:
                self._theta, self._own = (self._theta - step).astype(self._theta.dtype, copy=False), True
        return _NO_METRICS[: len(batches)]

    def gradient(self, batch: Any, out: Vector) -> np.ndarray:
        """Writes the gradient into ``out``."""
        out[...] = self._gradient(self._theta)
        return _NO_METRICS[0]


_NO_METRICS = np.empty((64, 0))


class _Simulation:
    """The workers' loops, the center, and who waits for what."""

    def __init__(
        self,
        rule: Rule,
        theta0: Vector,
        gradient: Gradient,
        *,
        workers: int,
        learning_rate: float | Schedule,
        scheduler: Scheduler | None,
        measure_gap: bool,
        keep_centers: bool,
    ) -> None:
        self.now = 0.0
        at_server = rule.traits.gradient
        if not at_server:
            require_number("learning_rate", learning_rate)  # a schedule is the server's
        self._center = Center(
            rule,
            theta0,
            workers=workers,
            learning_rate=learning_rate if at_server else None,
            scheduler=scheduler,
            measure_gap=measure_gap,
            block=_BLOCK,
            now=lambda: self.now,
        )
        self._parts = rule.traits.parts
        self._measure_gap = measure_gap
        self._norms: list[float] = []
        self._centers: list[Vector] | None = [] if keep_centers else None
        self._payloads: list[list[Buffer]] = [[] for _ in range(workers)]
        self._sent: list[Buffer | None] = [None] * workers
        self._held: set[int] = set()
        self._loops: list[Loop] = []
        self._pending: list[Request] = []
        eta = 0.0 if isinstance(learning_rate, Schedule) else learning_rate
        for worker in range(workers):
            self._center.join(worker, 0)
            replica = FunctionReplica(theta0.size, eta, _bound(gradient, worker))
            loop = work(rule, replica, _endless(), partial(self._payload, worker), now=None)
            self._pending.append(next(loop))
            self._loops.append(loop)
        for worker in range(workers):
            self.resume(worker, self._release(worker))

    def _payload(self, worker: int) -> tuple[Vector, ...]:
        take = self._center.pool.take
        self._payloads[worker] = buffers = [take() for _ in range(self._parts)]
        return tuple([buffer.array for buffer in buffers])

    def _release(self, worker: int) -> Reply:
        released = self._center.release(worker, 0)
        previous, self._sent[worker] = self._sent[worker], released.buffer
        if previous is not None:
            previous.drop()
        return Reply(released.learning_rate, released.buffer.array)

    def exchange(self, worker: int) -> None:
        """The exchange that is due reaches the server."""
        request = self._pending[worker]
        if isinstance(request, PullRequest):
            request = self.resume(worker, self._release(worker))
        assert isinstance(request, CommitRequest)
        self._commit(worker, request)
        if request.wants_center:
            self._held.add(worker)
        else:
            self.resume(worker, _ACKNOWLEDGED)

    def let_go(self) -> list[int]:
        """Sends the center to every worker who may have it; returns those workers, in order."""
        ready = [worker for worker in sorted(self._held) if self._center.ready(worker)]
        for worker in ready:
            self._held.discard(worker)
            self.resume(worker, self._release(worker))
        return ready

    def resume(self, worker: int, reply: Reply | None) -> Request:
        """Runs the worker's loop up to its next request: after None, takes the steps that it waited to take."""
        self._pending[worker] = request = self._loops[worker].send(reply)
        return request

    def _commit(self, worker: int, request: CommitRequest) -> None:
        if self._measure_gap:
            self._norms.append(math.sqrt(sum_of_squares(request.parts[0])))
        commit = Commit(
            worker=worker,
            attempt=0,
            incarnation=1,
            sequence=self._center.members[worker].sequence + 1,
            epoch=0,
            first=request.first,
            last=request.last,
            epoch_end=False,
            wants_center=request.wants_center,
            learning_rate=request.learning_rate,
            scale=request.scale,
            waited=0.0,
            parts=request.parts,
            moving_statistics=NO_FLOATS,
            history=NO_FLOATS,
        )
        self._center.commit(commit, self._payloads[worker])
        if self._centers is not None:
            self._centers.append(self._center.current.array.copy())

    def follow(self, schedule: Sequence[int], occupied: Occupied) -> None:
        """Commits complete in the order of ``schedule``."""
        workers = len(self._loops)
        for number, worker in enumerate(schedule):
            if not 0 <= worker < workers:
                raise ConfigurationError(
                    f"`schedule` must hold numbers in [0, {workers}). Received: {worker} at place {number}"
                )
            if worker in self._held:
                raise ConfigurationError(
                    f"`schedule` must let only running workers commit. Received: worker {worker} at place {number}, "
                    f"who waits for {sorted(self._center.scheduler.waiting_for(worker))}"
                )
            self.now = float(number)
            request = self._pending[worker]
            while isinstance(request, (Compute, ProbeRequest)):  # a window may be taken in several calls
                asks = isinstance(request, ProbeRequest)
                request = self.resume(worker, Reply(occupied=occupied(worker, number)) if asks else None)
            self.exchange(worker)
            self.let_go()

    def run(self, timing: Timing, communication: Communication, steps: int, seed: int) -> None:
        """Commits complete in the order that the times give, ``steps`` of them."""
        draw = timing.sampler(len(self._loops), np.random.default_rng(seed))
        size = self._center.current.array.nbytes
        up, down = communication.transfer(size * self._parts), communication.transfer(size)
        takes_time = up > 0 or communication.service > 0
        order = itertools.count()  # of events at the same time
        events: list[tuple[float, int, int, int]] = []
        free = 0.0  # when the server has dealt with all that has come so far
        under_way: deque[tuple[float, float]] = deque()  # of each commit: when it arrives, and when it is dealt with
        probes = self._center.traits.probes

        def begin(worker: int, since: float) -> None:
            request = self._pending[worker]
            assert isinstance(request, Compute)
            heapq.heappush(events, (since + draw(worker, request.steps), next(order), worker, _COMPUTED))

        def occupied(at: float) -> bool:
            while under_way and under_way[0][1] <= at:
                under_way.popleft()
            return bool(under_way) and under_way[0][0] <= at

        for worker in range(len(self._loops)):
            begin(worker, 0.0)
        while self._center.clock < steps:
            self.now, _, worker, stage = heapq.heappop(events)
            if stage == _COMPUTED:
                request = self.resume(worker, None)
                since = self.now
                if isinstance(request, ProbeRequest):
                    # No payload overtakes the question: what it will find there has been sent by now.
                    request = self.resume(worker, Reply(occupied=occupied(since + communication.latency)))
                    since += 2 * communication.latency
                if isinstance(request, Compute):
                    begin(worker, since)
                    continue
                if since > self.now:
                    heapq.heappush(events, (since, next(order), worker, _SENDS))
                    continue
            if stage != _DEALT_WITH and takes_time:
                # The payload travels, then waits for its turn at the server.
                arrival = self.now + up
                free = max(free, arrival) + communication.service
                if probes:
                    under_way.append((arrival, free))
                heapq.heappush(events, (free, next(order), worker, _DEALT_WITH))
                continue
            self.exchange(worker)
            released = self.let_go()
            if worker not in self._held and worker not in released:  # only acknowledged
                released.append(worker)
            for worker in released:
                begin(worker, self.now + down)

    def trace(self) -> Trace:
        """What happened so far."""
        column = self._center.log.commits()
        norms = np.array(self._norms) if self._measure_gap else np.full(len(column), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            normalized = column["gap"] / norms
        return Trace(
            theta=self._center.current.array.copy(),
            worker=column["worker"],
            staleness=column["staleness"],
            time=column["timestamp"],
            steps=column["steps"],
            scale=column["scale"],
            gap=column["gap"],
            normalized_gap=normalized,
            centers=None if self._centers is None else np.array(self._centers),
        )


#: How far a worker's window has come when its next event happens.
_COMPUTED, _SENDS, _DEALT_WITH = range(3)

#: What a worker gets that needs no vector.
_ACKNOWLEDGED = Reply()


def _never(worker: int, clock: int) -> bool:
    return False


def _bound(gradient: Gradient, worker: int) -> Callable[[Vector], Vector]:
    def bound(theta: Vector) -> Vector:
        value = gradient(theta, worker)
        if value.shape != theta.shape:
            raise ConfigurationError(f"`gradient` must return shape {theta.shape}. Received: {value.shape}")
        return value

    return bound


def _endless() -> Iterator[_Step]:
    return map(_Step, itertools.count())
