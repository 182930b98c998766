"""How much of a commit log is in which files, and which of them are to become one.

Each snapshot brings a file for the commits since the one before. Eight neighbors of one level become a file of the
next level, so a log of n files has at most seven for each of log₈ n levels: that bounds what a resumed job has to open,
whatever the length of the job. What would be larger than `_LARGEST` is not merged; files of that size are read at the
store's rate, and not at the pace of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

#: Files that become one, and bytes of the largest one.
_MERGED, _LARGEST = 8, 64 << 20


@dataclass(frozen=True)
class LogFile:
    """One file.

    Args:
        name: of the file.
        commits: in it.
        size: its bytes.
        level: how often files have become one for it.
    """

    name: str
    commits: int
    size: int
    level: int = 0


@dataclass(frozen=True)
class LogFiles:
    """All files of a log, in order; levels never rise from one to the next."""

    files: tuple[LogFile, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(file.name for file in self.files)

    @property
    def commits(self) -> int:
        """In all of them."""
        return sum(file.commits for file in self.files)

    def due(self) -> int:
        """How many of the last ones are to become one; 0: none."""
        taken = size = 0
        while taken < len(self.files):
            files = self.files[: len(self.files) - taken]
            level = files[-1].level
            run = next((count for count, file in enumerate(reversed(files)) if file.level != level), len(files))
            size += sum(file.size for file in files[-run:])
            # What the levels below have become counts as one of this level, if it is just the next one.
            merged = 1 if taken and level == self.files[-taken].level + 1 else 0
            if run + merged < _MERGED or size > _LARGEST:
                break
            taken += run
        return taken

    def with_last(self, file: LogFile, replaced: int = 0) -> LogFiles:
        """These, with ``file`` in place of the last ``replaced`` ones."""
        return LogFiles((*self.files[: len(self.files) - replaced], file))

    def to_json(self) -> list[dict[str, Any]]:
        """JSON-ready; `from_json` takes it back."""
        return [asdict(file) for file in self.files]

    @classmethod
    def from_json(cls, values: Iterable[dict[str, Any]]) -> LogFiles:
        """What `to_json` gave."""
        return cls(tuple(LogFile(**value) for value in values))
