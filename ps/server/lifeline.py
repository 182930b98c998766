"""How a server's process learns of its driver's end; how the driver learns of the server's is in `world.processes`.

The end of a pipe does not tell: whatever the driver has forked (multiprocessing, a data loader) has a copy of each of
its descriptors, and keeps the pipes open when both are dead. So the driver says goodbye in so many words, and each
watches the other itself: the driver its child, the server a descriptor of the driver's process, which no copy keeps
alive, or, where the system has none, the id of its parent.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from distkeras.ps.errors import ServerLostError
from distkeras.ps.world.processes import LOOK, PIECE

#: What the driver sends when the server is to end.
GOODBYE = b"goodbye\n"


class DriverLink:
    """The server's end: lines from its driver, until that says goodbye or is gone.

    Args:
        stream: descriptor of the pipe that the driver writes to.
        driver: descriptor of the driver's process, as `ChildProcess` gave it; None: there is none.
    """

    def __init__(self, stream: int, driver: int | None) -> None:
        self._stream = stream
        self._driver = driver
        self._parent = os.getppid()
        self._received = b""
        self._poller = select.poll()
        self._poller.register(stream, select.POLLIN)
        if driver is not None:
            self._poller.register(driver, select.POLLIN)

    def line(self, over: Callable[[], bool] = lambda: False) -> str | None:
        """The next line; None where the driver has said goodbye or is gone, or where it is ``over``."""
        while b"\n" not in self._received:
            if over():
                return None
            ready = [descriptor for descriptor, _ in self._poller.poll(1000 * LOOK)]
            if self._stream in ready:
                piece = os.read(self._stream, PIECE)
                if not piece:
                    return None
                self._received += piece
            elif self._driver in ready or os.getppid() != self._parent:
                return None
        line, _, self._received = self._received.partition(b"\n")
        return None if line + b"\n" == GOODBYE else line.decode()

    def require_driver(self) -> None:
        """Whether the driver's process lives; reads nothing.

        Raises:
            ServerLostError: it does not.
        """
        if self._driver in [descriptor for descriptor, _ in self._poller.poll(0)] or os.getppid() != self._parent:
            raise ServerLostError("a server's driver must live. Received: its end")

    def wait_until_over(self, over: Callable[[], bool] = lambda: False) -> None:
        """Returns when the driver has said goodbye or is gone, or where it is ``over``."""
        while self.line(over) is not None:
            pass
