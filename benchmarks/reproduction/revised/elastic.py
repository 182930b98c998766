"""Claim 4 with its control: a plain window that exchanges as often as early stopping does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import draw
from reproduction.claims import Criteria, Job, Results, Scale
from reproduction.elastic import (
    AEASGD_WORKERS,
    BEALE_BUDGET,
    BUDGET,
    RHO,
    WINDOW,
    WORKERS,
    on_beale,
)
from reproduction.parts import Check, Figure, Section, Table
from reproduction.revised.cells import best, cell, scores, spread
from reproduction.runs import Run
from reproduction.spreads import Spread, chosen, listed

#: Windows without early stopping; `CONTROL` exchanges slightly more often than early stopping by Eq 2.10.
PLAIN, CONTROL = (30, 3), 3
EARLY = "2.10"
#: The windows of AEASGD.
WINDOWS = (1, 30)
NAMES = {
    **{f"plain {window}": f"plain window of {window}" for window in PLAIN},
    "early": f"window of {WINDOW}, early stopping by Eq {EARLY}",
}
RATES = (0.19, 0.1, 0.05, 0.025)
HALF = 0.5


def on_pictures(window: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of AEASGD at the rate that is best for its window."""
    run = Run("aeasgd", AEASGD_WORKERS, 0.0, gradients, options=(("window", window), ("rho", RHO)))
    return cell(replace(run, rate=best(scores(run, RATES))), seeds)


def on_plane(scale: Scale) -> tuple[int, ...]:
    """Return the seeds of the runs on Beale's function, which hardly differ."""
    return scale.seeds[:3]


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the revised criteria of claim 4."""
    gradients, beale = scale.budget(BUDGET, 30), scale.budget(BEALE_BUDGET, WORKERS * WINDOW)
    by_name: dict[str, Job] = {f"aeasgd/{w}": partial(on_pictures, w, gradients, scale.many) for w in WINDOWS}
    for seed in on_plane(scale):
        by_name |= {f"plain {window}/{seed}": partial(on_beale, None, beale, seed, window) for window in PLAIN}
        by_name[f"early/{seed}"] = partial(on_beale, EARLY, beale, seed)
    return by_name


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 4, from its figures."""
    accuracy = {window: spread(results[f"aeasgd/{window}"]) for window in WINDOWS}
    short, long = WINDOWS
    lead = accuracy[long] - accuracy[short]
    exploration = Check(
        f"AEASGD on Fashion-MNIST, each window with its own rate: λ = {long} ends above λ = {short}",
        "“in general, the central variable benefits from more exploration” (Figure 2.16)",
        f"by {lead.interval()} points",
        lead.above(0),
        first=4,
    )
    table = Table(
        "AEASGD on Fashion-MNIST",
        ("λ", "rate", "test accuracy (%)"),
        [
            (str(window), chosen(results[f"aeasgd/{window}"]["rate"], RATES), one.percent)
            for window, one in accuracy.items()
        ],
    )
    setting = (
        f"As first, with plain windows of {listed(PLAIN)} compared with early stopping "
        f"(seeds {listed(on_plane(scale))}); AEASGD's rate, of {listed(RATES)}, "
        f"chosen for each window (seeds {scale.many[0]} to {scale.many[-1]})."
    )
    checks, beale = _on_beale(results, scale)
    figure = Figure(_picture(results, scale, folder), "The center's height over the gradients spent.")
    return Section(setting, [*checks, exploration], [beale, table, figure])


def _on_beale(results: Results, scale: Scale) -> tuple[list[Check], Table]:
    """Compare early stopping with its control."""

    def of(name: str, key: str) -> Spread:
        return Spread.of([results[f"{name}/{seed}"][key] for seed in on_plane(scale)])

    plain, rival = f"plain {WINDOW}", f"plain {CONTROL}"
    full, control, early = (np.log(of(name, "value").values) for name in (plain, rival, "early"))
    saved = Spread.of(control - early)
    with np.errstate(divide="ignore"):
        share = Spread.of((full - control) / (full - early))
    exchanges = {name: of(name, "commits") for name in NAMES}
    checks = [
        Check(
            f"Beale's function: stopping early by Eq {EARLY} brings the center lower than a plain window of {CONTROL}, "
            "which exchanges more often, on as many gradients",
            "“is it not in essence increasing the communication frequency […]? In effect it isn't” (Section 2.2.2)",
            f"f is {100 * (1 - np.exp(-saved.mean)):.0f} % lower; ln f by {saved.interval(3, 1)}; exchanges: "
            f"{exchanges['early'].mean:.0f} against {exchanges[rival].mean:.0f}",
            saved.above(0),
            first=2,
        ),
        Check(
            f"of what early stopping gains on the full window, in ln f, that plain window gains less than {HALF:.0%}",
            "as above",
            f"{100 * share.mean:.1f} % [{100 * (share.mean - share.error):.1f}, "
            f"{100 * (share.mean + share.error):.1f}]",
            share.below(HALF),
            first=2,
        ),
    ]
    table = Table(
        "EASGD on Beale's function",
        ("windows", "f(center) at the end", "exchanges"),
        [(title, of(name, "value").show(3), exchanges[name].show(0)) for name, title in NAMES.items()],
    )
    return checks, table


def _picture(results: Results, scale: Scale, folder: Path) -> str:
    figure, axes = draw.panels(1, 1, 3.2)
    for place, (name, title) in enumerate(NAMES.items()):
        gradients, values = results[f"{name}/{scale.seeds[0]}"]["curve"]
        axes[0, 0].plot(gradients, values, label=title, **{**draw.style(place), "marker": None})
    axes[0, 0].set_yscale("log")
    draw.finish(axes[0, 0], "gradients (all workers)", "f(center)", f"EASGD on Beale's function, seed {scale.seeds[0]}")
    return draw.save(figure, folder, "elastic.png")


REVISED = Criteria(jobs, section)
