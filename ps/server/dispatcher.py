"""What the server answers, and who waits for what: messages in, messages out, one lock around the `Center`.

Called from the sessions' threads, which do the receiving and the sending. The finite check is done outside the lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.checks import check_shapes, not_finite
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.checkpointer import Checkpointer
from distkeras.ps.errors import (
    ERRORS,
    DeadlineError,
    JobStoppedError,
    NonFiniteError,
    RemoteProtocolError,
    ServerLostError,
    ShapeError,
)
from distkeras.ps.events import report
from distkeras.ps.protocol.compression import FORMATS, Codec, codec_of, require_format
from distkeras.ps.protocol.error_codes import fault_of
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.layout import Layout, decode
from distkeras.ps.protocol.messages import (
    Abort,
    Ack,
    CenterReply,
    Commit,
    Drain,
    EndEarly,
    Fault,
    FetchModel,
    Hello,
    Inspect,
    Leave,
    ListWorkers,
    Message,
    ModelFile,
    Observe,
    Occupancy,
    Parked,
    Probe,
    Publish,
    Pull,
    Records,
    Status,
    Welcome,
    WorkerTable,
)
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.channel import Channel

log = logging.getLogger(__name__)

#: Room in a commit for its history: a row a step, far below this.
_HISTORY_BYTES = 16 * 1024 * 1024
#: How often a waiting thread looks whether its peer is still there, in seconds.
_LIVENESS = 1.0
#: How long one answer to somebody who waits for a lease may take, in seconds; then it asks again.
_PARKED = 10.0


def make_center(
    settings: ServerSettings, vector: np.ndarray, moving_statistics: np.ndarray, incarnation: int
) -> Center:
    """The center that ``settings`` ask for, from its initial parameters (float32) and moving statistics."""
    return Center(
        settings.rule,
        vector,
        workers=settings.workers,
        learning_rate=settings.learning_rate,
        scheduler=scheduler_for(settings.rule, settings.workers, settings.staleness_bound),
        moving_statistics=moving_statistics,
        measure_gap=settings.measure_gap,
        incarnation=incarnation,
    )


class Peer(Protocol):
    """A session, as far as its answers need it."""

    channel: Channel
    lease: tuple[int, int] | None
    heard: float
    asking: bool
    sending: Buffer | None

    @property
    def codec(self) -> Codec | None: ...
    def take_received(self, commit: Commit) -> list[Buffer]: ...
    def agree(self, codec: Codec | None) -> None: ...
    def unpack(self, commit: Commit) -> Commit: ...
    def pack(self, reply: CenterReply, *, whole: bool) -> CenterReply: ...


class Dispatcher:
    """Answers everybody who has proved that it holds the job's key.

    Args:
        settings: the server's.
        incarnation: of this server.
        saver: saves the center; None: the job ends with this process.
        restored: the center that a snapshot was taken of, from ``saver``; None: it is made when it is published.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        incarnation: int = 1,
        saver: Checkpointer | None = None,
        restored: Center | None = None,
    ) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self.deadlines = settings.deadlines
        self.saver = saver
        self.center = restored
        #: The lock, and the news that somebody may wait for.
        self.changed = threading.Condition()
        self.fault: Fault | None = None
        self.closing = False
        self._published_once = False
        self._began = time.monotonic()
        #: Who holds each partition's lease, or held it last.
        self._holders: dict[int, Peer] = {}
        #: Who has a commit received and not yet applied. Read without the lock, which the commits hold or wait for.
        self._committing: set[Peer] = set()
        self._model = np.empty(0, np.uint8)
        #: What the vectors consist of, center and statistics, where the driver told.
        self._layouts: list[Layout] = []
        self._metrics = saver.metrics if saver else ""

    def start(self) -> None:
        """Begins to save a restored center."""
        if self.saver is not None and self.center is not None:
            self.saver.start(self.center, self.changed)

    def limits(self) -> Limits:
        """Bounds on a frame: the exact need once the center is published.

        What a peer can make the server hold is one such frame and one reply, while they travel, besides the records of
        its applied commits: up to 16 MiB of history each. With a wire format other than float32, also the vectors of
        its commit, and between two requests a packed commit and a packed reply; with int8 the vector that it has.
        A stranger: a thread, and less than a kilobyte.
        """
        center = self.center
        if center is None or not self._published_once:
            return Limits(body=self._settings.max_body)
        vectors = center.traits.parts * center.current.array.nbytes
        return Limits(body=vectors + center.moving_statistics.nbytes + _HISTORY_BYTES)

    def fail(self, fault: Fault) -> None:
        """Ends the job; the first fault is the one that is told."""
        with self.changed:
            if self.fault is None:
                self.fault = fault
                text = f"job ends: {ERRORS[fault.code].__name__}: {fault.message}"
                report(log, "failed", text, worker=None if fault.worker < 0 else fault.worker)
            self.changed.notify_all()

    def close(self) -> None:
        """From now on nobody is kept waiting."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def gone(self, session: Peer) -> None:
        """A session ended."""
        if session.lease is None:
            return  # strangers come and go without waking everybody
        with self.changed:
            # Its peer may have come back over another connection before this one was known to be dead.
            if self._holders.get(session.lease[0]) is session:
                self._existing().disconnected(*session.lease)
            self.changed.notify_all()

    # ---- answers, one a message type; called from the sessions' threads

    def answer(self, session: Peer, message: Message) -> Message:
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
                return self._on_leave(session, message)
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
                with self.changed:
                    released = self._existing().inspect()
                return self._reply(session, released)
            case Drain():
                with self.changed:
                    commit_log = self._existing().log
                    commits = commit_log.commits(message.start, message.count)
                    history = commit_log.history(message.start, message.count)
                    total = len(commit_log)
                return Records(total, self._metrics, commits.view(np.uint8), history)
            case EndEarly():
                with self.changed:
                    self._existing().finish(message.reason)
                    self.changed.notify_all()
                return self._ack()
            case ListWorkers():
                return self._on_list_workers()
            case Abort():
                self.fail(fault_of(JobStoppedError(message.reason)))
                return self._ack()
            case _:
                raise RemoteProtocolError(f"a server must be asked. Received: {type(message).__name__}")

    def _on_publish(self, message: Publish) -> Message:
        with self.changed:
            if self._published_once:
                raise RemoteProtocolError("the center must be published once. Received: a second Publish")
            self._model, self._published_once = message.model, True
            if self.center is None:
                self.center = make_center(self._settings, message.center, message.moving_statistics, self._incarnation)
                if self.saver is not None:
                    self.saver.start(self.center, self.changed)
            if message.names.size:
                sizes = self.center.size, self.center.moving_statistics.size
                self._layouts = decode(message.names.tobytes(), sizes)
            self.changed.notify_all()
        return self._ack()

    def _on_hello(self, session: Peer, message: Hello) -> Message:
        self._published(session)
        with self.changed:
            center = self._existing()
            if (message.size, message.moving_statistics) != (center.size, center.moving_statistics.size):
                raise ShapeError(
                    f"the model must have {center.size} trainable and {center.moving_statistics.size} moving elements. "
                    f"Received: {message.size} and {message.moving_statistics}",
                    worker=message.worker,
                )
            if message.wire_format not in FORMATS:
                raise RemoteProtocolError(
                    f"`wire_format` must be one of {FORMATS}. Received: wire_format={message.wire_format!r}",
                    worker=message.worker,
                )
            require_format(message.wire_format, center.rule)
            session.agree(codec_of(message.wire_format, center.size))
            if not self._metrics:
                self._metrics = message.metrics
                if self.saver is not None:
                    self.saver.metrics = message.metrics
            worker, attempt = message.worker, message.attempt
            before = center.members.get(worker)
            holder = attempt if before is None else before.attempt
            held = before is not None and holder == attempt

            def joins() -> bool:
                return center.join(worker, attempt, expired=self._silence(worker) >= self.deadlines.lease) is not None

            if not self._until(session, joins, _PARKED):
                return Parked()
            member = center.members[worker]
            if member.finished:
                self._until_saved(session, worker)
            else:
                session.lease = (worker, attempt)
                self._holders[worker] = session
            self.changed.notify_all()
            welcome = Welcome(
                incarnation=center.incarnation,
                clock=center.clock,
                sequence=member.sequence,
                durable=self._durable(worker, member.sequence),
                epoch=member.epoch,
                batch=member.batch,
                finished=member.finished,
                held=held,
                checksum=member.checksum,
                skipped=member.skipped,
                stopping=center.stopping is not None,
            )
        if holder not in (attempt, -1) and not welcome.finished:
            text = "attempt %d took partition %d over from attempt %d, at mini-batch %d of epoch %d"
            where = (attempt, worker, holder, welcome.batch, welcome.epoch)
            report(log, "takeover", text, *where, worker=worker, attempt=attempt)
        return welcome

    def _silence(self, worker: int) -> float:
        """Seconds since the holder of a partition gave a sign of life; none while it is owed an answer."""
        holder = self._holders.get(worker)
        if holder is not None and holder.asking:
            return 0.0
        return time.monotonic() - (self._began if holder is None else holder.heard)

    def _durable(self, worker: int, sequence: int) -> int:
        """The last commit of ``worker`` that outlives this process; without snapshots the last one is as good."""
        return sequence if self.saver is None else self.saver.durable.get(worker, 0)

    def _on_pull(self, session: Peer, message: Pull) -> Message:
        with self.changed:
            self._same_life(message)
            released = self._release(session, message.worker, message.attempt)
        return session.pack(self._reply(session, released), whole=True)

    def _on_commit(self, session: Peer, commit: Commit) -> Message:
        center = self._existing()
        center.held(commit.worker, commit.attempt)  # the mistakes of who has no lease do not end the job
        check_shapes(center, commit, session.codec)
        commit = session.unpack(commit)
        bad = not_finite(commit, self._layouts)
        if bad is not None:
            return self._skip(center, commit, bad)
        parts = session.take_received(commit)
        self._committing.add(session)
        with self.changed:
            try:
                self._going_on()
                center.commit(commit, parts)
                if self.saver is not None:
                    self.saver.committed(center.clock)
            finally:
                self._committing.discard(session)
            # Rounds and bounded staleness release others here; an observer may be waiting for news.
            self.changed.notify_all()
            if not commit.wants_center:
                return self._ack(commit.worker, commit.sequence)
            released = self._release(session, commit.worker, commit.attempt)
        return session.pack(self._reply(session, released), whole=False)

    def _skip(self, center: Center, commit: Commit, error: NonFiniteError) -> Message:
        with self.changed:
            self._going_on()
            skipped = center.log.skipped
            if skipped >= self._settings.max_skipped:
                if skipped:
                    error.message += f", after {skipped} commits that were skipped"
                raise error
            news = center.skip(commit)
            if self.saver is not None:
                self.saver.committed(center.clock)
            self.changed.notify_all()
            answer = self._ack(commit.worker, commit.sequence, skipped=True)
        if news:
            count = f"{skipped + 1} of at most {self._settings.max_skipped}"
            text = "a commit is skipped (%s): %s"
            report(log, "skipped", text, count, error.message, worker=commit.worker, attempt=commit.attempt)
        return answer

    def _on_leave(self, session: Peer, message: Leave) -> Message:
        with self.changed:
            self._same_life(message)
            self._existing().leave(message.worker, message.attempt)
            self.changed.notify_all()
            self._until_saved(session, message.worker)
        return self._ack()

    def _until_saved(self, session: Peer, worker: int) -> None:
        """Waits for a snapshot of all that was done: who is let go can repeat nothing any more."""
        if self.saver is not None:
            saver, mark = self.saver, self.saver.mark()
            self._wait(
                session,
                lambda: saver.covers(mark),
                self.deadlines.reply,
                lambda: f"a snapshot; {saver.failure.message if saver.failure else 'it is being written'}",
                worker,
            )

    def _on_observe(self, session: Peer, message: Observe) -> Message:
        deadline = time.monotonic() + min(self.deadlines.reply, message.patience)  # this way round for a NaN
        with self.changed:
            while not (self.fault or self.closing or self._clock() > message.clock):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(min(left, _LIVENESS))
                if session.channel.hung_up():
                    raise ServerLostError("the waiting observer hung up")
            if self.fault is not None:
                return self.fault
            center = self.center
            if center is None:
                return Status(0, 0, 0, 0, 0, math.nan, math.nan)
            members = center.members.values()
            # Of partitions that have no rows nothing is to come.
            empty = sum(member.finished and not member.sequence for member in members)
            return Status(
                clock=center.clock,
                joined=len(members),
                finished=sum(member.finished for member in members),
                batches=center.log.batches,
                samples=center.log.samples,
                loss=center.log.loss,
                staleness=center.log.staleness,
                epochs=sum(member.epoch for member in members) / max(1, center.workers - empty),
            )

    def _on_list_workers(self) -> Message:
        now = time.time()
        rows = []
        with self.changed:
            for worker, member in self._existing().members.items():
                if not member.finished and member.attempt >= 0:
                    holder = self._holders.get(worker)
                    silent = 0.0 if holder is not None and holder.asking else now - member.since
                    rows.append((worker, member.attempt, member.sequence, silent))
        return WorkerTable(np.array(rows, np.float64).ravel())

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
        if self.closing:
            raise JobStoppedError("the server is closing")

    def _same_life(self, message: Pull | Leave) -> None:
        incarnation = self._existing().incarnation
        if message.incarnation != incarnation:
            raise RemoteProtocolError(
                f"`incarnation` must be {incarnation}. Received: incarnation={message.incarnation}",
                worker=message.worker,
            )

    def _published(self, session: Peer) -> None:
        """Not under the lock: waits for the driver's `Publish`."""
        with self.changed:
            self._wait(
                session,
                lambda: self._published_once,
                self.deadlines.publish,
                lambda: "the driver to publish the center",
            )

    def _release(self, session: Peer, worker: int, attempt: int) -> Released:
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
        session: Peer,
        condition: Callable[[], bool],
        timeout: float,
        what: Callable[[], str],
        worker: int | None = None,
    ) -> None:
        if not self._until(session, condition, timeout):
            raise DeadlineError(f"waited {timeout:g} s for {what()}", worker=worker)

    def _until(self, session: Peer, condition: Callable[[], bool], timeout: float) -> bool:
        """Waits for ``condition``; False if it did not come true in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            self._going_on()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.changed.wait(min(left, _LIVENESS))
            if session.channel.hung_up():
                raise ServerLostError("the waiting peer hung up")
        return True

    def _ack(self, worker: int = -1, sequence: int = 0, *, skipped: bool = False) -> Ack:
        center = self.center
        if center is None:
            return Ack(0, 0, sequence, self._durable(worker, sequence))
        stopping = center.stopping is not None
        durable = self._durable(worker, sequence)
        return Ack(center.incarnation, center.clock, sequence, durable, skipped, stopping)

    def _reply(self, session: Peer, released: Released) -> CenterReply:
        session.sending = released.buffer
        worker = -1 if session.lease is None else session.lease[0]
        center = self._existing()
        return CenterReply(
            incarnation=center.incarnation,
            clock=released.clock,
            sequence=released.sequence,
            durable=self._durable(worker, released.sequence),
            learning_rate=released.learning_rate,
            center=released.buffer.array,
            moving_statistics=released.moving_statistics,
            stopping=center.stopping is not None,
        )
