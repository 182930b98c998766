"""Growing pauses between the attempts at something that fails for a while."""

from __future__ import annotations

import math
from collections.abc import Callable

from distkeras.ps.world.world import REAL, World


class Backoff:
    """Pauses that double from ``first`` to ``longest``, until a deadline that begins to run now.

    Each pause is drawn from its upper half, so that what failed for many at the same moment is not tried again by all
    of them at the same moment.

    Args:
        first: the first pause, in seconds.
        longest: the longest pause, in seconds.
        timeout: seconds until the deadline.
        sleep: waits for so many seconds, or less; None: the world's.
        world: its clock.
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

    def begin_anew(self, most: float) -> None:
        """The deadline begins to run again, and passes ``most`` seconds after the very beginning at the latest."""
        self._deadline = min(self._world.monotonic() + self._timeout, self._began + most)

    def pause(self) -> bool:
        """Sleeps before the next attempt; False, at once, where the deadline would pass meanwhile."""
        if self._world.monotonic() + self._pause > self._deadline:
            return False
        self._sleep(self._pause * self._world.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, self._longest)
        return True
