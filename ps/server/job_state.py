"""The state that all requests to a job's server share, under one lock: its states, its waits, and its connections.

`JobCondition` is that lock, with the states of the server and the waits with a deadline; it guards
`LeaseConnections`, the connections over which the leases of the partitions are held. Each connection has `PeerVectors`:
the memory of its request and reply, pooled and in its wire format.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from distkeras.ps.center.buffers import Buffer, Pool
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import StateMemory
from distkeras.ps.errors import (
    ERRORS,
    DeadlineError,
    JobStoppedError,
    LeaseLostError,
    LocalProtocolError,
    RelayLostError,
    ServerLostError,
)
from distkeras.ps.events import report
from distkeras.ps.protocol.companions import Companion
from distkeras.ps.protocol.compression import Codec, PeerFormat
from distkeras.ps.protocol.messages import CenterReply, Commit, Fault, Hello, KeepOptimizer, Message
from distkeras.ps.protocol.shard_messages import SendPart
from distkeras.ps.protocol.shared_slots import SharedSlots, SlotSizes
from distkeras.ps.protocol.tables import Ids, TableShape, row_elements
from distkeras.ps.rules.base import Vector
from distkeras.ps.world.world import REAL, World

#: The messages whose vectors are received into pooled memory.
_COMMITS = (Commit, SendPart)


class PeerVectors:
    """The memory of one session's request and reply, in the connection's wire format; pooled after `agree`."""

    def __init__(self, states: StateMemory | None = None) -> None:
        #: The wire format of vectors; None: they are not encoded.
        self._format: PeerFormat | None = None
        self._states = states
        self._center_pool: Pool | None = None
        self._encoded_pool = Pool(0, np.uint8)
        #: The buffer of each array of the current request, in the message's order; None: the array is not pooled.
        self._received: list[Buffer | None] = []
        #: Buffers that must not be reused until the reply is sent.
        self._sending: list[Buffer] = []
        #: The memory that both ends of the connection share; None: they share none.
        self.slots: SharedSlots | None = None
        #: The version of the driver's values that the peer was sent last.
        self.version_sent = 0

    def allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        """Return the memory for the next array of an arriving message."""
        if kind in _COMMITS and size:
            for pool in (self._center_pool, self._encoded_pool):
                if pool is not None and pool.size == size and pool.dtype == dtype:
                    buffer = pool.take()
                    self._received.append(buffer)
                    return buffer.array
        self._received.append(None)
        if kind is KeepOptimizer and self._states is not None:
            return self._states.array(size)
        return np.empty(size, dtype)

    @property
    def codec(self) -> Codec | None:
        """The codec of the wire format; None for float32."""
        return None if self._format is None else self._format.codec

    def agree(self, codec: Codec | None, pool: Pool) -> None:
        """Use ``pool`` and ``codec`` from now on; reset the format's state, such as the peer's vector."""
        self._format, self._center_pool = None if codec is None else PeerFormat(codec), pool
        self._encoded_pool = Pool(codec.nbytes if codec else 0, np.uint8)

    def take_parts(self, commit: Commit, pool: Pool) -> list[Buffer]:
        """Return the parts of ``commit``, whose shapes are right, as vectors of ``pool``; the caller owns them."""
        if self._format is not None:
            parts = [pool.take() for _ in commit.packed]
            self._format.decode(commit, [part.array for part in parts])
            return parts
        # A commit's parts are its first arrays.
        parts = [buffer or pool.take() for buffer in self._received[: len(commit.parts)]]
        for buffer, part in zip(parts, commit.parts, strict=True):
            if buffer.array is not part:  # it was received into memory that is not pooled
                buffer.array[...] = part
        self._received[: len(parts)] = [None] * len(parts)
        return parts

    def keep_rest(self) -> None:
        """Do not return the memory of the request's other arrays to the pools: they are used after the reply."""
        self._received = []

    def slot_sizes(self, center: Center) -> SlotSizes:
        """Return the layout of the memory that both ends of this connection may share."""
        packed = 0 if self.codec is None else self.codec.nbytes
        return SlotSizes(center.size, center.traits.parts, packed, row_elements(center.table_shapes))

    def rows_of_reply(self, shapes: Sequence[TableShape], wants: Sequence[Ids]) -> Sequence[Vector | None]:
        """Return shared memory for the rows of the next reply, table by table; None: no memory is shared."""
        if self.slots is None or not wants:
            return [None] * len(wants)
        return self.slots.rows_of_reply([ids.size * shape.width for ids, shape in zip(wants, shapes, strict=True)])

    def known_finite(self, commit: Commit) -> bool:
        """Return whether the vectors of ``commit`` are known to be finite, without checking each number."""
        codec = self.codec
        return codec is not None and all(map(codec.known_finite, commit.packed))

    def encode(self, reply: CenterReply, *, whole: bool) -> CenterReply:
        if self._format is None:
            return reply
        return self._format.encode(reply, lambda: self.hold_until_sent(self._encoded_pool.take()).array, whole=whole)

    def hold_until_sent(self, buffer: Buffer) -> Buffer:
        """Keep ``buffer``, which the reply contains, until `drop`."""
        self._sending.append(buffer)
        return buffer

    @property
    def in_use(self) -> int:
        return sum(buffer is not None for buffer in self._received) + len(self._sending)

    def drop(self) -> None:
        """Return all memory to the pools, after the reply is sent."""
        for buffer in self._received:
            if buffer is not None:
                buffer.drop()
        for buffer in self._sending:
            buffer.drop()
        self._received, self._sending = [], []


log = logging.getLogger(__name__)

#: Seconds after which a waiting thread checks whether its peer is still connected.
_LIVENESS = 1.0
#: The longest time between two checks, in seconds; after a longer time, this process was suspended.
_CHECK_SECONDS_MAX = 5.0


class ServerState(enum.Enum):
    """The states of a server."""

    #: The server answers all requests.
    RUNNING = "running"
    #: The job has failed: workers receive the fault, and the driver may still read.
    FAILED = "failed"
    #: A commit was applied in part: the driver starts another server from the latest snapshot.
    CORRUPT = "corrupt"
    #: The driver has said goodbye.
    RELEASED = "released"
    #: The server is closing before the driver has said goodbye; waits end at once.
    CLOSING = "closing"
    #: The server is closing, and the driver has said goodbye.
    CLOSED = "closed"


#: The allowed transitions.
TRANSITIONS: Mapping[ServerState, frozenset[ServerState]] = {
    ServerState.RUNNING: frozenset(
        {ServerState.FAILED, ServerState.CORRUPT, ServerState.RELEASED, ServerState.CLOSING}
    ),
    ServerState.FAILED: frozenset({ServerState.RELEASED, ServerState.CLOSING}),
    ServerState.CORRUPT: frozenset({ServerState.FAILED, ServerState.RELEASED, ServerState.CLOSING}),
    ServerState.RELEASED: frozenset({ServerState.CLOSED}),
    ServerState.CLOSING: frozenset({ServerState.CLOSED}),
    ServerState.CLOSED: frozenset(),
}


class JobCondition:
    """The lock around a job's state, the condition that signals its changes, and the state of the server."""

    def __init__(self, world: World = REAL) -> None:
        self.world = world
        self._changed = world.condition(world.reentrant_lock())
        #: Whether waiting threads must be woken when the lock is released.
        self._news = False
        self.state = ServerState.RUNNING
        #: The error that ended the job; None while none has.
        self.fault: Fault | None = None
        #: Why the center is corrupt: a commit was applied in part. None while it is sound.
        self.corruption: str | None = None

    @property
    def closing(self) -> bool:
        """Return whether the server is closing, so that waits must end."""
        return self.state in (ServerState.CLOSING, ServerState.CLOSED)

    @property
    def over(self) -> bool:
        return self.state in (ServerState.RELEASED, ServerState.CLOSED)

    def move(self, state: ServerState) -> None:
        """Change the state, and notify; raise LocalProtocolError unless `TRANSITIONS` allows it. The lock is held."""
        if state not in TRANSITIONS[self.state]:
            raise LocalProtocolError(f"a server that is {self.state.value} cannot become {state.value}")
        self.state = state
        self.notify_all()

    def __enter__(self) -> bool:
        return self._changed.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spread_news()
        self._changed.__exit__(kind, error, trace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified, for ``timeout`` seconds at most; the caller holds the lock."""
        self._spread_news()
        return self._changed.wait(timeout)

    def notify_all(self) -> None:
        """Wake all waiting threads, once the lock is released; the caller holds it."""
        self._news = True

    def _spread_news(self) -> None:
        # Once, and late: a thread that is woken while another one holds the lock only waits for the lock instead.
        if self._news:
            self._news = False
            self._changed.notify_all()

    def fail(self, fault: Fault) -> None:
        """End the job; only the first fault is reported. Takes the lock."""
        with self:
            if self.fault is None:
                self.fault = fault
                text = f"job ends: {ERRORS[fault.code].__name__}: {fault.message}"
                asked = ERRORS[fault.code] is JobStoppedError  # by the driver, which says why
                worker = None if fault.worker < 0 else fault.worker
                report(log, "failed", text, worker=worker, level=logging.INFO if asked else logging.WARNING)
                if ServerState.FAILED in TRANSITIONS[self.state]:  # else the server is already closing
                    self.move(ServerState.FAILED)
            self.notify_all()

    def report_corruption(self, reason: str) -> None:
        """Stop serving the center, so that the driver starts another server. Takes the lock."""
        with self:
            if self.corruption is None:
                self.corruption = reason
                report(log, "restart", "this server must be restarted: %s", reason)
                if self.state is ServerState.RUNNING:
                    self.move(ServerState.CORRUPT)
            self.notify_all()

    def release(self) -> None:
        """Note that the driver has said goodbye. Takes the lock."""
        with self:
            if not self.over:
                self.move(ServerState.CLOSED if self.closing else ServerState.RELEASED)

    def close(self) -> None:
        with self:
            if not self.closing:
                self.move(ServerState.CLOSED if self.over else ServerState.CLOSING)

    def require_running(self) -> None:
        """Raise JobStoppedError if the job has ended, ServerLostError if it may continue with another server."""
        if self.state is ServerState.RUNNING:
            return
        if self.corruption is not None:
            raise ServerLostError(
                f"the center of this server is corrupt; another one starts from the latest snapshot: {self.corruption}"
            )
        if self.fault is not None:
            raise JobStoppedError(f"the job was ended: {self.fault.message}")
        if self.closing and self.over:
            raise JobStoppedError("the job is over: its driver has closed the server")
        if self.closing:
            raise ServerLostError("the server is closing, and its job has not ended")

    def require_readable(self) -> None:
        """Raise as `require_running` does, unless the job has failed: the driver may still read the center then."""
        if self.state not in (ServerState.FAILED, ServerState.RELEASED) or self.corruption is not None:
            self.require_running()

    def wait_while_running(self, condition: Callable[[], bool], timeout: float, hung_up: Callable[[], bool]) -> bool:
        """Wait for ``condition``, under the lock; return False if it is still false after ``timeout`` seconds.

        Time in which this process was suspended does not count, because no other process could reach it.
        """
        deadline = self.world.monotonic() + timeout
        while not condition():
            self.require_running()
            looked_at = self.world.monotonic()
            if not self.wait_for_change(deadline, hung_up):
                return False
            deadline += max(0.0, self.world.monotonic() - looked_at - _CHECK_SECONDS_MAX)
        return True

    def wait_for_change(self, deadline: float, hung_up: Callable[[], bool]) -> bool:
        """Wait for a change, for `_LIVENESS` seconds at most; return False past ``deadline``."""
        remaining = deadline - self.world.monotonic()
        if remaining <= 0:
            return False
        self.wait(min(remaining, _LIVENESS))
        if hung_up():
            raise ServerLostError("the peer closed its connection while it waited for an answer")
        return True

    def require(
        self,
        condition: Callable[[], bool],
        timeout: float,
        hung_up: Callable[[], bool],
        what: Callable[[], str],
        worker: int | None = None,
    ) -> None:
        """Wait as `wait_while_running` does; raise a DeadlineError that names ``what()`` if that returns False."""
        if not self.wait_while_running(condition, timeout, hung_up):
            raise DeadlineError(f"waited {timeout:g} s for {what()}", worker=worker)


class Peer(Protocol):
    """A session, as the dispatcher sees it."""

    #: Worker and attempt whose lease was granted over this connection.
    lease: tuple[int, int] | None
    #: When the peer last sent something (`World.monotonic`), and whether it waits for a reply now.
    active_at: float
    asking: bool

    @property
    def vectors(self) -> PeerVectors:
        """The memory of the peer's requests and their replies."""

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end."""

    def share(self, slots: SharedSlots | None) -> None:
        """Exchange vectors through ``slots`` from now on; None: over the connection."""


class LeaseConnections(dict[int, Peer]):
    """The connection over which each partition's lease is or was last held; the job's lock guards it."""

    def __init__(self) -> None:
        super().__init__()
        #: The number of the newest connection over which each attempt (worker, attempt) has asked for a lease.
        self._newest: dict[tuple[int, int], int] = {}

    def announce(self, hello: Hello) -> None:
        """Record that an attempt requests a lease; requests over its older connections are stale from now on."""
        attempt = (hello.worker, hello.attempt)
        self._newest[attempt] = max(self._newest.get(attempt, 0), hello.connection)
        self.require_newest(hello)

    def clear(self) -> None:
        """Forget all connections, at the beginning of a micro-batch."""
        super().clear()
        self._newest.clear()

    def require_newest(self, hello: Hello) -> None:
        """Raise a LeaseLostError if the attempt has opened a newer connection."""
        newest = self._newest[hello.worker, hello.attempt]
        if hello.connection < newest:
            raise LeaseLostError(
                f"attempt {hello.attempt} has opened connection {newest}, which replaces its connection "
                f"{hello.connection}; requests over the older one are refused",
                worker=hello.worker,
            )

    def require_companions(self, center: Center, sender: int, companions: Sequence[Companion]) -> None:
        """Raise a RelayLostError unless each companion still holds its lease over the connection that it names."""
        for connection, commit in companions:
            worker, attempt = commit.worker, commit.attempt
            lease = center.leases.get(worker)
            holds = lease is not None and not lease.finished and lease.attempt == attempt
            if not holds or self._newest.get((worker, attempt)) != connection:
                raise RelayLostError(
                    f"a sum must only include workers with a lease. Received: attempt {attempt} of worker {worker}, "
                    f"whose connection {connection} is not the present one",
                    worker=sender,
                )

    def require(self, peer: Peer, worker: int) -> None:
        """Raise a LeaseLostError unless ``peer`` is the connection over which the partition's lease is held."""
        if self.get(worker) is not peer:
            raise LeaseLostError(
                "the worker now holds its lease over another connection; requests over this one are refused",
                worker=worker,
            )
