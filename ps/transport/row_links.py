"""Mini-batches from the worker that has read their rows to one that trains them.

The worker that has the rows listens; the other one dials, with the job's key, and asks for some mini-batches at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distkeras.ps.errors import DistkerasError, MemberLostError, RemoteProtocolError
from distkeras.ps.protocol.framing import EndOfStream, Limits
from distkeras.ps.protocol.loop import Position
from distkeras.ps.protocol.messages import FetchBatches, Hello, SentBatch
from distkeras.ps.transport.client import Channel, dial
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.handshakes import MemberListener
from distkeras.ps.world.world import REAL, World

#: The largest number of arrays of a mini-batch.
_ARRAYS_MAX = 1 << 16
#: Mini-batches that are requested at a time.
AHEAD = 8
#: Kinds of numbers that travel: booleans, integers, floating numbers.
KINDS = "biuf"


class RawBatch(NamedTuple):
    """A mini-batch as its arrays, in the order in which the worker that sends it has them; see `BatchLike`."""

    epoch: int
    number: int
    last: bool
    checksum: int
    arrays: Sequence[np.ndarray]

    @property
    def next(self) -> Position:
        """Return the position of the next mini-batch."""
        return (self.epoch + 1, 0) if self.last else (self.epoch, self.number + 1)


def layout_of(arrays: Sequence[np.ndarray]) -> str:
    """Return dtypes and shapes of arrays, as JSON."""
    return json.dumps([[array.dtype.str, *array.shape] for array in arrays])


def arrays_of(sent: SentBatch) -> list[np.ndarray]:
    """Return the arrays of a message; raise RemoteProtocolError if its layout is not theirs."""
    try:
        layout = [(np.dtype(str(kind)), [int(extent) for extent in shape]) for kind, *shape in json.loads(sent.layout)]
        if any(dtype.kind not in KINDS for dtype, _ in layout):
            raise ValueError("numbers alone")
        return [data.view(dtype).reshape(shape) for data, (dtype, shape) in zip(sent.arrays, layout, strict=True)]
    except (ValueError, TypeError, KeyError) as error:
        raise RemoteProtocolError(f"a mini-batch must have the layout of its arrays. Received: {error}") from None


class RowServer:
    """Serves the mini-batches of one partition to other workers.

    Args:
        host: address to bind.
        batches: returns the mini-batches of the partition from an epoch and a number on; called in several threads.
        workers: the number of workers of the job, which bounds the connections.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        deadlines: Deadlines,
        batches: Callable[[int, int], Iterator[RawBatch]],
        workers: int,
        world: World = REAL,
    ) -> None:
        self._batches, self._deadlines = batches, deadlines
        self._lock = world.lock()
        self._channels: set[Channel] = set()
        self._closed = False
        self._listener = MemberListener(host, key, deadlines, world)
        self.address = self._listener.address
        self._listener.start(self._serve, most=workers, limits=Limits(), read_ahead=False)

    def _serve(self, hello: Hello, channel: Channel) -> bool:
        """Answer the requests over a connection until its peer hangs up."""
        with self._lock:
            if self._closed:
                return False
            self._channels.add(channel)
        try:
            place, batches = (-1, 0), iter(list[RawBatch]())
            while True:
                request = channel.receive(self._deadlines.silence, "a request for mini-batches")
                if not isinstance(request, FetchBatches):
                    return False
                if (request.epoch, request.batch) != place:
                    place, batches = (request.epoch, request.batch), self._batches(request.epoch, request.batch)
                for _ in range(request.count):
                    if place >= (request.end_epoch, request.end_batch):
                        break
                    batch = next(batches, None)
                    if batch is None:
                        return False
                    place = batch.next
                    arrays = [np.ascontiguousarray(array) for array in batch.arrays]
                    data = tuple(array.reshape(-1).view(np.uint8) for array in arrays)
                    channel.send(
                        SentBatch(batch.epoch, batch.number, batch.last, batch.checksum, layout_of(arrays), data)
                    )
        finally:
            with self._lock:
                self._channels.discard(channel)

    def close(self) -> None:
        """Close the port, and hang up on all peers."""
        with self._lock:
            self._closed, channels = True, [*self._channels]
        self._listener.close()
        for channel in channels:
            channel.hang_up()


class RowClient:
    """The mini-batches of another worker's partition, from a position on to one that may come nearer.

    Args:
        hello: names the lease under which this worker trains them.
        begin: the first position.
        end: returns the position that ends them.

    The iteration raises:
        MemberLostError: the worker that has the rows cannot be reached, or has sent something else.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        deadlines: Deadlines,
        *,
        hello: Hello,
        begin: Position,
        end: Callable[[], Position],
        world: World = REAL,
    ) -> None:
        self._address, self._hello = address, hello
        self._key, self._deadlines, self._world = key, deadlines, world
        self._begin, self._end = begin, end
        self._channel: Channel | None = None

    def __iter__(self) -> Iterator[RawBatch]:
        place = self._begin
        try:
            while place < (end := self._end()):
                channel = self._ask(place, end)
                for _ in range(AHEAD):
                    if place >= end:
                        break
                    batch = self._received(channel, place)
                    yield batch
                    place = batch.next
        except (DistkerasError, OSError) as error:
            raise MemberLostError(
                f"the worker at {self._address[0]}:{self._address[1]} must send the rows of its partition. "
                f"Received: {error}",
                worker=self._hello.worker,
            ) from error
        finally:
            self.close()

    def _ask(self, place: Position, end: Position) -> Channel:
        """Ask for some mini-batches from ``place`` on."""
        if self._channel is None:
            self._channel = dial(
                self._address,
                self._key,
                self._deadlines,
                limits=Limits(arrays=_ARRAYS_MAX),
                read_ahead=False,
                world=self._world,
            )
            self._channel.send(self._hello)
        self._channel.send(FetchBatches(*place, *end, AHEAD))
        return self._channel

    def _received(self, channel: Channel, place: Position) -> RawBatch:
        sent = channel.receive(self._deadlines.reply, "a mini-batch")
        if isinstance(sent, EndOfStream):
            raise ConnectionResetError("it has closed the connection")
        if not isinstance(sent, SentBatch) or (sent.epoch, sent.batch) != place:
            raise RemoteProtocolError(f"mini-batch {place} must come next. Received: {type(sent).__name__}")
        return RawBatch(sent.epoch, sent.batch, sent.last, sent.checksum, arrays_of(sent))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def hang_up(self) -> None:
        """End the connection, from any thread: a waiting iteration raises its error."""
        channel = self._channel
        if channel is not None:
            channel.hang_up()
