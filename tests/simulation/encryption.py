"""TLS over a connection in memory: the real protocol, whose records are sent over the connection."""

from __future__ import annotations

import ssl
from collections.abc import Callable

#: Bytes that are read at once.
_PIECE = 1 << 16

Read = Callable[[list[memoryview], float, bool], int]
Write = Callable[[list[memoryview], float], int]


class Encryption:
    """The encryption of one end of a connection.

    Args:
        context: the TLS context of the real end.
        server: whether this is the server's end.
        read, write: functions of the stream below.
        now: clock, seconds.
    """

    def __init__(
        self, context: ssl.SSLContext, *, server: bool, read: Read, write: Write, now: Callable[[], float]
    ) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._arrived, self._leaving, server_side=server)
        self._read_below, self._write_below, self._now = read, write, now
        self._buffer = memoryview(bytearray(_PIECE))

    def handshake(self, timeout: float) -> None:
        """Run the handshake; raise errors as `world.streams.Stream.encrypt` does."""
        deadline = self._now() + timeout
        while True:
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._more(deadline)
            else:
                self._flush(deadline)
                return

    def read(self, spaces: list[memoryview], timeout: float, whole: bool) -> int:
        """See `world.streams.Stream`."""
        deadline = self._now() + timeout
        while True:
            try:
                return self._ssl.read(len(spaces[0]), spaces[0])  # type: ignore[return-value]  # with a buffer, how many bytes
            except ssl.SSLWantReadError:
                self._more(deadline)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0

    def write(self, buffers: list[memoryview], timeout: float) -> int:
        """See `world.streams.Stream`."""
        count = self._ssl.write(buffers[0])
        self._flush(self._now() + timeout)
        return count

    def _more(self, deadline: float) -> None:
        try:
            count = self._read_below([self._buffer], deadline - self._now(), False)
        except BlockingIOError:
            raise TimeoutError from None
        if count:
            self._arrived.write(self._buffer[:count])
        else:
            self._arrived.write_eof()

    def _flush(self, deadline: float) -> None:
        data = memoryview(self._leaving.read())
        while data:
            try:
                data = data[self._write_below([data], deadline - self._now()) :]
            except BlockingIOError:
                raise TimeoutError from None
