"""Sockets and threads around a `Dispatcher`: one thread a connection.

Nothing is answered before its sender has proved that it holds the job's key.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
import traceback

import numpy as np

from distkeras.ps.center.buffers import Buffer, Pool
from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.checkpointer import Checkpointer
from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    LeaseLostError,
    LedgerError,
    LocalProtocolError,
    NonFiniteError,
    RemoteProtocolError,
    ShapeError,
)
from distkeras.ps.events import report
from distkeras.ps.protocol.compression import Codec
from distkeras.ps.protocol.error_codes import fault_of
from distkeras.ps.protocol.framing import EndOfStream
from distkeras.ps.protocol.handshake import Connection
from distkeras.ps.protocol.messages import CenterReply, Commit, Fault, Message
from distkeras.ps.protocol.wire_format import PeerFormat
from distkeras.ps.server.admission import AdmissionControl, PendingConnection
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.channel import Channel

log = logging.getLogger(__name__)

#: Errors found here that end the job, and not only the request they answer.
_ENDS_JOB = (NonFiniteError, LedgerError, DeadlineError, ShapeError, LocalProtocolError)


class ParameterServer:
    """Serves one job's center.

    Binds in the constructor, so that a taken port is an error there and `address` is known at once; serves from
    `start` (or ``with``) to `close`. The center exists from the driver's `Publish` on.

    Args:
        settings: all that is no secret.
        key: the job's key, 32 bytes.
        context: encrypts every connection (`tls.server_context`); None: plain.
        incarnation: of this server.
        saver: saves the center; None: the job ends with this process.
        restored: the center that a snapshot was taken of, from ``saver``; None: it is made when it is published.

    Raises:
        OSError: the port cannot be bound.
    """

    def __init__(
        self,
        settings: ServerSettings,
        key: bytes,
        *,
        context: ssl.SSLContext | None = None,
        incarnation: int = 1,
        saver: Checkpointer | None = None,
        restored: Center | None = None,
    ) -> None:
        self._key = key
        self.deadlines = settings.deadlines
        self._context = context
        #: Who may connect, and who was refused.
        self.admission = AdmissionControl()
        self.dispatcher = Dispatcher(settings, incarnation=incarnation, saver=saver, restored=restored)
        self._lock = threading.Lock()
        self._sessions: set[_Session] = set()
        host, port = settings.host, settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="ps-accept", daemon=True)

    def __enter__(self) -> ParameterServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Begins to accept connections."""
        self.dispatcher.start()
        self._acceptor.start()

    def close(self) -> None:
        """Closes the port and every connection, waits for the threads, and takes a last snapshot.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        self.dispatcher.close()
        with self._lock:
            sessions = list(self._sessions)
        with contextlib.suppress(OSError):  # not every platform lets a listener be shut down
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close alone does not
        self._listener.close()
        for session in sessions:
            session.channel.hang_up()
        deadline = time.monotonic() + self.deadlines.close
        threads = [session.thread for session in sessions]
        for thread in [*threads, self._acceptor]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(f"waited {self.deadlines.close} s for thread {thread.name} to end")
        if self.dispatcher.saver is not None:
            self.dispatcher.saver.close(self.deadlines.close)

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self.dispatcher.closing:
                    return
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                # Out of descriptors, or a peer that was gone before its turn: no reason to be deaf from now on.
                self.admission.relieve()
                continue
            try:
                session = _Session(self, sock, f"{peer[0]}:{peer[1]}")
                session.visit = self.admission.arrive(peer[0], session.channel.hang_up)
            except OSError:  # it was reset before its turn
                sock.close()
                continue
            with self._lock:
                if self.dispatcher.closing:
                    session.channel.close()
                    return
                self._sessions.add(session)
            try:
                session.thread.start()
            except RuntimeError as error:  # the system has no room for a thread
                session.end(error)

    @property
    def center(self) -> Center | None:
        """The center; None before it is published."""
        return self.dispatcher.center

    @property
    def fault(self) -> Fault | None:
        """What ended the job; None while nothing has."""
        return self.dispatcher.fault

    def forget(self, session: _Session) -> None:
        """A session ended."""
        with self._lock:
            self._sessions.discard(session)
        self.dispatcher.gone(session)


class _Session:
    """One connection and the thread that serves it."""

    def __init__(self, server: ParameterServer, sock: socket.socket, peer: str) -> None:
        self.server = server
        self.peer = peer
        connection = Connection(
            server=True, key=server._key, limits=server.dispatcher.limits(), allocate=self._allocate
        )
        self.channel = Channel(sock, connection, frame=server.deadlines.frame, context=server._context)
        self.visit: PendingConnection
        self.thread = threading.Thread(target=self._run, name=f"ps-{peer}", daemon=True)
        self.lease: tuple[int, int] | None = None
        #: When the peer last gave a sign of life, and whether it is owed an answer now.
        self.heard, self.asking = time.monotonic(), False
        self.sending: Buffer | None = None
        #: What is received, unpacked or packed for the present request.
        self._in_use: list[Buffer] = []
        self._format = PeerFormat(None)
        self._packs = Pool(0, np.uint8)

    def _take(self, pool: Pool) -> np.ndarray:
        buffer = pool.take()
        self._in_use.append(buffer)
        return buffer.array

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        center = self.server.dispatcher.center
        if kind is Commit and center is not None:
            for pool in (center.pool, self._packs):
                if (dtype, size) == (pool.dtype, pool.size):
                    return self._take(pool)
        return np.empty(size, dtype)

    def take_received(self, commit: Commit) -> list[Buffer]:
        """The buffers that ``commit``'s parts were received or unpacked into; the caller owns them."""
        parts = [next(buffer for buffer in self._in_use if buffer.array is part) for part in commit.parts]
        self._in_use = [buffer for buffer in self._in_use if buffer not in parts]
        return parts

    @property
    def codec(self) -> Codec | None:
        """Of the wire format; None for float32."""
        return self._format.codec

    def agree(self, codec: Codec | None) -> None:
        """From now on vectors travel like this; the peer begins anew, with nothing."""
        self._format = PeerFormat(codec)
        self._packs = Pool(codec.nbytes if codec else 0, np.uint8)

    def unpack(self, commit: Commit) -> Commit:
        """``commit``, whose shapes are right, with vectors as its parts."""
        center = self.server.dispatcher.center
        if center is None:
            return commit
        return self._format.decode(commit, lambda: self._take(center.pool))

    def pack(self, reply: CenterReply, *, whole: bool) -> CenterReply:
        """``reply`` in the wire format: see `PeerFormat.encode`."""
        return self._format.encode(reply, lambda: self._take(self._packs), whole=whole)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self.channel.handshake(self.server.deadlines.handshake, lambda: self.server.admission.admit(self.visit))
            while self._serve_one():
                pass
        except (DistkerasError, OSError) as failure:
            error = failure
        finally:
            self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """Closes the connection; ``error`` is why, unless the peer hung up in good order."""
        if error is not None:
            refused = not self.visit.known or isinstance(error, RemoteProtocolError)
            if refused and not self.server.dispatcher.closing:
                self.server.admission.refuse(self.visit, error)
            else:
                worth_it = self.lease is not None and not self.server.dispatcher.closing  # a worker is lost, perhaps
                log.log(logging.WARNING if worth_it else logging.DEBUG, "connection of %s ends: %s", self.peer, error)
        self._drop_buffers()
        self.channel.close()
        self.server.admission.leave(self.visit)
        self.server.forget(self)

    def _serve_one(self) -> bool:
        self.channel.connection.set_limits(self.server.dispatcher.limits())
        message = self.channel.receive(self.server.deadlines.silence, f"a request of {self.peer}")
        if isinstance(message, EndOfStream):
            return False
        self.asking = True
        try:
            reply = self._answer(message)
        except DistkerasError as error:
            ends = isinstance(error, _ENDS_JOB)
            if ends and error.remote_traceback is None:
                error.remote_traceback = traceback.format_exc()
            fault = fault_of(error)
            if ends:
                self.server.dispatcher.fail(fault)
            elif isinstance(error, LeaseLostError):
                worker, attempt = getattr(message, "worker", None), getattr(message, "attempt", None)
                report(log, "fenced", "a request is refused: %s", error.message, worker=worker, attempt=attempt)
            self._drop_buffers()
            self.channel.send(fault)
            return not isinstance(error, (LeaseLostError, RemoteProtocolError))
        finally:
            self.heard, self.asking = time.monotonic(), False
        self.channel.send(reply)
        self.heard = time.monotonic()
        self._drop_buffers()
        return True

    def _answer(self, message: Message) -> Message:
        try:
            return self.server.dispatcher.answer(self, message)
        except (DistkerasError, OSError):
            raise
        except Exception as error:
            # A rule's mistake, or ours. Unanswered, the worker would only see a lost connection, and try again.
            raise LocalProtocolError(
                f"a {type(message).__name__} must be answered. Received: {type(error).__name__}: {error}",
                worker=getattr(message, "worker", None),
                step=getattr(message, "first", None),
            ) from error

    def _drop_buffers(self) -> None:
        for buffer in self._in_use:
            buffer.drop()
        self._in_use = []
        if self.sending is not None:
            self.sending.drop()
            self.sending = None
