"""A relay between a client and the server, which forwards bytes, changes them, or answers as a stranger."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from distkeras.ps.transport.client import Address
from support.patience import patience
from support.ps.running_server import KEY


class Relay:
    """A port that forwards its connections to a server, except as a test configures.

    Args:
        where: the server's address.

    Attributes:
        address: the relay's port, with the server's key.
        change: bytes to replace, and their replacement, in either direction.
        left: the number of replacements that remain.
        impostors: functions that answer the next connections instead of the server, one each.
    """

    def __init__(self, where: tuple[str, int]) -> None:
        self._where = where
        self.change = (b"", b"")
        self.left = 0
        self.impostors: list[Callable[[socket.socket], None]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1], KEY)
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # The listener was closed.
            while True:
                near, _ = self._listener.accept()
                near.settimeout(patience(30))
                if self.impostors:
                    with near, contextlib.suppress(OSError):  # The client may close the connection at any time.
                        self.impostors.pop()(near)
                    continue
                far = socket.create_connection(self._where, timeout=patience(30))
                self._socks += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                old, new = self.change
                if self.left and old in data:
                    self.left -= 1
                    data = data.replace(old, new)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close all open connections."""
        socks, self._socks = self._socks, []
        for sock in socks:
            with contextlib.suppress(OSError):  # The other side has closed the connection already.
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._listener.close()
        self.cut()
