"""Claim 9: the first kind to reach a given accuracy, by interpolation of the curves, over more seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.claims import Criteria, Job, Results, Scale
from reproduction.parts import Check, Section, Table
from reproduction.revised.cells import best, reached, scores
from reproduction.runs import Run, train
from reproduction.spreads import Spread, chosen, listed
from reproduction.throughput import AT, BUDGET, TARGET

RATES = (0.01, 0.005, 0.002)
NAMES = {"ormo": "OrMo", "ssgdm": "SSGDm"}
ENVIRONMENTS = ("homogeneous", "slow workers")


def measured(rule: str, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the time to the training accuracy `TARGET`, in mean step times, by environment and seed."""
    run = Run(rule, AT, 0.0, gradients)
    run = replace(run, rate=best(scores(run, RATES)))
    return {"rate": run.rate} | {
        kind: [reached(train(replace(run, timing=kind), seed)["curve"], TARGET) / 128 for seed in seeds]
        for kind in ENVIRONMENTS
    }


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the revised criterion of claim 9."""
    return {rule: partial(measured, rule, scale.budget(BUDGET), scale.many) for rule in NAMES}


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 9, from its figures."""
    times = {(rule, kind): Spread.of(results[rule][kind]) for rule in NAMES for kind in ENVIRONMENTS}
    saved = {kind: times["ssgdm", kind] - times["ormo", kind] for kind in ENVIRONMENTS}
    checks = [
        Check(
            f"K = {AT}, {kind}: OrMo's training accuracy is at {TARGET:.0%} before SSGDm's",
            "“significant advantages in training speed” (Figure 5)",
            f"{saved[kind].interval(1, 1)} mean step times earlier",
            saved[kind].above(0),
            first=4,
        )
        for kind in ENVIRONMENTS
    ]
    table = Table(
        f"Mean step times until the training accuracy is at {TARGET:.0%}",
        ("rule", "rate", *ENVIRONMENTS),
        [
            (title, chosen(results[rule]["rate"], RATES), *(times[rule, kind].show(1) for kind in ENVIRONMENTS))
            for rule, title in NAMES.items()
        ],
    )
    setting = (
        f"As first, each environment by itself, the time read on the line between two points of the curve; rates of "
        f"{listed(RATES)}; seeds {scale.many[0]} to {scale.many[-1]}."
    )
    return Section(setting, checks, [table])


REVISED = Criteria(jobs, section)
