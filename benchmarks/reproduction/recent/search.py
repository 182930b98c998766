"""Learning rates that are searched step by step on a ladder, and figures of runs at the rate that was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from reproduction import network
from reproduction.momentum import NOTHING
from reproduction.revised.cells import reached
from reproduction.runs import Run, history, simulated, smoothed
from reproduction.spreads import Spread, chosen

#: Each rate about half of the one before.
LADDER = (6.4, 3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003, 0.0015, 0.0008, 0.0004, 0.0002)
#: AEASGD's, whose rate times its elasticity of 5 must be below 1.
ELASTIC_LADDER = (0.19, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003)
KEYS = ("accuracy", "reached", "staleness", "refused")
#: How the report describes the search.
SEARCH = (
    f"The rate is searched on a ladder of factors of about 2, from {LADDER[0]:g} down to {LADDER[-1]:g} (AEASGD, "
    f"whose rate is limited by ρ = 5: from {ELASTIC_LADDER[0]:g} to {ELASTIC_LADDER[-1]:g}): with seed 0, step by step "
    "toward the better neighbor, until both neighbors are worse (one seed and steps of 2, so that small differences "
    "between rules may be differences between neighboring rates)"
)

#: What is to be as high as possible: ``score(run, seed)``.
Score = Callable[[Run, int], float]


def ladder(rule: str) -> tuple[float, ...]:
    """The rates that a rule's is searched among."""
    return ELASTIC_LADDER if rule == "aeasgd" else LADDER


def climb(score: Callable[[float], float], grid: Sequence[float], start: float) -> float:
    """The rate that no neighbor in ``grid`` is better than, going from ``start`` to the better neighbor each time.

    Of equal rates the lower is the better one.
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
def held_out(run: Run, seed: int) -> float:
    """Accuracy on the held-out rows; 0 for a model that has learned nothing."""
    trace, _ = simulated(run, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _, accuracy = network.evaluate(trace.theta, "held out")
    return accuracy if accuracy > NOTHING else 0.0


def searched(run: Run, start: float, score: Score = held_out) -> Run:
    """``run`` at the rate that is best with seed 0."""
    return replace(run, rate=climb(lambda rate: score(replace(run, rate=rate), 0), ladder(run.rule), start))


@cache
def figures(run: Run, seed: int, target: float = math.inf) -> dict[str, float]:
    """Test accuracy, time until the training accuracy is at ``target``, mean staleness, and refused commits."""
    trace, batches = simulated(run, seed)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _, accuracy = network.evaluate(trace.theta)
        time = reached(smoothed(history(trace, batches)), target) / 128
    found = (accuracy, time, float(trace.staleness.mean()), float(len(trace.refused)))
    return {key: float(f"{value:.6g}") for key, value in zip(KEYS, found, strict=True)}


def cell(run: Run, seeds: Sequence[int], target: float = math.inf) -> dict[str, Any]:
    """Figures of ``run`` by seed, and its rate."""
    found = [figures(run, seed, target) for seed in seeds]
    return {"rate": run.rate} | {key: [one[key] for one in found] for key in KEYS}


def accuracy(found: Mapping[str, Any]) -> Spread:
    """Of a cell's runs."""
    return Spread.of(found["accuracy"])


def at_rate(found: Mapping[str, Any], rule: str) -> str:
    """Accuracy and rate of a cell, for a table."""
    return f"{accuracy(found).percent} at {chosen(found['rate'], ladder(rule))}"
