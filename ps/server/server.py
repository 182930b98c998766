"""The parameter server: a listener, and a thread for each connection, around a `Dispatcher`.

Nothing is answered before its sender has proved that it holds the job's key.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.directory import Saved, SnapshotDirectory
from distkeras.ps.errors import DeadlineError, LocalProtocolError
from distkeras.ps.protocol.handshake import Connection
from distkeras.ps.protocol.messages import Fault
from distkeras.ps.server.admission import AdmissionControl
from distkeras.ps.server.dispatcher import Dispatcher, PeerVectors
from distkeras.ps.server.session import Session
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.channel import Channel
from distkeras.ps.world.streams import Listener, Stream
from distkeras.ps.world.world import REAL, World


class ParameterServer:
    """Serves one job's center.

    Binds in the constructor, so that a taken port is an error there and `address` is known at once; serves from
    `start` (or ``with``) to `close`. The center exists from the driver's `Publish` on.

    Args:
        settings: all that is no secret.
        key: the job's key, 32 bytes.
        context: encrypts every connection (`tls.server_context`); None: plain.
        incarnation: of this server: rises with each restart.
        snapshots: where the center is saved; None: the job ends with this process.
        restored: the center that a snapshot was taken of, and that snapshot; None: it is made when it is published.
        world: time, threads and connections.
        listener: a port that is bound already; None: this binds the one of ``settings``.

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
        snapshots: SnapshotDirectory | None = None,
        restored: tuple[Center, Saved] | None = None,
        world: World = REAL,
        listener: Listener | None = None,
    ) -> None:
        self._key = key
        self._world = world
        self.deadlines = settings.deadlines
        self._context = context
        self._snapshots = snapshots
        self._whole = settings.authenticate_vectors and context is None  # TLS has authenticated all there is
        #: Who may connect, and who was refused.
        self.admission = AdmissionControl(world=world)
        self.dispatcher = Dispatcher(
            settings, incarnation=incarnation, snapshots=snapshots, restored=restored, world=world
        )
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
        """What ended the job; None while nothing has."""
        return self.dispatcher.changed.fault

    @property
    def corrupt(self) -> bool:
        """Return whether it is of no more use, and to be started again from its latest snapshot."""
        return self.dispatcher.changed.corruption is not None

    @property
    def superseded(self) -> bool:
        """Return whether another server of the same job owns the checkpoint now."""
        return self._snapshots is not None and self._snapshots.lost_to_own_job

    @property
    def over(self) -> bool:
        """Return whether the driver has said goodbye."""
        return self.dispatcher.changed.over

    @property
    def sessions(self) -> list[Session]:
        """Those that have not ended, the oldest first."""
        with self._lock:
            return list(self._sessions)

    def wait_for_news(self, seconds: float) -> None:
        """Return when something has changed, such as `over` and `corrupt`, and after ``seconds`` at the latest."""
        with self.dispatcher.changed:
            self.dispatcher.changed.wait(seconds)

    def announce(self, place: Mapping[str, Any]) -> None:
        """Writes down in the checkpoint's directory where this server is: see `SnapshotDirectory.announce`.

        Raises:
            LocalProtocolError: it has none.
            SnapshotError: that cannot be written.
        """
        if self._snapshots is None:
            raise LocalProtocolError("a server needs a checkpoint to announce itself in. Received: none")
        self._snapshots.announce(place)

    def start(self) -> None:
        """Begins to accept connections."""
        self._acceptor.start()

    def close(self) -> None:
        """Closes the port and every connection, waits for the threads, and takes a last snapshot.

        Raises:
            DeadlineError: a thread did not end in time.
        """
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
                # Out of descriptors, or a peer that hung up before its turn: no reason to be deaf from now on.
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
        """Waits until there is room for it."""
        vectors = PeerVectors()
        limits = self.dispatcher.limits()
        connection = Connection(
            server=True,
            key=self._key,
            limits=limits,
            allocate=vectors.allocate,
            token=self._world.token,
            whole=self._whole,
        )
        channel = Channel(stream, connection, frame=self.deadlines.frame, context=self._context, world=self._world)
        return Session(
            f"{host}:{port}",
            channel,
            vectors,
            self.admission.arrive(host, channel.hang_up),
            admission=self.admission,
            dispatcher=self.dispatcher,
            deadlines=self.deadlines,
            on_end=self._remove,
        )

    def _remove(self, session: Session) -> None:
        with self._lock:
            self._sessions.pop(session, None)
