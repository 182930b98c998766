"""Tables of the center: rows that commits name, and that change in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.rules.base import Chunk, Vector


class Table:
    """One table of the center; its caller holds the center's lock around every call.

    Args:
        shape: its name, rows and width.
        array: the initial rows, float32 ``(rows, width)``, which it takes over; None: zeros.
    """

    def __init__(self, shape: TableShape, array: np.ndarray | None = None) -> None:
        self.shape = shape
        self.array = np.zeros((shape.rows, shape.width), np.float32) if array is None else array
        self._changed = np.zeros(shape.rows, np.bool_)
        self._scratch = np.empty(0, np.float32)

    def apply(self, ids: Ids, moved: Vector, kernel: Callable[[Chunk], object]) -> None:
        """Move the rows ``ids``, which are unique, by a rule's ``kernel``; ``moved`` is flat, and is overwritten."""
        if not ids.size:
            return
        if self._scratch.size < moved.size:
            self._scratch = np.empty(moved.size, np.float32)
        chunk = Chunk()
        chunk.out, chunk.payload = moved, (moved,)
        chunk.center = chunk.sent = self.gather(ids)
        chunk.model, chunk.worker, chunk.scratch = (), (), self._scratch[: moved.size]
        kernel(chunk)
        self.array[ids] = moved.reshape(-1, self.shape.width)
        self._changed[ids] = True

    def gather(self, ids: Ids) -> Vector:
        """Return a copy of the rows ``ids``, flat."""
        return np.take(self.array, ids, axis=0).reshape(-1)

    def take_changed(self) -> Ids:
        """Return the rows that have changed since the last call."""
        changed = np.flatnonzero(self._changed)
        self._changed[changed] = False
        return changed

    def put_back(self, ids: Ids) -> None:
        """Count ``ids`` as changed again: what was to be done with them has failed."""
        self._changed[ids] = True
