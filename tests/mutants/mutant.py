"""A planted fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A small replacement that makes the program wrong.

    Args:
        name: for people; no two have the same.
        file: of the sources, from the repository's root.
        old: occurs in it exactly once.
        new: takes its place.
        why: what goes wrong then.
        tests: files, or tests, that are to find it.
        equivalent: why nothing goes wrong after all; empty: something does.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def applied(self, root: Path) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: the sources have moved on: ``old`` is not there, or more than once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: `old` must occur once in {self.file}. Received: {count} times")
        return text.replace(self.old, self.new)
