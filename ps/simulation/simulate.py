"""Any rule at any scale in one process: a virtual clock drives the worker's loop and the center that servers run.

Nothing runs at the same time here, so a run is a pure function of its arguments, to the bit. Local steps are taken at
the moment when their time is over, from the version that the worker was sent; so memory is the rule's own state, what
was sent to each worker, and what is on its way to the server where that takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.messages import Compute, ProbeRequest, Reply
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import BY_SPEED, Vector
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.simulation.function_replica import Gradient, NumberedGradient
from distkeras.ps.simulation.timing import Communication, Timing
from distkeras.ps.simulation.virtual_clock import VirtualClock
from distkeras.ps.simulation.virtual_job import Trace, VirtualJob
from distkeras.ps.validate import invalid, require_integer

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
) -> Trace:
    """Runs ``rule`` with virtual workers.

    Windows that follow the workers' speeds (``window="by_speed"``) are measured in virtual time, exchanges included.

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
        learning_rate: eta, of the server if the rule steps there, which may be a schedule; else of the workers' steps.
        schedule: worker ids in the order in which their commits complete, or are refused. Either this or `timing`.
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
        numbered: the gradient is ``gradient(theta, worker, batch)``, with the number of the worker's mini-batch from 0
            on. A window that a rule refuses is computed again from the same numbers.
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
    workers = require_integer("workers", workers)
    if not isinstance(rule.window, int) and rule.window_by_speed is None:
        raise invalid("window", rule.window, f"a number of steps or {BY_SPEED!r} in a simulation, which has no epochs")
    if (schedule is None) == (timing is None):
        raise ConfigurationError("either `schedule` or `timing` must be given. Received: both or none")
    if steps is not None or timing is not None:
        steps = require_integer("steps", steps, 0)
    if timing is None and rule.window_by_speed is not None:
        raise invalid("window", rule.window, "a number of steps under a schedule, which has no times to measure")
    if communication is not None and timing is None:
        raise ConfigurationError("`communication` must come with `timing`. Received: a schedule")
    if occupied is not None and schedule is None:
        raise ConfigurationError("`occupied` must come with `schedule`: times tell it otherwise. Received: `timing`")
    job = VirtualJob(
        rule,
        theta0,
        cast(NumberedGradient, gradient) if numbered else _without_number(cast(Gradient, gradient)),
        workers=workers,
        learning_rate=learning_rate,
        scheduler=scheduler_for(rule, workers, staleness_bound, rounds=rounds),
        measure_gap=measure_gap,
        keep_centers=keep_centers,
    )
    if schedule is not None:
        _follow(job, schedule if steps is None else schedule[:steps], occupied or _never)
    else:
        assert timing is not None
        assert steps is not None
        VirtualClock(job, timing, communication or Communication(), seed).run(steps)
    return job.trace()


def _follow(job: VirtualJob, schedule: Sequence[int], occupied: Occupied) -> None:
    """Commits complete in the order of ``schedule``."""
    for number, worker in enumerate(schedule):
        if not 0 <= worker < job.workers:
            raise ConfigurationError(
                f"`schedule` must hold numbers in [0, {job.workers}). Received: {worker} at place {number}"
            )
        if worker in job.waiting:
            raise ConfigurationError(
                f"`schedule` must let only running workers commit. Received: worker {worker} at place {number}, "
                f"who waits for {sorted(job.center.scheduler.waiting_for(worker))}"
            )
        job.now = float(number)
        request = job.pending[worker]
        while isinstance(request, (Compute, ProbeRequest)):  # a window may be taken in several calls
            asks = isinstance(request, ProbeRequest)
            request = job.resume(worker, Reply(occupied=occupied(worker, number)) if asks else None)
        job.exchange(worker)
        job.release_ready()


def _without_number(gradient: Gradient) -> NumberedGradient:
    return lambda theta, worker, batch: gradient(theta, worker)


def _never(worker: int, clock: int) -> bool:
    return False
