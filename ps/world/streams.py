"""Connections: TCP sockets, plain or encrypted; every call has a deadline."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Protocol

#: Bytes of a socket's buffer after the handshake: a vector of many megabytes needs few wake-ups.
SOCKET_BUFFER = 512 * 1024
#: The same if several connections are used at the same time: on one host, what they have in flight shares its caches.
PARALLEL_SOCKET_BUFFER = SOCKET_BUFFER // 2

#: Seconds after which a host that acknowledges nothing is treated as lost; twice as many if data is sent meanwhile.
HOST_SILENCE_SECONDS = 20
#: The state of a socket whose connection is over on both sides, in the kernel's numbering.
_TCP_CLOSE = 7

_LONGEST_CALL = 60.0  # seconds that one system call waits at most
_TIMEVAL = struct.Struct("@ll")  # the kernel's `struct timeval`
# Only Linux reports that the peer has shut down its direction; the end of both directions is always reported.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


class Stream(Protocol):
    """A connection's bytes, in both directions. Every call raises an OSError if the connection is lost."""

    def read(self, spaces: list[memoryview], timeout: float, whole: bool) -> int:
        """Read into ``spaces``, and return the number of bytes; 0 is the end of the stream.

        If ``whole``, fill all of ``spaces``, unless the time or the stream ends first. A TimeoutError or
        BlockingIOError says that nothing arrived within ``timeout`` seconds.
        """

    def write(self, buffers: list[memoryview], timeout: float) -> int:
        """Send a part of ``buffers``; return the number of bytes; raise TimeoutError or BlockingIOError if none."""

    def encrypt(self, context: ssl.SSLContext, *, server: bool, timeout: float) -> None:
        """Run the TLS handshake within ``timeout`` seconds, and encrypt from now on."""

    def enlarge(self, size: int) -> None:
        """Make the buffers ``size`` bytes large, for vectors, after the handshake."""

    def gone(self) -> bool:
        """Return whether the peer has closed its end, without consuming any bytes."""

    def shutdown(self) -> None:
        """End the connection, from any thread: a blocked call of another one returns."""

    def close(self) -> None:
        """Close the socket."""


class Listener(Protocol):
    """A bound port."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""

    def accept(self) -> tuple[Stream, str, int]:
        """Return the next connection, and its peer's host and port; raise OSError if closed or out of descriptors."""

    def close(self) -> None:
        """Release the port, and wake a thread that waits for a connection."""


class TcpStream:
    """A connected TCP socket, which the stream owns."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._ended = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _give_up_silent_hosts(sock)
        self._pipe: _Plain | _Encrypted = _Plain(sock)
        self.read, self.write = self._pipe.read, self._pipe.write

    def encrypt(self, context: ssl.SSLContext, *, server: bool, timeout: float) -> None:
        self.sock.settimeout(timeout)
        sock = context.wrap_socket(self.sock, server_side=server, do_handshake_on_connect=False)
        self.sock = sock
        if self._ended:  # `shutdown` may have ended the plain socket, which is detached now
            raise ConnectionAbortedError("this process has closed the connection")
        sock.do_handshake()
        self._pipe = _Encrypted(sock)
        self.read, self.write = self._pipe.read, self._pipe.write

    def enlarge(self, size: int) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.sock.setsockopt(socket.SOL_SOCKET, option, size)

    def gone(self) -> bool:
        try:
            poller = select.poll()
            poller.register(self.sock, _PEER_CLOSED)
            if poller.poll(0):  # this detects the end even if unread bytes precede it
                return True
            if isinstance(self.sock, ssl.SSLSocket):
                self.sock.settimeout(0)
            # The plain socket's method, because TLS sockets cannot peek.
            return socket.socket.recv(self.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # a closed socket raises ValueError
            return True

    def shutdown(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):  # the peer may have closed it already
            # Not the TLS socket's own method, which would switch to plain text while another thread is reading.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class TcpListener:
    """A listening TCP socket; port 0 means any free port."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self) -> tuple[Stream, str, int]:
        while True:
            sock, address = self._listener.accept()
            try:
                return TcpStream(sock), address[0], address[1]
            except OSError:  # it was reset before it was accepted
                sock.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # some platforms cannot shut down a listener
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
        self._listener.close()


def connect(address: tuple[str, int], timeout: float) -> Stream:
    """Return a connection to the listener at ``address``; raise an OSError if that fails within ``timeout`` seconds."""
    sock = socket.create_connection(address, timeout=timeout)
    if sock.getsockname() == sock.getpeername():
        # If nothing listens at a local port, the system may assign that port to this socket, which connects to itself.
        sock.close()
        raise ConnectionRefusedError("this client's own call")
    return TcpStream(sock)


class _Plain:
    """A plain socket with deadlines in the kernel, so that one system call sends or receives a whole vector."""

    # Python's timeouts make a socket non-blocking and need three system calls for every piece: for a vector of some
    # megabytes that costs up to a quarter of the throughput, and the interpreter's lock is released for each piece.

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._limits: dict[int, float] = {}
        sock.settimeout(None)

    def read(self, spaces: list[memoryview], timeout: float, whole: bool) -> int:
        flags = socket.MSG_WAITALL if whole else 0
        if len(spaces) == 1:
            return self._until_timeout(socket.SO_RCVTIMEO, timeout, lambda: self._sock.recv_into(spaces[0], 0, flags))
        return self._until_timeout(socket.SO_RCVTIMEO, timeout, lambda: self._sock.recvmsg_into(spaces, 0, flags)[0])

    def write(self, buffers: list[memoryview], timeout: float) -> int:
        return self._until_timeout(socket.SO_SNDTIMEO, timeout, lambda: self._sock.sendmsg(buffers))

    def _until_timeout(self, option: int, timeout: float, call: Callable[[], int]) -> int:
        """Return ``call()``; repeat it if the kernel's limit ends it before ``timeout``."""
        self._limit(option, timeout)
        began = time.monotonic()
        while True:
            try:
                return call()
            except BlockingIOError:
                left = began + timeout - time.monotonic()
                if left <= 0:
                    raise
                self._limit(option, left)
            except TimeoutError as error:
                raise _host_gone(error) from None

    def _limit(self, option: int, timeout: float) -> None:
        # All long waits have the same limit, and a limit may be off by one percent, which saves system calls.
        timeout = min(timeout, _LONGEST_CALL)
        if not 0.99 * timeout <= self._limits.get(option, 0.0) <= 1.01 * timeout:
            whole = int(timeout)
            rest = max(1, int((timeout - whole) * 1e6))  # zero would mean no limit
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, rest))
            self._limits[option] = timeout


class _Encrypted:
    """The calls of `Stream` for a TLS socket, which has no ``sendmsg``."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def read(self, spaces: list[memoryview], timeout: float, whole: bool) -> int:
        try:
            self._sock.settimeout(timeout)
            count = self._sock.recv_into(spaces[0])
            # Python reports a broken connection as the end of the stream, and does not close the socket.
            if not count and _closed(self._sock):
                raise ConnectionResetError(f"it was reset, or {_silent()}")
            return count
        except TimeoutError as error:
            raise _host_gone(error) from None
        except (AttributeError, ValueError):  # another thread is closing it
            raise ConnectionAbortedError("the connection was closed here") from None

    def write(self, buffers: list[memoryview], timeout: float) -> int:
        try:
            self._sock.settimeout(timeout)
            return self._sock.send(buffers[0])
        except TimeoutError as error:
            raise _host_gone(error) from None
        except (AttributeError, ValueError):
            raise ConnectionAbortedError("the connection was closed here") from None


def _host_gone(error: TimeoutError) -> OSError:
    """Return a ConnectionResetError if the kernel has given up the host; else ``error``, the timeout of a call."""
    if error.errno != errno.ETIMEDOUT:
        return error
    return ConnectionResetError(errno.ETIMEDOUT, _silent())


def _silent() -> str:
    return f"the peer's host has acknowledged nothing for {HOST_SILENCE_SECONDS} s"


def _closed(sock: socket.socket) -> bool:
    return hasattr(socket, "TCP_INFO") and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


def _give_up_silent_hosts(sock: socket.socket) -> None:
    """Make the kernel end connections to a lost host, and to a suspended process whose buffers are full."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for an idle connection
    options = {
        "TCP_KEEPIDLE": max(1, HOST_SILENCE_SECONDS // 3),
        "TCP_KEEPINTVL": max(1, HOST_SILENCE_SECONDS // 6),
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": 1000 * HOST_SILENCE_SECONDS,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # it depends on the platform
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
