"""A program: a parameter server whose first incarnation runs out of memory during its fifth commit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from distkeras.ps.__main__ import main
from distkeras.ps.center.commit_log import CommitLog, CommitOutcome
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.world.processes import Child, ChildProcess
from distkeras.ps.world.world import World

_add = CommitLog.add


class Forgetful(World):
    """The system's world, except that it starts this program in place of a server's."""

    def spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        return ChildProcess([sys.executable, __file__, *command[2:]], environment)


def forgetful(self: CommitLog, commit: Commit, outcome: CommitOutcome, partition: int | None = None) -> None:
    if commit.incarnation == 1 and len(self) == 4:
        raise MemoryError("no room for a row")
    _add(self, commit, outcome, partition)


if __name__ == "__main__":
    CommitLog.add = forgetful
    sys.exit(main(sys.argv[2:]))
