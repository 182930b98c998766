"""Reference-counted vectors from a pool.

New memory costs a page fault for every 4 KB, more than the arithmetic on it, so the server reuses its vectors. They
are counted because all replies in flight share a version of the center.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np

from distkeras.ps.rules.base import BLOCK, Chunk, Vector


class Buffer:
    """A vector with a reference count; the last owner's `drop` returns it to its pool, and it is reused."""

    __slots__ = ("_owners", "_pool", "array")

    def __init__(self, array: np.ndarray, pool: Pool) -> None:
        self.array = array
        self._pool = pool
        self._owners = 1

    def hold(self) -> Buffer:
        """Add an owner; return this buffer."""
        with self._pool.lock:
            self._owners += 1
        return self

    def drop(self) -> None:
        """Remove an owner; the last one returns the vector to the pool."""
        with self._pool.lock:
            self._owners -= 1
            if self._owners == 0:
                self._pool.free.append(self.array)


class Pool:
    """Vectors of one size and dtype, float32 on a server."""

    def __init__(self, size: int, dtype: np.dtype | type = np.float32) -> None:
        self.size = size
        self.dtype = np.dtype(dtype)
        self.lock = threading.Lock()
        self.free: list[np.ndarray] = []
        #: The number of vectors that were allocated.
        self.made = 0

    def take(self) -> Buffer:
        """Return a vector with one owner and arbitrary contents."""
        with self.lock:
            if self.free:
                return Buffer(self.free.pop(), self)
            self.made += 1
        return Buffer(np.empty(self.size, self.dtype), self)

    def adopt(self, array: np.ndarray) -> Buffer:
        """Return ``array``, of the pool's size and dtype, as a buffer; the pool takes it over."""
        return Buffer(array, self)


class ViewAhead:
    """At most one version that was computed with a commit, ahead of its reply; stale once the center changes."""

    def __init__(self) -> None:
        self._made_for: tuple[int, int] | None = None
        self._version: Buffer | None = None

    def put(self, worker: int, clock: int, version: Buffer) -> None:
        """Take over ``version``, which ``worker`` may be sent while the clock is ``clock``."""
        self.forget()
        self._made_for, self._version = (worker, clock), version

    def take(self, worker: int, clock: int) -> Buffer | None:
        """Return the version, with its ownership, if it is for ``worker`` at ``clock``; else None."""
        if self._made_for != (worker, clock):
            return None
        version, self._version, self._made_for = self._version, None, None
        return version

    def forget(self) -> None:
        """Return an unused version to its pool."""
        if self._version is not None:
            self._version.drop()
        self._version = self._made_for = None


class Chunks:
    """Cuts vectors of one size into consecutive chunks, with scratch memory."""

    def __init__(self, size: int, dtype: np.dtype, block: int) -> None:
        self._size = size
        # Each call of numpy may lose the interpreter's lock to another thread: vectors that fit a cache are not cut.
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
        """Yield one `Chunk` object repeatedly, each time with the next part of the vectors.

        ``sent`` is the center by default; ``block``, elements of a chunk, is at most `BLOCK`.
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
            # Equal vectors are cut once: slicing takes a considerable part of the time of a short kernel.
            chunk.sent = chunk.center if sent is center else sent[stretch]
            if out is center:
                chunk.out = chunk.center
            else:
                chunk.out = chunk.payload[0] if payload and out is payload[0] else out[stretch]
            chunk.scratch = self._scratch[: stretch.stop - start]
            yield chunk

    def gap(self, center: Vector, sent: Vector) -> float:
        """Return ``||center - sent|| / sqrt(size)``, summed in float64."""
        total = 0.0
        for start in range(0, self._size, BLOCK):
            stretch = slice(start, min(start + BLOCK, self._size))
            moved = np.subtract(center[stretch], sent[stretch], out=self._scratch[: stretch.stop - start])
            total += float(np.square(moved, dtype=np.float64).sum())
        return math.sqrt(total / max(1, self._size))
