"""A worker's or driver's connections to all shards, which are used at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from distkeras.ps.errors import DeadlineError, RemoteProtocolError, ServerLostError
from distkeras.ps.protocol.messages import Ack, CenterReply, Message
from distkeras.ps.protocol.shard_messages import FetchSlice, Greet, Shards
from distkeras.ps.shards.cut import Cut
from distkeras.ps.transport.client import Address, Client
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.worker_client import Posting
from distkeras.ps.world.world import REAL, World

_T = TypeVar("_T")


class ShardLink(Client):
    """The connection to one shard. The slice of the next reply is received into `space`."""

    def __init__(self, address: Address, deadlines: Deadlines, world: World, name: str) -> None:
        super().__init__(address, deadlines, world)
        #: Memory for the center of the next reply, and for an encoded one; None: new memory.
        self.space: tuple[np.ndarray, np.ndarray] | None = None
        self.posting: Posting[object] = Posting(world, name)

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        if kind is CenterReply and size and self.space is not None:
            for array in self.space:
                if array.dtype == dtype and array.size == size:
                    self.space = None  # rows that follow may have the same size
                    return array
        return super()._allocate(kind, dtype, size)

    def fetch(self, ticket: int, space: tuple[np.ndarray, np.ndarray], *, whole: bool = True) -> CenterReply:
        """Return the slice at ``ticket``, in ``space``: memory for it, and for its encoded form."""
        self.space = space
        reply = self.request(FetchSlice(ticket, whole), CenterReply)
        if (reply.center.size, reply.packed.size) not in ((space[0].size, 0), (0, space[1].size)):
            raise RemoteProtocolError(
                f"a slice must have {space[0].size} elements, or {space[1].size} bytes. "
                f"Received: {reply.center.size} and {reply.packed.size}"
            )
        return reply

    def end(self) -> None:
        """Close the connection, and end its thread; `close` alone comes before another attempt to connect."""
        self.close()
        self.posting.close()


class ShardLinks:
    """The connections to all shards.

    Args:
        shards: where they are.
        sequencer: address of their sequencer, whose key and certificate they share.
        greeting: is sent first over each connection, with the number of the shard; None: of a driver.
        name: of the threads.
    """

    def __init__(
        self,
        shards: Shards,
        sequencer: Address,
        deadlines: Deadlines,
        *,
        greeting: Greet | None = None,
        name: str,
        world: World = REAL,
    ) -> None:
        places = _places_of(shards)
        self.cut = Cut(shards.size, len(places))
        self._deadlines = deadlines
        self._links: list[ShardLink] = []
        for number, (host, port) in enumerate(places):
            address = Address(host, port, sequencer.key, sequencer.certificate)
            self._links.append(ShardLink(address, deadlines, world, f"{name}-shard-{number}"))
        if greeting is not None:
            try:
                self.each(lambda number, link: link.request(replace(greeting, shard=number), Ack))
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        return len(self._links)

    def post(self, call: Callable[[int, ShardLink], object]) -> None:
        """Begin ``call`` with the number and the connection of each shard, all at the same time."""
        for number, link in enumerate(self._links):
            link.posting.post(partial(call, number, link))

    def wait(self, timeout: float) -> list[Any]:
        """Wait until all calls have ended; return their results, or raise the most telling error.

        Raises:
            ServerLostError: a shard has not answered, or not within ``timeout`` seconds.
        """
        errors, results = list[Exception](), list[Any]()
        for number, link in enumerate(self._links):
            if not link.posting.wait(timeout):
                raise ServerLostError(f"waited {timeout:g} s for shard {number}")
            try:
                results.append(link.posting.outcome())
            except DeadlineError as error:
                lost = ServerLostError(f"shard {number}: {error.message}")
                errors.append(error if link.channel is not None else lost)
            except Exception as error:  # noqa: BLE001 - one of them is raised below
                errors.append(error)
        if errors:
            raise min(errors, key=lambda failure: isinstance(failure, ServerLostError))
        return results

    def each(self, call: Callable[[int, ShardLink], _T]) -> list[_T]:
        """Return ``call(number, connection)`` for all shards, each of which has a deadline of its own."""
        self.post(call)
        return self.wait(self.timeout)

    @property
    def timeout(self) -> float:
        """Seconds for all calls together, above the deadlines of each."""
        deadlines = self._deadlines
        return 3 * max(deadlines.reply, deadlines.gather) + deadlines.connect + deadlines.handshake + deadlines.frame

    def close(self) -> None:
        for link in self._links:
            link.end()


def _places_of(shards: Shards) -> Sequence[tuple[str, int]]:
    try:
        pairs = [line.split(" ") for line in shards.places.split("\n")]
        return [(host, int(port)) for host, port in pairs]
    except ValueError:
        raise RemoteProtocolError(f"shards must be host and port, a line each. Received: {shards.places!r}") from None
