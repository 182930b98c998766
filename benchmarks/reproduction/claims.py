"""The definition of a claim: jobs that compute figures, and a section of the report that uses only these figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

#: The contents of the file of results: plain numbers, lists and dictionaries by the job's name.
Results = Mapping[str, Any]
#: A `functools.partial` of a module-level function, which another process can run.
Job = Callable[[], Any]
#: A verdict in words; None: the spread over the seeds is too wide for one.
VERDICTS = {True: "yes", False: "**no**", None: "undecided"}


@dataclass(frozen=True)
class Scale:
    """The size of the runs: a factor on all budgets of gradients and commits, and the maximum number of seeds."""

    name: str
    length: float
    most: int

    def seeds(self, first: int, count: int) -> tuple[int, ...]:
        """Return ``count`` seeds from ``first`` on, or fewer; learning rates are chosen with seed 0."""
        return tuple(range(first, first + min(count, self.most)))

    def budget(self, number: int, multiple: int = 1) -> int:
        """Return ``number`` at this scale, as a multiple of ``multiple``."""
        return max(1, round(number * self.length / multiple)) * multiple


SCALES = {"tiny": Scale("tiny", 0.02, 3), "report": Scale("report", 1.0, 10)}


@dataclass(frozen=True)
class Check:
    """A criterion that was fixed before its runs, with its limits, and the results of the paper and of the runs.

    It holds, or not, or None if the spread over the seeds is too wide to decide. It is revised if it was written after
    the figures of a first criterion, which could not decide, had been seen.
    """

    criterion: str
    paper: str
    here: str
    holds: bool | None
    revised: bool = False


revised = partial(Check, revised=True)


@dataclass(frozen=True)
class Table:
    """A table of the report; cells are Markdown."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Figure:
    """A picture of the report, and its caption."""

    file: str
    caption: str


@dataclass(frozen=True)
class Section:
    """The section of a claim, in the order: setting, checks, blocks."""

    setting: str
    checks: list[Check]
    blocks: list[Table | Figure | str]


@dataclass(frozen=True)
class Count:
    """The number of criteria that are met, of all, and of those that are undecided."""

    met: int = 0
    all: int = 0
    undecided: int = 0

    def __add__(self, other: Count) -> Count:
        """Return the sum of both."""
        return Count(self.met + other.met, self.all + other.all, self.undecided + other.undecided)

    def __str__(self) -> str:
        return f"{self.met} of {self.all}" + (f", {self.undecided} undecided" if self.undecided else "")


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: its name on the command line, heading, text, and source.

    ``jobs`` returns the jobs at a scale, by name; ``section`` draws its pictures into a folder. ``before`` has the
    verdicts of criteria as first written whose programs are only in release 0.3.0.
    """

    name: str
    title: str
    says: str
    source: str
    jobs: Callable[[Scale], dict[str, Job]]
    section: Callable[[Results, Scale, Path], Section]
    before: Count = Count()
