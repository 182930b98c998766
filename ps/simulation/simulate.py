"""The simulation of any rule at any scale in one process: a virtual clock drives the real worker loop and center.

Nothing runs concurrently, so a run is a pure function of its arguments, to the bit. Local steps are computed at the
virtual time at which they end, from the version that the worker was sent. So the memory holds the rule's state, the
version that each worker was sent, and the payloads in flight.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, cast

import numpy as np

from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.loop import Compute, ProbeRequest, Reply
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import BY_SPEED, Vector
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.simulation.timing import Communication, Timing
from distkeras.ps.simulation.virtual_job import Gradient, NumberedGradient, Trace, VirtualJob
from distkeras.ps.validate import invalid, require_integer


class _Stage(Enum):
    """The stage of a worker's window at its next event."""

    COMPUTED = 1
    SENDS = 2
    PROCESSED = 3


class _ServerQueue:
    """A server that processes one exchange at a time, in the order of arrival.

    Args:
        service: seconds for each exchange.
        probed: whether `occupied` will be called; else no exchanges are recorded for it.
    """

    def __init__(self, service: float, *, probed: bool) -> None:
        self._service = service
        self._probed = probed
        self._free = 0.0  # when all exchanges so far are processed
        self._exchanges: deque[tuple[float, float]] = deque()  # when each arrives, and when it is processed

    def add(self, arrival: float) -> float:
        """Return the time at which an exchange that arrives at ``arrival`` is processed."""
        self._free = max(self._free, arrival) + self._service
        if self._probed:
            self._exchanges.append((arrival, self._free))
        return self._free

    def occupied(self, at: float) -> bool:
        """Return whether an exchange has arrived and is not processed at the time ``at``, which never decreases."""
        while self._exchanges and self._exchanges[0][1] <= at:
            self._exchanges.popleft()
        return bool(self._exchanges) and self._exchanges[0][0] <= at


class VirtualClock:
    """Runs a job in the order of virtual times."""

    def __init__(self, job: VirtualJob, timing: Timing, communication: Communication, seed: int) -> None:
        self._job = job
        self._draw = timing.sampler(job.workers, np.random.default_rng(seed))
        size = job.center.current.array.nbytes
        self._up = communication.transfer(size * job.traits.parts)
        self._down = communication.transfer(size)
        self._latency = communication.latency
        self._takes_time = self._up > 0 or communication.service > 0
        self._server = _ServerQueue(communication.service, probed=job.center.rule.probes)
        self._order = itertools.count()  # of events at the same time
        self._events: list[tuple[float, int, int, _Stage]] = []
        #: When the latest exchange of each lease reaches the server.
        self._arrivals: dict[int, float] = {}

    def run(self, commits: int | None) -> None:
        """Run until ``commits`` commits are applied in total, or all mini-batches are trained."""
        job = self._job
        for worker in [*job.pending]:
            self._begin_steps(worker, 0.0)
        while self._events and (commits is None or job.center.clock < commits):
            job.now, _, worker, stage = heapq.heappop(self._events)
            if stage is _Stage.COMPUTED and not self._end_steps(worker):
                continue
            if stage is not _Stage.PROCESSED:
                self._arrivals[worker] = job.now + self._up
                if self._takes_time:
                    self._at(self._server.add(self._arrivals[worker]), worker, _Stage.PROCESSED)
                    continue
            job.exchange(worker, self._arrivals[worker])
            released = job.release_ready()
            acknowledged = worker in job.pending and worker not in job.waiting and worker not in released
            job.lend()
            begun, job.begun = job.begun, []
            for ready in [*released, *([worker] if acknowledged else ()), *begun]:
                self._begin_steps(ready, job.now + self._down)

    def _at(self, time: float, worker: int, stage: _Stage) -> None:
        heapq.heappush(self._events, (time, next(self._order), worker, stage))

    def _begin_steps(self, worker: int, since: float) -> None:
        request = self._job.pending[worker]
        assert isinstance(request, Compute)
        holder = self._job.center.leases[worker].holder
        self._at(since + self._draw(holder, request.steps), worker, _Stage.COMPUTED)

    def _end_steps(self, worker: int) -> bool:
        """Compute the steps that end now; return whether their exchange must be sent now."""
        job = self._job
        request, since = job.resume(worker, None), job.now
        if isinstance(request, ProbeRequest):
            # No payload can overtake the probe, so all commits that it will find are already known.
            occupied = self._server.occupied(since + self._latency)
            request = job.resume(worker, Reply(occupied=occupied))
            since += 2 * self._latency
        if isinstance(request, Compute):
            self._begin_steps(worker, since)
            return False
        if since > job.now:
            self._at(since, worker, _Stage.SENDS)
            return False
        return True


#: ``occupied(worker, clock)``
Occupied = Callable[[int, int], bool]


def simulate(  # noqa: PLR0913 - what defines a simulation, each with its name
    rule: Rule | str,
    theta0: Vector,
    gradient: Gradient | NumberedGradient,
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
    numbered: bool = False,
    measure_gap: bool = False,
    keep_centers: bool = False,
    groups: Sequence[Sequence[int]] | None = None,
    batches: Sequence[int] | None = None,
    lends: bool = False,
) -> Trace:
    """Run ``rule`` with virtual workers, and return a trace of the commits.

    Windows that follow the workers' speeds (``window="by_speed"``) are measured in virtual time, exchanges included.

    All workers receive the center at clock 0. Under rules that step locally, workers take plain SGD steps.

    Without `batches`, the data of a worker never ends, so no worker leaves. Under rules with a buffer (fedbuff, fadas),
    the buffer is therefore not drained at the end, as a job would do: `Trace.buffered` is the number of commits in it.

    If a rule asks whether the server is occupied (zealous DOWNPOUR), the question and its answer each take the latency
    of `communication`. The server is occupied while a commit that has arrived has not been applied yet; without
    ``service`` it never is.

    Args:
        rule: an update rule, or its name.
        theta0: initial parameters, shape ``(size,)``.
        gradient: ``gradient(theta, worker)`` returns a gradient, shape ``(size,)``. It is called once per local step,
            in the order in which the steps end. It must neither change ``theta`` nor keep it.
        workers: number of virtual workers, n.
        learning_rate: eta of the server if the rule steps there, a number or a schedule; otherwise of the workers.
        schedule: worker ids in the order in which their commits complete or are refused. Give either this or `timing`.
        steps: total number of commits. Default: the length of `schedule`.
        seed: seed of `timing`.
        dtype: float32 or float64, for all vectors.
        communication: duration of an exchange: of the payload, the server, and the reply. Only with `timing`. None: an
            exchange takes no time.
        occupied: ``occupied(worker, clock)`` answers whether the server is occupied, with a `schedule`. None: never.
        staleness_bound: largest number of iterations by which a worker may be ahead of the slowest one, for rules whose
            reply is the center.
        rounds: whether to add a barrier to such a rule without rounds.
        numbered: whether the gradient is ``gradient(theta, worker, batch)``, with the number of the worker's
            mini-batch, from 0. A window that a rule refuses is computed again with the same numbers.
        measure_gap: whether to measure the gaps.
        keep_centers: whether to keep the center after each commit.
        batches: the number of mini-batches of each worker, with `timing`; with ``steps=None``, all are trained.
        lends: whether a worker that has none left trains some of the worker that is expected to end last, as in a job.
            It needs `batches`, and a rule that allows it.
        groups: the workers of each group, which compute one window each and commit together. Each worker is in one
            group. It needs a `schedule`, which then has numbers of groups.

    Raises:
        ConfigurationError: An argument is invalid, arguments do not fit together, or the schedule names a waiting
            worker.
    """
    theta0 = flat_vector(theta0, dtype)
    workers = require_integer("workers", workers)
    rule = (make(rule) if isinstance(rule, str) else rule).for_workers(workers)
    _require_simulated(rule)
    if (schedule is None) == (timing is None):
        raise ConfigurationError("either `schedule` or `timing` must be given. Received: both or none")
    if steps is not None or (timing is not None and batches is None):
        steps = require_integer("steps", steps, 0)
    _require_batches(rule, workers, batches, timing, lends=lends)
    if lends and (rounds or staleness_bound is not None):
        raise ConfigurationError(
            f"`lends` must not come with `rounds` or `staleness_bound`. Received: {rounds=}, {staleness_bound=}"
        )
    if timing is None and rule.window_by_speed is not None:
        raise invalid("window", rule.window, "a number of steps under a schedule, which has no times to measure")
    if communication is not None and timing is None:
        raise ConfigurationError("`communication` must come with `timing`. Received: a schedule")
    if occupied is not None and schedule is None:
        raise ConfigurationError("`occupied` must be given only with a `schedule`. Received: `timing`")
    job = VirtualJob(
        rule,
        theta0,
        cast("NumberedGradient", gradient)
        if numbered
        else lambda theta, worker, batch: cast("Gradient", gradient)(theta, worker),
        workers=workers,
        learning_rate=learning_rate,
        scheduler=scheduler_for(rule, workers, staleness_bound, rounds=rounds),
        measure_gap=measure_gap,
        keep_centers=keep_centers,
        batches=batches,
        lends=lends,
    )
    if groups is not None:
        _follow_groups(job, _checked_groups(rule, workers, schedule, groups), (schedule or ())[:steps])
    elif schedule is not None:
        _follow(job, schedule if steps is None else schedule[:steps], occupied or (lambda worker, clock: False))
    else:
        assert timing is not None
        VirtualClock(job, timing, communication or Communication(), seed).run(steps)
    return job.trace()


def flat_vector(theta0: Vector, dtype: Any) -> Vector:
    """Return ``theta0`` as a vector of float32 or float64; raise ConfigurationError for another type or shape."""
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise invalid("dtype", dtype, "float32 or float64")
    theta0 = np.asarray(theta0, dtype)
    if theta0.ndim != 1:
        raise ConfigurationError(f"`theta0` must be one flat vector. Received: shape {theta0.shape}")
    return theta0


def _require_simulated(rule: Rule) -> None:
    if rule.traits.peers:
        raise invalid("rule", rule.name, "one whose workers exchange with a center alone")
    if not isinstance(rule.window, int) and rule.window_by_speed is None:
        raise invalid("window", rule.window, f"a number of steps or {BY_SPEED!r} in a simulation, which has no epochs")


def _require_batches(
    rule: Rule, workers: int, batches: Sequence[int] | None, timing: Timing | None, *, lends: bool
) -> None:
    if batches is not None and (timing is None or len(batches) != workers or min(batches) < 0):
        raise ConfigurationError(
            f"`batches` must have a number for each of {workers} workers, with `timing`. Received: {list(batches)}"
        )
    if lends and (batches is None or not rule.traits.lends):
        raise ConfigurationError(
            f"`lends` must come with `batches` and a rule that allows it. Received: lends=True with rule {rule.name!r}"
        )


def _follow(job: VirtualJob, schedule: Sequence[int], occupied: Occupied) -> None:
    """Run the job; commits complete in the order of ``schedule``."""
    for number, worker in enumerate(schedule):
        if not 0 <= worker < job.workers:
            raise ConfigurationError(
                f"`schedule` must hold numbers in [0, {job.workers}). Received: {worker} at place {number}"
            )
        if worker in job.waiting:
            raise ConfigurationError(
                f"`schedule` must not name a worker that waits for others. Received: worker {worker} at place "
                f"{number}, which waits for {sorted(job.center.scheduler.waiting_for(worker))}"
            )
        job.now = float(number)
        request = job.pending[worker]
        while isinstance(request, (Compute, ProbeRequest)):  # a window may need several requests
            asks = isinstance(request, ProbeRequest)
            job.resume(worker, Reply(occupied=occupied(worker, number)) if asks else None)
            request = job.pending[worker]
        job.exchange(worker)
        job.release_ready()


def _checked_groups(
    rule: Rule, workers: int, schedule: Sequence[int] | None, groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    checked = [sorted(group) for group in groups]
    if schedule is None or not rule.traits.sums or sorted(itertools.chain(*checked)) != [*range(workers)]:
        raise ConfigurationError(
            f"`groups` must contain each of {workers} workers once, with a `schedule` and a rule that adds movements. "
            f"Received: groups={groups!r} with rule {rule.name!r}"
        )
    if not all(0 <= number < len(checked) for number in schedule):
        raise ConfigurationError(f"`schedule` must have numbers in [0, {len(checked)}). Received: {list(schedule)}")
    return checked


def _follow_groups(job: VirtualJob, groups: list[list[int]], schedule: Sequence[int]) -> None:
    """Run the job; the commits of groups complete in the order of ``schedule``."""
    for number, group in enumerate(schedule):
        job.now = float(number)
        for worker in groups[group]:
            while isinstance(job.pending[worker], Compute):
                job.resume(worker, None)
        job.exchange_group(groups[group])
        job.release_ready()
