"""How workers meet: the listener of a worker, the handshake between two of them, and memory that both ends share.

A worker offers memory, and the server or another worker maps it: see `shared_slots`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from distkeras.ps.errors import DistkerasError, RemoteProtocolError
from distkeras.ps.protocol.framing import Allocate, Connection, EndOfStream, Limits
from distkeras.ps.protocol.messages import Hello, Welcome
from distkeras.ps.protocol.shared_slots import SLOTS_MAX, TOKEN_BYTES, SharedSlots, SlotSizes
from distkeras.ps.transport.client import Channel
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.world.shared_memory import SharedMemory
from distkeras.ps.world.streams import Stream
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)


def offer_slots(sizes: SlotSizes, world: World) -> tuple[SharedMemory, SharedSlots, str] | None:
    """Return new memory, its slots, and the token in it as hexadecimal digits; None: no memory is available."""
    try:
        memory = world.share(sizes.nbytes)
    except OSError as error:
        log.info("vectors travel over the connection: this process cannot share memory: %s", error)
        return None
    slots, token = SharedSlots(sizes, memory.memory, server=False), world.token(TOKEN_BYTES)
    slots.write_token(token)
    return memory, slots, token.hex()


def map_slots(hello: Hello, sizes: SlotSizes, world: World) -> SharedSlots | None:
    """Return the slots in the memory that a worker offers; None: it offers none, or is not on this host."""
    if not hello.memory:
        return None
    try:
        if sizes.slots > SLOTS_MAX:
            raise OSError(f"there are {SLOTS_MAX} slots at most. Received: {sizes.slots}")
        slots = SharedSlots(sizes, world.map_shared(hello.memory, sizes.nbytes), server=True)
        token = bytes.fromhex(hello.memory_token)
        if len(token) != TOKEN_BYTES or not slots.has_token(token):
            raise OSError("the worker's token must be there. Received: memory of another process")
    except (OSError, ValueError) as error:  # the worker is on another host, in another container, or of another user
        text = "the vectors of partition %d travel over its connection: its memory cannot be mapped here: %s"
        log.info(text, hello.worker, error)
        return None
    log.info("partition %d and the server exchange vectors through shared memory", hello.worker)
    return slots


def begin_handshake(
    channel: Channel, hello: Hello, sizes: SlotSizes | None, timeout: float, world: World
) -> SharedSlots | None:
    """Send the ``hello`` of this worker to another one, and return the slots for their vectors; None: none.

    ``sizes`` is the layout of the memory to offer; None: offer none.
    """
    memory, slots, token = (offer_slots(sizes, world) if sizes is not None else None) or (None, None, "")
    try:
        channel.send(replace(hello, memory="" if memory is None else memory.place, memory_token=token))
        answer = channel.receive(timeout, "the answer to a Hello")
    finally:
        if memory is not None:
            memory.hide()
    if isinstance(answer, EndOfStream):
        raise ConnectionResetError("it has closed the connection")
    if not isinstance(answer, Welcome):
        raise RemoteProtocolError(f"a worker must welcome another one. Received: {type(answer).__name__}")
    shared = slots if answer.shares else None
    channel.connection.share(shared)
    return shared


def answer_handshake(channel: Channel, hello: Hello, sizes: SlotSizes, world: World) -> None:
    """Answer another worker's ``hello``, and exchange vectors through its memory if that can be mapped."""
    slots = map_slots(hello, sizes, world)
    channel.send(
        Welcome(
            incarnation=0, clock=0, sequence=0, durable=0, epoch=0, batch=0, finished=False, shares=slots is not None
        )
    )
    channel.connection.share(slots)


#: Connections that may be in their handshake at a time, in addition to those of the members.
_HANDSHAKES_MAX = 64


class MemberListener:
    """A port of ``host``, bound by the constructor, and a thread for each connection that arrives after `start`."""

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
