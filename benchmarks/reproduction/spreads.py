"""Figures over seeds, and how they are written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Two-sided 95 % quantile of Student's t distribution, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; shown as mean ± standard deviation (of the sample)."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Of any numbers."""
        return cls(tuple(float(value) for value in values))

    def __sub__(self, other: Spread) -> Spread:
        """Seed by seed: runs with the same seed begin alike, and their workers draw the same mini-batches."""
        with np.errstate(invalid="ignore"):  # two infinite values have no difference, and no verdict
            return Spread.of(np.subtract(self.values, other.values))

    @property
    def mean(self) -> float:
        """Of the values."""
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """Standard deviation of the sample; 0 for a single value."""
        if len(self.values) < 2 or not np.isfinite(self.values).all():
            return math.nan if len(self.values) > 1 else 0.0
        return float(np.std(self.values, ddof=1))

    @property
    def error(self) -> float:
        """Half the width of the mean's 95 % confidence interval, by Student's t distribution."""
        count = len(self.values)
        return STUDENT[count - 1] * self.sd / math.sqrt(count) if count > 1 else math.inf

    def above(self, limit: float) -> bool | None:
        """Whether the mean is above ``limit``; None if the 95 % interval has it on both sides."""
        if not math.isfinite(self.error) or abs(self.mean - limit) <= self.error:
            return None
        return self.mean > limit

    def below(self, limit: float) -> bool | None:
        """Whether the mean is below ``limit``; None in the same case."""
        above = self.above(limit)
        return None if above is None else not above

    def show(self, digits: int = 2, factor: float = 1.0) -> str:
        """Mean and standard deviation, times ``factor``."""
        if not np.isfinite(self.values).all():
            return "not finite"
        return f"{self.mean * factor:.{digits}f} ± {self.sd * factor:.{digits}f}"

    @property
    def percent(self) -> str:
        """A share as the report shows it."""
        return self.show(1, 100)

    def interval(self, digits: int = 2, factor: float = 100.0) -> str:
        """The mean's 95 % interval with signs, such as "+1.20 [+0.90, +1.50]"; of shares, in percentage points."""
        if not math.isfinite(self.error):
            return "not finite"
        low, high = (factor * (self.mean + sign * self.error) for sign in (-1, 1))
        return f"{factor * self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def points(a: Spread, b: Spread) -> float:
    """How far the mean of ``a`` is above that of ``b``, in percentage points."""
    return 100 * (a.mean - b.mean)


def every(verdicts: Sequence[bool | None]) -> bool | None:
    """Of criteria that must all be met: not met if one is not, undecided if one of the others is."""
    return False if False in verdicts else None if None in verdicts else True


def chosen(rate: float, grid: Sequence[float]) -> str:
    """A rate, and whether a better one may lie outside the grid that it was chosen from."""
    return f"{rate:g} (edge)" if rate in (min(grid), max(grid)) else f"{rate:g}"


def listed(values: Sequence[Any], digits: int | None = None) -> str:
    """The values as prose has them, such as "a, b and c"."""
    texts = [str(value) if digits is None else f"{value:.{digits}f}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
