"""Ordered momentum and its rivals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import draw
from reproduction.claims import Check, Claim, Count, Figure, Job, Results, Scale, Section, Table, revised
from reproduction.runs import Run, best, scores, with_curve
from reproduction.spreads import SeedRuns, Spread, all_above, all_below, chosen, every, intervals, listed

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
Setting = tuple[int, str]
#: All pairs of K and environment.
SETTINGS: list[Setting] = [(n, environment) for n in WORKERS for environment in ENVIRONMENTS]
#: Test accuracy on CIFAR-10, Table 1, in these settings.
PAPER = {
    "asgd": (89.77, 89.73, 83.14, 83.94),
    "asgdm": (88.15, 73.23, 82.39, 68.75),
    "shifted_momentum": (90.23, 89.95, 83.72, 83.99),
    "smega2": (90.60, 90.88, 86.82, 86.89),
    "ormo": (90.95, 91.01, 88.03, 87.76),
}
#: Rates around the best ones of a wider grid; for 64 workers, lower ones.
LOW = (0.001, 0.0005, 0.0002, 0.0001)
RATES = {
    ("asgd", 16): (0.02, 0.01, 0.005),
    ("asgdm", 16): (0.002, 0.001, 0.0005),
    ("shifted_momentum", 16): (0.005, 0.002, 0.001),
    ("smega2", 16): (0.01, 0.005, 0.002),
    ("ormo", 16): (0.01, 0.005, 0.002),
    ("asgd", 64): (0.005, 0.002, 0.001),
    **{(rule, 64): LOW for rule in NAMES if rule != "asgd"},
}
OTHERS, RIVAL = ("asgd", "asgdm", "shifted_momentum"), "smega2"
#: Training losses that differ by at most this count as equal.
SHARED = 0.02


def measured(run: Run, grid: tuple[float, ...], seed: int) -> dict[str, Any]:
    """Return the figures of a rule in both environments, at the rate that is best in the homogeneous one."""
    run = replace(run, rate=best(scores(run, grid)))
    return {"homogeneous": with_curve(run, seed), "slow workers": with_curve(replace(run, timing="slow workers"), seed)}


def _jobs(scale: Scale) -> dict[str, Job]:
    return {
        f"{rule}/{n}/{seed}": partial(measured, Run(rule, n, 0.0, scale.budget(BUDGET), decay=True), grid, seed)
        for (rule, n), grid in RATES.items()
        for seed in scale.seeds(11, 10)
    }


class _OrderedFigures(SeedRuns):
    """Figures of the runs by rule and setting."""

    def of(self, rule: str, setting: Setting, key: str = "accuracy") -> Spread:
        """Return a figure in one setting."""
        n, environment = setting
        return Spread.of([one[environment][key] for one in self.runs[f"{rule}/{n}"]])

    def lead(self, rule: str, other: str, key: str = "accuracy") -> dict[Setting, Spread]:
        """Return the difference of a figure of two rules, in each setting."""
        return {setting: self.of(rule, setting, key) - self.of(other, setting, key) for setting in SETTINGS}

    def curve(self, rule: str, setting: Setting) -> np.ndarray:
        """Return time in mean step times and accuracy in percent, as means over the seeds."""
        n, environment = setting
        curves = [one[environment]["curve"] for one in self.runs[f"{rule}/{n}"]]
        mean: np.ndarray = np.mean(curves, axis=0) * [[1 / 128], [100]]
        return mean

    def rate(self, rule: str, n: int) -> str:
        """Return the chosen rate, as text."""
        return chosen(self.runs[f"{rule}/{n}"][0]["homogeneous"]["rate"], RATES[rule, n])


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    found = _OrderedFigures(results)
    table = Table(
        "Final test accuracy (%), here and in brackets in the paper (ResNet-20, CIFAR-10)",
        ("rule", *map(_named, SETTINGS), "rates chosen"),
        [
            (
                title,
                *(f"{found.of(rule, s).percent} ({paper:.2f})" for s, paper in zip(SETTINGS, PAPER[rule], strict=True)),
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
        f"Seeds {scale.seeds(11, 10)[0]} to {scale.seeds(11, 10)[-1]}. Only CIFAR-10's table is compared."
    )
    caption = (
        "Left: training accuracy, mean over the seeds; OrMo's line is the broad one, which others lie on. Right: how "
        "far each rule is above OrMo at the same time, which tells them apart."
    )
    checks = [*_accuracy_checks(found), _loss_check(found)]
    return Section(setting, checks, [table, Figure(_curves(found, folder), caption)])


def _named(setting: Setting) -> str:
    return "K = {}, {}".format(*setting)


def _by_name(found: dict[Setting, Spread]) -> dict[str, Spread]:
    return {_named(setting): one for setting, one in found.items()}


def _accuracy_checks(found: _OrderedFigures) -> list[Check]:
    over = {rule: found.lead("ormo", rule) for rule in NAMES}
    least = {s: min((over[other][s] for other in OTHERS), key=lambda one: one.mean) for s in SETTINGS}
    rival = [ormo - smega2 for ormo, smega2 in zip(PAPER["ormo"], PAPER[RIVAL], strict=True)]
    plain = {s: over["asgd"][s] for s in SETTINGS if s[0] == 64}
    naive = found.lead("asgd", "asgdm")
    change = {n: found.of("ormo", (n, "slow workers")) - found.of("ormo", (n, "homogeneous")) for n in WORKERS}
    return [
        revised(
            "OrMo's test accuracy is above that of ASGD, naive ASGDm and shifted momentum in all four settings",
            "it is (Table 1)",
            f"the least lead in points: {intervals(_by_name(least))}",
            every([all_above(over[other].values(), 0) for other in OTHERS]),
        ),
        revised(
            "OrMo's test accuracy is above SMEGA²'s in all four settings",
            f"by {listed(rival, 2)} points (Table 1)",
            f"points: {intervals(_by_name(over[RIVAL]))}",
            all_above(over[RIVAL].values(), 0),
        ),
        revised(
            f"K = 64: OrMo ends at least {MUCH:g} points above ASGD in both environments",
            "4.89 and 3.82 points (Table 1)",
            f"points: {intervals(_by_name(plain))}",
            all_above(plain.values(), MUCH / 100),
        ),
        revised(
            "naive ASGDm ends below ASGD in all four settings",
            "it does; with slow workers it sometimes fails to converge (Table 1)",
            f"below by points: {intervals(_by_name(naive))}",
            all_above(naive.values(), 0),
        ),
        revised(
            f"slow workers change OrMo's accuracy by at most {SAME:g} point, for both K",
            "+0.06 and −0.27 points (Table 1)",
            "; ".join(f"K = {n}: {one.interval()} points" for n, one in change.items()),
            every([all_above(change.values(), -SAME / 100), all_below(change.values(), SAME / 100)]),
        ),
    ]


def _loss_check(found: _OrderedFigures) -> Check:
    leads = [found.lead("ormo", rule, "training loss") for rule in NAMES if rule != "ormo"]
    behind = {s: max((lead[s] for lead in leads), key=lambda one: one.mean) for s in SETTINGS}
    return revised(
        f"OrMo's training loss is at most {SHARED} above the lowest of the others in all four settings",
        "it has the lowest, or shares it (Table 1)",
        f"above it by {intervals(_by_name(behind), 3, 1)}",
        all_below(behind.values(), SHARED),
    )


def _curves(found: _OrderedFigures, folder: Path) -> str:
    figure, axes = draw.panels(2, 4, 2.3)
    for (left, right), setting in zip(axes, SETTINGS, strict=True):
        reference = found.curve("ormo", setting)
        for place, (rule, title) in enumerate(NAMES.items()):
            time, accuracy = found.curve(rule, setting)
            look = {**draw.style(place), "marker": None}
            if rule == "ormo":  # a broad line below the others, so that equal lines are visible
                look |= {"linewidth": 5, "alpha": 0.5, "zorder": 1, "linestyle": "-"}
            left.plot(time, accuracy, label=title, **look)
            right.plot(time, accuracy - np.interp(time, *reference), **look)
        where = _named(setting)
        draw.finish(left, "time (mean step times)", "training accuracy (%)", where, legend=False)
        draw.finish(right, "time (mean step times)", "points above OrMo", f"{where}: against OrMo", legend=False)
        left.set_ylim(0, 100)
    draw.legend_below(figure, axes[0, 0], 5)
    return draw.save(figure, folder, "ordered.png")


CLAIM = Claim(
    name="ormo",
    title="Ordered momentum is the best asynchronous momentum, and does not mind slow workers",
    says="OrMo ends more accurate than ASGD, naive ASGDm, shifted momentum and SMEGA² with 16 and with 64 workers; "
    "slow workers do not affect it, whereas naive ASGDm impedes convergence.",
    source="Shi et al. 2024, Section 4, Table 1, Figures 3 and 6",
    jobs=_jobs,
    section=_section,
    before=Count(3, 5),
)
