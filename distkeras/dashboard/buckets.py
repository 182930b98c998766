"""Sums over time in bounded memory, however long a job is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: Seconds of the narrowest bucket.
_NARROWEST = 1.0
#: Most bins of a histogram.
_BINS = 64


class Buckets:
    """Sums of several quantities, each with some rows, in buckets of time of one width.

    There are at most ``most`` buckets; when time goes beyond the last one, neighbors become one and the width doubles.

    Args:
        rows: of each quantity, by its name.
        most: buckets; even.

    Attributes:
        width: seconds of a bucket.
        used: buckets up to the latest that has something.
        changed: the first bucket that has changed since `settle`; ``used`` where none has.
        folded: the width has changed since `settle`.
    """

    def __init__(self, rows: Mapping[str, int], most: int) -> None:
        self._sums = {name: np.zeros((count, most)) for name, count in rows.items()}
        self._most = most
        self.width = _NARROWEST
        self.used = self.changed = 0
        self.folded = False

    def place(self, seconds: np.ndarray) -> np.ndarray:
        """The bucket of each of some times, float64 seconds of at least 0; makes room for the latest one."""
        if not len(seconds):
            return np.zeros(0, np.int64)
        while seconds.max() >= self.width * self._most:
            self._fold()
        places = (seconds / self.width).astype(np.int64)
        self.used = max(self.used, int(places.max()) + 1)
        self.changed = min(self.changed, int(places.min()))
        return places

    def add(self, name: str, rows: np.ndarray | int, places: np.ndarray, values: np.ndarray | float) -> None:
        """Adds to the buckets that `place` has given."""
        cells: Any = (rows, places)
        np.add.at(self._sums[name], cells, values)

    def sums(self, name: str, first: int = 0) -> np.ndarray:
        """Those of a quantity, float64 ``(rows, used - first)``."""
        return self._sums[name][:, first : self.used]

    def settle(self) -> None:
        """Mark all that there is as sent."""
        self.changed, self.folded = self.used, False

    def _fold(self) -> None:
        half = self._most // 2
        for sums in self._sums.values():
            sums[:, :half] = sums.reshape(len(sums), half, 2).sum(axis=2)
            sums[:, half:] = 0.0
        self.width *= 2.0
        self.used, self.changed, self.folded = (self.used + 1) // 2, 0, True


class Histogram:
    """How often each whole number from 0 on has come, in at most 64 bins, whose width doubles.

    Attributes:
        width: numbers in a bin.
        counts: int64, one a bin.
    """

    def __init__(self) -> None:
        self.width = 1
        self.counts = np.zeros(_BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts some numbers, of int64."""
        if not len(values):
            return
        while values.max() >= self.width * _BINS:
            self.counts[: _BINS // 2] = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts[_BINS // 2 :] = 0
            self.width *= 2
        self.counts += np.bincount(np.maximum(values, 0) // self.width, minlength=_BINS)
