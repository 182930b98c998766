"""The listener of a worker, which accepts connections of other workers that prove the job's key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.framing import Allocate, Connection, Limits
from distkeras.ps.protocol.messages import Hello
from distkeras.ps.transport.client import Channel
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.world.streams import Stream
from distkeras.ps.world.world import REAL, World

#: Connections that may be in their handshake at a time, in addition to those of the members.
_HANDSHAKES_MAX = 64


class MemberListener:
    """A port, bound by the constructor, and a thread for each connection that arrives after `start`.

    Args:
        host: the address at which others reach this worker.
    """

    def __init__(self, host: str, key: bytes, deadlines: Deadlines, world: World = REAL) -> None:
        self._key, self._deadlines, self._world = key, deadlines, world
        self._lock = world.lock()
        self._pending: set[Channel] = set()
        self._closed = False
        self._listener = world.listen(host, 0)
        self.address = self._listener.address

    def start(
        self,
        take: Callable[[Hello, Channel], bool],
        *,
        most: int,
        limits: Limits,
        allocate: Callable[[], Allocate | None] = lambda: None,
        read_ahead: bool = True,
    ) -> None:
        """Begin to accept connections.

        Args:
            take: called in the connection's thread with the peer's `Hello`; returns whether it takes the channel over.
                Otherwise, and after an error of the connection, the channel is closed.
            most: how many members may be connected at a time.
            limits, read_ahead: of the connections.
            allocate: returns the allocator for the arrays of one connection.
        """

        def accept() -> None:
            while True:
                try:
                    stream, _, _ = self._listener.accept()
                except OSError:  # after `close`; after another error, the deadlines of waiting members pass
                    return
                connection = Connection(
                    server=True,
                    key=self._key,
                    limits=limits,
                    allocate=allocate(),
                    token=self._world.token,
                    read_ahead=read_ahead,
                )
                self._admit(stream, connection, take, most)

        self._world.thread(accept, f"members-{self.address[1]}").start()

    def _admit(self, stream: Stream, connection: Connection, take: Callable[[Hello, Channel], bool], most: int) -> None:
        channel = Channel(stream, connection, frame=self._deadlines.frame, world=self._world)
        with self._lock:
            refused = self._closed or len(self._pending) >= most + _HANDSHAKES_MAX
            if not refused:
                self._pending.add(channel)
        if refused:
            channel.close()
        else:
            self._world.thread(partial(self._meet, channel, take), "member-handshake").start()

    def _meet(self, channel: Channel, take: Callable[[Hello, Channel], bool]) -> None:
        """Authenticate the peer of ``channel``, receive its `Hello`, and call ``take``; close the channel otherwise."""
        taken = False
        try:
            channel.handshake(self._deadlines.handshake)
            hello = channel.receive(self._deadlines.handshake, "a member's Hello")
            taken = isinstance(hello, Hello) and take(hello, channel)
        except (DistkerasError, OSError):
            taken = False  # not a member, or a broken connection; other members detect a missing member
        finally:
            with self._lock:
                self._pending.discard(channel)
            if not taken:
                channel.close()

    def close(self) -> None:
        """Close the port, and hang up on all connections in their handshake; idempotent."""
        with self._lock:
            self._closed = True
            pending = [*self._pending]
        self._listener.close()
        for channel in pending:
            channel.hang_up()
