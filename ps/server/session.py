"""One connection and the thread that serves it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

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
from distkeras.ps.protocol.framing import EndOfStream
from distkeras.ps.protocol.messages import Goodbye, Message, fault_of
from distkeras.ps.server.admission import AdmissionControl, PendingConnection
from distkeras.ps.server.dispatcher import Dispatcher, PeerVectors
from distkeras.ps.transport.channel import Channel
from distkeras.ps.transport.deadlines import Deadlines

log = logging.getLogger(__name__)

#: Errors found here that end the job, and not only the request they answer.
_ENDS_JOB = (NonFiniteError, LedgerError, DeadlineError, ShapeError, LocalProtocolError, NodeError)


class Session:
    """Receives the requests of one peer, and sends the dispatcher's answers.

    Args:
        name: the peer's address and port, for the log.
        channel: to the peer; the session owns it.
        vectors: what ``channel`` receives commits into.
        pending: the connection, as admission control knows it.
        admission: records which peers prove the key, are refused, and leave.
        dispatcher: answers.
        deadlines: of every wait.
        on_end: called once, with this session, when it has ended.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        vectors: PeerVectors,
        pending: PendingConnection,
        *,
        admission: AdmissionControl,
        dispatcher: Dispatcher,
        deadlines: Deadlines,
        on_end: Callable[[Session], None],
    ) -> None:
        self.name = name
        self.channel = channel
        self.vectors = vectors
        self._pending = pending
        self._admission = admission
        self._dispatcher = dispatcher
        self._deadlines = deadlines
        self._on_end = on_end
        self._now = channel.world.monotonic
        self.thread = channel.world.thread(self._run, f"ps-{name}")
        # What the dispatcher knows of a `Peer`.
        self.lease: tuple[int, int] | None = None
        self.active_at, self.asking = self._now(), False

    def start(self) -> None:
        """Begins to serve; without a thread to be had, the session has ended."""
        try:
            self.thread.start()
        except RuntimeError as error:  # the system has no room for a thread
            self._end(error)

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end."""
        return self.channel.hung_up()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self.channel.handshake(self._deadlines.handshake, lambda: self._admission.admit(self._pending))
            while self._serve_one():
                pass
        except (DistkerasError, OSError, MemoryError) as failure:  # the peer sends again what was not answered
            error = failure
        finally:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        """Closes the connection; ``error`` is why, unless the peer hung up in good order."""
        if error is not None:
            closing = self._dispatcher.changed.closing
            refused = not self._pending.admitted or isinstance(error, RemoteProtocolError)
            if refused and not closing:
                self._admission.refuse(self._pending, error)
            else:
                worker_lost = self.lease is not None and not closing
                log.log(
                    logging.WARNING if worker_lost else logging.DEBUG, "connection of %s ends: %s", self.name, error
                )
        self.vectors.drop()
        self.channel.close()
        self._admission.leave(self._pending)
        self._on_end(self)
        self._dispatcher.disconnected(self)

    def _serve_one(self) -> bool:
        """Answers one request; False where the connection ends after it."""
        self.channel.connection.set_limits(self._dispatcher.limits())
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
            if isinstance(message, Goodbye):  # not before the answer is sent: the server's end closes this connection
                self._dispatcher.changed.release()
        self.active_at = self._now()
        self.vectors.drop()
        return True

    def _send_fault(self, message: Message, error: DistkerasError) -> bool:
        """Tells the peer; False where the connection ends after it."""
        ends_job = isinstance(error, _ENDS_JOB)
        if ends_job and error.remote_traceback is None:
            error.remote_traceback = traceback.format_exc()
        fault = fault_of(error)
        if ends_job:
            self._dispatcher.changed.fail(fault)
        elif isinstance(error, LeaseLostError):
            worker, attempt = getattr(message, "worker", None), getattr(message, "attempt", None)
            report(log, "fenced", "a request is refused: %s", error.message, worker=worker, attempt=attempt)
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
                raise  # the connection ends, and the peer sends again what was not applied
            typed = sorted_error(error)
            if isinstance(typed, NodeError):
                raise self._dispatcher.corrupted(typed) from error
            # A rule's mistake, or ours. Unanswered, the worker would only see a lost connection, and try again.
            raise LocalProtocolError(
                f"a {type(message).__name__} must be answered. Received: {type(error).__name__}: {error}",
                worker=getattr(message, "worker", None),
                step=getattr(message, "first", None),
            ) from error
