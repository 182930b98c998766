"""Reference-counted vectors from a pool.

Fresh memory of this size costs a page fault for every 4 KB, more than the arithmetic on it; so the server reuses
its vectors. A version of the center is shared by every reply that is still being sent, hence the count.
"""

from __future__ import annotations

import threading

import numpy as np


class Buffer:
    """A vector with an owner count; it goes back to its pool when the last owner drops it.

    Who forgets to drop costs a buffer its reuse, never its safety: nobody else is given it.
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
