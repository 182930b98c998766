"""The limit of an exchange: a server that only receives, checks, adds and sends.

Each commit is added as a whole, and its reply is the center. There is no protocol, session, lease, ledger, clock or
rule. The implementation is the fastest one found for numpy with a thread per connection: a vector is received as a
whole into reused memory, checked in one pass outside the lock, and becomes the next version of the center, block by
block. It trusts every peer that connects: use it for measurements only.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from bench.processes import Where, tune
from distkeras.ps.rules.base import BLOCK


def server(size: int) -> Callable[[socket.socket], None]:
    """Return a function for `processes.serving`; it serves one center of ``size`` elements, float32, zeros at first."""
    return BareCenter(size).serve


def receive(sock: socket.socket, buffer: memoryview) -> bool:
    """Fill ``buffer``, and return whether that succeeded; False if the peer has disconnected."""
    # One system call for all bytes: on a busy machine up to a quarter faster than several.
    return sock.recv_into(buffer, 0, socket.MSG_WAITALL) == len(buffer)


class BareClient:
    """A client that sends a vector of ``size`` elements, float32, and receives the center."""

    def __init__(self, number: int, address: Where, size: int) -> None:
        self._sock = tune(socket.create_connection(address))
        self._sent = np.full(size, 1e-3, np.float32).data.cast("B")
        self._received = np.empty(size, np.float32).data.cast("B")

    def exchange(self) -> None:
        """Send the vector, and wait for the complete answer."""
        self._sock.sendall(self._sent)
        if not receive(self._sock, self._received):
            raise EOFError("the server closed the connection")


class BareCenter:
    """The center, which has ``size`` elements."""

    def __init__(self, size: int) -> None:
        self._size = size
        #: The center's lock; separate from the pool's, so that no use of the pool waits for an addition.
        self._lock = threading.Lock()
        self._pool = threading.Lock()
        self._free: list[_Version] = []
        self._current = _Version(np.zeros(size, np.float32))

    def serve(self, sock: socket.socket) -> None:
        """Serve one connection: add each vector, and send the center, until the peer disconnects or sends a NaN."""
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
        """Add the center to ``payload``, which becomes the current version; its connection and the center hold it."""
        with self._lock:
            before, after = self._current.array, payload.array
            for start in range(0, self._size, BLOCK):
                block = after[start : start + BLOCK]
                np.add(before[start : start + BLOCK], block, out=block)
            payload.connections = 2  # No other thread has it yet.
            last, self._current = self._current, payload
        self._drop(last)

    def _drop(self, version: _Version) -> None:
        with self._pool:
            version.connections -= 1
            if version.connections == 0:
                self._free.append(version)


class _Version:
    """A vector and the number of its users; it must not change while it has any."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.connections = 1
