"""Which connection speaks for each partition: an attempt may have several, of which only the newest is heard.

A connection is known to be dead at its two ends at different times. What an attempt had sent over an older one may
arrive after it has come back over a newer one, and been told where it stands: answered then, a late pull would move the
clock that its staleness counts from.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from distkeras.ps.errors import LeaseLostError
from distkeras.ps.protocol.messages import Hello
from distkeras.ps.server.peer_vectors import PeerVectors


class Peer(Protocol):
    """A session, as far as its answers need it."""

    #: Worker and attempt whose lease was given over this connection.
    lease: tuple[int, int] | None
    #: When the peer last gave a sign of life (`World.monotonic`), and whether it is owed an answer now.
    heard_at: float
    asking: bool

    @property
    def vectors(self) -> PeerVectors:
        """Of its requests and their replies."""

    def hung_up(self) -> bool:
        """Whether the peer has closed its end."""


class Holders(dict[int, Peer]):
    """Who holds each partition's lease, or held it last; the job's lock guards it."""

    def __init__(self) -> None:
        super().__init__()
        #: The number of the newest connection over which each attempt (worker, attempt) has asked for a lease.
        self._newest: dict[tuple[int, int], int] = {}

    def announce(self, hello: Hello) -> None:
        """An attempt asks for a lease; what comes over its older connections is late from now on.

        Raises:
            LeaseLostError: this one is late itself.
        """
        attempt = (hello.worker, hello.attempt)
        self._newest[attempt] = max(self._newest.get(attempt, 0), hello.connection)
        self.require_newest(hello)

    def require_newest(self, hello: Hello) -> None:
        """Whether the attempt has not asked over a newer connection since.

        Raises:
            LeaseLostError: it has.
        """
        newest = self._newest[hello.worker, hello.attempt]
        if hello.connection < newest:
            raise LeaseLostError(
                f"attempt {hello.attempt} speaks over its connection {newest}. "
                f"Received: a Hello over connection {hello.connection}",
                worker=hello.worker,
            )

    def require(self, peer: Peer, worker: int) -> None:
        """Whether ``peer`` is the connection that the partition's lease was given over.

        Raises:
            LeaseLostError: it is not: the same attempt may have come back over another one.
        """
        if self.get(worker) is not peer:
            raise LeaseLostError(
                "the lease must have been given over this connection. Received: a request over another one",
                worker=worker,
            )

    def asking(self) -> Collection[int]:
        """The partitions whose holders are owed an answer."""
        return {worker for worker, peer in self.items() if peer.asking}
