"""Runs of one setting over several seeds: what the revised criteria are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from reproduction.runs import Run, held_out, train
from reproduction.spreads import Spread

K = TypeVar("K", float, tuple[float, float])

KEYS = ("accuracy", "training accuracy", "training loss", "gap", "normalized gap", "time")


@cache
def with_curve(run: Run, seed: int) -> dict[str, Any]:
    """Figures of one run, six digits each, its rate and its curve."""
    found = train(run, seed)
    return {"rate": run.rate, "curve": found["curve"]} | {key: float(f"{found[key]:.6g}") for key in KEYS}


def figures(run: Run, seed: int) -> dict[str, float]:
    """Figures of one run, and its rate."""
    return {key: value for key, value in with_curve(run, seed).items() if key != "curve"}


def cell(run: Run, seeds: Sequence[int]) -> dict[str, Any]:
    """Figures of ``run`` by seed, and its rate."""
    found = [figures(run, seed) for seed in seeds]
    return {"rate": run.rate} | {key: [one[key] for one in found] for key in KEYS}


def spread(found: Mapping[str, Any], key: str = "accuracy") -> Spread:
    """Of a cell's figure."""
    return Spread.of(found[key])


def scores(run: Run, grid: Sequence[float]) -> dict[float, float]:
    """Accuracy on the held-out rows with seed 0, by the learning rate."""
    return {rate: held_out(replace(run, rate=rate)) for rate in grid}


def best(scored: Mapping[K, float]) -> K:
    """The rate, or what else was tried, with the highest score; of equals, the lowest."""
    return max(sorted(scored), key=scored.__getitem__)


def reached(curve: Sequence[Sequence[float]], accuracy: float) -> float:
    """Virtual time at which a curve first is at ``accuracy``, between its points on a line; infinite if never."""
    times, values = curve
    for place, value in enumerate(values):
        if value >= accuracy:
            if place == 0:
                return times[0]
            share = (accuracy - values[place - 1]) / (value - values[place - 1])
            return times[place - 1] + share * (times[place] - times[place - 1])
    return math.inf
