"""Where a server is that moves: it writes its address into the checkpoint's directory, where others read it.

The address bears the server's claim in its name, as all that it writes there. So the one of the highest claim counts,
and where an owner has not written one yet, a server is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distkeras.ps.checkpoint.ownership import Claim, Name, parsed
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


@dataclass(frozen=True)
class Owner:
    """The owner of a checkpoint's directory, as far as its files tell.

    Args:
        claim: the highest one there.
        address: host and port at which it can be asked whether it lives; None: it has not said.
        announced: see `SnapshotDirectory.announce`; None: nothing yet.
    """

    claim: Claim
    address: tuple[str, int] | None = None
    announced: dict[str, Any] | None = None


def owner_of(uri: str, world: World = REAL) -> Owner | None:
    """Return the owner of a checkpoint's directory; None where no server has claimed it.

    Raises:
        SnapshotError: the directory cannot be read.
    """
    store = Store(uri, world)
    claim, announced = _highest(store)
    if claim is None:
        return None
    address = store.load(str(Name("owner", claim)))[0].get("address")
    place = store.load(str(Name("server", claim)))[0] if announced else None
    return Owner(claim, address and (str(address[0]), int(address[1])), place)


def _highest(store: Store) -> tuple[Claim | None, bool]:
    """Return the highest claim, and whether its server has announced itself."""
    names = [name for name in map(parsed, store.names()) if name is not None]
    claim = max((name.claim for name in names if name.kind == "owner"), default=None)
    return claim, claim is not None and Name("server", claim) in names


def find(uri: str, world: World = REAL) -> dict[str, Any]:
    """What the owner of a checkpoint's directory has announced: see `SnapshotDirectory.announce`.

    Raises:
        ServerLostError: nothing, or the directory cannot be read.
    """
    missing = f"no parameter server is announced in {uri!r}"
    try:
        store = Store(uri, world)
        claim, announced = _highest(store)
        if claim is None:
            raise ServerLostError(f"{missing}: there is no server's claim")
        if not announced:
            raise ServerLostError(f"{missing}: the one with claim {claim} is not up yet")
        return store.load(str(Name("server", claim)))[0]
    except SnapshotError as error:
        raise ServerLostError(f"{missing}: {error.message}") from error
