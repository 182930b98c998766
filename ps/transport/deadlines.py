"""The deadlines of waits, and the pauses between attempts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from distkeras.ps.validate import check_field, require_number
from distkeras.ps.world.world import REAL, World


@dataclass(frozen=True)
class Deadlines:
    """The longest duration of each wait, in seconds.

    Args:
        connect: time to connect to the server's port.
        handshake: time from a connection to its authentication.
        frame: time from the first byte of a frame to the last.
        publish: a worker's wait until the driver has published the center.
        gather: a worker's wait until all workers have joined, if the rule or the scheduler needs all of them. At a
            restarted server, it lasts ``reply`` if that is longer, since the others may still compute their windows.
        reply: a worker's wait for a round, a slower worker, or a busy server.
        lease: silence of a connected holder of a partition after which another attempt takes over. A holder that
            lives is never silent that long: it sends heartbeats while it computes.
        silence: time between two requests of a connected worker, and between two saved groups of all tasks of
            `Trainer.train_groups`.
        standstill: time without an answer to the driver after which the server's process is killed and restarted from
            its checkpoint. Without a checkpoint, the job ends after ``reply`` seconds without an answer.
        reconnect: time for a worker's attempts to reach the server again after a lost connection.
        rows: a worker's wait for Spark's next rows, which other stages may have to compute first.
        close: time for the server's threads to end.

    Raises:
        ConfigurationError: A deadline is not a finite number above 0.
    """

    connect: float = 20.0
    handshake: float = 10.0
    frame: float = 120.0
    publish: float = 60.0
    gather: float = 60.0
    reply: float = 600.0
    lease: float = 120.0
    silence: float = 24 * 3600.0
    standstill: float = 120.0
    reconnect: float = 30.0
    rows: float = 3600.0
    close: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(self, field.name, require_number)

    def after_restart(self) -> Deadlines:
        """Return the deadlines of a restarted server.

        A worker that computes does not join it before the end of its window, which another worker may wait for as long
        as for a round.
        """
        return dataclasses.replace(self, gather=max(self.gather, self.reply))


class Backoff:
    """Pauses that double from ``first`` to ``longest`` seconds, until a deadline ``timeout`` seconds from now.

    Each is random, between half and all of its length, so that callers that failed together do not retry together.
    """

    def __init__(
        self,
        *,
        first: float = 0.05,
        longest: float,
        timeout: float = math.inf,
        sleep: Callable[[float], object] | None = None,
        world: World = REAL,
    ) -> None:
        self._pause, self._longest = first, longest
        self._sleep, self._world = sleep or world.sleep, world
        self._timeout, self._began = timeout, world.monotonic()
        self._deadline = self._began + timeout

    def restart(self, most: float) -> None:
        """Restart the deadline; it passes at the latest ``most`` seconds after the construction."""
        self._deadline = min(self._world.monotonic() + self._timeout, self._began + most)

    def pause(self) -> bool:
        """Sleep before the next attempt; return False, at once, if the deadline would pass meanwhile."""
        if self._world.monotonic() + self._pause > self._deadline:
            return False
        self._sleep(self._pause * self._world.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, self._longest)
        return True
