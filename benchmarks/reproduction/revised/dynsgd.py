"""Claim 3 over more seeds: the loss with windows of 10 is near its limit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.claims import Criteria, Job, Results, Scale
from reproduction.parts import Check, Section, Table
from reproduction.revised.cells import cell, spread
from reproduction.spreads import listed
from reproduction.windows import BUDGET, MANY, limit, run

WINDOWS, LOST = (1, 10), 2.0


def measured(window: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of DynSGD at the rate of all of the claim's runs."""
    return cell(replace(run("dynsgd", MANY, window, gradients), rate=limit(gradients)), seeds)


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the revised criterion of claim 3."""
    return {f"{window}": partial(measured, window, scale.budget(BUDGET, 30), scale.seeds) for window in WINDOWS}


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 3, from its figures."""
    short, long = (spread(results[f"{window}"], "training accuracy") for window in WINDOWS)
    lost = short - long
    check = Check(
        f"n = {MANY}: with λ = 10 DynSGD's training accuracy is at least {LOST:g} points below λ = 1, on as much data",
        "90 % against 98.1 % (Figure 2.15)",
        f"below by {lost.interval()} points",
        lost.above(LOST / 100),
        first=2,
    )
    table = Table(
        f"DynSGD, n = {MANY}",
        ("λ", "training accuracy (%)", "test accuracy (%)"),
        [
            (f"{window}", one.percent, spread(results[f"{window}"]).percent)
            for window, one in zip(WINDOWS, (short, long), strict=True)
        ],
    )
    return Section(f"As first; seeds {listed(scale.seeds)}.", [check], [table])


REVISED = Criteria(jobs, section)
