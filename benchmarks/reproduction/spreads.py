"""Figures over seeds, and their formats in the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Two-sided 95 % quantile of Student's t distribution, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; it is shown as mean ± standard deviation (of the sample)."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Return the spread of numbers."""
        return cls(tuple(float(value) for value in values))

    def __sub__(self, other: Spread) -> Spread:
        """Return the differences by seed: runs with one seed have the same initial weights and mini-batches."""
        with np.errstate(invalid="ignore"):  # the difference of two infinite values is NaN, without a verdict
            return Spread.of(np.subtract(self.values, other.values))

    @property
    def mean(self) -> float:
        """Return the mean of the values."""
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """Return the standard deviation of the sample; 0 for a single value."""
        if len(self.values) < 2 or not np.isfinite(self.values).all():
            return math.nan if len(self.values) > 1 else 0.0
        return float(np.std(self.values, ddof=1))

    @property
    def error(self) -> float:
        """Return half the width of the mean's 95 % confidence interval, by Student's t distribution."""
        count = len(self.values)
        return STUDENT[count - 1] * self.sd / math.sqrt(count) if count > 1 else math.inf

    def above(self, limit: float) -> bool | None:
        """Return whether the mean is above ``limit``; None if the 95 % interval contains the limit."""
        if not math.isfinite(self.error) or abs(self.mean - limit) <= self.error:
            return None
        return self.mean > limit

    def below(self, limit: float) -> bool | None:
        """Return whether the mean is below ``limit``; None if the 95 % interval contains the limit."""
        above = self.above(limit)
        return None if above is None else not above

    def show(self, digits: int = 2, factor: float = 1.0) -> str:
        """Return mean and standard deviation as text, times ``factor``."""
        if not np.isfinite(self.values).all():
            return "not finite"
        return f"{self.mean * factor:.{digits}f} ± {self.sd * factor:.{digits}f}"

    @property
    def percent(self) -> str:
        """Return a share as text, in percent."""
        return self.show(1, 100)

    def interval(self, digits: int = 2, factor: float = 100.0) -> str:
        """Return the mean's 95 % interval with signs, such as "+1.20 [+0.90, +1.50]"; of shares, in points."""
        if not math.isfinite(self.error):
            return "not finite"
        low, high = (factor * (self.mean + sign * self.error) for sign in (-1, 1))
        return f"{factor * self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


class SeedRuns:
    """The figures of jobs that are named ``case/seed``, by case and in the order of the seeds."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.runs: dict[str, list[Any]] = {}
        for job in sorted(results, key=lambda job: int(job.rpartition("/")[2])):
            self.runs.setdefault(job.rpartition("/")[0], []).append(results[job])

    def spread(self, case: str, key: str = "accuracy") -> Spread:
        """Return a figure over the seeds."""
        return Spread.of([one[key] for one in self.runs[case]])


def points(a: Spread, b: Spread) -> float:
    """Return by how many percentage points the mean of ``a`` is above that of ``b``."""
    return 100 * (a.mean - b.mean)


def every(verdicts: Sequence[bool | None]) -> bool | None:
    """Return the verdict of criteria that must all be met: False if one is False, else None if one is None."""
    return False if False in verdicts else None if None in verdicts else True


def all_above(found: Iterable[Spread], limit: float) -> bool | None:
    """Return whether all means are above ``limit``; None if an interval contains it, and no mean is below."""
    return every([one.above(limit) for one in found])


def all_below(found: Iterable[Spread], limit: float) -> bool | None:
    """Return whether all means are below ``limit``; None if an interval contains it, and no mean is above."""
    return every([one.below(limit) for one in found])


def intervals(found: Mapping[str, Spread], digits: int = 2, factor: float = 100.0, colon: str = ": ") -> str:
    """Return the intervals with their names, as text."""
    return "; ".join(f"{name}{colon}{one.interval(digits, factor)}" for name, one in found.items())


def chosen(rate: float, grid: Sequence[float]) -> str:
    """Return a rate as text, with a note if it is at an end of its grid, beyond which a better one may lie."""
    return f"{rate:g} (edge)" if rate in (min(grid), max(grid)) else f"{rate:g}"


def listed(values: Sequence[Any], digits: int | None = None) -> str:
    """Return the values as prose, such as "a, b and c"."""
    texts = [str(value) if digits is None else f"{value:.{digits}f}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
