"""A stream with a `handshake.Connection` around it: blocking calls, each with a deadline."""

from __future__ import annotations

import contextlib
import ssl
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
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.world.streams import Stream
from distkeras.ps.world.world import REAL, World

_LONGEST_PAUSE = 1.0  # seconds between two attempts to connect


class Channel:
    """One connected peer.

    Args:
        stream: to the peer; the channel owns it.
        connection: the protocol's state.
        frame: seconds that one frame may take.
        context: encrypts the connection; None: plain.
        world: its clock.
    """

    def __init__(
        self,
        stream: Stream,
        connection: Connection,
        *,
        frame: float,
        context: ssl.SSLContext | None = None,
        world: World = REAL,
    ) -> None:
        self.stream = stream
        self.connection = connection
        self.frame = frame
        self.world = world
        self._context = context
        self._now = world.monotonic

    def handshake(self, timeout: float, admit: Callable[[], None] = lambda: None) -> None:
        """Runs the handshake. A server calls ``admit`` when the client has proved the key, before it answers.

        Raises:
            AuthenticationError: the peer does not hold the key or the certificate, or a client hung up instead of
                proving that it does.
            ServerLostError: the server hung up; it does so to make room, and may have some later.
            DeadlineError: it took longer than ``timeout`` seconds.
            RemoteProtocolError: the peer speaks something else.
        """
        deadline = self._now() + timeout
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
                # Sent as an answer: a bare hang-up would also mean that the server has no room.
                with contextlib.suppress(OSError):
                    self._send(self.connection.refusal(), deadline, "the handshake")
                raise
            if self.connection.authenticated:
                admit()
            self._send(answer, deadline, "the handshake")
        self.stream.enlarge()

    def _encrypt(self, context: ssl.SSLContext, deadline: float) -> None:
        timeout = self._left(deadline, "the TLS handshake")
        try:
            self.stream.encrypt(context, server=self.connection.server, timeout=timeout)
        except TimeoutError:
            raise DeadlineError("waited for the TLS handshake until its deadline") from None
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(
                f"the server does not have the job's certificate ({error.verify_message})"
            ) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise self._handshake_cut_short() from None
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"the peer must speak TLS 1.3. Received: {error.reason or error}") from None

    def _handshake_cut_short(self) -> DistkerasError:
        if self.connection.server:
            return AuthenticationError("the peer hung up before it had proved the job's key")
        return ServerLostError("the server hung up during the handshake")

    def send(self, message: Message) -> None:
        """Sends ``message`` whole.

        Raises:
            DeadlineError: the peer did not take it in ``frame`` seconds.
            OSError: the connection is gone.
        """
        self._send(self.connection.send(message), self._now() + self.frame, f"{type(message).__name__} to be sent")

    def receive(self, timeout: float, what: str) -> Message | EndOfStream:
        """The next message. ``what`` names it for the error; ``timeout`` seconds may pass before its first byte.

        Raises:
            DeadlineError: nothing came in time, or the frame stalled.
            RemoteProtocolError: the bytes are not the protocol's.
            OSError: the connection is gone.
        """
        deadline = self._now() + timeout
        begun = False
        while True:
            count = self._receive(deadline, what, whole=begun)
            if begun and count == 0:  # no offense against the protocol: the peer died, or its line did
                raise ConnectionResetError("the peer hung up within a frame")
            event, _ = self.connection.received(count)
            if event is not None:
                return event
            if not begun:
                begun, deadline = True, self._now() + self.frame

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end, found without reading anything away."""
        return self.stream.gone()

    def hang_up(self) -> None:
        """Ends the conversation from any thread: a blocked call in another one returns, and that one closes."""
        self.stream.shutdown()

    def close(self) -> None:
        """Closes the socket; a blocked call in another thread returns."""
        self.hang_up()
        self.stream.close()

    def _receive(self, deadline: float, what: str, *, whole: bool = False) -> int:
        """Fills the connection's spaces; ``whole``: all, unless the deadline or the stream's end comes first."""
        try:
            return self.stream.read(self.connection.spaces(), self._left(deadline, what), whole)
        except (TimeoutError, BlockingIOError):
            raise DeadlineError(f"waited for {what} until its deadline; nothing came") from None

    def _send(self, buffers: list[bytes | memoryview], deadline: float, what: str) -> None:
        pending = [memoryview(buffer) for buffer in buffers]
        while pending:
            try:
                sent = self.stream.write(pending, self._left(deadline, what))
            except (TimeoutError, BlockingIOError):
                raise DeadlineError(f"waited for {what} until its deadline; the peer does not take it") from None
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]

    def _left(self, deadline: float, what: str) -> float:
        left = deadline - self._now()
        if left <= 0:
            raise DeadlineError(f"waited for {what} until its deadline")
        return left


def dial(
    address: tuple[str, int],
    key: bytes,
    deadlines: Deadlines,
    *,
    allocate: Allocate | None = None,
    context: ssl.SSLContext | None = None,
    world: World = REAL,
) -> Channel:
    """Connects to a server and authenticates; where it hangs up to make room, again, until ``deadlines.connect``.

    Raises:
        ServerLostError: nothing listens there, or it cannot be reached.
        AuthenticationError, RemoteProtocolError, DeadlineError: see `Channel.handshake`.
    """
    where = f"{address[0]}:{address[1]}"
    backoff = Backoff(longest=_LONGEST_PAUSE, timeout=deadlines.connect, world=world)
    while True:
        try:
            stream = world.connect(address, deadlines.connect)
        except OSError as error:
            raise ServerLostError(f"no parameter server listens at {where}: {error}") from None
        connection = Connection(server=False, key=key, allocate=allocate, token=world.token)
        channel = Channel(stream, connection, frame=deadlines.frame, context=context, world=world)
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
            raise ServerLostError(f"the handshake with the server at {where} has failed: {dropped}")
