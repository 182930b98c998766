"""The choice of learning rates, from a grid or step by step on a ladder, and figures of runs at the best rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from reproduction import network
from reproduction.runs import Run, history, simulated, smoothed, train
from reproduction.spreads import Spread, chosen

#: Accuracy below which a model has learned next to nothing.
NOTHING = 0.15
#: Each rate is about half of the previous one.
LADDER = (6.4, 3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003, 0.0015, 0.0008, 0.0004, 0.0002)
#: The rates of AEASGD, whose rate times its elasticity of 5 must be below 1.
ELASTIC_LADDER = (0.19, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003)
KEYS = ("accuracy", "reached", "staleness", "refused")
#: The figures of `with_curve`.
CURVE_KEYS = ("accuracy", "training accuracy", "training loss", "gap", "normalized gap", "time")
#: How the report describes the search.
SEARCH = (
    f"The rate is searched on a ladder of factors of about 2, from {LADDER[0]:g} down to {LADDER[-1]:g} (AEASGD, "
    f"whose rate is limited by ρ = 5: from {ELASTIC_LADDER[0]:g} to {ELASTIC_LADDER[-1]:g}): with seed 0, step by step "
    "toward the better neighbor, until both neighbors are worse (one seed and steps of 2, so that small differences "
    "between rules may be differences between neighboring rates)"
)

#: The function to maximize: ``score(run, seed)``.
Score = Callable[[Run, int], float]


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


def searched(run: Run, start: float, score: Score = held_out) -> Run:
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
