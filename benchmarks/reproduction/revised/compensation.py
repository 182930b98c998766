"""Claim 7 with harmful staleness: more workers, at one rate for all rules, as in the paper, and at each rule's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.claims import Criteria, Job, Results, Scale
from reproduction.ordered import BUDGET, DC_NAMES
from reproduction.parts import Check, Section, Table
from reproduction.revised.cells import best, cell, spread
from reproduction.runs import Run, held_out
from reproduction.spreads import Spread, chosen, every, listed

RATES = {32: (0.0125, 0.00625, 0.003125)}
#: The common rate, by the number of workers: ASGD still trains at it, but suffers.
SHARED = {32: 0.0125}
STRENGTHS = {"dc_c": (0.5, 2.0), "dc_a": (2.0, 8.0)}
COMPENSATED = tuple(STRENGTHS)
CHOICES = {"shared": "one rate for all rules", "own": "each rule's own rate"}


def _variants(name: str, n: int, gradients: int) -> dict[float, Run]:
    """Return the runs by strength; 0 for a rule without one."""
    if name not in STRENGTHS:
        return {0.0: Run(name, n, 0.0, gradients, decay=True)}
    adaptive = ("adaptive", name == "dc_a")
    return {
        strength: Run("dc_asgd", n, 0.0, gradients, options=(adaptive, ("compensation", strength)), decay=True)
        for strength in STRENGTHS[name]
    }


def measured(name: str, n: int, gradients: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return figures of a rule with both choices of the rate, each with the strength that is better with seed 0."""
    factor = n if name == "ssgd" else 1  # n gradients of a round make one step with their mean
    grids = {"shared": (SHARED[n] * factor,), "own": tuple(rate * factor for rate in RATES[n])}
    found: dict[str, Any] = {}
    for choice, grid in grids.items():
        runs = {
            (strength, rate): replace(run, rate=rate)
            for strength, run in _variants(name, n, gradients).items()
            for rate in grid
        }
        strength, rate = best({key: held_out(run) for key, run in runs.items()})
        found[choice] = {"strength": strength, **cell(runs[strength, rate], seeds)}
    return found


def jobs(scale: Scale) -> dict[str, Job]:
    """Return the jobs of the revised criteria of claim 7."""
    gradients = scale.budget(BUDGET)
    return {f"{name}/{n}": partial(measured, name, n, gradients, scale.seeds) for name in DC_NAMES for n in RATES}


def section(results: Results, scale: Scale, folder: Path) -> Section:
    """Return the section about claim 7, from its figures."""

    def lead(name: str, other: str, n: int, choice: str) -> Spread:
        return spread(results[f"{name}/{n}"][choice]) - spread(results[f"{other}/{n}"][choice])

    def check(criterion: str, paper: str, pairs: list[tuple[str, str]], choice: str, first: int) -> Check:
        leads = {(a, b, n): lead(a, b, n, choice) for a, b in pairs for n in RATES}
        texts = [f"{DC_NAMES[a]}, M = {n}: {one.interval()}" for (a, b, n), one in leads.items()]
        verdicts = [one.above(0) for one in leads.values()]
        return Check(criterion, paper, f"points: {'; '.join(texts)}", every(verdicts), first)

    lost = "the figure is lost in the scan"
    both = [(name, "asgd") for name in COMPENSATED]
    shared, own = CHOICES.values()
    where = f"M = {listed(list(RATES))}"
    checks = [
        check(
            f"{where}, {shared}: DC-ASGD-c and DC-ASGD-a end above ASGD",
            f"“significantly better than ASGD and SSGD” (Table 1; {lost})",
            both,
            "shared",
            1,
        ),
        check(
            f"{where}, {shared}: DC-ASGD-a ends above SSGD",
            f"it does (Table 1; {lost})",
            [("dc_a", "ssgd")],
            "shared",
            2,
        ),
        check(f"{where}, {own}: DC-ASGD-c and DC-ASGD-a end above ASGD", "not asked: one rate for all", both, "own", 1),
    ]
    rows = []
    for n in RATES:
        for name, title in DC_NAMES.items():
            cells = {choice: results[f"{name}/{n}"][choice] for choice in CHOICES}
            grid = [rate * n if name == "ssgd" else rate for rate in RATES[n]]
            texts = [_chosen(one, chosen(one["rate"], grid)) for one in cells.values()]
            rows.append(
                (
                    title,
                    str(n),
                    *(t for c, text in zip(cells.values(), texts, strict=True) for t in (text, spread(c).percent)),
                )
            )
    header = ("rule", "M", "rate", f"{shared}: test accuracy (%)", "rate chosen", f"{own}: test accuracy (%)")
    setting = (
        f"As first, with {where}: with 4 and 8 workers staleness does little harm, and there is little to compensate. "
        f"One rate for all rules, as in the paper: {listed([f'{rate:g} (M = {n})' for n, rate in SHARED.items()])}, "
        "twice ASGD's best one, with which it suffers; then each rule's own best, of "
        + "; ".join(f"{listed(grid)} (M = {n})" for n, grid in RATES.items())
        + f" (SSGD: M times these). Strengths λ0 of {listed(STRENGTHS['dc_c'])} for -c and {listed(STRENGTHS['dc_a'])} "
        f"for -a. {scale.budget(BUDGET):,} mini-batches a run. Seeds {listed(scale.seeds)}."
    )
    return Section(setting, checks, [Table("Final test accuracy", header, rows)])


def _chosen(found: dict[str, Any], rate: str) -> str:
    return rate + (f", λ0 = {found['strength']:g}" if found["strength"] else "")


REVISED = Criteria(jobs, section)
