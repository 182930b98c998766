"""The plain way to write a parameter server, as in early implementations: pickled lists of arrays, one lock, a deep
copy per pull, commit and pull as two exchanges, default socket buffers, received pieces that are appended to a buffer.
It trusts every peer that connects: use it for measurements only.
"""

from __future__ import annotations

import copy
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.processes import Where

#: The shapes of a model's arrays.
Shapes = tuple[tuple[int, ...], ...]
_LENGTH = struct.Struct(">Q")


def _send(sock: socket.socket, value: Any) -> None:
    data = pickle.dumps(value, -1)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_receive_bytes(sock, _LENGTH.size))
    return pickle.loads(_receive_bytes(sock, length))  # noqa: S301 - both processes belong to this benchmark


def _receive_bytes(sock: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = sock.recv(count - len(received))
        if not piece:
            raise EOFError("the peer closed the connection")
        received += piece
    return received


def server(shapes: Shapes) -> Callable[[socket.socket], None]:
    """Return a function for `processes.serving`; it serves one center of arrays of these ``shapes``."""
    center = [np.zeros(shape, np.float32) for shape in shapes]
    lock = threading.Lock()

    def converse(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while action := sock.recv(1):
            if action == b"c":
                delta = _receive(sock)["delta"]
                with lock:
                    for index, change in enumerate(delta):
                        center[index] = center[index] + change
            else:
                with lock:
                    model = copy.deepcopy(center)
                _send(sock, {"model": model})

    return converse


class NaiveClient:
    """A client that commits a list of arrays and then pulls the center.

    Args:
        number: number of the client.
        address: address of the server.
        shapes: shapes of the arrays.
    """

    def __init__(self, number: int, address: Where, shapes: Shapes) -> None:
        self._number = number
        self._sock = socket.create_connection(address)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._delta = [np.full(shape, 1e-3, np.float32) for shape in shapes]

    def exchange(self) -> None:
        """Commit, then pull."""
        self._sock.sendall(b"c")
        _send(self._sock, {"worker_id": self._number, "delta": self._delta})
        self.pull()

    def pull(self) -> list[np.ndarray]:
        """Return the center."""
        self._sock.sendall(b"p")
        model: list[np.ndarray] = _receive(self._sock)["model"]
        return model
