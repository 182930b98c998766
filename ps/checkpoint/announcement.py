"""Where a server is that moves: it writes its address into the checkpoint's directory, where others read it.

The address bears the server's claim in its name, as all that it writes there. So the one of the highest claim counts,
and where an owner has not written one yet, a server is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distkeras.ps.checkpoint.names import Name, parsed
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ServerLostError, SnapshotError
from distkeras.ps.transport.client import Address
from distkeras.ps.world.world import REAL, World


@dataclass(frozen=True, repr=False)
class AnnouncedAddress(Address):
    """The address of a server that may come back somewhere else, with the key to it.

    Args:
        uri: the checkpoint's directory, which everybody who is to find the server must reach.
    """

    uri: str = ""

    def __str__(self) -> str:
        return f"the address that is announced in {self.uri!r}"

    @property
    def moves(self) -> bool:
        """It may."""
        return True

    def locate(self, world: World = REAL) -> tuple[str, int]:
        """Host and port as they are announced now.

        Raises:
            ServerLostError: none are.
        """
        place = find(self.uri, world)
        return str(place["host"]), int(place["port"])


def find(uri: str, world: World = REAL) -> dict[str, Any]:
    """What the owner of a checkpoint's directory has announced: see `SnapshotDirectory.announce`.

    Raises:
        ServerLostError: nothing, or the directory cannot be read.
    """
    wanted = f"a server must be announced in {uri!r}"
    try:
        store = Store(uri, world)
        names = [name for name in map(parsed, store.names()) if name is not None]
        owner = max((name.claim for name in names if name.kind == "owner"), default=None)
        if owner is None:
            raise ServerLostError(f"{wanted}. Received: no server's claim there")
        if Name("server", owner) not in names:
            raise ServerLostError(f"{wanted}. Received: one that is not up yet, with claim {owner}")
        return store.load(str(Name("server", owner)))[0]
    except SnapshotError as error:
        raise ServerLostError(f"{wanted}. Received: {error.message}") from error
