"""What the files of a checkpoint directory are called; whatever else lies there is not the project's."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(owner|server|snapshot|log)-(\d{6,18})-([0-9a-f]{8})(?:[.]([1-9]\d{0,8}))?(?:-(\d{6,18})-(\d{12,18}))?"
)


@dataclass(frozen=True, order=True)
class Claim:
    """One server's claim to a checkpoint directory: the highest one is the owner's.

    Args:
        epoch: the job's, as long as its driver lives: above the `incarnation` of any claim that was there before.
        token: the job's, 8 hexadecimal digits: settles between two that claim at the same moment.
        start: rises when the job's server is started again. So a restarted server never comes before a job that has
            taken the directory over meanwhile.
    """

    epoch: int
    token: str
    start: int = 0

    def __str__(self) -> str:
        return f"{self.epoch:06d}-{self.token}" + (f".{self.start}" if self.start else "")

    @property
    def incarnation(self) -> int:
        """At least that of the server whose claim it is."""
        return self.epoch + self.start


@dataclass(frozen=True)
class Name:
    """A file's name.

    Args:
        kind: "owner", "server", "snapshot" or "log".
        claim: of who wrote it: nobody else writes, or writes over, this file.
        serial: rises with each file of a claim; no two have the same. -1 for an owner's or a server's.
        number: clock of a snapshot, commits before those of a log file; -1 for the others.
    """

    kind: str
    claim: Claim
    serial: int = -1
    number: int = -1

    def __str__(self) -> str:
        end = "" if self.serial < 0 else f"-{self.serial:06d}-{self.number:012d}"
        return f"{self.kind}-{self.claim}{end}"

    @property
    def age(self) -> tuple[Claim, int]:
        """The higher, the later."""
        return self.claim, self.serial


def parsed(text: str) -> Name | None:
    """The name that ``text`` is; None where it is none of ours."""
    match = _NAME.fullmatch(text)
    if match is None or (match[1] in ("owner", "server")) != (match[5] is None):
        return None
    kind, epoch, token, start, serial, number = match.groups()
    return Name(kind, Claim(int(epoch), token, int(start or 0)), int(serial or -1), int(number or -1))
