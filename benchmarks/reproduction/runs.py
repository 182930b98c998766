"""Training runs of the perceptron under a rule, the choice of their learning rates, and figures at the best rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from distkeras.ps import rules
from distkeras.ps.rules.schedules import Schedule, StepDecay, WarmUp
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma, SlowWorkers, Timing
from distkeras.ps.simulation.virtual_job import Trace
from reproduction import network
from reproduction.spreads import Spread, chosen

#: The environments of the papers, by the names in the report.
TIMINGS: dict[str, Timing] = {
    "homogeneous": Gamma(),
    "heterogeneous": Gamma(heterogeneous=True),
    "slow workers": SlowWorkers(),
    "one slow worker": SlowWorkers(share=1 / 8, factor=4.0),
    "equal workers": SlowWorkers(share=0.0),
}
#: Points of a curve in ``results.json``.
CURVE = 40
#: Accuracy below which a model has learned next to nothing.
NOTHING = 0.15
#: Each rate is about half of the previous one.
LADDER = (6.4, 3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003, 0.0015, 0.0008, 0.0004, 0.0002)
#: The rates of AEASGD, whose rate times its elasticity of 5 must be below 1.
ELASTIC_LADDER = (0.19, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003)
KEYS = ("accuracy", "reached", "staleness", "refused")
#: The figures of `with_curve`.
CURVE_KEYS = ("accuracy", "training loss", "gap", "normalized gap")
#: How the report describes the search.
SEARCH = (
    f"The rate is searched on a ladder of factors of about 2, from {LADDER[0]:g} down to {LADDER[-1]:g} (AEASGD, "
    f"whose rate is limited by ρ = 5: from {ELASTIC_LADDER[0]:g} to {ELASTIC_LADDER[-1]:g}): with seed 0, step by step "
    "toward the better neighbor, until both neighbors are worse (one seed and steps of 2, so that small differences "
    "between rules may be differences between neighboring rates)"
)


@dataclass(frozen=True)
class Run:
    """One training run, except for its seed; ``rate`` is the highest learning rate, ``timing`` a key of `TIMINGS`.

    The workers' windows share the mini-batches, ``gradients``. If windows follow the workers' speeds, their number is
    computed as if all workers were as fast as the fastest. With ``decay``, the rate falls to a tenth after a half and
    after three quarters of the commits, as in papers; with ``warm_up``, it rises from ``rate / workers`` over the first
    sixteenth, as in DANA's runs.
    """

    rule: str
    workers: int
    rate: float
    gradients: int
    timing: str = "homogeneous"
    options: tuple[tuple[str, Any], ...] = ()
    decay: bool = False
    warm_up: bool = False
    gap: bool = False

    @property
    def commits(self) -> int:
        """Return the number of commits; for a synchronous rule, a multiple of the workers."""
        rule = rules.make(self.rule, **dict(self.options))
        window = rule.window_by_speed or rule.window
        assert isinstance(window, int), "a simulation has no epochs"
        commits = max(1, self.gradients // window)
        # An incomplete round does not move the center.
        return -(-commits // self.workers) * self.workers if rule.traits.synchronous else commits

    @property
    def learning_rate(self) -> float | Schedule:
        """Return the learning rate as a function of the clock."""
        places = {self.commits // 2, self.commits * 3 // 4} if self.decay else set()
        boundaries = tuple(sorted(places))
        if self.warm_up:
            length = max(1, self.commits // 16)
            return WarmUp(self.rate, boundaries, length=length, divisor=float(self.workers))
        return StepDecay(self.rate, boundaries) if self.decay else self.rate


def simulated(run: Run, seed: int) -> tuple[Trace, network.Batches]:
    """Return the trace of a run, and the gradients that it computed."""
    batches, rule = network.Batches(seed), rules.make(run.rule, **dict(run.options))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # Divergence is a valid outcome.
        trace = simulate(
            rule,
            network.initial(seed),
            batches.numbered if rule.may_refuse else batches,
            workers=run.workers,
            learning_rate=run.learning_rate,
            timing=TIMINGS[run.timing],
            steps=run.commits,
            seed=seed,
            dtype=np.float32,
            numbered=rule.may_refuse,
            measure_gap=run.gap,
        )
    return trace, batches


def train(run: Run, seed: int, part: str = "test") -> dict[str, Any]:
    """Return the figures of one run, which are plain numbers. The model is evaluated on ``part``."""
    trace, batches = simulated(run, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        loss, accuracy = network.evaluate(trace.theta, part)
        steps = history(trace, batches)
        late = steps.sort_values("seconds").tail(max(1, len(steps) // 10))
        time, curve = smoothed(steps)
        return {
            "accuracy": accuracy,
            "diverged": bool(loss > network.GUESSING),
            "training loss": float(late["loss"].mean()),
            "scale": float(trace.scale.mean()),
            "gap": float(trace.gap.mean()),
            "normalized gap": float(np.median(trace.normalized_gap)),
            "curve": [time, curve],
        }


def history(trace: Trace, batches: network.Batches) -> pd.DataFrame:
    """Return a row for each gradient whose commit was applied, in the form that `distkeras.analysis.metrics` takes.

    The steps of a window share the time between the worker's two commits evenly. ``seconds`` are units of the timing.
    """
    worker_of_gradient, parts = np.array(batches.worker), []
    loss, accuracy = np.array(batches.loss), np.array(batches.accuracy)
    for worker in range(worker_of_gradient.max() + 1):
        own = trace.worker == worker
        steps = trace.steps[own]
        begun = np.concatenate([[0.0], trace.time[own]])
        spans = np.repeat(np.diff(begun) / steps, steps)
        times = np.repeat(begun[:-1], steps) + spans * np.concatenate([np.arange(1, step + 1) for step in [*steps, 0]])
        places = np.flatnonzero(worker_of_gradient == worker)[: len(times)]
        columns = {"worker": worker, "iteration": np.arange(len(times)), "seconds": times}
        parts.append(pd.DataFrame({**columns, "loss": loss[places], "accuracy": accuracy[places]}))
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(epoch=0, samples=network.BATCH, timestamp=pd.to_datetime(frame["seconds"], unit="s"))


def smoothed(steps: pd.DataFrame) -> tuple[list[float], list[float]]:
    """Return the training accuracy over time: means over as many spans as a curve has points."""
    ordered = steps.sort_values(["seconds", "worker"])
    parts = np.array_split(ordered[["seconds", "accuracy"]].to_numpy(), min(CURVE, len(ordered)))
    means = [part.mean(axis=0) for part in parts]
    return [round(float(mean[0]), 1) for mean in means], [round(float(mean[1]), 4) for mean in means]


def ladder(rule: str) -> tuple[float, ...]:
    """Return the rates among which a rule's is searched."""
    return ELASTIC_LADDER if rule == "aeasgd" else LADDER


def climb(score: Callable[[float], float], grid: Sequence[float], start: float) -> float:
    """Return a local optimum among the rates in ``grid``, by moving from ``start`` to the better neighbor.

    Of equally good rates the lower one is better.
    """
    tried: dict[int, float] = {}
    place = grid.index(start)
    while True:
        near = [near for near in (place - 1, place, place + 1) if 0 <= near < len(grid)]
        tried.update({one: score(grid[one]) for one in near if one not in tried})
        best = max(near, key=lambda one: (tried[one], -grid[one]))
        if best == place:
            return grid[place]
        place = best


@cache
def _held_out(run: Run, seed: int) -> float:
    trace, _ = simulated(run, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return network.evaluate(trace.theta, "held out")[1]


def held_out(run: Run, seed: int) -> float:
    """Return the accuracy on the held-out rows; 0 for a model that has learned nothing."""
    accuracy = _held_out(run, seed)
    return accuracy if accuracy > NOTHING else 0.0


def searched(run: Run, start: float, score: Callable[[Run, int], float] = held_out) -> Run:
    """Return ``run`` at the rate that is best with seed 0."""
    return replace(run, rate=climb(lambda rate: score(replace(run, rate=rate), 0), ladder(run.rule), start))


@cache
def figures(run: Run, seed: int, target: float = math.inf) -> dict[str, float]:
    """Return test accuracy, time to the training accuracy ``target``, mean staleness, and refused commits."""
    trace, batches = simulated(run, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _, accuracy = network.evaluate(trace.theta)
        time = reached(smoothed(history(trace, batches)), target) / 128
    found = (accuracy, time, float(trace.staleness.mean()), float(len(trace.refused)))
    return {key: float(f"{value:.6g}") for key, value in zip(KEYS, found, strict=True)}


def cell(run: Run, seeds: Sequence[int], target: float = math.inf) -> dict[str, Any]:
    """Return the figures of ``run`` by seed, and its rate."""
    found = [figures(run, seed, target) for seed in seeds]
    return {"rate": run.rate} | {key: [one[key] for one in found] for key in KEYS}


def accuracy(found: Mapping[str, Any]) -> Spread:
    """Return the accuracy of a cell's runs."""
    return Spread.of(found["accuracy"])


def at_rate(found: Mapping[str, Any], rule: str) -> str:
    """Return accuracy and rate of a cell, as text for a table."""
    return f"{accuracy(found).percent} at {chosen(found['rate'], ladder(rule))}"


@cache
def with_curve(run: Run, seed: int) -> dict[str, Any]:
    """Return the figures of one run, with six digits each, its rate and its curve."""
    found = train(run, seed)
    return {"rate": run.rate, "curve": found["curve"]} | {key: float(f"{found[key]:.6g}") for key in CURVE_KEYS}


def scores(run: Run, grid: Sequence[float]) -> dict[float, float]:
    """Return the accuracy on the held-out rows with seed 0, by the learning rate."""
    return {rate: _held_out(replace(run, rate=rate), 0) for rate in grid}


def best(scored: Mapping[float, float]) -> float:
    """Return the rate with the highest score; of equals, the lowest."""
    return max(sorted(scored), key=scored.__getitem__)


def reached(curve: Sequence[Sequence[float]], accuracy: float) -> float:
    """Return the interpolated virtual time at which a curve first reaches ``accuracy``; infinite if never."""
    times, values = curve
    for place, value in enumerate(values):
        if value >= accuracy:
            if place == 0:
                return times[0]
            share = (accuracy - values[place - 1]) / (value - values[place - 1])
            return times[place - 1] + share * (times[place] - times[place - 1])
    return math.inf
