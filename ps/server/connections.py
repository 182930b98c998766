"""The connections over which the leases of a job's partitions are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from distkeras.ps.center.center import Center
from distkeras.ps.errors import LeaseLostError, RelayLostError
from distkeras.ps.protocol.companions import Companion
from distkeras.ps.protocol.messages import Hello
from distkeras.ps.protocol.shared_slots import SharedSlots

if TYPE_CHECKING:
    from distkeras.ps.server.dispatcher import PeerVectors


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
