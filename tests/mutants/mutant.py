"""A planted fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A small replacement that makes the program wrong.

    Args:
        name: what the fault does, in words; unique.
        file: path of the changed file, relative to the repository's root.
        old: the text that is replaced; it occurs in the file exactly once.
        new: the text in its place.
        why: the consequence of the fault.
        tests: test files, or tests, that should find it.
        equivalent: why the replacement changes no behavior; empty if it does.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def applied(self, root: Path) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: ``old`` does not occur exactly once, because the sources have changed.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: `old` must occur once in {self.file}. Received: {count} times")
        return text.replace(self.old, self.new)
