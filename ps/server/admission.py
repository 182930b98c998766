"""Who may connect, and who was refused.

A stranger is a connection that has not proved yet that it holds the job's key; afterwards it is a peer. Rules:

1. There is room for so many strangers, and each has a deadline. When one more comes, the oldest stranger of the
   address that has the most of them is hung up on, unless it came only this moment: then the newcomer waits for a
   moment in the listener's queue. So a crowd is in its own way first, and an honest worker that was in a crowd's way
   gets through when it dials again.
2. There is room for so many peers. One more is hung up on before it is told that its proof was good, and dials again.
3. A refused address is logged once, whatever number of connections it opens, and remembered, up to a bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.events import report

log = logging.getLogger(__name__)

#: Seconds in which no stranger is hung up on for a newer one.
_GRACE = 0.1
#: Seconds that one who was hung up on has until the next one is.
_ENDING = 1.0


class Refusal(NamedTuple):
    """An address's first refusal: seconds since the epoch, the host, and why."""

    time: float
    address: str
    reason: str


class PendingConnection:
    """One connection at the gate."""

    __slots__ = ("address", "arrived", "dropped", "hang_up", "known")

    def __init__(self, address: str, hang_up: Callable[[], None]) -> None:
        self.address = address
        self.hang_up = hang_up
        self.arrived = time.monotonic()
        #: When it was hung up on, to make room.
        self.dropped: float | None = None
        #: Whether it is a peer.
        self.known = False


class AdmissionControl:
    """Counts connections; thread-safe.

    Args:
        strangers: connections in their handshake at a time; each costs the server a thread.
        peers: authenticated connections at a time.
        addresses: refused addresses that are remembered.
    """

    def __init__(self, *, strangers: int = 256, peers: int = 4096, addresses: int = 1024) -> None:
        self.strangers, self.peers, self.addresses = strangers, peers, addresses
        self._changed = threading.Condition()
        self._strangers: dict[PendingConnection, None] = {}  # the oldest first
        self._peers = 0
        self._first: dict[tuple[str, bool], Refusal] = {}
        #: Refused connections in all.
        self.refused = 0

    @property
    def refusals(self) -> list[Refusal]:
        """The first refusal of each address, oldest first; one for it as a stranger, one as a peer."""
        with self._changed:
            return list(self._first.values())

    def arrive(self, address: str, hang_up: Callable[[], None]) -> PendingConnection:
        """A stranger connected; returns when there is room for it.

        Args:
            address: its host.
            hang_up: ends its connection, from any thread; its own thread then calls `leave`.
        """
        visit = PendingConnection(address, hang_up)
        with self._changed:
            while len(self._strangers) >= self.strangers:
                self._changed.wait(self._make_room())
            self._strangers[visit] = None
        return visit

    def _make_room(self) -> float:
        """Hangs up on a stranger, if it is time to; returns the seconds after which to look again."""
        now = time.monotonic()
        if any(visit.dropped is not None and now - visit.dropped < _ENDING for visit in self._strangers):
            return _ENDING
        staying = [visit for visit in self._strangers if visit.dropped is None]
        if not staying:
            return _ENDING
        crowds = Counter(visit.address for visit in staying)
        most = max(crowds.values())
        oldest = next(visit for visit in staying if crowds[visit.address] == most)
        if now - oldest.arrived < _GRACE:
            return oldest.arrived + _GRACE - now
        self._drop(oldest, now)
        return _ENDING

    def _drop(self, visit: PendingConnection, now: float) -> None:
        visit.dropped = now
        visit.hang_up()

    def relieve(self) -> None:
        """The system has no room for a connection: hangs up on the oldest stranger and waits a moment for its end."""
        with self._changed:
            oldest = next((visit for visit in self._strangers if visit.dropped is None), None)
            if oldest is not None:
                self._drop(oldest, time.monotonic())
            self._changed.wait(_GRACE)

    def admit(self, visit: PendingConnection) -> None:
        """The stranger proved the key.

        Raises:
            RemoteProtocolError: there is no room for another peer, or it was just hung up on.
        """
        with self._changed:
            if self._peers >= self.peers:
                raise RemoteProtocolError(f"a server must have at most {self.peers} peers. Received: one more")
            if visit.dropped is not None:
                raise RemoteProtocolError("the connection must still be there. Received: its end")
            del self._strangers[visit]
            visit.known = True
            self._peers += 1
            self._changed.notify_all()

    def leave(self, visit: PendingConnection) -> None:
        """The connection has ended."""
        with self._changed:
            if visit.known:
                self._peers -= 1
            else:
                self._strangers.pop(visit, None)
            self._changed.notify_all()

    def refuse(self, visit: PendingConnection, error: Exception) -> None:
        """Writes down that the connection was ended because of ``error``."""
        reason = str(error) if visit.dropped is None else "it made room for newer connections"
        key = (visit.address, visit.known)
        with self._changed:
            self.refused += 1
            if key in self._first or len(self._first) > self.addresses:
                return
            full = len(self._first) == self.addresses
            address = "further addresses" if full else visit.address
            self._first[("", False) if full else key] = Refusal(time.time(), address, reason)
        report(log, "refused", "refused %s: %s; this is said once", address, reason)
