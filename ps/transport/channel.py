"""A socket with a `handshake.Connection` around it: blocking calls, each with a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable

from distkeras.ps.errors import (
    AuthenticationError,
    DeadlineError,
    DistkerasError,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.protocol.framing import Allocate, EndOfStream
from distkeras.ps.protocol.handshake import Connection
from distkeras.ps.protocol.messages import Message
from distkeras.ps.transport.backoff import Backoff
from distkeras.ps.transport.deadlines import Deadlines

#: Large enough that a multi-megabyte vector is not cut into many wake-ups. Strangers get the system's own, small ones.
SOCKET_BUFFER = 512 * 1024

_LONGEST_PAUSE = 1.0  # seconds between two attempts to connect
_LONGEST_CALL = 60.0  # seconds that one system call waits
_TIMEVAL = struct.Struct("@ll")  # the kernel's
# Only Linux tells of half a connection's end; the other half's is always told.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


class Channel:
    """One connected peer.

    Args:
        sock: a connected stream socket; the channel owns it.
        connection: the protocol's state.
        frame: seconds that one frame may take.
        context: encrypts the connection; None: plain.
    """

    def __init__(
        self, sock: socket.socket, connection: Connection, *, frame: float, context: ssl.SSLContext | None = None
    ) -> None:
        self.sock = sock
        self.connection = connection
        self.frame = frame
        self._context = context
        self._ended = False
        self._pipe: _Plain | _Encrypted = _Plain(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)

    def handshake(self, timeout: float, admit: Callable[[], None] = lambda: None) -> None:
        """Runs the handshake. A server calls ``admit`` when the client has proved the key and is not told yet.

        Raises:
            AuthenticationError: the peer does not hold the key or the certificate, or a client hung up instead of
                proving that it does.
            ServerLostError: the server hung up; it does so to make room, and may have some later.
            DeadlineError: it took longer than ``timeout`` seconds.
            RemoteProtocolError: the peer speaks something else.
        """
        deadline = time.monotonic() + timeout
        if self._context is not None:
            self._encrypt(self._context, deadline)
        self._send(self.connection.start(), deadline, "the handshake")
        while not self.connection.authenticated:
            count = self._receive(deadline, "the handshake")
            if count == 0:
                raise self._handshake_cut_short()
            try:
                _, answer = self.connection.received(count)
            except AuthenticationError:
                # Said aloud, or the client could not tell it from a server that hung up for want of room.
                with contextlib.suppress(OSError):
                    self._send(self.connection.refusal(), deadline, "the handshake")
                raise
            if self.connection.authenticated:
                admit()
            self._send(answer, deadline, "the handshake")
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)

    def _encrypt(self, context: ssl.SSLContext, deadline: float) -> None:
        server = self.connection.server
        self.sock.settimeout(_left(deadline, "the TLS handshake"))
        try:
            sock = context.wrap_socket(self.sock, server_side=server, do_handshake_on_connect=False)
            self.sock = sock
            if self._ended:  # on the plain socket, which is an empty shell now
                raise ConnectionAbortedError("the connection was ended here")
            sock.do_handshake()
        except TimeoutError:
            raise DeadlineError("waited for the TLS handshake until its deadline") from None
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(
                f"the server must have the job's certificate. Received: another one ({error.verify_message})"
            ) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise self._handshake_cut_short() from None
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"the peer must speak TLS 1.3. Received: {error.reason or error}") from None
        self._pipe = _Encrypted(sock)

    def _handshake_cut_short(self) -> DistkerasError:
        if self.connection.server:
            return AuthenticationError("the peer must prove the job's key. Received: the end of the stream")
        return ServerLostError("the server must complete the handshake. Received: it hung up")

    def send(self, message: Message) -> None:
        """Sends ``message`` whole.

        Raises:
            DeadlineError: the peer did not take it in ``frame`` seconds.
            OSError: the connection is gone.
        """
        self._send(self.connection.send(message), time.monotonic() + self.frame, f"{type(message).__name__} to be sent")

    def receive(self, timeout: float, what: str) -> Message | EndOfStream:
        """The next message. ``what`` names it for the error; ``timeout`` seconds may pass before its first byte.

        Raises:
            DeadlineError: nothing came in time, or the frame stalled.
            RemoteProtocolError: the bytes are not the protocol's.
            OSError: the connection is gone.
        """
        deadline = time.monotonic() + timeout
        begun = False
        while True:
            count = self._receive(deadline, what, whole=begun)
            if begun and count == 0:  # no offense against the protocol: the peer died, or its line did
                raise ConnectionResetError("the peer hung up within a frame")
            event, _ = self.connection.received(count)
            if event is not None:
                return event
            if not begun:
                begun, deadline = True, time.monotonic() + self.frame

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, found without reading anything away."""
        try:
            poller = select.poll()
            poller.register(self.sock, _PEER_CLOSED)
            if poller.poll(0):  # finds it behind bytes that nobody has read yet, which a peek does not
                return True
            if self._context is not None:
                self.sock.settimeout(0)
            # Below TLS, whose sockets cannot peek.
            return socket.socket.recv(self.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # the latter from a closed socket
            return True

    def hang_up(self) -> None:
        """Ends the conversation from any thread: a blocked call in another one returns, and that one closes."""
        self._ended = True
        with contextlib.suppress(OSError):  # the peer may have been faster
            # Not the TLS socket's own method, which goes over to plain text under the feet of a reading thread.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket; a blocked call in another thread returns."""
        self.hang_up()
        self.sock.close()

    def _receive(self, deadline: float, what: str, *, whole: bool = False) -> int:
        """Fills the connection's spaces; ``whole``: all, unless the deadline or the stream's end comes first."""
        try:
            return self._pipe.read(self.connection.spaces(), _left(deadline, what), whole)
        except (TimeoutError, BlockingIOError):
            raise DeadlineError(f"waited for {what} until its deadline; nothing came") from None

    def _send(self, buffers: list[bytes | memoryview], deadline: float, what: str) -> None:
        pending = [memoryview(buffer) for buffer in buffers]
        while pending:
            try:
                sent = self._pipe.write(pending, _left(deadline, what))
            except (TimeoutError, BlockingIOError):
                raise DeadlineError(f"waited for {what} until its deadline; the peer does not take it") from None
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]


class _Plain:
    """A socket whose deadlines the kernel keeps, so that a vector comes or goes in one call of it.

    Python's own timeouts make a socket non-blocking and ask the kernel three times for every piece: on a vector of
    some megabytes that costs up to a quarter of the rate, and a turn of the interpreter's lock a piece.
    """

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
        """``call()``, again where the kernel's limit ends it before ``timeout``."""
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

    def _limit(self, option: int, timeout: float) -> None:
        # All long waits have one limit, and others may differ by a hundredth: a system call is saved.
        timeout = min(timeout, _LONGEST_CALL)
        if not 0.99 * timeout <= self._limits.get(option, 0.0) <= 1.01 * timeout:
            whole = int(timeout)
            rest = max(1, int((timeout - whole) * 1e6))  # zero would mean for ever
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, rest))
            self._limits[option] = timeout


class _Encrypted:
    """A TLS socket's calls, as `Channel` wants them: it has no ``sendmsg``."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def read(self, spaces: list[memoryview], timeout: float, whole: bool) -> int:
        try:
            self._sock.settimeout(timeout)
            return self._sock.recv_into(spaces[0])
        except (AttributeError, ValueError):  # another thread closes it at this moment
            raise ConnectionAbortedError("the connection was closed here") from None

    def write(self, buffers: list[memoryview], timeout: float) -> int:
        try:
            self._sock.settimeout(timeout)
            return self._sock.send(buffers[0])
        except (AttributeError, ValueError):
            raise ConnectionAbortedError("the connection was closed here") from None


def dial(
    address: tuple[str, int],
    key: bytes,
    deadlines: Deadlines,
    *,
    allocate: Allocate | None = None,
    context: ssl.SSLContext | None = None,
) -> Channel:
    """Connects to a server and authenticates; where it hangs up to make room, again, until ``deadlines.connect``.

    Raises:
        ServerLostError: nobody listens there, or it cannot be reached.
        AuthenticationError, RemoteProtocolError, DeadlineError: see `Channel.handshake`.
    """
    where = f"{address[0]}:{address[1]}"
    backoff = Backoff(longest=_LONGEST_PAUSE, timeout=deadlines.connect)
    while True:
        try:
            sock = socket.create_connection(address, timeout=deadlines.connect)
        except OSError as error:
            raise ServerLostError(f"a parameter server must listen at {where}. Received: {error}") from None
        if sock.getsockname() == sock.getpeername():
            # Where nobody listens on this very host, the system may give a socket its own target as its port.
            sock.close()
            raise ServerLostError(f"a parameter server must listen at {where}. Received: this client's own call")
        connection = Connection(server=False, key=key, allocate=allocate)
        channel = Channel(sock, connection, frame=deadlines.frame, context=context)
        dropped: OSError
        try:
            channel.handshake(deadlines.handshake)
            return channel
        except ServerLostError as error:
            dropped = error
        except DistkerasError:
            channel.close()
            raise
        except OSError as error:
            dropped = error
        channel.close()
        if not backoff.pause():
            raise ServerLostError(f"the server at {where} must complete the handshake. Received: {dropped}")


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(f"waited for {what} until its deadline")
    return left


def _keep_alive(sock: socket.socket) -> None:
    # A host that vanished without a FIN is noticed by the kernel within about 30 s; no heartbeat thread is needed.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
