"""Checks, under any fault, of the numbers that drivers set for the workers."""

from __future__ import annotations

import numpy as np

from distkeras.ps.center.center import Center
from simulation.scheduler import Finding, Process

#: The place of the number that drivers set; it is not the learning rate, from which the center is computed.
PLACE = 1


def value_in(rows: np.ndarray) -> float:
    """Return the number in rows of place and value; 0 if it was not set."""
    return float(dict(rows.tolist()).get(PLACE, 0.0))


class ValueWatch:
    """A record of the numbers that drivers have set, which rise."""

    def __init__(self) -> None:
        self._latest = 0.0
        #: The number that servers have promised to keep.
        self._kept = 0.0
        #: By driver and incarnation of its server, the clocks before which it set a number, and the numbers.
        self._set: dict[tuple[Process, int], list[tuple[int, float]]] = {}

    def next(self) -> np.ndarray:
        """Return the rows of a higher number."""
        self._latest += 1.0
        return np.array([[PLACE, self._latest]])

    def note(self, server: tuple[Process, int], clock: int, value: float) -> None:
        """Record that a server has acknowledged ``value``."""
        self._set.setdefault(server, []).append((clock, value))
        self._kept = max(self._kept, value)

    def forget(self) -> None:
        """Record that a snapshot was damaged, so that numbers may be lost."""
        self._kept = 0.0

    def require_kept(self, center: Center) -> None:
        """Check that a server has what was acknowledged."""
        value = value_in(center.values.current.rows)
        if value < self._kept:
            raise Finding("values", f"{self._kept} must outlive its server, as was promised. Received: {value}")

    def least(self, server: tuple[Process, int], clock: int) -> float:
        """Return the number with which a worker must take its steps after a reply at ``clock``."""
        return max((value for before, value in self._set.get(server, ()) if before < clock), default=0.0)
