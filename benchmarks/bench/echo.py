"""The limit of any exchange: a server that only sends back what it received."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import numpy as np

from bench.processes import Where, tune


def receive(sock: socket.socket, buffer: memoryview) -> bool:
    """Fill ``buffer``, and return whether that succeeded; False if the peer has disconnected."""
    # One system call for all bytes: on a busy machine up to a quarter faster than several.
    return sock.recv_into(buffer, 0, socket.MSG_WAITALL) == len(buffer)


def server(size: int) -> Callable[[socket.socket], None]:
    """Return a function for `processes.serving`; it echoes ``size`` bytes at a time."""
    return partial(_echo, size=size)


def _echo(sock: socket.socket, size: int) -> None:
    tune(sock)
    buffer = memoryview(bytearray(size))
    while receive(sock, buffer):
        sock.sendall(buffer)


class EchoClient:
    """A client that sends a vector to `server` or `bare.server` and receives one.

    Args:
        number: number of the client.
        address: address of the server.
        size: number of elements of the vector, float32.
    """

    def __init__(self, number: int, address: Where, size: int) -> None:
        self._sock = tune(socket.create_connection(address))
        self._sent = np.full(size, 1e-3, np.float32).data.cast("B")
        self._received = np.empty(size, np.float32).data.cast("B")

    def exchange(self) -> None:
        """Send the vector, and wait for the complete answer."""
        self._sock.sendall(self._sent)
        if not receive(self._sock, self._received):
            raise EOFError("the server closed the connection")
