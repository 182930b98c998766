"""The measurement of a figure: ours, its limit and the plain way, in turns; only their ratios are reported.

Absolute rates drift from run to run on a shared machine, but the ratio of two consecutive runs hardly does. So a ratio
is computed for each round: the median over the rounds is the figure, and their relative interquartile range is its
spread. A ratio with a spread above `MEANINGLESS` is refused: the row says so, and shows no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

#: One timed run, which returns a rate in the case's unit; higher is better.
Run = Callable[[], float]
#: Rounds of a case, and with --quick.
ROUNDS, QUICK_ROUNDS = 5, 3
#: Interquartile range over median from which a ratio is refused.
MEANINGLESS = 0.25


@dataclass(frozen=True)
class Case:
    """A measurement that is set up and warm.

    Args:
        section: the section of the case.
        name: what is measured, unique within the section.
        unit: unit of the rates, such as "exchanges/s".
        ours: one timed run of the project's code.
        limit: one timed run of a program that no implementation can beat; None if there is none.
        naive: one timed run of the plain way to do it.
        target_limit: the target of the ratio to the limit.
        target_naive: the target of the ratio to the plain way.
        turns: the number of runs of each side within a round, in turns; its rate is their mean. It is for runs that are
            short compared with the time over which a shared machine's speed changes.
        note: further text of the row; a callable is called after the last round.
        missing: what this machine lacks to measure the case; empty if it lacks nothing.
        once: whether there is one round, without a spread, because a run takes minutes and repeats its work itself.
        rounds: maximum number of rounds, for runs that take long.
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


@dataclass(frozen=True)
class Row:
    """A measured `Case`. Rates and ratios are medians over the rounds.

    Args:
        section, case, unit, target_limit, target_naive, note: see `Case`.
        ours, limit, naive: rates; None if the case has no such side, or could not be measured.
        ratio_to_limit, ratio_to_naive: our rate over theirs, computed within each round; None if there is none, or it
            was refused.
        spread_to_limit, spread_to_naive: interquartile range of the rounds' ratios over their median.
        runs: number of rounds; 0 if it could not be measured.
        refused: why a ratio is missing; empty if none is.
        processor: the processor on which it was measured.
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
    def short(self) -> bool:
        """Return whether a ratio is below its target."""
        pairs = ((self.ratio_to_limit, self.target_limit), (self.ratio_to_naive, self.target_naive))
        return any(ratio is not None and target is not None and ratio < target for ratio, target in pairs)


def measure(case: Case, runs: int = ROUNDS) -> Row:
    """Run every side of ``case`` in each round, each turn in another order; run none if something is missing.

    Args:
        case: the case, set up and warm.
        runs: number of rounds, at least 1.

    Raises:
        ValueError: If the rate of a side is not positive.
    """
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
    """Yield the rows of all cases, one after the other, each measured within the context of its factory.

    Args:
        factories: the factories of the cases.
        runs: rounds of each case; below `ROUNDS`, each is a single turn.
        only: measure only cases whose name contains it.
    """
    for factory in factories:
        with factory() as cases:
            for case in cases if isinstance(cases, list) else [cases]:
                if only in case.name:
                    yield measure(case if runs >= ROUNDS else replace(case, turns=1), runs)
