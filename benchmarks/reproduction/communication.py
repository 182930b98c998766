"""Accuracy by the number of steps between two exchanges, from 1 to 500."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from reproduction import draw
from reproduction.claims import Check, Claim, Figure, Job, Results, Scale, Section, Table
from reproduction.runs import SEARCH, Run, accuracy, at_rate, cell, searched
from reproduction.spreads import Spread, all_above, all_below, intervals, listed

WORKERS, BUDGET = 4, 16_000
WINDOWS = (1, 5, 20, 50, 100, 500)
SHORT, LONG = WINDOWS[0], WINDOWS[3:]
NAMES = {
    "downpour": "DOWNPOUR",
    "agn": "AGN",
    "aeasgd": "AEASGD",
    "diloco": "DiLoCo",
    "delayed_nesterov": "delayed Nesterov",
}
#: The learning rates at which the search begins.
STARTS = {"downpour": 0.0125, "agn": 0.2, "aeasgd": 0.05, "diloco": 0.05, "delayed_nesterov": 0.1}
#: The starts of repeated searches: the first ones had stopped at a local optimum far from the best rate.
STARTS_AGAIN = {("downpour", 500): 0.0008}
#: The first seed, and their number: five, since there are 30 settings.
SEEDS = 1, 5
#: The difference in points up to which accuracies count as equal.
CLOSE = 1.0
#: Windows at which the rules of the thesis are compared with their shortest one.
OF_AGN, OF_DOWNPOUR = 20, 50


def measured(rule: str, window: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of a rule with windows of one length, at its own rate."""
    run = Run(rule, WORKERS, 0.0, gradients, options=(("window", window),))
    return cell(searched(run, STARTS_AGAIN.get((rule, window), STARTS[rule])), seeds)


def _jobs(scale: Scale) -> dict[str, Job]:
    gradients = scale.budget(BUDGET, WORKERS * WINDOWS[-1])
    return {
        f"{rule}/{window}": partial(measured, rule, window, gradients, scale.seeds(*SEEDS))
        for rule in NAMES
        for window in WINDOWS
    }


def _checks(results: Results) -> list[Check]:
    def of(rule: str, window: int) -> Spread:
        return accuracy(results[f"{rule}/{window}"])

    most = WINDOWS[-1]
    lost = of("diloco", SHORT) - of("diloco", most)
    rivals = ("downpour", "agn", "aeasgd")
    leads = {(window, rule): of("diloco", window) - of(rule, window) for window in LONG for rule in rivals}
    (window, rule), least = min(leads.items(), key=lambda item: item[1].mean)
    behind = {f"λ = {window}": of("diloco", window) - of("delayed_nesterov", window) for window in LONG}
    downpour, elastic = (of(rule, SHORT) - of(rule, OF_DOWNPOUR) for rule in ("downpour", "aeasgd"))
    agn = of("agn", SHORT) - of("agn", OF_AGN)
    return [
        Check(
            f"DiLoCo with λ = {most} ends less than {CLOSE:g} point below itself with λ = {SHORT}, which is "
            "synchronous SGD with Nesterov's momentum",
            "“as well as fully synchronous optimization while communicating 500 times less” (2311.08105, abstract)",
            f"behind by {lost.interval()} points",
            lost.below(CLOSE / 100),
        ),
        Check(
            f"with λ of {listed(LONG)}, DiLoCo ends above DOWNPOUR, AGN and AEASGD",
            "not compared there",
            f"the least lead: {least.interval()} points (over {NAMES[rule]}, λ = {window})",
            all_above(leads.values(), 0),
        ),
        Check(
            f"with λ of {listed(LONG)}, delayed Nesterov ends less than {CLOSE:g} point below DiLoCo",
            "“matches the performance of synchronous Local-SGD” per update (2401.09135, abstract; with DyLU)",
            f"behind by points: {intervals(behind)}",
            all_below(behind.values(), CLOSE / 100),
        ),
        Check(
            f"DOWNPOUR with λ = {OF_DOWNPOUR} ends at least {CLOSE:g} point below λ = {SHORT}",
            "with accumulated gradients it no longer converges “as before”, at one rate for both (thesis, Figure 3.2)",
            f"below by {downpour.interval()} points",
            downpour.above(CLOSE / 100),
        ),
        Check(
            f"AGN with λ = {OF_AGN} ends less than {CLOSE:g} point below λ = {SHORT}",
            "validation accuracy 98.43 % with λ = 10, 98.50 % with λ = 30 (thesis, Table 3.2, n = 10)",
            f"below by {agn.interval()} points",
            agn.below(CLOSE / 100),
        ),
        Check(
            f"AEASGD with λ = {OF_DOWNPOUR} ends less than {CLOSE:g} point below λ = {SHORT}",
            "“in general, the central variable benefits from more exploration” (thesis, Figure 2.16)",
            f"below by {elastic.interval()} points",
            elastic.below(CLOSE / 100),
        ),
    ]


def _section(results: Results, scale: Scale, folder: Path) -> Section:
    gradients = scale.budget(BUDGET, WORKERS * WINDOWS[-1])
    table = Table(
        "Final test accuracy (%) at each setting's own rate",
        ("rule", *(f"λ = {window}" for window in WINDOWS)),
        [(title, *(at_rate(results[f"{rule}/{window}"], rule) for window in WINDOWS)) for rule, title in NAMES.items()]
        + [("exchanges", *(f"{gradients // window:,}" for window in WINDOWS))],
    )
    again = listed([f"{NAMES[rule]} with λ = {window}" for rule, window in STARTS_AGAIN])
    setting = (
        f"n = {WORKERS}, {gradients:,} mini-batches a run, shared by the workers; plain SGD in the workers at a "
        "constant rate (AdamW in the papers on DiLoCo and delayed Nesterov), the rules' other hyper-parameters at "
        f"their defaults; homogeneous gamma-distributed times. {SEARCH}, for each rule and λ, on the held-out rows. "
        f"For {again} it was repeated from a lower rate after the first figures: it had stopped between two worse "
        f"rates, far from the best one. Seeds {listed(scale.seeds(*SEEDS))}."
    )
    caption = (
        "Test accuracy over the number of steps between two exchanges, on as many mini-batches; below, the range "
        "of the best ones. Bars: one standard deviation."
    )
    return Section(setting, _checks(results), [table, Figure(_picture(results, folder), caption)])


def _picture(results: Results, folder: Path) -> str:
    figure, axes = draw.panels(1, 2, 3.0, sharex=True)
    for ax in axes.flat:
        for place, (rule, title) in enumerate(NAMES.items()):
            beside = [window * 1.03 ** (place - 2) for window in WINDOWS]  # bars of one window next to each other
            draw.spreads(ax, beside, [accuracy(results[f"{rule}/{w}"]) for w in WINDOWS], place, title, 100)
        draw.logarithmic(ax, WINDOWS)
    whole, best = axes[:, 0]
    highest = max(accuracy(one).mean for one in results.values())
    best.set_ylim(100 * highest - 6, 100 * highest + 1)
    draw.finish(whole, "", "test accuracy (%)", f"n = {WORKERS}, the same number of mini-batches")
    draw.finish(best, "window λ (steps between two exchanges)", "test accuracy (%)", legend=False)
    return draw.save(figure, folder, "communication.png")


CLAIM = Claim(
    name="communication",
    title="DiLoCo exchanges 500 times less at the same accuracy",
    says="Averaging the workers' movements over hundreds of steps, and taking the mean as a step of an optimizer with "
    "Nesterov's momentum, trains as well as exchanging after each step. With a momentum that is renewed once in n "
    "movements, the same works without rounds.",
    source="Douillard et al. 2023 (arXiv 2311.08105); Liu et al. 2024 (arXiv 2401.09135); Hermans 2017, Figures 2.16 "
    "and 3.2, Table 3.2",
    jobs=_jobs,
    section=_section,
)
