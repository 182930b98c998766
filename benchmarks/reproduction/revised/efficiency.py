"""Claim 5 with rates chosen for each number of workers and each window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.analysis import metrics
from reproduction import draw
from reproduction.claims import Criteria, Job, Results, Scale
from reproduction.elastic import BUDGET, PAPER_SHARE, TABLE, configured
from reproduction.parts import Check, Figure, Section, Table
from reproduction.revised.cells import best, scores
from reproduction.runs import history, simulated
from reproduction.spreads import Spread, chosen, listed

CASES = ((10, 10), (10, 40), (20, 20), (40, 10), (40, 40))
GRIDS = {"agn": (0.025, 0.05, 0.1, 0.2, 0.4), "aeasgd": (0.02, 0.05, 0.1, 0.19)}
AHEAD = 0.5


def measured(workers: int, window: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the temporal efficiency of AGN over AEASGD, each at its best rate, by seed."""
    runs = {rule: configured(rule, workers, window, gradients) for rule in GRIDS}
    runs = {rule: replace(run, rate=best(scores(run, GRIDS[rule]))) for rule, run in runs.items()}
    ratios = []
    for seed in seeds:
        agn, aeasgd = (history(*simulated(runs[rule], seed)) for rule in ("agn", "aeasgd"))
        ratios.append(float(f"{metrics.temporal_efficiency(agn, aeasgd):.6g}"))
    return {"ratio": ratios, "rates": {rule: run.rate for rule, run in runs.items()}}


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the revised criteria of claim 5."""
    gradients = scale.budget(BUDGET, 40 * 3)
    return {f"{n}/{window}": partial(measured, n, window, gradients, scale.few) for n, window in CASES}


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 5, from its figures."""
    ratios = {case: Spread.of(results[f"{case[0]}/{case[1]}"]["ratio"]) for case in CASES}
    rates = {case: results[f"{case[0]}/{case[1]}"]["rates"] for case in CASES}
    verdicts = [one.above(1) for one in ratios.values()]
    ahead, behind = verdicts.count(True), verdicts.count(False)
    limit = AHEAD * len(CASES)
    means = {n: np.mean([ratios[case].values for case in CASES if case[0] == n], axis=0) for n in (10, 40)}
    gain = Spread.of(means[40] - means[10])
    paper = {n: np.mean([TABLE[case] for case in CASES if case[0] == n]) for n in means}
    checks = [
        Check(
            f"temporal efficiency of AGN over AEASGD, each with its own rate, above 1 in more than {AHEAD:.0%} of the "
            "settings",
            f"in {PAPER_SHARE} % of 49 settings (Table 3.1)",
            f"above 1 in {ahead}, below in {behind}, undecided in {verdicts.count(None)} of {len(CASES)}",
            True if ahead > limit else False if len(CASES) - behind <= limit else None,
            first=1,
        ),
        Check(
            "AGN's advantage is larger with 40 workers than with 10 (means over the windows)",
            f"{paper[40]:.3f} against {paper[10]:.3f} (Table 3.1, same settings)",
            f"by {gain.interval(3, 1)}",
            gain.above(0),
            first=2,
        ),
    ]
    table = Table(
        "Temporal efficiency of AGN over AEASGD; above 1, AGN is ahead",
        ("n", "λ", "AGN's rate", "AEASGD's rate", "Table 3.1", "here"),
        [
            (
                str(n),
                str(window),
                *(chosen(rates[n, window][rule], GRIDS[rule]) for rule in GRIDS),
                f"{TABLE[n, window]:.3f}",
                ratios[n, window].show(3),
            )
            for n, window in CASES
        ],
    )
    setting = (
        f"As first, but for the rates: of {listed(GRIDS['agn'])} for AGN and {listed(GRIDS['aeasgd'])} for AEASGD, "
        f"chosen for each n and λ with seed 0. Seeds {listed(scale.few)}."
    )
    caption = "Bars: one standard deviation over the seeds; the thesis has one run each."
    return Section(setting, checks, [table, Figure(_picture(ratios, folder), caption)])


def _picture(ratios: dict[tuple[int, int], Spread], folder: Path) -> str:
    figure, axes = draw.panels(1, 1, 3.0)
    places = np.arange(len(CASES))
    axes[0, 0].axhline(1, color="black", linewidth=0.8)
    axes[0, 0].plot(places, [TABLE[case] for case in CASES], label="Table 3.1", **{**draw.style(0), "linestyle": ""})
    axes[0, 0].errorbar(
        places,
        [ratio.mean for ratio in ratios.values()],
        [ratio.sd for ratio in ratios.values()],
        label="here",
        capsize=3,
        **{**draw.style(1), "linestyle": ""},
    )
    axes[0, 0].set_xticks(places, [f"n={n}\nλ={w}" for n, w in CASES], fontsize=8)
    draw.finish(axes[0, 0], "", "temporal efficiency (ratio)", "AGN over AEASGD")
    return draw.save(figure, folder, "temporal-efficiency.png")


REVISED = Criteria(jobs, section)
