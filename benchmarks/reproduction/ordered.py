"""Ordered momentum and its rivals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import draw
from reproduction.claims import Check, Claim, Count, Figure, Job, Results, Scale, Section, Table
from reproduction.runs import Run
from reproduction.search import best, scores, with_curve
from reproduction.spreads import Spread, chosen, every, listed

BUDGET = 3000
NAMES = {
    "asgd": "ASGD",
    "asgdm": "naive ASGDm",
    "shifted_momentum": "shifted momentum",
    "smega2": "SMEGA²",
    "ormo": "OrMo",
}
WORKERS = (16, 64)
SAME, MUCH = 1.0, 2.0
ENVIRONMENTS = ("homogeneous", "slow workers")
#: Test accuracy on CIFAR-10, Table 1, by K and environment.
PAPER = {
    ("asgd", 16, "homogeneous"): 89.77,
    ("asgd", 64, "homogeneous"): 83.14,
    ("asgd", 16, "slow workers"): 89.73,
    ("asgd", 64, "slow workers"): 83.94,
    ("asgdm", 16, "homogeneous"): 88.15,
    ("asgdm", 64, "homogeneous"): 82.39,
    ("asgdm", 16, "slow workers"): 73.23,
    ("asgdm", 64, "slow workers"): 68.75,
    ("shifted_momentum", 16, "homogeneous"): 90.23,
    ("shifted_momentum", 64, "homogeneous"): 83.72,
    ("shifted_momentum", 16, "slow workers"): 89.95,
    ("shifted_momentum", 64, "slow workers"): 83.99,
    ("smega2", 16, "homogeneous"): 90.60,
    ("smega2", 64, "homogeneous"): 86.82,
    ("smega2", 16, "slow workers"): 90.88,
    ("smega2", 64, "slow workers"): 86.89,
    ("ormo", 16, "homogeneous"): 90.95,
    ("ormo", 64, "homogeneous"): 88.03,
    ("ormo", 16, "slow workers"): 91.01,
    ("ormo", 64, "slow workers"): 87.76,
}
Setting = tuple[int, str]
#: All pairs of K and environment.
SETTINGS: list[Setting] = [(n, environment) for n in WORKERS for environment in ENVIRONMENTS]
#: Rates around the best ones of a wider grid; for 64 workers, lower ones.
LOW = (0.001, 0.0005, 0.0002, 0.0001)
RATES = {
    ("asgd", 16): (0.02, 0.01, 0.005),
    ("asgdm", 16): (0.002, 0.001, 0.0005),
    ("shifted_momentum", 16): (0.005, 0.002, 0.001),
    ("smega2", 16): (0.01, 0.005, 0.002),
    ("ormo", 16): (0.01, 0.005, 0.002),
    ("asgd", 64): (0.005, 0.002, 0.001),
    ("asgdm", 64): LOW,
    ("shifted_momentum", 64): LOW,
    ("smega2", 64): LOW,
    ("ormo", 64): LOW,
}
OTHERS, RIVAL = ("asgd", "asgdm", "shifted_momentum"), "smega2"
#: Training losses that differ by at most this count as equal.
SHARED = 0.02


def seeds(scale: Scale) -> tuple[int, ...]:
    """Return ten seeds."""
    return scale.seeds(11, 10)


def measured(run: Run, grid: tuple[float, ...], seed: int) -> dict[str, Any]:
    """Return the figures of a rule in both environments, at the rate that is best in the homogeneous one."""
    run = replace(run, rate=best(scores(run, grid)))
    return {"homogeneous": with_curve(run, seed), "slow workers": with_curve(replace(run, timing="slow workers"), seed)}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the claim."""
    return {
        f"{rule}/{n}/{seed}": partial(measured, Run(rule, n, 0.0, scale.budget(BUDGET), decay=True), grid, seed)
        for (rule, n), grid in RATES.items()
        for seed in seeds(scale)
    }


class _OrderedFigures:
    """Spreads of the runs.

    Args:
        results: of the claim's jobs.
        scale: how much was run.
    """

    def __init__(self, results: Results, scale: Scale) -> None:
        self.results, self.seeds = results, seeds(scale)

    def of(self, rule: str, setting: Setting, key: str = "accuracy") -> Spread:
        """Return a figure in one setting."""
        n, environment = setting
        return Spread.of([self.results[f"{rule}/{n}/{seed}"][environment][key] for seed in self.seeds])

    def lead(self, other: str, setting: Setting) -> Spread:
        """Return the difference of OrMo's accuracy and the other's."""
        return self.of("ormo", setting) - self.of(other, setting)

    def curve(self, rule: str, setting: Setting) -> np.ndarray:
        """Return time in mean step times and accuracy in percent, as means over the seeds."""
        n, environment = setting
        curves = [self.results[f"{rule}/{n}/{seed}"][environment]["curve"] for seed in self.seeds]
        mean: np.ndarray = np.mean(curves, axis=0) * [[1 / 128], [100]]
        return mean

    def rate(self, rule: str, n: int) -> str:
        """Return the chosen rate, as text."""
        return chosen(self.results[f"{rule}/{n}/{self.seeds[0]}"]["homogeneous"]["rate"], RATES[rule, n])


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about the claim, from its figures."""
    found = _OrderedFigures(results, scale)
    table = Table(
        "Final test accuracy (%), here and in brackets in the paper (ResNet-20, CIFAR-10)",
        ("rule", *(f"K = {n}, {environment}" for n, environment in SETTINGS), "rates chosen"),
        [
            (
                title,
                *(f"{found.of(rule, s).percent} ({PAPER[(rule, *s)]:.2f})" for s in SETTINGS),
                listed([found.rate(rule, n) for n in WORKERS]),
            )
            for rule, title in NAMES.items()
        ],
    )
    setting = (
        f"{scale.budget(BUDGET):,} mini-batches a run, momentum 0.9, a tenth of the rate at one half and at three "
        "quarters. For each rule and K the rate that is best with seed 0 in the homogeneous environment, used in both: "
        f"of three, around the best one of a wider grid, and with K = 64 of {listed(LOW)} for all rules but ASGD. Slow "
        "workers: K/16 of them, ten times slower. "
        f"Seeds {seeds(scale)[0]} to {seeds(scale)[-1]}. Only CIFAR-10's table is compared."
    )
    caption = (
        "Left: training accuracy, mean over the seeds; OrMo's line is the broad one, which others lie on. Right: how "
        "far each rule is above OrMo at the same time, which tells them apart."
    )
    checks = [*_accuracy_checks(found), _loss_check(found)]
    return Section(setting, checks, [table, Figure(_curves(found, folder), caption)])


def _intervals_text(leads: dict[Setting, Spread]) -> str:
    return "; ".join(f"K = {n}, {environment}: {lead.interval()}" for (n, environment), lead in leads.items())


def _accuracy_checks(found: _OrderedFigures) -> list[Check]:
    of, lead = found.of, found.lead
    least = {s: min((lead(other, s) for other in OTHERS), key=lambda one: one.mean) for s in SETTINGS}
    rival = {s: lead(RIVAL, s) for s in SETTINGS}
    plain = {s: lead("asgd", s) for s in SETTINGS if s[0] == 64}
    naive = {s: of("asgd", s) - of("asgdm", s) for s in SETTINGS}
    change = {n: of("ormo", (n, "slow workers")) - of("ormo", (n, "homogeneous")) for n in WORKERS}
    return [
        Check(
            "OrMo's test accuracy is above that of ASGD, naive ASGDm and shifted momentum in all four settings",
            "it is (Table 1)",
            f"the least lead in points: {_intervals_text(least)}",
            every([lead(other, s).above(0) for other in OTHERS for s in SETTINGS]),
            revised=True,
        ),
        Check(
            "OrMo's test accuracy is above SMEGA²'s in all four settings",
            f"by {listed([PAPER[('ormo', *s)] - PAPER[(RIVAL, *s)] for s in SETTINGS], 2)} points (Table 1)",
            f"points: {_intervals_text(rival)}",
            every([one.above(0) for one in rival.values()]),
            revised=True,
        ),
        Check(
            f"K = 64: OrMo ends at least {MUCH:g} points above ASGD in both environments",
            "4.89 and 3.82 points (Table 1)",
            f"points: {_intervals_text(plain)}",
            every([one.above(MUCH / 100) for one in plain.values()]),
            revised=True,
        ),
        Check(
            "naive ASGDm ends below ASGD in all four settings",
            "it does; with slow workers it sometimes fails to converge (Table 1)",
            f"below by points: {_intervals_text(naive)}",
            every([one.above(0) for one in naive.values()]),
            revised=True,
        ),
        Check(
            f"slow workers change OrMo's accuracy by at most {SAME:g} point, for both K",
            "+0.06 and −0.27 points (Table 1)",
            "; ".join(f"K = {n}: {one.interval()} points" for n, one in change.items()),
            every([verdict for one in change.values() for verdict in (one.above(-SAME / 100), one.below(SAME / 100))]),
            revised=True,
        ),
    ]


def _loss_check(found: _OrderedFigures) -> Check:
    of = partial(found.of, key="training loss")
    behind = {
        s: max((of("ormo", s) - of(rule, s) for rule in NAMES if rule != "ormo"), key=lambda one: one.mean)
        for s in SETTINGS
    }
    return Check(
        f"OrMo's training loss is at most {SHARED} above the lowest of the others in all four settings",
        "it has the lowest, or shares it (Table 1)",
        "above it by " + "; ".join(f"K = {n}, {kind}: {one.interval(3, 1)}" for (n, kind), one in behind.items()),
        every([one.below(SHARED) for one in behind.values()]),
        revised=True,
    )


def _curves(found: _OrderedFigures, folder: Path) -> str:
    figure, axes = draw.panels(2, 4, 2.3)
    for (left, right), (n, environment) in zip(axes, SETTINGS, strict=True):
        reference = found.curve("ormo", (n, environment))
        for place, (rule, title) in enumerate(NAMES.items()):
            time, accuracy = found.curve(rule, (n, environment))
            look = {**draw.style(place), "marker": None}
            if rule == "ormo":  # a broad line below the others, so that equal lines are visible
                look |= {"linewidth": 5, "alpha": 0.5, "zorder": 1, "linestyle": "-"}
            left.plot(time, accuracy, label=title, **look)
            right.plot(time, accuracy - np.interp(time, *reference), **look)
        where = f"K = {n}, {environment}"
        draw.finish(left, "time (mean step times)", "training accuracy (%)", where, legend=False)
        draw.finish(right, "time (mean step times)", "points above OrMo", f"{where}: against OrMo", legend=False)
        left.set_ylim(0, 100)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=5, loc="outside lower center", frameon=False, fontsize=8)
    return draw.save(figure, folder, "ordered.png")


CLAIM = Claim(
    name="ormo",
    title="Ordered momentum is the best asynchronous momentum, and does not mind slow workers",
    says="OrMo ends more accurate than ASGD, naive ASGDm, shifted momentum and SMEGA² with 16 and with 64 workers; "
    "slow workers do not affect it, whereas naive ASGDm impedes convergence.",
    source="Shi et al. 2024, Section 4, Table 1, Figures 3 and 6",
    jobs=jobs,
    section=section,
    before=Count(3, 5),
)
