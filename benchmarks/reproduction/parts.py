"""What a section of the report is made of."""

from __future__ import annotations

from dataclasses import dataclass

#: A verdict in words; None: the spread over the seeds is too wide for one.
VERDICTS = {True: "yes", False: "**no**", None: "undecided"}


@dataclass(frozen=True)
class Check:
    """A criterion that was fixed before the runs that it is held against, and what came of it.

    Args:
        criterion: in words, with its limits.
        paper: what the paper says.
        here: what the runs gave.
        holds: whether it is met; None where the spread over the seeds does not let this be said.
        first: number of the first criterion, from 1, that a revised one is added to.
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
    """A picture of the report, and what to say below it."""

    file: str
    caption: str


@dataclass(frozen=True)
class Section:
    """What the report says of a claim by one set of criteria, in the order: setting, checks, blocks."""

    setting: str
    checks: list[Check]
    blocks: list[Table | Figure | str]
