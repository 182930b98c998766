"""One connection to a peer: a channel whose every call has a deadline, and a client's requests and replies over it.

A connection may be encrypted with a pinned certificate: a job's clients accept the one certificate that was made for
it. The certificate is sent with the key, in Spark's task closure, so no certificate authority and no host name is
checked: the holder of this certificate's private key is the server. Clients are authenticated by the job's key, as
without TLS.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from distkeras.ps.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    DistkerasError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.protocol.framing import Allocate, Connection, EndOfStream, Limits
from distkeras.ps.protocol.messages import Fault, Message, error_of
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.world.streams import SOCKET_BUFFER, Stream
from distkeras.ps.world.world import REAL, World

#: The largest difference between the clocks of two machines.
_SKEW = datetime.timedelta(days=1)
_LIFE = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: str
    private_key: str = field(repr=False)


def make_certificate() -> Certificate:
    """Return a new certificate of one job (ECDSA over P-256, not a CA); ConfigurationError without ``cryptography``."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError:
        raise ConfigurationError(
            "`tls` needs the package cryptography: pip install 'distkeras[tls]'. Received: no such package"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distkeras")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """Return a server's TLS context; raise ConfigurationError unless the certificate and the private key match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session resumption: each connection has a full handshake
    with tempfile.TemporaryDirectory() as folder:  # readable by this user only
        path = Path(folder, "server.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(certificate.private_key + "\n" + certificate.certificate)
        try:
            context.load_cert_chain(path)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"`certificate` must be a certificate and its private key, in PEM. Received: {error}"
            ) from None
    return context


def client_context(certificate: str) -> ssl.SSLContext:
    """Return a client's TLS context, which accepts only ``certificate``; raise ConfigurationError unless it is PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the pinned certificate is a stronger check than a host name
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise ConfigurationError(f"`certificate` must be a certificate in PEM. Received: {error}") from None
    return context


_Answer = TypeVar("_Answer", bound=Message)
_PAUSE_SECONDS_MAX = 1.0  # seconds between two attempts to connect
#: Seconds between two attempts to reach the server again, at most.
RETRY_SECONDS = 2.0
#: Errors if the server cannot be reached, or another process has its port while it is down.
UNREACHED = (ServerLostError, DeadlineError, AuthenticationError, RemoteProtocolError)
#: How often, within `Deadlines.gather`, a waiting client checks whether another server has replaced its own. Under a
#: rule that needs all workers at once, the others wait for `Deadlines.gather` at most.
_POLLS = 3
#: Seconds between two questions whether a look in progress has ended.
_LOOKING_SECONDS = 1.0
#: The largest number of arrays in a frame of the server.
_ARRAYS_MAX = 1024


class Lookout:
    """Looks for another server in the place of the peer, in a thread: what it reads may be a slow store.

    Args:
        replaced: returns whether there is another server.
        every: seconds from one look to the next.
    """

    def __init__(self, replaced: Callable[[], bool], every: float, world: World) -> None:
        self._replaced, self._every, self._world = replaced, every, world
        self._looking = self._found = False
        self._error: Exception | None = None

    @property
    def pause(self) -> float:
        """Seconds until `found` must be asked again."""
        return min(_LOOKING_SECONDS, self._every) if self._looking else self._every

    def found(self) -> bool:
        """Return whether a look has found another server, or raise its error; look again if none looks now."""
        if self._error is not None:
            raise self._error
        if not self._found and not self._looking:
            self._looking = True
            try:
                self._world.thread(self._look, "ps-lookout").start()
            except RuntimeError:  # the system cannot start a thread now, but may at the next look
                self._looking = False
        return self._found

    def _look(self) -> None:
        try:
            self._found = self._replaced()
        except Exception as error:  # noqa: BLE001 - `found` raises it
            self._error = error
        finally:
            self._looking = False


class Channel:
    """One connected peer, over ``stream``, which it owns.

    A frame may take ``frame`` seconds; ``context`` encrypts; ``buffer`` is the size of the socket's buffers, in bytes.
    """

    def __init__(
        self,
        stream: Stream,
        connection: Connection,
        *,
        frame: float,
        context: ssl.SSLContext | None = None,
        buffer: int = SOCKET_BUFFER,
        world: World = REAL,
    ) -> None:
        self.stream, self.connection, self.frame, self._buffer = stream, connection, frame, buffer
        self.world, self._now = world, world.monotonic
        self._context = context
        self._lookout: Lookout | None = None

    def watch(self, replaced: Callable[[], bool], every: float) -> None:
        """During a wait for a reply, call ``replaced`` every ``every`` seconds; if it is true, the peer is lost."""
        self._lookout = Lookout(replaced, every, self.world)

    def handshake(self, timeout: float, admit: Callable[[], None] = lambda: None) -> None:
        """Run the handshake. A server calls ``admit`` when the client has proved the key, before it answers.

        A ServerLostError says that the server hung up; it may have been full, and accept a later connection.
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
                # The refusal is sent, because a mere hang-up would mean that the server is full.
                with contextlib.suppress(OSError):
                    self._send(self.connection.refusal(), deadline, "the handshake")
                raise
            if self.connection.authenticated:
                admit()
            self._send(answer, deadline, "the handshake")
        self.stream.enlarge(self._buffer)

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
            return AuthenticationError("the peer closed the connection before it had proved the job's key")
        return ServerLostError("the server closed the connection during the handshake")

    def send(self, message: Message) -> None:
        """Send ``message``; raise DeadlineError after ``frame`` seconds, OSError if the connection is lost."""
        self._send(self.connection.send(message), self._now() + self.frame, f"{type(message).__name__} to be sent")

    def receive(self, timeout: float, what: str) -> Message | EndOfStream:
        """Return the next message, whose first byte must arrive within ``timeout`` seconds; errors call it ``what``.

        An OSError says that the connection is lost, or another server has replaced the peer.
        """
        deadline = self._now() + timeout
        begun = False
        while True:
            pause = math.inf if begun or self._lookout is None else self._lookout.pause
            look = min(deadline, self._now() + pause)
            try:
                count = self._receive(look, what, whole=begun)
            except DeadlineError:
                if look == deadline or self._lookout is None:
                    raise
                if self._lookout.found():
                    raise ConnectionResetError("another server has taken its place") from None
                continue
            if begun and count == 0:  # the peer died or the connection broke, which is not a protocol error
                raise ConnectionResetError("the peer closed the connection within a frame")
            event, _ = self.connection.received(count)
            if event is not None:
                return event
            if not begun:
                begun, deadline = True, self._now() + self.frame

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end, without consuming any bytes."""
        return self.stream.gone()

    def hang_up(self) -> None:
        """End the connection, from any thread; a blocked call of the owner's thread returns, and that closes it."""
        self.stream.shutdown()

    def close(self) -> None:
        self.hang_up()
        self.stream.close()

    def _receive(self, deadline: float, what: str, *, whole: bool = False) -> int:
        """Read into the connection's spaces; with ``whole``, fill all of them unless the stream ends first."""
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
                raise DeadlineError(
                    f"waited for {what} until its deadline; the peer does not read what is sent"
                ) from None
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
    limits: Limits | None = None,
    context: ssl.SSLContext | None = None,
    read_ahead: bool = True,
    world: World = REAL,
) -> Channel:
    """Connect to a server and authenticate; if it hangs up because it is full, retry until ``deadlines.connect``."""
    where = f"{address[0]}:{address[1]}"
    backoff = Backoff(longest=_PAUSE_SECONDS_MAX, timeout=deadlines.connect, world=world)
    while True:
        try:
            stream = world.connect(address, deadlines.connect)
        except OSError as error:
            raise ServerLostError(
                f"no parameter server listens at {where}: {error}. "
                "It has ended, or this machine cannot reach that address"
            ) from None
        connection = Connection(
            server=False, key=key, limits=limits, allocate=allocate, token=world.token, read_ahead=read_ahead
        )
        channel = Channel(stream, connection, frame=deadlines.frame, context=context, world=world)
        try:
            channel.handshake(deadlines.handshake)
            return channel
        except (DistkerasError, OSError) as error:
            channel.close()
            if isinstance(error, DistkerasError) and not isinstance(error, ServerLostError):
                raise
            if not backoff.pause():
                raise ServerLostError(f"the handshake with the server at {where} has failed: {error}") from None


@dataclass(frozen=True)
class Address:
    """A server's host and port, the job's key (32 bytes, not in the repr), and its certificate, as PEM.

    It is sent in Spark's task closure. Without a certificate, the connection is not encrypted.
    """

    host: str
    port: int
    key: bytes
    certificate: str = ""

    def __repr__(self) -> str:
        return f"Address(host={self.host!r}, port={self.port}, tls={bool(self.certificate)})"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def moves(self) -> bool:
        """Return whether a lost server may be restarted at another host or port."""
        return False

    def locate(self, world: World = REAL) -> tuple[str, int]:
        """Return the present host and port; raise a ServerLostError if they are not known."""
        return self.host, self.port


class Client:
    """Request and reply over one channel, which is opened by the first request.

    ``met``: the server is known to be at this address, so another process with its port counts as a lost server.
    """

    def __init__(
        self, address: Address, deadlines: Deadlines | None = None, world: World = REAL, *, met: bool = False
    ) -> None:
        self.address = address
        self.deadlines = deadlines or Deadlines()
        self.world = world
        self.channel: Channel | None = None
        #: Bounds on the server's frames; a driver receives two arrays for each table.
        self.limits = Limits(arrays=_ARRAYS_MAX)
        self._met = met
        #: Held while a request is in progress.
        self._requesting = world.lock()

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for a reply: longer than the server's own waits, because its errors name the reason."""
        return max(self.deadlines.reply, self.deadlines.gather) + 10.0

    @property
    def meeting_timeout(self) -> float:
        """Seconds to wait for a reply for which all workers must join, and then commit or announce themselves."""
        return 2 * self.reply_timeout  # each of the two waits may be as long, at a restarted server

    def _connect(self) -> Channel:
        """Connect. If the server was met before, report another process at its port as a ServerLostError."""
        where, certificate = self.address.locate(self.world), self.address.certificate
        context = client_context(certificate) if certificate else None
        try:
            self.channel = dial(
                where,
                self.address.key,
                self.deadlines,
                allocate=self.allocate,
                limits=self.limits,
                context=context,
                world=self.world,
            )
        except DeadlineError as error:  # the kernel accepts connections even for a suspended server
            raise ServerLostError(f"the server has not completed the handshake: {error.message}") from error
        except (AuthenticationError, RemoteProtocolError) as error:
            if not self._met:
                raise
            raise ServerLostError(f"the server has lost its port to another process: {error.message}") from error
        self._met = True
        if self.address.moves:
            self.channel.watch(lambda: self._replaced(where), self.deadlines.gather / _POLLS)
        return self.channel

    def _replaced(self, where: tuple[str, int]) -> bool:
        """Return whether a server is announced at another address than ``where``."""
        try:
            return self.address.locate(self.world) != where
        except ServerLostError:  # no new server is announced, or the announcements cannot be read now
            return False

    def allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        return np.empty(size, dtype)

    def request(
        self, message: Message, expected: type[_Answer] | tuple[type[_Answer], ...], timeout: float | None = None
    ) -> _Answer:
        """Send ``message`` and return the reply, one of ``expected``; the server's error is raised here."""
        with self._requesting:
            answer = self.exchange(message, self.reply_timeout if timeout is None else timeout)
        return self._checked(message, answer, expected)

    @staticmethod
    def _checked(message: Message, answer: Message, expected: type[_Answer] | tuple[type[_Answer], ...]) -> _Answer:
        """Return the ``answer`` to ``message``, which must be one of ``expected``."""
        if isinstance(answer, Fault):
            raise error_of(answer)
        if not isinstance(answer, expected):
            names = " or ".join(kind.__name__ for kind in (expected if isinstance(expected, tuple) else (expected,)))
            raise RemoteProtocolError(
                f"the answer to {type(message).__name__} must be {names}. Received: {type(answer).__name__}"
            )
        return answer

    def exchange(self, message: Message, timeout: float) -> Message:
        """Send ``message`` and return the answer, even if it is a `Fault`; for one thread at a time."""
        channel = self.channel or self._connect()
        what = f"the server's answer to {type(message).__name__}"
        try:
            channel.send(message)
            answer = channel.receive(timeout, what)
        except (LocalProtocolError, DeadlineError):
            self.close()  # a late answer must not be taken for that to the next request
            raise
        except (RemoteProtocolError, OSError) as error:  # a RemoteProtocolError here means corrupted bytes
            self.close()
            raise ServerLostError(f"the server has not answered {type(message).__name__}: {error}") from error
        if isinstance(answer, EndOfStream):
            self.close()
            raise ServerLostError(f"the server closed the connection instead of answering {type(message).__name__}")
        return answer

    def lost(self, error: Exception) -> bool:
        """Return whether the latest request, which raised ``error``, was not answered."""
        # A client closes the connection after its own DeadlineError; one that the server sent leaves it open.
        return isinstance(error, ServerLostError) or (isinstance(error, DeadlineError) and self.channel is None)

    @staticmethod
    def handshake_unanswered(error: Exception) -> bool:
        """Return whether a handshake was not answered: the host accepts connections even for a suspended process."""
        return isinstance(error, ServerLostError) and isinstance(error.__cause__, DeadlineError)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
