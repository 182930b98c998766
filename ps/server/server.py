"""The parameter server: a listener, and a thread for each connection, around a `Dispatcher`.

A peer must prove that it holds the job's key before any of its requests is answered.
"""

from __future__ import annotations

import errno
import logging
import ssl
import traceback
from collections.abc import Mapping
from typing import Any, Protocol

from distkeras.ps.center.center import Center, partition_of
from distkeras.ps.center.leases import StateMemory
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    LeaseLostError,
    LedgerError,
    LocalProtocolError,
    NodeError,
    NonFiniteError,
    RemoteProtocolError,
    ShapeError,
    sorted_error,
)
from distkeras.ps.events import report
from distkeras.ps.protocol.driver_messages import Goodbye
from distkeras.ps.protocol.framing import Connection, EndOfStream, Limits
from distkeras.ps.protocol.messages import AskForWork, Fault, Message, fault_of
from distkeras.ps.protocol.shared_slots import SharedSlots
from distkeras.ps.server.admission import AdmissionControl, PendingConnection
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.server.job_state import JobCondition, Peer, PeerVectors
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Channel
from distkeras.ps.world.streams import PARALLEL_SOCKET_BUFFER, SOCKET_BUFFER, Listener, Stream
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

#: Errors that end the whole job, not only the request.
_ENDS_JOB = (NonFiniteError, LedgerError, DeadlineError, ShapeError, LocalProtocolError, NodeError)


class Answering(Protocol):
    """What answers a server's requests: a `Dispatcher`, or that of a shard."""

    changed: JobCondition
    #: Bounds on the frames of the peers, and the memory for states of optimizers.
    limits: Limits
    states: StateMemory

    @property
    def center(self) -> Center | None:
        """The center, or the part of it that this server has; None before it is published."""

    def answer(self, peer: Peer, message: Message) -> Message:
        """Return the reply to ``message``; the session sends a DistkerasError to the peer."""

    def disconnected(self, peer: Peer) -> None:
        """Note that a session has ended."""

    def corrupted(self, error: NodeError) -> DistkerasError:
        """Return the error to raise for ``error``, after which a commit is applied in part."""

    def close(self, timeout: float) -> None:
        """End within ``timeout`` seconds; no request may follow."""


class Session:
    """Receives the requests of one peer over ``channel``, which it owns, and sends the dispatcher's answers."""

    def __init__(
        self, server: ParameterServer, name: str, channel: Channel, vectors: PeerVectors, pending: PendingConnection
    ) -> None:
        self.name, self.channel, self.vectors = name, channel, vectors
        self._server, self._pending = server, pending
        self._admission, self._dispatcher, self._deadlines = server.admission, server.dispatcher, server.deadlines
        self._now = channel.world.monotonic
        self.thread = channel.world.thread(self._run, f"ps-{name}")
        # The attributes of a `Peer`.
        self.lease: tuple[int, int] | None = None
        self.active_at, self.asking = self._now(), False

    def start(self) -> None:
        """Begin to serve; end the session if the system cannot start a thread."""
        try:
            self.thread.start()
        except RuntimeError as error:
            self._end(error)

    def hung_up(self) -> bool:
        return self.channel.hung_up()

    def share(self, slots: SharedSlots | None) -> None:
        self.channel.connection.share(slots)
        self.vectors.slots = slots

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self.channel.handshake(self._deadlines.handshake, lambda: self._admission.admit(self._pending))
            while self._serve_one():
                pass
        except (DistkerasError, OSError, MemoryError) as failure:  # the peer repeats an unanswered request
            error = failure
        finally:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        """Close the connection; ``error`` is the reason, None if the peer closed it in good order."""
        if error is not None:
            closing = self._dispatcher.changed.closing
            refused = not self._pending.admitted or isinstance(error, RemoteProtocolError)
            if refused and not closing:
                self._admission.refuse(self._pending, error)
            else:
                worker_lost = self.lease is not None and not closing
                log.log(
                    logging.WARNING if worker_lost else logging.DEBUG,
                    "the connection of %s has ended: %s",
                    self.name,
                    error,
                )
        self.vectors.drop()
        self.share(None)  # release the memory now: `LeaseConnections` may refer to this session for a long time
        self.channel.close()
        self._admission.leave(self._pending)
        self._server.remove(self)
        self._dispatcher.disconnected(self)

    def _serve_one(self) -> bool:
        """Answer one request; return False if the connection must end after it."""
        self.channel.connection.set_limits(self._dispatcher.limits)
        message = self.channel.receive(self._deadlines.silence, f"a request of {self.name}")
        if isinstance(message, EndOfStream):
            return False
        self.asking = True
        try:
            reply = self._answer(message)
        except DistkerasError as error:
            return self._send_fault(message, error)
        finally:
            self.active_at, self.asking = self._now(), False
        try:
            self.channel.send(reply)
        finally:
            if isinstance(message, Goodbye):  # after the reply is sent, because the server then closes this connection
                self._dispatcher.changed.release()
        self.active_at = self._now()
        self.vectors.drop()
        return True

    def _send_fault(self, message: Message, error: DistkerasError) -> bool:
        """Send ``error`` to the peer; return False if the connection must end after it."""
        ends_job = isinstance(error, _ENDS_JOB)
        if not isinstance(message, AskForWork):  # helpers have numbers of their own
            error.worker = partition_of(self._dispatcher.center, error.worker)
        if ends_job and error.remote_traceback is None:
            error.remote_traceback = traceback.format_exc()
        fault = fault_of(error)
        if ends_job:
            self._dispatcher.changed.fail(fault)
        elif isinstance(error, LeaseLostError):
            worker, attempt = getattr(message, "worker", None), getattr(message, "attempt", None)
            partition = partition_of(self._dispatcher.center, worker)
            report(log, "fenced", "a request is refused: %s", error.message, worker=partition, attempt=attempt)
        self.vectors.drop()
        self.channel.send(fault)
        return not isinstance(error, (LeaseLostError, RemoteProtocolError))

    def _answer(self, message: Message) -> Message:
        try:
            return self._dispatcher.answer(self, message)
        except DistkerasError:
            raise
        except Exception as error:
            center = self._dispatcher.center
            corrupt = center is not None and center.corrupt
            if isinstance(error, (OSError, MemoryError)) and not corrupt:
                raise  # the connection ends, and the peer repeats the request
            typed = sorted_error(error)
            if isinstance(typed, NodeError):
                raise self._dispatcher.corrupted(typed) from error
            # A defect of a rule or of this server. Without a reply, the worker would retry forever.
            raise LocalProtocolError(
                f"a {type(message).__name__} must be answered. Received: {type(error).__name__}: {error}",
                worker=getattr(message, "worker", None),
                step=getattr(message, "first", None),
            ) from error


class ParameterServer:
    """The server of one job's center.

    The constructor binds the port, so that a taken port raises an error there and `address` is known at once. The
    server serves from `start` (or ``with``) to `close`. The center exists once the driver has published it.

    Args:
        key: the job's key, 32 bytes.
        context: encrypts every connection (`server_context`); None: plain.
        snapshots: where the ``dispatcher`` saves the center; None: nowhere.
        dispatcher: what answers the requests; None: a `Dispatcher` that saves nothing.
        listener: a port that is bound already; None: the constructor binds the port of ``settings``.
    """

    def __init__(
        self,
        settings: ServerSettings,
        key: bytes,
        *,
        context: ssl.SSLContext | None = None,
        snapshots: SnapshotDirectory | None = None,
        world: World = REAL,
        listener: Listener | None = None,
        dispatcher: Answering | None = None,
    ) -> None:
        self._key, self._context = key, context
        self._world, self._snapshots = world, snapshots
        self.deadlines = settings.deadlines
        self._buffer = SOCKET_BUFFER if settings.shards == 1 else PARALLEL_SOCKET_BUFFER
        #: Admission control: the connections that are accepted, and the refused ones.
        self.admission = AdmissionControl(world=world)
        self.dispatcher: Answering = dispatcher or Dispatcher(settings, world=world)
        self._lock = world.lock()
        self._sessions: dict[Session, None] = {}  # in the order of their arrival
        self._listener = listener or world.listen(settings.host, settings.port)
        self.address = self._listener.address
        self._acceptor = world.thread(self._accept, "ps-accept")

    def __enter__(self) -> ParameterServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def center(self) -> Center | None:
        """The center; None before it is published."""
        return self.dispatcher.center

    @property
    def fault(self) -> Fault | None:
        return self.dispatcher.changed.fault

    @property
    def corrupt(self) -> bool:
        """Return whether a commit was applied in part: the server must be restarted from its latest snapshot."""
        return self.dispatcher.changed.corruption is not None

    @property
    def superseded(self) -> bool:
        """Return whether another server of the same job owns the checkpoint now."""
        return self._snapshots is not None and self._snapshots.lost_to_own_job

    @property
    def over(self) -> bool:
        return self.dispatcher.changed.over

    @property
    def sessions(self) -> list[Session]:
        """The sessions that have not ended, the oldest first."""
        with self._lock:
            return list(self._sessions)

    def wait_for_change(self, seconds: float) -> None:
        """Wait for a change, such as of `over` or `corrupt`, for ``seconds`` at most."""
        with self.dispatcher.changed:
            self.dispatcher.changed.wait(seconds)

    def announce(self, place: Mapping[str, Any]) -> None:
        """Write this server's address into the checkpoint's directory: see `SnapshotDirectory.announce`."""
        if self._snapshots is None:
            raise LocalProtocolError(
                "a server that workers find through the checkpoint needs a `checkpoint`. Received: none"
            )
        self._snapshots.announce(place)

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Close port and connections, join the threads, take a last snapshot; raise DeadlineError if a thread hangs."""
        self.dispatcher.changed.close()
        sessions = self.sessions
        self._listener.close()
        for session in sessions:
            session.channel.hang_up()
        deadline = self._world.monotonic() + self.deadlines.close
        for thread in [*(session.thread for session in sessions), self._acceptor]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - self._world.monotonic()))
            if thread.is_alive():
                raise DeadlineError(f"waited {self.deadlines.close} s for thread {thread.name} to end")
        self.dispatcher.close(self.deadlines.close)

    def _accept(self) -> None:
        while True:
            try:
                stream, host, port = self._listener.accept()
            except OSError as error:
                if self.dispatcher.changed.closing:
                    return
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                # The process is out of descriptors, or the peer hung up early: later connections are still accepted.
                self.admission.evict_oldest()
                continue
            session = self._make_session(stream, host, port)
            with self._lock:
                if self.dispatcher.changed.closing:
                    session.channel.close()
                    return
                self._sessions[session] = None
            session.start()

    def _make_session(self, stream: Stream, host: str, port: int) -> Session:
        """Return a session for ``stream``, once admission control has room for it."""
        vectors = PeerVectors(self.dispatcher.states)
        connection = Connection(
            server=True,
            key=self._key,
            allocate=vectors.allocate,
            token=self._world.token,
        )
        channel = Channel(
            stream,
            connection,
            frame=self.deadlines.frame,
            context=self._context,
            buffer=self._buffer,
            world=self._world,
        )
        return Session(self, f"{host}:{port}", channel, vectors, self.admission.arrive(host, channel.hang_up))

    def remove(self, session: Session) -> None:
        with self._lock:
            self._sessions.pop(session, None)
