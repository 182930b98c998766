"""A socket with a `wire.Connection` around it: blocking calls, each with a deadline."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

from distkeras.ps.errors import AuthenticationError, DeadlineError, DistkerasError, ServerLostError
from distkeras.ps.messages import Message
from distkeras.ps.wire import Connection, EndOfStream

#: Large enough that a multi-megabyte vector is not cut into many wake-ups.
SOCKET_BUFFER = 512 * 1024


@dataclass(frozen=True)
class Deadlines:
    """How long each wait may last, in seconds.

    Args:
        connect: to reach the server's port.
        handshake: from a connection to its authentication.
        frame: from a frame's first byte to its last.
        publish: a worker's wait for the driver to publish the center.
        gather: a worker's wait for all others to join, where the rule or the scheduler needs them all.
        reply: a worker's wait for a round, a slower worker, or a busy server.
        takeover: a newcomer's wait for the previous attempt of its partition to be gone.
        silence: of a connected worker between two requests.
        reconnect: a worker's attempts to reach the server again after a lost connection.
        close: for the server's threads to end.
    """

    connect: float = 20.0
    handshake: float = 10.0
    frame: float = 120.0
    publish: float = 60.0
    gather: float = 60.0
    reply: float = 600.0
    takeover: float = 120.0
    silence: float = 24 * 3600.0
    reconnect: float = 30.0
    close: float = 10.0


class Channel:
    """One connected peer.

    Args:
        sock: a connected stream socket; the channel owns it.
        connection: the protocol's state.
        frame: seconds that one frame may take.
    """

    def __init__(self, sock: socket.socket, connection: Connection, *, frame: float) -> None:
        self.sock = sock
        self.connection = connection
        self.frame = frame
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        _keep_alive(sock)

    def handshake(self, timeout: float) -> None:
        """Runs the handshake.

        Raises:
            AuthenticationError: the peer does not hold the key, or hung up instead of proving it.
            DeadlineError: it took longer than ``timeout`` seconds.
            RemoteProtocolError: the peer speaks something else.
        """
        deadline = time.monotonic() + timeout
        self._send(self.connection.start(), deadline, "the handshake")
        while not self.connection.authenticated:
            event, answer = self.connection.received(self._receive(deadline, "the handshake"))
            if isinstance(event, EndOfStream):
                raise AuthenticationError("the peer must prove the job's key. Received: the end of the stream")
            self._send(answer, deadline, "the handshake")

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
            count = self._receive(deadline, what)
            event, _ = self.connection.received(count)
            if event is not None:
                return event
            if not begun:
                begun, deadline = True, time.monotonic() + self.frame

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, found without reading anything away."""
        self.sock.settimeout(0)
        try:
            return self.sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the socket; a blocked call in another thread returns."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _receive(self, deadline: float, what: str) -> int:
        self.sock.settimeout(_left(deadline, what))
        try:
            return self.sock.recv_into(self.connection.space())
        except TimeoutError:
            raise DeadlineError(f"waited for {what} until its deadline; nothing came") from None

    def _send(self, buffers: list[bytes | memoryview], deadline: float, what: str) -> None:
        pending = [memoryview(buffer) for buffer in buffers]
        while pending:
            self.sock.settimeout(_left(deadline, what))
            try:
                sent = self.sock.sendmsg(pending)
            except TimeoutError:
                raise DeadlineError(f"waited for {what} until its deadline; the peer does not take it") from None
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]


def dial(address: tuple[str, int], key: bytes, deadlines: Deadlines, connection: Connection | None = None) -> Channel:
    """Connects to a server and authenticates.

    Raises:
        ServerLostError: nobody listens there, or it cannot be reached.
        AuthenticationError, RemoteProtocolError, DeadlineError: see `Channel.handshake`.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout=deadlines.connect)
    except OSError as error:
        raise ServerLostError(f"a parameter server must listen at {where}. Received: {error}") from None
    channel = Channel(sock, connection or Connection(server=False, key=key), frame=deadlines.frame)
    try:
        channel.handshake(deadlines.handshake)
    except DistkerasError:
        channel.close()
        raise
    except OSError as error:
        channel.close()
        raise ServerLostError(f"the server at {where} must complete the handshake. Received: {error}") from None
    return channel


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
