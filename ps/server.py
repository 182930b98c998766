"""Sockets and threads around a `Center`: one thread a connection, one lock for the center.

The work that a lock would hold up is done outside it: receiving, the finite check, sending. Nothing is answered
before its sender has proved that it holds the job's key.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
import traceback
from collections.abc import Callable

import numpy as np

from distkeras.ps.buffers import Buffer
from distkeras.ps.center import Center, Released
from distkeras.ps.channel import Channel, Deadlines
from distkeras.ps.errors import (
    ERRORS,
    DeadlineError,
    DistkerasError,
    JobStoppedError,
    LeaseLostError,
    LedgerError,
    LocalProtocolError,
    NonFiniteError,
    RemoteProtocolError,
    ServerLostError,
    ShapeError,
)
from distkeras.ps.faults import fault_of
from distkeras.ps.messages import (
    Ack,
    CenterReply,
    Commit,
    Drain,
    Fault,
    FetchModel,
    Hello,
    Inspect,
    Leave,
    Message,
    ModelFile,
    Observe,
    Occupancy,
    Probe,
    Publish,
    Pull,
    Records,
    Status,
    Stop,
    Welcome,
)
from distkeras.ps.wire import Connection, EndOfStream, Limits

log = logging.getLogger(__name__)

#: Room in a commit for its history: a row a step, far below this.
_HISTORY_BYTES = 16 * 1024 * 1024
#: How often a waiting thread looks whether its peer is still there, in seconds.
_LIVENESS = 1.0
#: Errors found here that end the job, and not only the request they answer.
_ENDS_JOB = (NonFiniteError, LedgerError, DeadlineError, ShapeError, LocalProtocolError)


class ParameterServer:
    """Serves one job's center.

    Binds in the constructor, so that a taken port is an error there and `address` is known at once; serves from
    `start` (or ``with``) to `close`. The center exists from the driver's `Publish` on.

    Args:
        center: makes the center from the published vector and statistics.
        key: the job's key, 32 bytes.
        host: address to bind.
        port: 0 for one that is free.
        deadlines: of every wait.
        max_body: bytes of the largest `Publish`.

    Raises:
        OSError: the port cannot be bound.
    """

    def __init__(
        self,
        center: Callable[[np.ndarray, np.ndarray], Center],
        *,
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        deadlines: Deadlines | None = None,
        max_body: int = 1 << 32,
    ) -> None:
        self._make_center = center
        self._key = key
        self.deadlines = deadlines or Deadlines()
        self._max_body = max_body
        self._changed = threading.Condition()
        self.center: Center | None = None
        self.fault: Fault | None = None
        self._model = np.empty(0, np.uint8)
        self._metrics = ""
        self._closing = False
        self._sessions: set[_Session] = set()
        #: Who has a commit received and not yet applied. Read without the lock, which the commits hold or wait for.
        self._committing: set[_Session] = set()
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
        self._acceptor.start()

    def close(self) -> None:
        """Closes the port and every connection, and waits for the threads.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        with self._changed:
            self._closing = True
            sessions = list(self._sessions)
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # not every platform lets a listener be shut down
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close alone does not
        self._listener.close()
        for session in sessions:
            session.channel.close()
        deadline = time.monotonic() + self.deadlines.close
        threads = [session.thread for session in sessions]
        for thread in [*threads, self._acceptor]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(f"waited {self.deadlines.close} s for thread {thread.name} to end")

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                raise
            session = _Session(self, sock, f"{peer[0]}:{peer[1]}")
            with self._changed:
                if self._closing:
                    session.channel.close()
                    return
                self._sessions.add(session)
            session.thread.start()

    def limits(self) -> Limits:
        """Bounds on a frame: the exact need once the center is published."""
        center = self.center
        if center is None:
            return Limits(body=self._max_body)
        vectors = center.traits.parts * center.current.array.nbytes
        return Limits(body=vectors + center.statistics.nbytes + _HISTORY_BYTES)

    def forget(self, session: _Session) -> None:
        """A session ended."""
        with self._changed:
            self._sessions.discard(session)
            if self.center is not None and session.lease is not None:
                self.center.disconnected(*session.lease)
            self._changed.notify_all()

    def fail(self, fault: Fault) -> None:
        """Ends the job; the first fault is the one that is told."""
        with self._changed:
            if self.fault is None:
                self.fault = fault
                log.warning("job ends: %s: %s", ERRORS[fault.code].__name__, fault.message)
            self._changed.notify_all()

    # ---- answers, one a message type; called from the sessions' threads

    def answer(self, session: _Session, message: Message) -> Message:
        """The reply to ``message``.

        Raises:
            DistkerasError: it cannot be answered; the peer is told.
        """
        match message:
            case Commit():
                return self._on_commit(session, message)
            case Pull():
                return self._on_pull(session, message)
            case Probe():
                self._going_on()
                # A session asks one thing at a time: whoever is in the set is another one.
                return Occupancy(bool(self._committing))
            case Hello():
                return self._on_hello(session, message)
            case Leave():
                return self._on_leave(message)
            case Fault():
                self.fail(message)
                return self._ack()
            case FetchModel():
                self._published(session)
                return ModelFile(self._model)
            case Publish():
                return self._on_publish(message)
            case Observe():
                return self._on_observe(session, message)
            case Inspect():
                with self._changed:
                    released = self._existing().inspect()
                return self._reply(session, released)
            case Drain():
                with self._changed:
                    journal = self._existing().log
                    commits = journal.commits(message.start, message.count)
                    history = journal.history(message.start, message.count)
                    total = len(journal)
                return Records(total, self._metrics, commits.view(np.uint8), history)
            case Stop():
                self.fail(fault_of(JobStoppedError(message.reason)))
                return self._ack()
            case _:
                raise RemoteProtocolError(f"a server must be asked. Received: {type(message).__name__}")

    def _on_publish(self, message: Publish) -> Message:
        with self._changed:
            if self.center is not None:
                raise RemoteProtocolError("the center must be published once. Received: a second Publish")
            self._model = message.model
            self.center = self._make_center(message.center, message.statistics)
            self._changed.notify_all()
        return self._ack()

    def _on_hello(self, session: _Session, message: Hello) -> Message:
        self._published(session)
        with self._changed:
            center = self._existing()
            if (message.size, message.statistics) != (center.size, center.statistics.size):
                raise ShapeError(
                    f"the model must have {center.size} trainable and {center.statistics.size} moving elements. "
                    f"Received: {message.size} and {message.statistics}",
                    worker=message.worker,
                )
            if not self._metrics:
                self._metrics = message.metrics
            member = center.join(message.worker, message.attempt)
            if member is None:
                self._wait(
                    session,
                    lambda: center.join(message.worker, message.attempt) is not None,
                    self.deadlines.takeover,
                    lambda: f"the previous attempt of partition {message.worker} to be gone",
                    message.worker,
                )
            member = center.held(message.worker, message.attempt)
            session.lease = (message.worker, message.attempt)
            self._changed.notify_all()
            return Welcome(
                incarnation=center.incarnation,
                clock=center.clock,
                sequence=member.sequence,
                durable=member.sequence,
                epoch=member.epoch,
                batch=member.batch,
                finished=member.finished,
                checksum=member.checksum,
            )

    def _on_pull(self, session: _Session, message: Pull) -> Message:
        with self._changed:
            self._same_life(message)
            released = self._release(session, message.worker, message.attempt)
        return self._reply(session, released)

    def _on_commit(self, session: _Session, commit: Commit) -> Message:
        center = self._existing()
        self._check_payload(center, commit)
        parts = session.take_received(commit)
        self._committing.add(session)
        with self._changed:
            try:
                self._going_on()
                center.commit(commit, parts)
            finally:
                self._committing.discard(session)
            # Rounds and bounded staleness release others here; an observer may be waiting for news.
            self._changed.notify_all()
            if not commit.wants_center:
                return self._ack(commit.sequence)
            released = self._release(session, commit.worker, commit.attempt)
        return self._reply(session, released)

    def _on_leave(self, message: Leave) -> Message:
        with self._changed:
            self._same_life(message)
            self._existing().leave(message.worker, message.attempt)
            self._changed.notify_all()
        return self._ack()

    def _on_observe(self, session: _Session, message: Observe) -> Message:
        deadline = time.monotonic() + min(message.patience, self.deadlines.reply)
        with self._changed:
            while not (self.fault or self._closing or self._clock() > message.clock):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self.fault is not None:
                return self.fault
            center = self.center
            if center is None:
                return Status(0, 0, 0, 0, 0, math.nan, math.nan)
            members = center.members.values()
            return Status(
                clock=center.clock,
                joined=len(members),
                finished=sum(member.finished for member in members),
                batches=center.log.batches,
                samples=center.log.samples,
                loss=center.log.loss,
                staleness=center.log.staleness,
            )

    # ---- what the answers share; the lock is held unless said otherwise

    def _clock(self) -> int:
        return -1 if self.center is None else self.center.clock

    def _existing(self) -> Center:
        if self.center is None:
            raise RemoteProtocolError("the center must be published first. Received: a request for it")
        return self.center

    def _going_on(self) -> None:
        if self.fault is not None:
            raise JobStoppedError(f"the job was ended: {self.fault.message}")
        if self._closing:
            raise JobStoppedError("the server is closing")

    def _same_life(self, message: Pull | Leave) -> None:
        incarnation = self._existing().incarnation
        if message.incarnation != incarnation:
            raise RemoteProtocolError(
                f"`incarnation` must be {incarnation}. Received: incarnation={message.incarnation}",
                worker=message.worker,
            )

    def _published(self, session: _Session) -> None:
        """Not under the lock: waits for the driver's `Publish`."""
        with self._changed:
            self._wait(
                session,
                lambda: self.center is not None,
                self.deadlines.publish,
                lambda: "the driver to publish the center",
            )

    def _release(self, session: _Session, worker: int, attempt: int) -> Released:
        center = self._existing()
        center.held(worker, attempt)
        if not center.ready(worker):
            gathering = bool(center.scheduler.missing())
            self._wait(
                session,
                lambda: center.ready(worker),
                self.deadlines.gather if gathering else self.deadlines.reply,
                lambda: self._whom(center, worker),
                worker,
            )
        self._going_on()
        return center.release(worker, attempt)

    def _whom(self, center: Center, worker: int) -> str:
        missing = center.scheduler.missing()
        if missing:
            running = center.workers - len(missing)
            return (
                f"all workers to run at once, as this rule needs: {running} of {center.workers} got a slot; "
                f"missing: {sorted(missing)}"
            )
        return f"workers {sorted(center.scheduler.waiting_for(worker))} to commit"

    def _wait(
        self,
        session: _Session,
        condition: Callable[[], bool],
        timeout: float,
        what: Callable[[], str],
        worker: int | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            self._going_on()
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"waited {timeout:g} s for {what()}", worker=worker)
            self._changed.wait(min(left, _LIVENESS))
            if session.channel.hung_up():
                raise ServerLostError("the waiting peer hung up")

    def _check_payload(self, center: Center, commit: Commit) -> None:
        """Not under the lock: shapes, and whether every number is finite."""
        sizes = [part.size for part in commit.parts]
        if sizes != [center.size] * center.traits.parts or commit.statistics.size != center.statistics.size:
            raise ShapeError(
                f"a commit must have {center.traits.parts} parts of {center.size} elements and "
                f"{center.statistics.size} statistics. Received: {sizes} and {commit.statistics.size}",
                worker=commit.worker,
                step=commit.first,
            )
        if commit.steps < 1 or commit.history.size % commit.steps:
            raise ShapeError(
                f"a commit must have a row of history for each of its {commit.steps} steps. "
                f"Received: {commit.history.size} numbers",
                worker=commit.worker,
                step=commit.first,
            )
        for part in (*commit.parts, commit.statistics):
            # One pass finds nearly all; the squares of large finite numbers overflow too, hence the second look.
            with np.errstate(over="ignore"):
                suspicious = part.size > 0 and not math.isfinite(float(np.dot(part, part)))
            if suspicious:
                bad = np.flatnonzero(~np.isfinite(part))
                if bad.size:
                    raise NonFiniteError(
                        f"a commit must hold finite numbers. Received: {part[bad[0]]} at element {bad[0]} "
                        f"({bad.size} such) in mini-batches {commit.first}-{commit.last} of epoch {commit.epoch}",
                        worker=commit.worker,
                        step=commit.first,
                    )

    def _ack(self, sequence: int = 0) -> Ack:
        incarnation = 0 if self.center is None else self.center.incarnation
        return Ack(incarnation, max(0, self._clock()), sequence, sequence)

    def _reply(self, session: _Session, released: Released) -> CenterReply:
        session.sending = released.buffer
        return CenterReply(
            incarnation=self._existing().incarnation,
            clock=released.clock,
            sequence=released.sequence,
            durable=released.sequence,
            learning_rate=released.learning_rate,
            center=released.buffer.array,
            statistics=released.statistics,
        )


class _Session:
    """One connection and the thread that serves it."""

    def __init__(self, server: ParameterServer, sock: socket.socket, peer: str) -> None:
        self.server = server
        self.peer = peer
        connection = Connection(server=True, key=server._key, limits=server.limits(), allocate=self._allocate)
        self.channel = Channel(sock, connection, frame=server.deadlines.frame)
        self.thread = threading.Thread(target=self._run, name=f"ps-{peer}", daemon=True)
        self.lease: tuple[int, int] | None = None
        self.sending: Buffer | None = None
        self._receiving: list[Buffer] = []

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        center = self.server.center
        if kind is Commit and center is not None and (dtype, size) == (center.pool.dtype, center.size):
            buffer = center.pool.take()
            self._receiving.append(buffer)
            return buffer.array
        return np.empty(size, dtype)

    def take_received(self, commit: Commit) -> list[Buffer]:
        """The buffers that ``commit``'s parts were received into; the caller owns them."""
        parts = [next(buffer for buffer in self._receiving if buffer.array is part) for part in commit.parts]
        self._receiving = [buffer for buffer in self._receiving if buffer not in parts]
        return parts

    def _run(self) -> None:
        try:
            self.channel.handshake(self.server.deadlines.handshake)
            while self._serve_one():
                pass
        except (DistkerasError, OSError) as error:
            level = logging.DEBUG if self.server._closing else logging.WARNING
            log.log(level, "connection of %s ends: %s", self.peer, error)
        finally:
            self._drop_buffers()
            self.channel.close()
            self.server.forget(self)

    def _serve_one(self) -> bool:
        self.channel.connection.bound(self.server.limits())
        message = self.channel.receive(self.server.deadlines.silence, f"a request of {self.peer}")
        if isinstance(message, EndOfStream):
            return False
        try:
            reply = self._answer(message)
        except DistkerasError as error:
            ends = isinstance(error, _ENDS_JOB)
            if ends and error.remote_traceback is None:
                error.remote_traceback = traceback.format_exc()
            fault = fault_of(error)
            if ends:
                self.server.fail(fault)
            self.channel.send(fault)
            return not isinstance(error, (LeaseLostError, RemoteProtocolError))
        self.channel.send(reply)
        self._drop_buffers()
        return True

    def _answer(self, message: Message) -> Message:
        try:
            return self.server.answer(self, message)
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
        for buffer in self._receiving:
            buffer.drop()
        self._receiving = []
        if self.sending is not None:
            self.sending.drop()
            self.sending = None
