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
from distkeras.ps.transport.client import Address, Channel, Client
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.worker_client import Posting
from distkeras.ps.world.streams import PARALLEL_SOCKET_BUFFER
from distkeras.ps.world.world import REAL, World

_T = TypeVar("_T")
#: A vector at the sequencer, which has one element.
ZERO = np.zeros(1, np.float32)


class ShardLink(Client):
    """The connection to one shard. The slice of the next reply is received into `space`.

    It is used by a thread called ``name``, or by its owner's thread if that is None.
    """

    def __init__(self, address: Address, deadlines: Deadlines, world: World, name: str | None) -> None:
        super().__init__(address, deadlines, world)
        #: Memory for the center of the next reply, and for an encoded one; None: new memory.
        self.space: tuple[np.ndarray, np.ndarray] | None = None
        self.posting: Posting[Any] | None = None if name is None else Posting(world, name)
        self._ended = False

    def _connect(self) -> Channel:
        channel = super()._connect()
        channel.stream.enlarge(PARALLEL_SOCKET_BUFFER)
        if self._ended:
            channel.hang_up()
        return channel

    def allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        if kind is CenterReply and size and self.space is not None:
            for array in self.space:
                if array.dtype == dtype and array.size == size:
                    self.space = None  # rows that follow may have the same size
                    return array
        return super().allocate(kind, dtype, size)

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
        """Hang up, and end the thread, which closes the connection: it may be using it."""
        self._ended = True
        channel = self.channel
        if channel is not None:
            channel.hang_up()
        if self.posting is None:
            self.close()
        else:
            self.posting.close(self.close)


class ShardLinks:
    """The connections to all shards.

    Args:
        shards: where they are.
        sequencer: address of their sequencer, whose key and certificate they share.
        greeting: is sent first over each connection, with the number of the shard; None: of a driver.
        name: of the threads, of which there is one for each shard but the last.
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
        self._deadlines, self._now = deadlines, world.monotonic
        #: The last one is used by the caller's thread: each hand-over to another thread takes time.
        self._links: list[ShardLink] = []
        for number, (host, port) in enumerate(places):
            address = Address(host, port, sequencer.key, sequencer.certificate)
            thread = f"{name}-shard-{number}" if number + 1 < len(places) else None
            self._links.append(ShardLink(address, deadlines, world, thread))
        if greeting is not None:
            try:
                self.each(lambda number, link: link.request(replace(greeting, shard=number), Ack))
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        return len(self._links)

    def each(self, call: Callable[[int, ShardLink], _T]) -> list[_T]:
        """Return ``call(number, connection)`` for all shards, at the same time: that of the last one is made here.

        Raises:
            ServerLostError: a shard has not answered, or not within `timeout`; other errors of the calls come first.
        """
        errors, results = list[Exception](), list[_T]()
        deadline = self._now() + self.timeout
        for number, link in enumerate(self._links):
            if link.posting is not None:
                link.posting.post(partial(call, number, link))
        for number, link in reversed([*enumerate(self._links)]):
            try:
                results.append(self._result(call, number, link, deadline))
            except DeadlineError as error:
                lost = ServerLostError(f"shard {number}: {error.message}")
                errors.append(error if link.channel is not None else lost)
            except Exception as error:  # noqa: BLE001 - one of them is raised below
                errors.append(error)
        if errors:
            raise min(errors, key=lambda failure: isinstance(failure, ServerLostError))
        return results[::-1]

    def _result(self, call: Callable[[int, ShardLink], _T], number: int, link: ShardLink, deadline: float) -> _T:
        if link.posting is None:
            return call(number, link)
        if not link.posting.wait(deadline - self._now()):
            raise ServerLostError(f"waited {self.timeout:g} s for shard {number}")
        result: _T = link.posting.outcome()
        return result

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
