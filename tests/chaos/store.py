"""A store of snapshots in trouble: slow, or failing half-way. It needs no file system of its own.

The servers of a run are started by `server.py`, which puts itself between them and their files, and does what it reads
in one file of this machine; `Store` writes that.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: In the environment of every server: where that file is.
VARIABLE = "DISTKERAS_CHAOS_STORE"
_SERVER = Path(__file__).with_name("server.py")

#: Seconds that a call of a slow store takes, on average; the share of a torn one's calls that fail, and of its writes
#: in which the server dies.
SLOW, FAILING, DYING = 0.3, 0.15, 0.05


class Store:
    """The trouble of all servers that this process starts from now on, and their descendants.

    Args:
        orders: the file that says it.
    """

    def __init__(self, orders: Path) -> None:
        self._orders, self._numbers = orders, dict[str, float]()
        #: When it was torn, from and to, in seconds since the epoch.
        self._torn: list[tuple[float, float]] = []
        os.environ[VARIABLE] = str(orders)
        take_over_servers()

    def slow(self) -> None:
        """Each call takes a while from now on."""
        self._order({"slow": SLOW})

    def tear(self) -> None:
        """Calls fail half-way from now on: files are written in part, moves fail before or after they are done."""
        self._torn.append((time.time(), math.inf))
        self._order({"failing": FAILING, "dying": DYING})

    def mend(self) -> None:
        """Calls do not fail from now on."""
        self._order({"failing": 0.0, "dying": 0.0})
        self._torn = [(first, min(last, time.time())) for first, last in self._torn]

    def tore(self, path: Path) -> bool:
        """Return whether the store was torn when this file was written: its server may have died, or not delete it."""
        written = path.stat().st_mtime
        return any(first - 1.0 <= written <= last + 1.0 for first, last in self._torn)

    def hurry(self) -> None:
        """Calls are fast from now on."""
        self._order({"slow": 0.0})

    def _order(self, numbers: Mapping[str, float]) -> None:
        self._numbers |= numbers
        draft = self._orders.with_suffix(".part")
        draft.write_text(json.dumps(self._numbers))
        draft.replace(self._orders)


def take_over_servers() -> None:
    """Has this process start `server.py` in place of each parameter server."""
    from distkeras.ps.world.processes import Child, ChildProcess
    from distkeras.ps.world.world import World

    def spawn(self: World, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        # It still says "distkeras.ps", from which it is known.
        return ChildProcess([sys.executable, str(_SERVER), *command[2:]], environment)

    World.spawn = spawn  # type: ignore[method-assign]  # the trainer starts it in no other way
