"""Connections in memory, byte by byte, with latency, small buffers, cuts, stalls, and vanishing peers."""

from __future__ import annotations

import errno
import math
import ssl
from collections import deque
from collections.abc import Callable

from simulation.encryption import Encryption
from simulation.scheduler import Process, Scheduler, Task

#: The scope of the connections between a shard and its server; they stay within a host, which nothing separates.
SHARD = "shard"
#: Seconds after which the system closes a connection to a peer that does not answer; see `world.streams`.
_GIVEN_UP = 35.0


class _Direction:
    """The bytes in transit in one direction."""

    def __init__(self) -> None:
        #: Each piece with the time of its arrival; the reader takes them from the left.
        self.pieces: deque[tuple[float, memoryview]] = deque()
        self.size = 0
        #: The time at which the end of the stream arrives; None if it was not sent.
        self.end: float | None = None
        self.last = 0.0
        self.readers: list[Task] = []
        self.writers: list[Task] = []

    def clear(self) -> None:
        """Lose the bytes in transit."""
        self.pieces.clear()
        self.size = 0


class Link:
    """One connection.

    Args:
        network: network of the connection.
        number: number among the connections of this run.
        scope: owner of the connection, for faults that concern one partition.
    """

    def __init__(self, network: Network, number: int, scope: str) -> None:
        self.network, self.number, self.scope = network, number, scope
        self.reset = False
        self.sends = 0
        #: The time from which nothing is transmitted; None if the connection works.
        self.vanished: float | None = None
        self.ends: list[VirtualStream] = []
        #: The time until which bytes may arrive late.
        self.disturbed_until = -math.inf

    def cut(self) -> None:
        """Reset the connection for both ends."""
        if not self.reset:
            self.reset = True
            for end in self.ends:
                end.incoming.clear()
                self.network.wake(end)

    def vanish(self) -> None:
        """Transmit nothing from now on, without an error at either end."""
        if self.vanished is None and not self.reset:
            now = self.network.scheduler.now
            self.vanished = now
            for end in self.ends:
                arrived = [piece for piece in end.incoming.pieces if piece[0] <= now]
                end.incoming.pieces = deque(arrived)
                end.incoming.size = sum(len(data) for _, data in arrived)
                if end.incoming.end is not None and end.incoming.end > now:
                    end.incoming.end = None
            self.network.scheduler.later(_GIVEN_UP, self.cut)

    def half_cut(self, sender: VirtualStream, seconds: float) -> None:
        """End the connection for the connecting process now, and for the other one after the bytes in transit."""
        near = self.ends[0]
        if self.vanished is None and not self.reset:
            self.stall(near, seconds)
            near.broken = True
            if near is not sender:
                near.end()
            self.network.wake(near)

    def stall(self, sender: VirtualStream, seconds: float) -> None:
        """Delay the arrival of what ``sender`` sends."""
        direction = sender.outgoing
        direction.last = max(direction.last, self.network.scheduler.now) + seconds
        self.disturbed_until = max(self.disturbed_until, direction.last)


class VirtualStream:
    """One end of a connection, as a simulated `world.streams.Stream`."""

    def __init__(self, link: Link, process: Process, incoming: _Direction, outgoing: _Direction) -> None:
        self.link, self.process = link, process
        self.incoming, self.outgoing = incoming, outgoing
        self.shut = self.closed = self.broken = False
        #: The part of the next write that is changed in transit; None if none is.
        self.spoiled: float | None = None
        self.peer: VirtualStream
        self._scheduler = link.network.scheduler
        self.read, self.write = self._receive, self._send

    def _receive(self, spaces: list[memoryview], timeout: float, whole: bool) -> int:
        """See `Stream`."""
        scheduler = self._scheduler
        scheduler.pass_on()
        deadline = scheduler.now + timeout
        wanted, taken = sum(map(len, spaces)), 0
        while True:
            self._require_open()
            if self.shut and not self.broken:
                return taken
            if self.link.reset or self.broken:
                if taken:
                    return taken
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            count, following = self._arrived(wanted - taken)
            if count:
                taken += self._take(spaces, taken, count)
                if taken == wanted or not whole:
                    return taken
            elif following is None and self.incoming.end is not None:
                return taken
            elif scheduler.now >= deadline:
                if taken:
                    return taken
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            else:
                scheduler.wait(self.incoming.readers, min(deadline, following or deadline) - scheduler.now)

    def _arrived(self, wanted: int) -> tuple[int, float | None]:
        """Return how many of ``wanted`` bytes have arrived, and when more bytes or the end of the stream arrive."""
        now, count = self._scheduler.now, 0
        for arrival, data in self.incoming.pieces:
            if arrival > now:
                return count, arrival
            count += len(data)
            if count >= wanted:
                return wanted, None
        end = self.incoming.end
        return count, end if end is not None and end > now else None

    def _take(self, spaces: list[memoryview], offset: int, count: int) -> int:
        """Move ``count`` bytes, or fewer, into ``spaces`` from ``offset`` on."""
        network, pieces = self.link.network, self.incoming.pieces
        if count > 1 and network.fragmenting and network.scheduler.random.random() < network.fragmenting:
            count = 1 + int(network.scheduler.random.random() * (count - 1))
        data = pieces[0][1]
        if len(data) == count:  # Most pieces are taken whole.
            pieces.popleft()
        else:
            data = self._cut_off(count)
        at = 0
        for space in spaces:
            size = min(len(space) - offset, count - at)
            if size > 0:
                space[offset : offset + size] = data[at : at + size]
                at += size
            offset = max(0, offset - len(space))
        self.incoming.size -= count
        if self.incoming.writers:
            self._scheduler.wake_all(self.incoming.writers)
        return count

    def _cut_off(self, count: int) -> memoryview:
        """Return the next ``count`` bytes in transit."""
        pieces, taken = self.incoming.pieces, list[memoryview]()
        while count:
            arrival, data = pieces.popleft()
            if len(data) > count:
                pieces.appendleft((arrival, data[count:]))
                data = data[:count]
            taken.append(data)
            count -= len(data)
        return memoryview(b"".join(taken))

    def _send(self, buffers: list[memoryview], timeout: float) -> int:
        """See `Stream`."""
        scheduler, network = self._scheduler, self.link.network
        scheduler.pass_on()
        deadline = scheduler.now + timeout
        while True:
            self._require_open()
            if self.shut and not self.broken:
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            if self.link.reset or self.broken:
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            room = network.capacity - self.outgoing.size
            if room > 0:
                break
            if scheduler.now >= deadline:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            scheduler.wait(self.outgoing.writers, deadline - scheduler.now)
        data = memoryview(bytearray(b"".join(buffers)))[:room]
        self.link.sends += 1
        share = network.on_send(self)
        if self.spoiled is not None:
            data[int(self.spoiled * len(data))] ^= 1
            self.spoiled = None
        self._deliver(data if share is None else data[: int(share * len(data))])
        if share is not None:
            network.scheduler.later(self._latency(), self.link.cut)
        if self.broken:
            self.end()
        if scheduler.current.process.stopped or scheduler.silent:
            scheduler.pass_on(always=True)
        return len(data)

    def _latency(self) -> float:
        return self.link.network.latency * (0.5 + self._scheduler.random.random())

    def _deliver(self, data: memoryview) -> None:
        link, direction = self.link, self.outgoing
        if link.reset:
            return
        if link.vanished is not None:
            direction.size += len(data)
            return
        if self.peer.closed:
            link.cut()
            return
        arrival = self._arrival()
        if len(data):
            direction.pieces.append((arrival, data))
            direction.size += len(data)
        self._scheduler.wake_at(direction.readers, arrival)

    def _arrival(self) -> float:
        direction = self.outgoing
        direction.last = max(direction.last, self._scheduler.now + self._latency())
        return direction.last

    def encrypt(self, context: ssl.SSLContext, *, server: bool, timeout: float) -> None:
        """See `Stream`."""
        scheduler = self._scheduler
        encryption = Encryption(context, server=server, read=self._receive, write=self._send, now=lambda: scheduler.now)
        encryption.handshake(timeout)
        self.read, self.write = encryption.read, encryption.write

    def enlarge(self, size: int) -> None:
        """See `Stream`."""

    def gone(self) -> bool:
        """See `Stream`."""
        end = self.incoming.end
        return self.closed or self.shut or self.link.reset or (end is not None and end <= self._scheduler.now)

    def shutdown(self) -> None:
        """See `Stream`."""
        if not self._scheduler.silent:
            self.end()

    def end(self) -> None:
        """Send the end of the stream, and wake the readers of this end."""
        if not self.shut:
            self.shut = True
            self._scheduler.wake_all(self.incoming.readers)
            self._scheduler.wake_all(self.outgoing.writers)
            if self.link.vanished is None and not self.link.reset:
                self.outgoing.end = self._arrival()
                self._scheduler.wake_at(self.outgoing.readers, self.outgoing.end)

    def close(self) -> None:
        """See `Stream`."""
        if not self._scheduler.silent:
            self.give_up()

    def give_up(self) -> None:
        """Close the stream, as the system does when its process ends."""
        if self.closed:
            return
        unread = any(arrival <= self._scheduler.now for arrival, _ in self.incoming.pieces)
        self.end()
        self.closed = True
        self.link.network.streams.pop(self, None)
        if unread and self.link.vanished is None:
            self._scheduler.later(self._latency(), self.link.cut)

    def _require_open(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")


class VirtualListener:
    """The simulated `world.streams.Listener`."""

    def __init__(self, network: Network, process: Process, address: tuple[str, int]) -> None:
        self._network, self.process, self.address = network, process, address
        self.backlog: deque[VirtualStream] = deque()
        self.waiting: list[Task] = []
        self.closed = False

    def accept(self) -> tuple[VirtualStream, str, int]:
        """See `Listener`."""
        scheduler = self._network.scheduler
        scheduler.pass_on()
        while not self.backlog:
            if self.closed:
                raise OSError(errno.EBADF, "Bad file descriptor")
            scheduler.wait(self.waiting, None)
        stream = self.backlog.popleft()
        return stream, stream.peer.process.host, 40_000 + stream.link.number

    def close(self) -> None:
        """See `Listener`."""
        if not self._network.scheduler.silent:
            self.give_up()

    def give_up(self) -> None:
        """Close the listener, as the system does when its process ends."""
        if not self.closed:
            self.closed = True
            self._network.listeners.pop(self.address, None)
            for stream in self.backlog:
                stream.link.cut()
            self._network.scheduler.wake_all(self.waiting)


class Network:
    """All connections of a run.

    Args:
        scheduler: scheduler of the run.
        on_send: called at each write with its stream; returns None, or the share that arrives before a cut.
    """

    def __init__(self, scheduler: Scheduler, on_send: Callable[[VirtualStream], float | None]) -> None:
        self.scheduler = scheduler
        self.on_send = on_send
        self.latency = 0.001
        #: Bytes that may be in transit in one direction, and how often a read returns only a part of the available
        #: bytes.
        self.capacity = 1 << 20
        self.fragmenting = 0.1
        self.listeners: dict[tuple[str, int], VirtualListener] = {}
        #: The connections in the order in which they were made.
        self.streams: dict[VirtualStream, None] = {}
        #: Pairs of hosts that cannot reach each other.
        self.partitioned: list[tuple[str, str]] = []
        self._links = 0
        self._port = 50_000

    def listen(self, process: Process, host: str, port: int) -> VirtualListener:
        """Return a new listener of ``process``."""
        if port == 0:
            self._port += 1
            port = self._port
        if (host, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = self.listeners[host, port] = VirtualListener(self, process, (host, port))
        process.at_end.append(listener.give_up)
        return listener

    def connect(self, process: Process, address: tuple[str, int], timeout: float, scope: str) -> VirtualStream:
        """Return a new connection of ``process``."""
        scheduler = self.scheduler
        scheduler.wait(None, self.latency)
        listener = self.listeners.get(address)
        host = listener.process.host if listener is not None else address[0]
        if self.separated(process.host, host) and scope != SHARD:
            scheduler.wait(None, timeout)
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._links += 1
        link = Link(self, self._links, scope)
        there, back = _Direction(), _Direction()
        near, far = VirtualStream(link, process, back, there), VirtualStream(link, listener.process, there, back)
        near.peer, far.peer = far, near
        link.ends = [near, far]
        for stream in link.ends:
            self.streams[stream] = None
            stream.process.at_end.append(stream.give_up)
        listener.backlog.append(far)
        scheduler.wake_all(listener.waiting)
        return near

    def separated(self, one: str, other: str) -> bool:
        """Return whether two hosts cannot reach each other."""
        return (one, other) in self.partitioned or (other, one) in self.partitioned

    def part(self, one: str, other: str, seconds: float) -> None:
        """Separate two hosts for a number of seconds."""
        pair = (one, other)
        self.partitioned.append(pair)
        for stream in list(self.streams):
            if {stream.process.host, stream.peer.process.host} == {one, other} and stream.link.scope != SHARD:
                stream.link.vanish()
        self.scheduler.later(seconds, lambda: self.partitioned.remove(pair))

    def wake(self, stream: VirtualStream) -> None:
        """Wake the tasks that wait for this connection."""
        self.scheduler.wake_all(stream.incoming.readers)
        self.scheduler.wake_all(stream.outgoing.writers)
