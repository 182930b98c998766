"""Reference-counted vectors from a pool.

Fresh memory of this size costs a page fault for every 4 KB, more than the arithmetic on it; so the server reuses
its vectors. A version of the center is shared by every reply that is still being sent, hence the count.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np

from distkeras.ps.rules.base import BLOCK, Chunk, Vector


class Buffer:
    """A vector with an owner count; it goes back to its pool when the last owner drops it.

    A holder that never drops its buffer keeps it from being reused, and that is all: no one else is given it.
    """

    __slots__ = ("_owners", "_pool", "array")

    def __init__(self, array: np.ndarray, pool: Pool) -> None:
        self.array = array
        self._pool = pool
        self._owners = 1

    def hold(self) -> Buffer:
        """One more owner."""
        with self._pool.lock:
            self._owners += 1
        return self

    def drop(self) -> None:
        """One owner less."""
        with self._pool.lock:
            self._owners -= 1
            if self._owners == 0:
                self._pool.free.append(self.array)


class Pool:
    """Vectors of one size and dtype.

    Args:
        size: elements of each.
        dtype: of each; float32 on a server.
    """

    def __init__(self, size: int, dtype: np.dtype | type = np.float32) -> None:
        self.size = size
        self.dtype = np.dtype(dtype)
        self.lock = threading.Lock()
        self.free: list[np.ndarray] = []
        #: Vectors ever made: what the pool costs in memory.
        self.made = 0

    def take(self) -> Buffer:
        """A vector with one owner and arbitrary contents."""
        with self.lock:
            if self.free:
                return Buffer(self.free.pop(), self)
            self.made += 1
        return Buffer(np.empty(self.size, self.dtype), self)

    def adopt(self, array: np.ndarray) -> Buffer:
        """``array`` (this size and dtype) as a buffer of the pool; the caller gives it up."""
        return Buffer(array, self)


class Chunks:
    """Cuts vectors of one size into consecutive stretches, with scratch memory for each.

    Args:
        size: elements of each vector.
        dtype: of each.
        block: elements of one stretch.
    """

    def __init__(self, size: int, dtype: np.dtype, block: int) -> None:
        self._size = size
        # Each call of numpy gives another thread its turn at the interpreter's lock: not for what fits a cache whole.
        self._block = block if size > 2 * block else max(block, size)
        self._scratch = np.empty(min(max(self._block, BLOCK), size), dtype)
        self._chunk = Chunk()

    def over(
        self,
        out: Vector,
        center: Vector,
        payload: tuple[Vector, ...] = (),
        model: tuple[Vector, ...] = (),
        worker: tuple[Vector, ...] = (),
        sent: Vector | None = None,
        *,
        block: int | None = None,
    ) -> Iterator[Chunk]:
        """The same `Chunk` object, moved over consecutive stretches of the vectors; see there what each is.

        Args:
            out, center, payload, model, worker: the chunk's.
            sent: the chunk's; None: the center.
            block: elements of one stretch, at most `BLOCK`; None: as many as was said at the beginning.
        """
        chunk, size, block = self._chunk, self._size, block or self._block
        sent = center if sent is None else sent
        if 0 < size <= block:
            chunk.out, chunk.center, chunk.payload, chunk.model = out, center, payload, model
            chunk.worker, chunk.sent, chunk.scratch = worker, sent, self._scratch[:size]
            yield chunk
            return
        for start in range(0, size, block):
            stretch = slice(start, min(start + block, size))
            chunk.center = center[stretch]
            chunk.payload = tuple([vector[stretch] for vector in payload])
            chunk.model = tuple([vector[stretch] for vector in model])
            chunk.worker = tuple([vector[stretch] for vector in worker])
            # Cut once: of a short kernel, the cutting is a good part.
            chunk.sent = chunk.center if sent is center else sent[stretch]
            if out is center:
                chunk.out = chunk.center
            else:
                chunk.out = chunk.payload[0] if payload and out is payload[0] else out[stretch]
            chunk.scratch = self._scratch[: stretch.stop - start]
            yield chunk

    def gap(self, center: Vector, sent: Vector) -> float:
        """``||center - sent|| / sqrt(size)``, added up in float64."""
        total = 0.0
        for start in range(0, self._size, BLOCK):
            stretch = slice(start, min(start + BLOCK, self._size))
            moved = np.subtract(center[stretch], sent[stretch], out=self._scratch[: stretch.stop - start])
            total += float(np.square(moved, dtype=np.float64).sum())
        return math.sqrt(total / max(1, self._size))
