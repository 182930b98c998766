"""Runs of one setting over several seeds, from which the revised criteria are computed."""

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
    """Return the figures of one run, with six digits each, its rate and its curve."""
    found = train(run, seed)
    return {"rate": run.rate, "curve": found["curve"]} | {key: float(f"{found[key]:.6g}") for key in KEYS}


def figures(run: Run, seed: int) -> dict[str, float]:
    """Return the figures of one run, and its rate."""
    return {key: value for key, value in with_curve(run, seed).items() if key != "curve"}


def cell(run: Run, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the figures of ``run`` by seed, and its rate."""
    found = [figures(run, seed) for seed in seeds]
    return {"rate": run.rate} | {key: [one[key] for one in found] for key in KEYS}


def spread(found: Mapping[str, Any], key: str = "accuracy") -> Spread:
    """Return the spread of a cell's figure."""
    return Spread.of(found[key])


def scores(run: Run, grid: Sequence[float]) -> dict[float, float]:
    """Return the accuracy on the held-out rows with seed 0, by the learning rate."""
    return {rate: held_out(replace(run, rate=rate)) for rate in grid}


def best(scored: Mapping[K, float]) -> K:
    """Return the key, such as a rate, with the highest score; of equals, the lowest."""
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
