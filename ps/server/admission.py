"""Admission control: the connections that are accepted, and the refused ones.

A connection is pending until it has proved that it holds the job's key; then it is admitted as a peer. Rules:

1. The number of pending connections is bounded, and each has a deadline. If the bound is exceeded, the server hangs up
   on the oldest connection of the address that has the most. If that connection is very new, the next one waits in the
   listener's queue for a moment. So a flood from one address delays that address first, and a worker is admitted when
   it dials again.
2. The number of peers is bounded. A further one is disconnected before its handshake ends, and dials again.
3. A refused address is logged once, regardless of how many connections it opens, and remembered, up to a bound.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.events import report
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

#: The age in seconds below which a pending connection is not evicted.
_GRACE = 0.1
#: Seconds between two evictions.
_EVICTION_PAUSE = 1.0


class Refusal(NamedTuple):
    """An address's first refusal: seconds since the epoch, the host, and why."""

    time: float
    address: str
    reason: str


@dataclass(eq=False)
class PendingConnection:
    """One connection, as admission control sees it."""

    #: The peer's host.
    address: str
    #: Ends the connection, from any thread.
    hang_up: Callable[[], None]
    #: When it arrived, and when it was evicted to make room (`World.monotonic`).
    arrived: float
    evicted: float | None = None
    #: Whether it is admitted as a peer.
    admitted: bool = False


class AdmissionControl:
    """Counts connections; thread-safe. Each of ``pending_max`` handshakes at a time costs the server a thread."""

    def __init__(
        self, *, pending_max: int = 256, peers_max: int = 4096, addresses_max: int = 1024, world: World = REAL
    ) -> None:
        self.pending_max, self.peers_max, self.addresses_max = pending_max, peers_max, addresses_max
        self._world = world
        self._changed = world.condition()
        self._pending: dict[PendingConnection, None] = {}  # the oldest first
        self._peers = 0
        self._first: dict[tuple[str, bool], Refusal] = {}
        #: The number of refused connections.
        self.refused = 0

    @property
    def refusals(self) -> list[Refusal]:
        """The first refusals of each address, oldest first: one of a pending connection, one of a peer."""
        with self._changed:
            return list(self._first.values())

    @property
    def pending(self) -> list[PendingConnection]:
        """Connections in their handshake, the oldest first."""
        with self._changed:
            return list(self._pending)

    def arrive(self, address: str, hang_up: Callable[[], None]) -> PendingConnection:
        """Wait for room for a connection from ``address``; ``hang_up`` ends it, and its thread then calls `leave`."""
        pending = PendingConnection(address, hang_up, self._world.monotonic())
        with self._changed:
            while len(self._pending) >= self.pending_max:
                self._changed.wait(self._evict_one())
            self._pending[pending] = None
        return pending

    def _evict_one(self) -> float:
        """Evict a pending connection, unless it is too early; return the seconds until the next attempt."""
        now = self._world.monotonic()
        if any(pending.evicted is not None and now - pending.evicted < _EVICTION_PAUSE for pending in self._pending):
            return _EVICTION_PAUSE
        candidates = [pending for pending in self._pending if pending.evicted is None]
        if not candidates:
            return _EVICTION_PAUSE
        counts = Counter(pending.address for pending in candidates)
        most = max(counts.values())
        oldest = next(pending for pending in candidates if counts[pending.address] == most)
        if now - oldest.arrived < _GRACE:
            return oldest.arrived + _GRACE - now
        self._evict(oldest, now)
        return _EVICTION_PAUSE

    def _evict(self, pending: PendingConnection, now: float) -> None:
        pending.evicted = now
        pending.hang_up()

    def evict_oldest(self) -> None:
        """Evict the oldest pending connection and wait a moment, because the system cannot accept another one."""
        with self._changed:
            oldest = next((pending for pending in self._pending if pending.evicted is None), None)
            if oldest is not None:
                self._evict(oldest, self._world.monotonic())
            self._changed.wait(_GRACE)

    def admit(self, pending: PendingConnection) -> None:
        """Admit an authenticated connection as a peer; raise RemoteProtocolError if there is no room for it."""
        with self._changed:
            if self._peers >= self.peers_max:
                raise RemoteProtocolError(f"the server has {self.peers_max} peers, and accepts no further one")
            if pending.evicted is not None:
                raise RemoteProtocolError("the server closed the connection, to make room for newer ones")
            del self._pending[pending]
            pending.admitted = True
            self._peers += 1
            self._changed.notify_all()

    def leave(self, pending: PendingConnection) -> None:
        with self._changed:
            if pending.admitted:
                self._peers -= 1
            else:
                self._pending.pop(pending, None)
            self._changed.notify_all()

    def refuse(self, pending: PendingConnection, error: Exception) -> None:
        """Record and report, once per address, that a connection was ended because of ``error``."""
        reason = str(error) if pending.evicted is None else "it made room for newer connections"
        key = (pending.address, pending.admitted)
        with self._changed:
            self.refused += 1
            if key in self._first or len(self._first) > self.addresses_max:
                return
            full = len(self._first) == self.addresses_max
            address = "further addresses" if full else pending.address
            self._first[("", False) if full else key] = Refusal(self._world.time(), address, reason)
        report(log, "refused", "a connection from %s is refused: %s (logged once per address)", address, reason)
