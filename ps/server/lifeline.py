"""How a server's process and its driver learn of each other's end.

The end of a pipe does not tell: whatever the driver has forked (multiprocessing, a data loader) has a copy of each of
its descriptors, and keeps the pipes open when both are dead. So the driver says goodbye in so many words, and each
watches the other itself: the driver its child, the server a descriptor of the driver's process, which no copy keeps
alive, or, where the system has none, the id of its parent.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import time
from collections.abc import Iterator

from distkeras.ps.errors import DeadlineError, ServerLostError

#: What the driver sends when the server is to end.
GOODBYE = b"goodbye\n"
#: Seconds from one look at the other process to the next, where nothing tells of its end.
_LOOK = 0.5
_PIECE = 65536


class DriverLink:
    """The server's end: lines from its driver, until that says goodbye or is gone.

    Args:
        stream: descriptor of the pipe that the driver writes to.
        driver: descriptor of the driver's process, as `process_descriptor` gave it; None: there is none.
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

    def line(self) -> str | None:
        """The next line; None where the driver has said goodbye, or is gone."""
        while b"\n" not in self._received:
            ready = [descriptor for descriptor, _ in self._poller.poll(1000 * _LOOK)]
            if self._stream in ready:
                piece = os.read(self._stream, _PIECE)
                if not piece:
                    return None
                self._received += piece
            elif self._driver in ready or os.getppid() != self._parent:
                return None
        line, _, self._received = self._received.partition(b"\n")
        return None if line + b"\n" == GOODBYE else line.decode()

    def wait_until_over(self) -> None:
        """Returns when the driver has said goodbye, or is gone."""
        while self.line() is not None:
            pass


def process_descriptor() -> int | None:
    """A descriptor of this process that tells others of its end, whoever has a copy; None where there are none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # another system than Linux, or an old one
        return None


def lines_of(child: subprocess.Popen[bytes], stream: int, deadline: float = math.inf) -> Iterator[bytes]:
    """The lines that ``child`` writes to a pipe, until the pipe ends or the child has.

    Args:
        child: who writes.
        stream: the descriptor to read from.
        deadline: when they must have ended (`time.monotonic`).

    Raises:
        DeadlineError: they have not.
    """
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    rest = b""
    while True:
        ended = child.poll() is not None  # before the pipe is looked at: what it wrote is there then
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("waited for a line of the parameter server until its deadline")
        if poller.poll(0 if ended else 1000 * min(_LOOK, left)):
            piece = os.read(stream, _PIECE)
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line + b"\n" for line in lines)
            ended = not piece
        if ended:
            break
    if rest:
        yield rest


def first_line(child: subprocess.Popen[bytes], stream: int, timeout: float) -> bytes:
    """The first line that ``child`` writes, once it is whole.

    Raises:
        DeadlineError: it did not come in ``timeout`` seconds.
        ServerLostError: the child has ended instead.
    """
    try:
        line = next(lines_of(child, stream, time.monotonic() + timeout), b"")
    except DeadlineError:
        raise DeadlineError(f"waited {timeout:g} s for the parameter server to start") from None
    if not line.endswith(b"\n"):
        raise ServerLostError(f"the parameter server must start. Received: exit {child.wait(timeout)}")
    return line
