"""The measurement of a figure: ours, its limit and the plain way, in turns; only their ratios are reported.

Absolute rates drift from run to run on a shared machine, but the ratio of two consecutive runs hardly does. So a ratio
is computed for each round: the median over the rounds is the figure, and their relative interquartile range is its
spread. A ratio with a spread above `MEANINGLESS` is refused: the row says so, and shows no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

#: One timed run, which returns a rate in the case's unit; higher is better.
Run = Callable[[], float]
#: Rounds of a case, and with --quick.
ROUNDS, QUICK_ROUNDS = 5, 3
#: Interquartile range over median from which a ratio is refused.
MEANINGLESS = 0.25


@dataclass(frozen=True)
class Case:
    """A measurement that is set up and warm, with a unique name in its section, and a unit of its rates.

    ``limit`` is a program that no implementation can beat, ``naive`` the plain way to do the same; targets are of our
    ratios to them. In a round, each side has ``turns`` runs, whose mean is its rate, for runs that are short compared
    with the time over which a shared machine's speed changes. With ``once``, there is one round, without a spread,
    because a run takes minutes and repeats its work itself. A callable ``note`` is called after the last round.
    ``missing`` is what this machine lacks to measure the case.
    """

    section: str
    name: str
    unit: str
    ours: Run
    limit: Run | None
    naive: Run | None = None
    target_limit: float | None = None
    target_naive: float | None = None
    turns: int = 1
    note: str | Callable[[], str] = ""
    missing: str = ""
    once: bool = False
    rounds: int = ROUNDS


#: Sets up servers, processes or Spark, yields a case or several that share them, and tears them down.
Factory = Callable[[], AbstractContextManager[Case | list[Case]]]


class Side(NamedTuple):
    """What a row has of the limit, or of the plain way; None is what is absent, refused or not measured."""

    rate: float | None
    ratio: float | None
    spread: float | None
    target: float | None

    @property
    def short(self) -> bool:
        """Return whether the ratio is below its target."""
        return self.ratio is not None and self.target is not None and self.ratio < self.target


@dataclass(frozen=True)
class Row:
    """A measured `Case`, as it is stored.

    Rates are medians over the rounds, and so are ratios, which are computed within each round; a spread is the
    interquartile range of a ratio over its median. There are 0 ``runs`` if it could not be measured. ``refused`` is why
    a ratio is missing.
    """

    section: str
    case: str
    unit: str
    ours: float | None
    limit: float | None
    naive: float | None
    ratio_to_limit: float | None
    ratio_to_naive: float | None
    target_limit: float | None
    target_naive: float | None
    spread_to_limit: float | None
    spread_to_naive: float | None
    runs: int
    refused: str = ""
    note: str = ""
    processor: str = ""

    @property
    def sides(self) -> dict[str, Side]:
        """Return the limit and the plain way."""
        return {
            "limit": Side(self.limit, self.ratio_to_limit, self.spread_to_limit, self.target_limit),
            "naive": Side(self.naive, self.ratio_to_naive, self.spread_to_naive, self.target_naive),
        }


def measure(case: Case, runs: int = ROUNDS) -> Row:
    """Run every side of ``case`` in each round, each turn in another order; run none if something is missing."""
    sides = {"ours": case.ours, "limit": case.limit, "naive": case.naive}
    present = [(name, run) for name, run in sides.items() if run is not None and not case.missing]
    runs = (1 if case.once else min(runs, case.rounds)) if present else 0
    rates: dict[str, list[float]] = {name: [] for name, _ in present}
    for turn in range(runs * case.turns):
        start = turn % len(present)
        for name, run in present[start:] + present[:start]:
            rate = run()
            if not rate > 0:
                raise ValueError(f"a rate must be positive. Received: {rate} from {name!r} of {case.name!r}")
            rates[name].append(rate)
    rates = {name: np.reshape(taken, (runs, case.turns)).mean(axis=1).tolist() for name, taken in rates.items()}
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    ours = rates.get("ours", [])
    to_limit, limit_spread = _ratio(ours, rates.get("limit"))
    to_naive, naive_spread = _ratio(ours, rates.get("naive"))
    refusals = [f"not measured: {case.missing}"] if case.missing else []
    refusals += [
        f"ratio to {other} refused: its rounds disagree by {spread:.0%}"
        for other, spread in (("limit", limit_spread), ("naive", naive_spread))
        if spread is not None and spread > MEANINGLESS
    ]
    return Row(
        section=case.section,
        case=case.name,
        unit=case.unit,
        ours=medians.get("ours"),
        limit=medians.get("limit"),
        naive=medians.get("naive"),
        ratio_to_limit=to_limit,
        ratio_to_naive=to_naive,
        target_limit=case.target_limit,
        target_naive=case.target_naive,
        spread_to_limit=limit_spread,
        spread_to_naive=naive_spread,
        runs=runs,
        refused="; ".join(refusals),
        note=case.note() if callable(case.note) else case.note,
    )


def _ratio(ours: list[float], theirs: list[float] | None) -> tuple[float | None, float | None]:
    """Return the median ratio and its spread; the ratio is None if the spread is too large."""
    if theirs is None:
        return None, None
    low, median, high = np.percentile(np.divide(ours, theirs), (25, 50, 75))
    if len(ours) == 1:
        return float(median), None
    spread = float((high - low) / median)
    return (None if spread > MEANINGLESS else float(median)), spread


def measured(factories: list[Factory], runs: int, only: str = "") -> Iterator[Row]:
    """Yield the rows of all cases whose name contains ``only``; with fewer than `ROUNDS` runs, each is one turn."""
    for factory in factories:
        with factory() as cases:
            for case in cases if isinstance(cases, list) else [cases]:
                if only in case.name:
                    yield measure(case if runs >= ROUNDS else replace(case, turns=1), runs)
