"""The faulty stores of snapshots, slow or failing within an operation.

A store without a file system of its own is the files of the servers: `server.py` starts the servers of a run and
intercepts access to their files. It follows the orders in one file of this machine, which `Store` writes. The other one
speaks the protocol of S3; its requests fail at the same times, those of drivers too.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from support.s3 import S3, App, CutReply, CutRequest, Environ, ErrorWithin200, Fault, LostReply, Start, Status

#: The path of that file, in the environment of every server.
VARIABLE = "DISTKERAS_CHAOS_STORE"
_SERVER = Path(__file__).with_name("server.py")

#: Seconds that a call of a slow store takes on average; the share of a failing store's calls that fail, and the share
#: of its writes in which the server dies.
SLOW, FAILING, DYING = 0.3, 0.15, 0.05


class Torn(Fault):
    """Fails some requests, each in one of the ways of a store of S3's protocol."""

    def __init__(self) -> None:
        super().__init__()
        self._ways = (Status(), CutRequest(), LostReply(), CutReply(), ErrorWithin200())

    def meets(self, environ: Environ) -> bool:
        """Return whether this request fails."""
        return random.random() < FAILING

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        """Fail the request."""
        way = random.choice([way for way in self._ways if way.meets(environ)])
        return way.strike(environ, start, app)


class Store:
    """The file faults of all servers that this process starts from now on, and of their descendants.

    Args:
        orders: the file with the orders.
        s3: the server of S3's protocol.
    """

    def __init__(self, orders: Path, s3: S3) -> None:
        self._orders, self._numbers = orders, dict[str, float]()
        self.s3 = s3
        #: The periods in which the store failed, in seconds since the epoch.
        self._torn: list[tuple[float, float]] = []
        os.environ[VARIABLE] = str(orders)
        take_over_servers()

    def slow(self) -> None:
        """Delay each call from now on."""
        self._order({"slow": SLOW})

    def tear(self) -> None:
        """Make calls fail from now on: files are written in part, and moves fail before or after they are done."""
        self._torn.append((time.time(), math.inf))
        self.s3.fault = Torn()
        self._order({"failing": FAILING, "dying": DYING})

    def mend(self) -> None:
        """End the failures of calls."""
        self._order({"failing": 0.0, "dying": 0.0})
        self.s3.fault = Fault()
        self._torn = [(first, min(last, time.time())) for first, last in self._torn]

    def tore(self, written: float) -> bool:
        """Return whether the store failed at this time: the server of a file may have died, or could not delete it."""
        return any(first - 1.0 <= written <= last + 1.0 for first, last in self._torn)

    def hurry(self) -> None:
        """End the delays of calls."""
        self._order({"slow": 0.0})

    def _order(self, numbers: Mapping[str, float]) -> None:
        self._numbers |= numbers
        draft = self._orders.with_suffix(".part")
        draft.write_text(json.dumps(self._numbers))
        draft.replace(self._orders)


def take_over_servers() -> None:
    """Make this process start `server.py` in place of each parameter server."""
    from distkeras.ps.world.processes import Child, ChildProcess
    from distkeras.ps.world.world import World

    def spawn(self: World, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        # The name still contains "distkeras.ps", which identifies it.
        return ChildProcess([sys.executable, str(_SERVER), *command[2:]], environment)

    World.spawn = spawn  # type: ignore[method-assign]  # the trainer starts it in no other way
