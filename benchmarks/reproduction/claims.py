"""The definition of a claim: jobs that compute figures, and a section of the report that uses only these figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reproduction.parts import Section
from reproduction.spreads import Spread

T = TypeVar("T")

#: The contents of the files of results: plain numbers, lists and dictionaries by the job's name.
Results = Mapping[str, Any]
#: A `functools.partial` of a module-level function, which another process can run.
Job = Callable[[], Any]


@dataclass(frozen=True)
class Scale:
    """The size of the runs.

    Args:
        name: "tiny", "quick", "middle" or "full".
        seeds: seeds of the reported runs; learning rates are chosen with seed 0. The seeds of the middle scale were
            not used before: its criteria were written after the quick scale's figures had been seen.
        length: factor on all budgets of gradients and commits.
    """

    name: str
    seeds: tuple[int, ...]
    length: float

    @property
    def few(self) -> tuple[int, ...]:
        """Return enough seeds for large differences."""
        return self.seeds[:5]

    @property
    def many(self) -> tuple[int, ...]:
        """Return ten seeds, for runs that differ most from each other."""
        return tuple(range(self.seeds[0], self.seeds[0] + 10))

    def budget(self, number: int, multiple: int = 1) -> int:
        """Return ``number`` at this scale, as a multiple of ``multiple``."""
        return max(1, round(number * self.length / multiple)) * multiple

    def pick(self, quick: T, full: T) -> T:
        """Return ``full`` at the full scale, ``quick`` at others."""
        return full if self.name == "full" else quick


SCALES = {
    "tiny": Scale("tiny", (1, 2, 3), 0.02),
    "quick": Scale("quick", (1, 2, 3), 1.0),
    "middle": Scale("middle", (11, 12, 13, 14, 15, 16), 1.0),
    "full": Scale("full", (1, 2, 3, 4, 5), 4.0),
}


@dataclass(frozen=True)
class Criteria:
    """A set of criteria, with their jobs and their section of the report.

    Args:
        jobs: returns the jobs at a scale, by name.
        section: returns the section from the figures, and draws its pictures into the folder.
    """

    jobs: Callable[[Scale], dict[str, Job]]
    section: Callable[[Results, Scale, Path], Section]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        name: its name on the command line.
        title: its heading.
        says: the claim in one or two sentences.
        source: paper, figures, sections.
        first: the criteria that were fixed before the first run; `reproduction.revised` has further ones.
    """

    name: str
    title: str
    says: str
    source: str
    first: Criteria


def over_seeds(results: Results, name: str, scale: Scale, key: str) -> Spread:
    """Return a figure of the jobs ``name/seed``, over the seeds."""
    return Spread.of([results[f"{name}/{seed}"][key] for seed in scale.seeds])
