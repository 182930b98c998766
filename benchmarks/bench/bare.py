"""The limit of an exchange that does what it is for: a server that receives, checks, adds and sends, and nothing else.

Each commit is added whole, and its reply is the center. No protocol, sessions, leases, ledger, clock or rule. What it
does, it does in the way that was found to be fastest for numpy and a thread a connection: a vector is received whole
into memory used before, checked in one pass outside the lock, and becomes the next version of the center, block by
block. Trusts every peer that connects: for measuring only.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from bench.echo import receive
from bench.processes import tune
from distkeras.ps.rules.base import BLOCK


def server(size: int) -> Callable[[socket.socket], None]:
    """For `processes.serving`: serves one center of ``size`` elements, float32, zeros at first."""
    return BareCenter(size).serve


class BareCenter:
    """The center.

    Args:
        size: elements.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: Of the center; separate from the pool's, so that no thread of the pool waits for an addition.
        self._lock = threading.Lock()
        self._pool = threading.Lock()
        self._free: list[_Version] = []
        self._current = _Version(np.zeros(size, np.float32))

    def serve(self, sock: socket.socket) -> None:
        """One connection: a vector in, the center with it out, until the peer hangs up or sends a NaN."""
        tune(sock)
        with sock, suppress(ConnectionError):
            while True:
                payload = self._take()
                if not receive(sock, payload.array.data.cast("B")):
                    return
                if not math.isfinite(float(np.dot(payload.array, payload.array))):
                    return
                self._add(payload)
                sock.sendall(payload.array.data)
                self._drop(payload)

    def _take(self) -> _Version:
        with self._pool:
            if self._free:
                return self._free.pop()
        return _Version(np.empty(self._size, np.float32))

    def _add(self, payload: _Version) -> None:
        """Makes ``payload`` the center with it, held by its connection and as the current one."""
        with self._lock:
            before, after = self._current.array, payload.array
            for start in range(0, self._size, BLOCK):
                block = after[start : start + BLOCK]
                np.add(before[start : start + BLOCK], block, out=block)
            payload.connections = 2  # no other thread has it yet
            last, self._current = self._current, payload
        self._drop(last)

    def _drop(self, version: _Version) -> None:
        with self._pool:
            version.connections -= 1
            if version.connections == 0:
                self._free.append(version)


class _Version:
    """A vector, and how many still need it as it is."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.connections = 1
