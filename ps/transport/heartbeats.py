"""Signs of life of a worker that computes: a lease lasts as long as its holder lives, whatever a window takes."""

from __future__ import annotations

from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.messages import Ack, Heartbeat
from distkeras.ps.transport.channel import Channel
from distkeras.ps.world.world import Lock

#: How many heartbeats a lease lasts: some may be late.
BEATS_A_LEASE = 4


class Heartbeats:
    """Sends a `Heartbeat` at an interval from a thread of its own, while no request is under way on the channel.

    A peer that is owed an answer is alive to the server, so a request under way stands for the heartbeat. Where the
    connection is found dead it is hung up: the next request finds that, and connects again.

    Args:
        channel: of one connection, whose worker has joined.
        lock: held by whoever has a request under way on it.
        interval: seconds.
        timeout: seconds for an answer.
        name: of the thread.
    """

    def __init__(self, channel: Channel, lock: Lock, *, interval: float, timeout: float, name: str) -> None:
        self._channel = channel
        self._lock = lock
        self._interval = interval
        self._timeout = timeout
        self._stopped = channel.world.event()
        self._thread = channel.world.thread(self._run, name)

    def start(self) -> None:
        """Begins, an interval from now."""
        self._thread.start()

    def stop(self) -> None:
        """Sends no more; the thread ends by itself."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._send_heartbeat():
                        self._channel.hang_up()  # before anybody's next request, which finds it so
                        return
                finally:
                    self._lock.release()

    def _send_heartbeat(self) -> bool:
        if self._stopped.is_set():
            return True
        try:
            self._channel.send(Heartbeat())
            return isinstance(self._channel.receive(self._timeout, "the server's answer to a Heartbeat"), Ack)
        except (DistkerasError, OSError):
            return False
