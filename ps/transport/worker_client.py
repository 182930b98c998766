"""The worker's end of a connection to the parameter server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from distkeras.ps.errors import (
    AuthenticationError,
    DeadlineError,
    DistkerasError,
    RelayLostError,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.compression import WorkerFormat
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.loop import CommitRecord, OptimizerState, Reply
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.shared_slots import SharedSlots, SlotSizes
from distkeras.ps.protocol.tables import Ids, TableShape, describe, most_state_bytes, row_elements
from distkeras.ps.rules.base import Vector
from distkeras.ps.transport.client import RETRY_SECONDS, UNREACHED, Address, Channel, Client
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.transport.handshakes import offer_slots
from distkeras.ps.world.shared_memory import SharedMemory
from distkeras.ps.world.world import REAL, Lock, World

log = logging.getLogger(__name__)

#: The largest size of shared memory with tables, in bytes: all of it is reserved from the beginning.
_SHARED_BYTES_MAX = 256 << 20
#: How many heartbeats are sent during a lease, so that some of them may be late.
HEARTBEATS_PER_LEASE = 4
#: What answers a commit.
COMMITTED: tuple[type[messages.CenterReply | messages.Ack], ...] = (messages.CenterReply, messages.Ack)


class Heartbeats:
    """Sends a `Heartbeat` at an interval from its own thread, until `stop`, while the channel has no request.

    The server treats a peer that waits for a reply as alive, so a request replaces a heartbeat. If the connection is
    dead, it is hung up, and the next request connects again.

    Args:
        channel: the connection of a worker that has joined.
        lock: held by a thread while its request is in progress.
        interval, timeout: seconds between heartbeats, and for a reply.
    """

    def __init__(self, channel: Channel, lock: Lock, *, interval: float, timeout: float, name: str) -> None:
        self._channel, self._lock = channel, lock
        self._interval, self._timeout = interval, timeout
        self._stopped = channel.world.event()
        channel.world.thread(self._run, name).start()

    def stop(self) -> None:
        """Send no more heartbeats; the thread ends by itself."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._send_heartbeat():
                        self._channel.hang_up()  # under the lock, before another request can begin
                        return
                finally:
                    self._lock.release()

    def _send_heartbeat(self) -> bool:
        if self._stopped.is_set():
            return True
        try:
            self._channel.send(messages.Heartbeat())
            return isinstance(self._channel.receive(self._timeout, "the server's answer to a Heartbeat"), messages.Ack)
        except (DistkerasError, OSError):
            return False


_T = TypeVar("_T")
_Answer = TypeVar("_Answer", bound=Message)

#: Seconds that an idle thread waits for a call at a time.
_IDLE = 60.0


class Posting(Generic[_T]):
    """Runs one call at a time, in a thread called ``name`` that ends with `close`."""

    def __init__(self, world: World, name: str) -> None:
        self._changed = world.condition()
        self._now = world.monotonic
        self._call: Callable[[], _T] | None = None
        self._outcome: list[_T | BaseException] = []
        #: What the thread calls last; None: it does not end yet.
        self._last: Callable[[], object] | None = None
        self._thread = world.thread(self._run, name)
        self._thread.start()

    def post(self, call: Callable[[], _T]) -> None:
        """Begin ``call``; the previous call must have ended."""
        with self._changed:
            self._call = call
            self._outcome.clear()
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait for up to ``timeout`` seconds; return whether the call has ended."""
        deadline = self._now() + timeout
        with self._changed:
            while not self._outcome:
                left = deadline - self._now()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def outcome(self) -> _T:
        """Return the result of the call, which has ended, or raise its error."""
        outcome = self._outcome[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self, last: Callable[[], object] = lambda: None) -> None:
        """End the thread, after the call that is in progress, and ``last``."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            outcome: _T | BaseException
            try:
                outcome = call()
            except BaseException as error:  # noqa: BLE001 - `outcome` raises it
                outcome = error
            with self._changed:
                self._outcome.append(outcome)
                self._changed.notify_all()
        assert self._last is not None
        self._last()

    def _next(self) -> Callable[[], _T] | None:
        with self._changed:
            while self._call is None and self._last is None:
                self._changed.wait(_IDLE)
            call, self._call = self._call, None
            return call


class RestartFromCenter(Exception):
    """This worker's latest steps are discarded: it must continue from the center, at the progress in ``welcome``.

    The server was restarted from a snapshot without these steps, another attempt has held the lease meanwhile, or the
    commit was skipped for a NaN or infinity.
    """

    def __init__(self, welcome: messages.Welcome) -> None:
        super().__init__(welcome)
        self.welcome = welcome


class _SpareBuffers(Generic[_T]):
    """At most two buffers, one of which is in use; `spare` returns the other one.

    Args:
        buffers: existing buffers, at most two.
        in_use: the buffer that is in use; it need not be one of ``buffers``.
    """

    def __init__(self, buffers: Sequence[_T] = (), in_use: _T | None = None) -> None:
        self._buffers = list(buffers)
        self.in_use = in_use

    def spare(self, make: Callable[[], _T]) -> _T:
        for buffer in self._buffers:
            if buffer is not self.in_use:
                return buffer
        self._buffers.append(make())
        return self._buffers[-1]


class CommitGroup(Protocol):
    """Sends the commits of several workers as one: see `relay_group`."""

    def require_place(self, client: WorkerClient) -> None:
        """Connect to the worker that sends the group's commits, unless it is this one."""

    def send(self, client: WorkerClient, commit: messages.Commit) -> messages.CenterReply | messages.Ack:
        """Send a commit in the group's, and return the reply."""

    def leave(self) -> None:
        """Leave the group."""


class WorkerClient(Client):
    """One worker's connection: it requests the lease of its partition, then pulls and commits.

    After a lost connection, the client reconnects, with growing pauses, until ``deadlines.reconnect`` has passed. The
    server then reports its last applied commit: if only the reply was lost, the center is pulled, and the commit is not
    sent again. `worker.loop.run_worker` also survives a restart of the server.

    Args:
        size: elements of the model's parameter vector.
        moving_statistics: elements of its moving statistics.
        metrics: the history's metric columns, loss first.
        wire_format: the format of vectors on the wire, in both directions: a name in `compression.FORMATS`.
        connection: the number of the attempt's latest connection for this lease; its own are later.
        tables: the shapes of the tables that travel by rows.
        shared_parts: the number of parts of each payload, if vectors and rows may be exchanged through memory shared
            with a server on this host; 0: they are sent over the connection.
        micro_batch: the number of the partition's micro-batch; -1: the job trains no stream.
        group: the worker's place in its group, which the caller closes; None: the worker commits alone.

    Attributes:
        incarnation: the incarnation of the server that this worker has joined; 0: none yet.
        sequence: number of the last commit that the server applied.
        stopping: whether the server has reported that the job ends early.
        end: the position, epoch and mini-batch, from which on another worker trains; None: there is none.
    """

    def __init__(  # noqa: PLR0913 - independent facts of one worker, which callers name
        self,
        address: Address,
        *,
        worker: int,
        attempt: int,
        size: int,
        moving_statistics: int = 0,
        metrics: tuple[str, ...] = ("loss",),
        deadlines: Deadlines | None = None,
        wire_format: str = "float32",
        tables: Sequence[TableShape] = (),
        shared_parts: int = 0,
        micro_batch: int = -1,
        group: CommitGroup | None = None,
        connection: int = 0,
        world: World = REAL,
    ) -> None:
        super().__init__(address, deadlines, world)
        self._group = group
        self.worker, self.attempt, self.size = worker, attempt, size
        self.incarnation = self.sequence = 0
        self.stopping = False
        self.end: tuple[int, int] | None = None
        #: The message with which this worker joins.
        self.hello = messages.Hello(
            worker,
            attempt,
            size,
            moving_statistics,
            "\n".join(metrics),
            wire_format,
            tables=describe(tables),
            micro_batch=micro_batch,
            connection=connection,
        )
        self.limits = Limits(arrays=Limits.arrays + len(tables))
        self._most_state_bytes = most_state_bytes(size, tables)
        # Centers are recognized by their size: statistics or rows of the same size would get the same memory.
        self._reuses_centers = size != moving_statistics and not tables
        self._format = WorkerFormat(wire_format, size)
        sizes = SlotSizes(size, shared_parts, self._format.nbytes or 0, row_elements(tables))
        #: Elements of a payload: the dense ones, then those of the rows.
        self._payload_size = sizes.elements
        #: The layout of the memory that this worker offers to share; None: it offers none.
        self._sizes = sizes if shared_parts and not (tables and sizes.nbytes > _SHARED_BYTES_MAX) else None
        #: The slots of the connection, if the server shares them.
        self._slots: SharedSlots | None = None
        #: Two centers: the rule still reads the latest one while the next one arrives.
        self._centers: _SpareBuffers[Vector] = _SpareBuffers()
        #: Two payloads: the next window's is filled while the previous one is in flight.
        self._payloads: _SpareBuffers[tuple[Vector, ...]] = _SpareBuffers()
        self._encoded_reply: np.ndarray | None = None
        self._sender: Posting[Reply] | None = None
        self._posted = False
        self._waited = 0.0
        #: The completed share of the partition's epoch, which commits report.
        self.passed = 0.0
        self._skipped = self._refused = False
        #: The sequence number of the optimizer state that was fetched last; 0: there was none.
        self._fetched = 0
        self._too_large = False
        self._heartbeats: Heartbeats | None = None

    @property
    def shares_memory(self) -> bool:
        """Return whether this worker and its server exchange vectors through shared memory."""
        return self._slots is not None

    def fill_payloads_in(self, slots: SharedSlots) -> None:
        """Use memory that is shared with a relay for the next payloads."""
        self._payloads = _SpareBuffers(slots.payloads(), self._payloads.in_use)

    def spare_payload(self, own: tuple[Vector, ...]) -> tuple[Vector, ...]:
        """Return buffers for a payload, other than ``own``."""
        self._payloads.in_use, previous = own, self._payloads.in_use
        spare = self.payload(len(own))
        self._payloads.in_use = previous
        return spare

    def allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        if kind is messages.CenterReply:
            if dtype == np.float32 and size == self.size and self._reuses_centers:
                return self._spare_center()
            if dtype == np.uint8 and size == self._format.nbytes:
                if self._encoded_reply is None:
                    self._encoded_reply = np.empty(size, np.uint8)
                return self._encoded_reply
        return super().allocate(kind, dtype, size)

    def _spare_center(self) -> Vector:
        return self._centers.spare(lambda: np.empty(self.size, np.float32))

    def payload(self, parts: int) -> tuple[Vector, ...]:
        """Return buffers for the next commit, other than those of a commit that is in progress.

        The dense elements of each are followed by the rows of all tables; see `tables.spans`.
        """
        return self._payloads.spare(lambda: tuple(np.empty(self._payload_size, np.float32) for _ in range(parts)))

    def join(self) -> messages.Welcome:
        """Request the partition's lease, and wait while another attempt that is alive holds it.

        Returns:
            The partition's progress, which is ``finished`` if another attempt has trained the partition to its end.
        """
        return self._reconnecting(self._join, rejoin=False)

    def rejoin(self) -> messages.Welcome:
        """Join again over a new connection, after this worker has lost its lease."""
        self.close()
        self.incarnation = 0
        return self.join()

    def _join(self) -> messages.Welcome:
        if self._group is not None:
            self._group.leave()
        timeout = self.deadlines.publish + self.reply_timeout
        answer: Message = messages.Waiting()
        self.hello = replace(self.hello, connection=self.hello.connection + 1)
        self._use(None)
        memory, slots = self._offer()
        while isinstance(answer, messages.Waiting):
            answer = self.request(self.hello, (messages.Welcome, messages.Waiting), timeout)
        assert isinstance(answer, messages.Welcome)
        if memory is not None:
            memory.hide()
        self._use(slots if answer.shares else None)
        known, self.incarnation, self.sequence = self.incarnation, answer.incarnation, answer.sequence
        self._skipped, self.stopping = answer.skipped, self.stopping or answer.stopping
        self._refused = answer.refused
        self._note_end(answer)
        if not answer.finished:
            self._start_heartbeats()
        if known and (known != answer.incarnation or answer.finished or not answer.held):
            raise RestartFromCenter(answer)
        return answer

    def _offer(self) -> tuple[SharedMemory | None, SharedSlots | None]:
        """Create shared memory for the vectors of this connection, and name it in the next Hello."""
        if self._sizes is None:
            return None, None
        offer = offer_slots(self._sizes, self.world)
        if offer is None:
            self.hello = replace(self.hello, memory="", memory_token="")
            return None, None
        memory, slots, token = offer
        self.hello = replace(self.hello, memory=memory.place, memory_token=token)
        return memory, slots

    def _use(self, slots: SharedSlots | None) -> None:
        """Exchange vectors through ``slots`` from now on; None: over the connection. Earlier slots stay valid."""
        if self.channel is not None:
            self.channel.connection.share(slots)
        if slots is not self._slots:
            own = slots.payloads() if slots and not self._format.nbytes else []
            self._payloads = _SpareBuffers(own, self._payloads.in_use)
            self._slots = slots

    def _start_heartbeats(self) -> None:
        self._stop_heartbeats()
        if self.channel is not None:
            self._heartbeats = Heartbeats(
                self.channel,
                self._requesting,
                interval=self.deadlines.lease / HEARTBEATS_PER_LEASE,
                timeout=self.reply_timeout,
                name=f"heartbeats-{self.worker}",
            )

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.stop()
            self._heartbeats = None

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._stop_heartbeats()
        self._use(None)
        super().close()

    def leave(self) -> None:
        """Report to the server that the partition's data has ended."""
        if self._group is not None:
            self._group.leave()
        self._ask(lambda: messages.Leave(*self._lease), messages.Ack)

    def pull(self, wants: tuple[Ids, ...] = ()) -> Reply:
        """Return the center, and the rows ``wants`` of each table."""
        return self._timed(lambda: self._delivered(self._reconnecting(lambda: self._pull(wants))))

    def commit(self, record: CommitRecord) -> Reply:
        """Commit ``record`` exactly once, and return the reply; after a refusal, return the center, which is pulled.

        Raises:
            RestartFromCenter: the commit was skipped for a NaN or infinity, or earlier commits were lost.
        """
        if not self.incarnation:
            self.join()
        sequence = self.sequence + 1
        slots, packed = self._slots, tuple[np.ndarray, ...]()
        if self._format.nbytes:  # once, because encoding changes the residuals; a repeated commit has the same bytes
            packed = self._format.encode(record.parts, () if slots is None else slots.packed_payload())
        commit = messages.Commit.of(
            record,
            worker=self.worker,
            attempt=self.attempt,
            incarnation=self.incarnation,
            sequence=sequence,
            waited=self._waited,
            passed=self.passed,
            packed=packed,
        )

        def once() -> messages.CenterReply | messages.Ack:
            # After a reconnect: if the commit was applied, only the reply was lost, and the center is pulled instead.
            applied = self.sequence == sequence
            if applied and (self._skipped or self._refused or not record.wants_center):
                return messages.Ack(
                    self.incarnation, 0, sequence, sequence, self._skipped, self.stopping, self._refused
                )
            if applied:
                return self._pull(record.wants)
            return self.request(commit, COMMITTED) if self._group is None else self._group.send(self, commit)

        reply = self._timed(lambda: self._reconnecting(once))
        self.sequence = sequence
        if isinstance(reply, messages.CenterReply):
            return self._delivered(reply)
        self.stopping = self.stopping or reply.stopping
        self._note_end(reply)
        if reply.skipped:
            raise RestartFromCenter(self.join())
        if reply.refused:
            self._format.restore_residuals(record.parts)
            return self.pull(record.touched)._replace(refused=True)
        if record.wants_center:
            raise RemoteProtocolError("the answer to a Commit that is applied must be the center. Received: an Ack")
        return Reply(stopping=self.stopping, window=reply.window)

    def post(self, record: CommitRecord) -> None:
        """Begin `commit` in a thread, which owns the connection until `collect` or `wait_for_posted`."""
        if self._sender is None:
            self._sender = Posting(self.world, f"ps-worker-{self.worker}")
        self._payloads.in_use, self._posted = record.parts, True
        self._sender.post(lambda: self.commit(record))

    def collect(self) -> Reply:
        """Return the reply to the posted commit; only this wait counts as the worker's waiting time."""
        assert self._sender is not None, "a commit must be posted before its reply is collected"
        began, timeout = self.world.monotonic(), self._commit_timeout
        if not self._sender.wait(timeout):
            raise DeadlineError(
                f"waited {timeout:g} s for the parameter server to answer a commit. It may be overloaded or suspended",
                worker=self.worker,
            )
        self._payloads.in_use, self._waited = None, self.world.monotonic() - began
        return self._sender.outcome()

    def wait_for_posted(self) -> None:
        """Wait until the posted commit has ended, with or without success; then the caller owns the connection."""
        if self._sender is not None:
            if self._posted:
                self._sender.wait(self._commit_timeout)
            self._sender.close()
            self._sender, self._posted = None, False

    @property
    def _commit_timeout(self) -> float:
        """Seconds that a commit may take, including a reconnect and another wait for the lease."""
        return self.deadlines.reconnect + self.deadlines.publish + 3 * self.reply_timeout

    def forget_residuals(self) -> None:
        """Discard the quantization residuals, because their steps were discarded."""
        self._format.forget_residuals()

    def _pull(self, wants: tuple[Ids, ...]) -> messages.CenterReply:
        if not self.incarnation:
            self.join()
        if self._group is not None:
            self._group.require_place(self)
        return self.request(messages.Pull(*self._lease, wants), messages.CenterReply, self.meeting_timeout)

    def _delivered(self, reply: messages.CenterReply) -> Reply:
        """Return ``reply`` with its center decoded."""
        center = reply.center
        if reply.packed.size:
            known, center = self._centers.in_use, self._spare_center()
            self._format.decode(reply, known, center)
        self._centers.in_use = center
        self.stopping = self.stopping or reply.stopping
        self._note_end(reply)
        return Reply(
            reply.learning_rate,
            center,
            reply.moving_statistics,
            stopping=self.stopping,
            window=reply.window,
            rows=reply.rows,
            version=reply.version,
            values=reply.values,
        )

    def _note_end(self, message: messages.Welcome | messages.CenterReply | messages.Ack) -> None:
        self.end = None if message.end_epoch < 0 else (message.end_epoch, message.end_batch)

    def _timed(self, exchange: Callable[[], _T]) -> _T:
        began = self.world.monotonic()
        result = exchange()
        self._waited = self.world.monotonic() - began
        return result

    def occupied(self) -> bool:
        """Return whether the server is applying commits of other workers now."""
        return self._ask(messages.Probe, messages.Occupancy).occupied

    def fetch_model(self) -> bytes:
        """Return the model file that the driver published."""
        leased, timeout = self.channel, self.deadlines.publish + self.deadlines.frame
        answer = self._reconnecting(
            lambda: self.request(messages.FetchModel(), messages.ModelFile, timeout), rejoin=False
        )
        if self.channel is not leased:
            self.close()  # no lease is held over the new connection
        return answer.model.tobytes()

    def announce(self, host: str, port: int, node: str, batches: int) -> messages.Members:
        """Announce that others reach this worker at ``host`` and ``port``; return the members once all are ready."""
        timeout = self.deadlines.rows + self.meeting_timeout
        return self._ask(lambda: messages.Announce(*self._lease, host, port, node, batches), messages.Members, timeout)

    def keep_optimizer(self, state: OptimizerState, *, ahead: bool = False) -> None:
        """Send ``state``, that of the optimizer after the latest commit, to be kept for a later attempt.

        With ``ahead``, it is the state after the next commit. A state above `most_state_bytes` is not sent.
        """
        if state.content.nbytes > self._most_state_bytes:
            if not self._too_large:
                self._too_large = True
                text = "the optimizer's state has %d bytes and is not kept: at most %d are, for a model of %d elements"
                log.warning(text, state.content.nbytes, self._most_state_bytes, self.size)
            return
        self._ask(
            lambda: messages.KeepOptimizer(
                state.layout,
                state.content,
                state.checksum,
                worker=self.worker,
                attempt=self.attempt,
                incarnation=self.incarnation,
                sequence=self.sequence + ahead,
            ),
            messages.Ack,
        )

    def fetch_optimizer(self) -> OptimizerState | None:
        """Return the optimizer state that the server keeps for this partition; None if there is none."""
        answer = self._ask(lambda: messages.FetchOptimizer(*self._lease), messages.KeptOptimizer)
        self._fetched = answer.sequence
        return answer if answer.sequence else None

    def report_optimizer(self, problem: str) -> None:
        """Report that the fetched state was loaded, or, if ``problem`` is not empty, why it was not."""
        self._ask(lambda: messages.OptimizerTaken(*self._lease, self._fetched, problem), messages.Ack)

    @property
    def _lease(self) -> tuple[int, int, int]:
        """The first fields of a `LeaseMessage`."""
        return self.worker, self.attempt, self.incarnation

    def _ask(self, make: Callable[[], Message], expected: type[_Answer], timeout: float | None = None) -> _Answer:
        """Return the answer to a message, which is made again after each reconnect."""
        return self._reconnecting(lambda: self.request(make(), expected, timeout))

    def report(self, error: DistkerasError) -> None:
        """End the job with ``error``, unless the server is unreachable."""
        try:
            self.request(messages.fault_of(error), messages.Ack, self.deadlines.handshake)
        except UNREACHED:
            self.close()

    def _reconnecting(self, exchange: Callable[[], _T], rejoin: bool = True) -> _T:
        """Return ``exchange()``; while the connection breaks or stalls, reconnect and repeat, until the deadline."""
        # The deadline is later if the server is suspended, because its driver must detect that and restart it; and if
        # the server may move, because Spark must find an executor for it.
        backoff: Backoff | None = None
        while True:
            try:
                if self.channel is None and rejoin and (self.incarnation or backoff is not None):
                    self._join()
                return exchange()
            except UNREACHED as error:
                if self.channel is not None and not isinstance(error, ServerLostError):
                    raise  # the server's error: after an error on this side, the connection is closed
                self.close()
                backoff = backoff or Backoff(longest=RETRY_SECONDS, timeout=self.deadlines.reconnect, world=self.world)
                if isinstance(error, RelayLostError):
                    backoff.restart(self._commit_timeout)  # the server itself is reachable
                elif self.handshake_unanswered(error) or self.address.moves:
                    backoff.restart(self.deadlines.standstill + self.deadlines.reconnect)
                if not backoff.pause():
                    kind = AuthenticationError if isinstance(error, AuthenticationError) else ServerLostError
                    raise kind(
                        f"the server at {self.address} must be reached within "
                        f"{self.deadlines.reconnect:g} s. Received: {error.message}",
                        worker=self.worker,
                    ) from error
