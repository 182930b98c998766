"""What a claim is: jobs that give figures, and a section of the report that is made of nothing but those figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reproduction.parts import Section
from reproduction.spreads import Spread

T = TypeVar("T")

#: Plain numbers, lists and dictionaries by the job's name: what the files of results hold.
Results = Mapping[str, Any]
#: A `functools.partial` of a module-level function, which another process can run.
Job = Callable[[], Any]


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Args:
        name: "tiny", "quick", "middle" or "full".
        seeds: of the runs that are reported; seed 0 is the one that learning rates are chosen with. Those of the middle
            scale were in no run before: its criteria were written after the quick scale's figures had been seen.
        length: factor on all budgets of gradients and commits.
    """

    name: str
    seeds: tuple[int, ...]
    length: float

    @property
    def few(self) -> tuple[int, ...]:
        """Seeds enough for large differences."""
        return self.seeds[:5]

    @property
    def many(self) -> tuple[int, ...]:
        """Ten seeds, where runs differ most from each other."""
        return tuple(range(self.seeds[0], self.seeds[0] + 10))

    def budget(self, number: int, multiple: int = 1) -> int:
        """``number`` at this scale, as a multiple of ``multiple``."""
        return max(1, round(number * self.length / multiple)) * multiple

    def pick(self, quick: T, full: T) -> T:
        """What the full scale has, or what the others have."""
        return full if self.name == "full" else quick


SCALES = {
    "tiny": Scale("tiny", (1, 2, 3), 0.02),
    "quick": Scale("quick", (1, 2, 3), 1.0),
    "middle": Scale("middle", (11, 12, 13, 14, 15, 16), 1.0),
    "full": Scale("full", (1, 2, 3, 4, 5), 4.0),
}


@dataclass(frozen=True)
class Criteria:
    """A set of criteria with what decides them.

    Args:
        jobs: what must be run, by name, at a scale.
        section: the figures' meaning; draws its pictures into the folder.
    """

    jobs: Callable[[Scale], dict[str, Job]]
    section: Callable[[Results, Scale, Path], Section]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        name: as on the command line.
        title: heading.
        says: the claim in one or two sentences.
        source: paper, figures, sections.
        first: the criteria that were fixed before the first run; `reproduction.revised` has others for some claims.
    """

    name: str
    title: str
    says: str
    source: str
    first: Criteria


def over_seeds(results: Results, name: str, scale: Scale, key: str) -> Spread:
    """A figure of the jobs ``name/seed``."""
    return Spread.of([results[f"{name}/{seed}"][key] for seed in scale.seeds])
