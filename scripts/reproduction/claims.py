"""What a claim is: jobs that give figures, and a section of the report that is made of nothing but those figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Plain numbers, lists and dictionaries by the job's name: what goes into ``results.json``.
Results = Mapping[str, Any]
#: A module-level function with its arguments, which another process can run.
Job = Callable[[], Any]


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Args:
        name: "tiny", "quick" or "full".
        seeds: of the runs that are reported; seed 0 is the one that learning rates are chosen with.
        length: factor on all budgets of gradients and commits.
    """

    name: str
    seeds: tuple[int, ...]
    length: float

    def budget(self, number: int, multiple: int = 1) -> int:
        """``number`` at this scale, as a multiple of ``multiple``."""
        return max(1, round(number * self.length / multiple)) * multiple

    def pick(self, quick: T, full: T) -> T:
        """What the full scale has, or what the others have."""
        return full if self.name == "full" else quick


SCALES = {
    "tiny": Scale("tiny", (1, 2, 3), 0.02),
    "quick": Scale("quick", (1, 2, 3), 1.0),
    "full": Scale("full", (1, 2, 3, 4, 5), 4.0),
}


@dataclass(frozen=True)
class Spread:
    """A figure over seeds; shown as mean ± standard deviation (of the sample)."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Of any numbers."""
        return cls(tuple(float(value) for value in values))

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

    def show(self, digits: int = 2, factor: float = 1.0) -> str:
        """Mean and standard deviation, times ``factor``."""
        if not np.isfinite(self.values).all():
            return "not finite"
        return f"{self.mean * factor:.{digits}f} ± {self.sd * factor:.{digits}f}"

    @property
    def percent(self) -> str:
        """A share as the report shows it."""
        return self.show(1, 100)


def points(a: Spread, b: Spread) -> float:
    """How far the mean of ``a`` is above that of ``b``, in percentage points."""
    return 100 * (a.mean - b.mean)


@dataclass(frozen=True)
class Check:
    """A criterion that was fixed before the runs, and what came of it."""

    criterion: str
    paper: str
    here: str
    holds: bool


@dataclass(frozen=True)
class Table:
    """A table of the report; cells are Markdown."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Figure:
    """A picture of the report, and what to say below it."""

    file: str
    caption: str


@dataclass(frozen=True)
class Section:
    """What the report says of a claim, in the order: setting, checks, blocks."""

    setting: str
    checks: list[Check]
    blocks: list[Table | Figure | str]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        name: as on the command line.
        title: heading.
        says: the claim in one or two sentences.
        source: paper, figures, sections.
        jobs: what must be run, by name, at a scale.
        section: the figures' meaning; draws its pictures into the folder.
    """

    name: str
    title: str
    says: str
    source: str
    jobs: Callable[[Scale], dict[str, Job]]
    section: Callable[[Results, Scale, Path], Section]


def over_seeds(results: Results, name: str, scale: Scale, key: str) -> Spread:
    """A figure of the jobs ``name/seed``."""
    return Spread.of([results[f"{name}/{seed}"][key] for seed in scale.seeds])


def chosen(rate: float, grid: Sequence[float]) -> str:
    """A rate, and whether a better one may lie outside the grid that it was chosen from."""
    return f"{rate:g} (edge)" if rate in (min(grid), max(grid)) else f"{rate:g}"


def listed(values: Sequence[Any], digits: int | None = None) -> str:
    """The values as prose has them, such as "a, b and c"."""
    texts = [str(value) if digits is None else f"{value:.{digits}f}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
