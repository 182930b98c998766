"""What all requests to a job's server share, under one lock: its life, its waits, and who is connected.

`JobCondition` is that lock, with the states of the server's life and the waits that have a deadline;
`LeaseConnections`, which it guards, has the connections over which the leases of the partitions are held.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from distkeras.ps.center.center import Center
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
from distkeras.ps.protocol.messages import Fault, Hello
from distkeras.ps.protocol.shared_slots import SharedSlots
from distkeras.ps.world.world import REAL, World

if TYPE_CHECKING:
    from distkeras.ps.server.dispatcher import PeerVectors

log = logging.getLogger(__name__)

#: Seconds after which a waiting thread checks whether its peer is still there.
_LIVENESS = 1.0
#: The longest time that one check takes, in seconds; after a longer one, this process has stood still.
_SLOWEST_LOOK = 5.0


class ServerState(enum.Enum):
    """The states of a server's life."""

    #: It answers all requests.
    RUNNING = "running"
    #: The job has failed: workers receive the fault, and the driver may still read.
    FAILED = "failed"
    #: A commit was applied in part: the driver starts another server from the latest snapshot.
    CORRUPT = "corrupt"
    #: The driver has said goodbye.
    RELEASED = "released"
    #: It closes before the driver has said goodbye; no thread is kept waiting.
    CLOSING = "closing"
    #: It closes after the driver has said goodbye.
    CLOSED = "closed"


#: What may follow each state.
FOLLOWS: Mapping[ServerState, frozenset[ServerState]] = {
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
    """The lock around a job's state, the condition for changes of it, and the state of the server's life."""

    def __init__(self, world: World = REAL) -> None:
        self.world = world
        self._changed = world.condition(world.reentrant_lock())
        self.state = ServerState.RUNNING
        #: The error that ended the job; None while none has.
        self.fault: Fault | None = None
        #: Why the center is corrupt: a commit was applied in part. None while it is sound.
        self.corruption: str | None = None

    @property
    def closing(self) -> bool:
        """Return whether the server closes, so that no thread is kept waiting."""
        return self.state in (ServerState.CLOSING, ServerState.CLOSED)

    @property
    def over(self) -> bool:
        """Return whether the driver has said goodbye."""
        return self.state in (ServerState.RELEASED, ServerState.CLOSED)

    def move(self, state: ServerState) -> None:
        """Change the state, and wake all who wait; LocalProtocolError unless `FOLLOWS` has it. The lock is held."""
        if state not in FOLLOWS[self.state]:
            raise LocalProtocolError(f"a server that is {self.state.value} cannot become {state.value}")
        self.state = state
        self.notify_all()

    def __enter__(self) -> bool:
        return self._changed.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changed.__exit__(kind, error, trace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified, for ``timeout`` seconds at most; the caller holds the lock."""
        return self._changed.wait(timeout)

    def notify_all(self) -> None:
        """Wake all who wait; the caller holds the lock."""
        self._changed.notify_all()

    def fail(self, fault: Fault) -> None:
        """End the job; only the first fault is reported. Takes the lock."""
        with self:
            if self.fault is None:
                self.fault = fault
                text = f"job ends: {ERRORS[fault.code].__name__}: {fault.message}"
                report(log, "failed", text, worker=None if fault.worker < 0 else fault.worker)
                if ServerState.FAILED in FOLLOWS[self.state]:  # else the server ends already
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
        """Keep no thread waiting from now on. Takes the lock."""
        with self:
            if not self.closing:
                self.move(ServerState.CLOSED if self.over else ServerState.CLOSING)

    def require_running(self) -> None:
        """Raise JobStoppedError if the job has ended, ServerLostError if it may go on with another server."""
        if self.corruption is not None:
            raise ServerLostError(
                f"the center of this server is corrupt; another one starts from the latest snapshot: {self.corruption}"
            )
        if self.fault is not None:
            raise JobStoppedError(f"the job was ended: {self.fault.message}")
        if self.closing and self.over:
            raise JobStoppedError("the job is over: its driver has closed the server")
        if self.closing:  # the job may go on with another server
            raise ServerLostError("the server is closing, and its job has not ended")

    def wait_while_running(self, condition: Callable[[], bool], timeout: float, hung_up: Callable[[], bool]) -> bool:
        """Wait for ``condition``, under the lock; return False if it did not come true in ``timeout`` seconds.

        Time in which this process stood still does not count, since no other process could reach it.

        Args:
            condition: called after each change.
            hung_up: returns whether the waiting peer has hung up.

        Raises:
            JobStoppedError: the job ended meanwhile.
            ServerLostError: the peer hung up, and receives no answer.
        """
        deadline = self.world.monotonic() + timeout
        while not condition():
            self.require_running()
            looked_at = self.world.monotonic()
            if not self.wait_for_news(deadline, hung_up):
                return False
            deadline += max(0.0, self.world.monotonic() - looked_at - _SLOWEST_LOOK)
        return True

    def wait_for_news(self, deadline: float, hung_up: Callable[[], bool]) -> bool:
        """Wait for a change, or a moment; return False past ``deadline``. ServerLostError if the peer hung up."""
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
        """Do what `wait_while_running` does, and raise a DeadlineError for ``what()`` where that returns False."""
        if not self.wait_while_running(condition, timeout, hung_up):
            raise DeadlineError(f"waited {timeout:g} s for {what()}", worker=worker)


class Peer(Protocol):
    """A session, as far as its answers need it."""

    #: Worker and attempt whose lease was given over this connection.
    lease: tuple[int, int] | None
    #: When the peer last gave a sign of life (`World.monotonic`), and whether it waits for an answer now.
    active_at: float
    asking: bool

    @property
    def vectors(self) -> PeerVectors:
        """The memory of its requests and their replies."""

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end."""

    def share(self, slots: SharedSlots | None) -> None:
        """Find and leave the vectors of messages in ``slots``; None: no longer."""


class LeaseConnections(dict[int, Peer]):
    """The connection that holds each partition's lease, or held it last; the job's lock guards it."""

    def __init__(self) -> None:
        super().__init__()
        #: The number of the newest connection over which each attempt (worker, attempt) has asked for a lease.
        self._newest: dict[tuple[int, int], int] = {}

    def announce(self, hello: Hello) -> None:
        """Note that an attempt asks for a lease; what comes over its older connections is late from now on.

        Raises:
            LeaseLostError: this one is late itself.
        """
        attempt = (hello.worker, hello.attempt)
        self._newest[attempt] = max(self._newest.get(attempt, 0), hello.connection)
        self.require_newest(hello)

    def clear(self) -> None:
        """Forget all attempts: none of them gets a lease any more."""
        super().clear()
        self._newest.clear()

    def require_newest(self, hello: Hello) -> None:
        """Raise a LeaseLostError if the attempt has opened a newer connection since."""
        newest = self._newest[hello.worker, hello.attempt]
        if hello.connection < newest:
            raise LeaseLostError(
                f"attempt {hello.attempt} has opened connection {newest}, which replaces its connection "
                f"{hello.connection}; requests over the older one are refused",
                worker=hello.worker,
            )

    def require_companions(self, center: Center, sender: int, companions: Sequence[Companion]) -> None:
        """Raise a RelayLostError unless all of them hold their leases over the connections that they had."""
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
        """Raise a LeaseLostError unless ``peer`` is the connection that holds the partition's lease.

        The same attempt may have come back over another one.
        """
        if self.get(worker) is not peer:
            raise LeaseLostError(
                "the worker now holds its lease over another connection; requests over this one are refused",
                worker=worker,
            )
