"""The parts of a section of the report."""

from __future__ import annotations

from dataclasses import dataclass

#: A verdict in words; None: the spread over the seeds is too wide for one.
VERDICTS = {True: "yes", False: "**no**", None: "undecided"}


@dataclass(frozen=True)
class Check:
    """A criterion that was fixed before its runs, and their result.

    Args:
        criterion: in words, with its limits.
        paper: the paper's result.
        here: the result of the runs.
        holds: whether it is met; None if the spread over the seeds is too wide to decide.
        first: number of the first criterion, from 1, to which this revised one is added.
    """

    criterion: str
    paper: str
    here: str
    holds: bool | None
    first: int | None = None


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
    """The report of a claim by one set of criteria, in the order: setting, checks, blocks."""

    setting: str
    checks: list[Check]
    blocks: list[Table | Figure | str]
