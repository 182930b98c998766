"""What an attempt at a partition consists of: the watched client, and models that count mini-batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distkeras.ps.protocol.compression import WorkerFormat
from distkeras.ps.protocol.loop import CommitRecord, OptimizerState, Reply
from distkeras.ps.protocol.messages import Ack, CenterReply, Commit, Message, Pull
from distkeras.ps.protocol.tables import Span
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.simulation.virtual_job import VirtualBatch
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.relay_group import RelayGroup, RelayLink
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.optimizer_keeper import SaveInterval
from simulation.plan import Layout, Plan
from simulation.reference import Sent
from simulation.scheduler import Finding, Process
from simulation.speed_watch import AccountOfWindows
from simulation.tables import TableBatch, check_reply
from simulation.value_watch import value_in
from simulation.watch import Watch


class WatchedClient(WorkerClient):
    """A client that records what it sends and receives, and which commits the server promises to keep.

    Args:
        plan, watch: plan and watch of the run.
        driver, layout: driver and layout of its job.
        address, options: see `WorkerClient`.
    """

    def __init__(
        self, plan: Plan, watch: Watch, driver: Process, layout: Layout, address: Address, **options: Any
    ) -> None:
        super().__init__(address, **options)
        self._watch, self._driver, self._layout = watch, driver, layout
        self._scheduler = options["world"].surroundings.scheduler
        self._format = self._account = AccountedFormat(plan.wire_format, self.size)
        self._outlives = plan.every > 0
        self._pulls_first = plan.make_rule().traits.pull_first
        self.interval = SaveInterval.of(plan.make_rule(), len(layout.batches), now=self.world.monotonic)
        self._account_of_state = AccountOfState(self.world.monotonic())
        traits = plan.make_rule().traits
        lent = self.worker >= len(layout.batches)  # The state of an optimizer is kept with a partition's own lease.
        self._overlaps, self._keeps = plan.overlap, plan.keeps and not (traits.gradient or traits.peers or lent)
        #: The clocks at which windows began, and the number of the loop's first commit.
        self._began: list[int] = []
        self._first = 0
        #: The number, set by the driver, with which steps must be taken from now on.
        self.least = 0.0
        follows = plan.make_rule().window_by_speed is not None
        self._windows = AccountOfWindows(follows=follows, pulls_first=self._pulls_first, now=self._now)

    def begin(self) -> None:
        """Record the start of a loop, with a pull; nothing that was computed before counts."""
        self._began.clear()
        self._first, self.least = 0, 0.0
        self._account.begin()
        self._account_of_state.begin()
        self._windows.begin(self._now)

    def request(self, message: Message, expected: Any, timeout: float | None = None) -> Any:
        """See `Client`."""
        requested = self._now
        if isinstance(message, Commit) and not message.grouped:  # The commits of a sum are recorded one by one.
            self.record_sent(message)
        answer = super().request(message, expected, timeout)
        if isinstance(answer, CenterReply) and isinstance(message, (Commit, Pull)):
            check_reply(answer, message.wants)
        if isinstance(answer, CenterReply) and not (self._pulls_first and self._began):
            self._began.append(answer.clock)
        if isinstance(answer, CenterReply):
            self._windows.sent(requested, self._now, answer.window)
        applied = isinstance(message, Commit) and isinstance(answer, Ack) and not answer.skipped
        if applied or isinstance(answer, CenterReply):
            announced = answer.incarnation, self.worker, answer.clock, answer.window
            self._watch.speeds.check_announced(self._driver, *announced)
        if self._outlives:
            self._watch.promise(self._layout, self.worker, getattr(answer, "durable", 0))
        return answer

    def see_reply_of_relay(self, requested: float, answer: CenterReply) -> None:
        """Record that a relay has passed the center on."""
        self._began.append(answer.clock)
        self._windows.sent(requested, self._now, answer.window)

    def record_sent(self, commit: Commit) -> None:
        """Record a commit that is sent now, or passed to a relay."""
        self._first = self._first or commit.sequence
        parts = self._account.read if commit.packed else [part.copy() for part in commit.parts]
        before = commit.overlapped and len(self._began) > 1
        began = self._began[-2 if before else -1]
        times = self._windows.sends(commit.sequence, self._now)
        first, moved = commit.sequence == self._first, tuple([rows.copy() for rows in commit.moved])
        sent = Sent(parts, commit.moving_statistics.copy(), began, first, times, commit.touched, moved)
        self._watch.sent[self._driver, commit.incarnation, self.worker, self.attempt, commit.sequence] = sent
        self._watch.streams.sent(self._layout, commit)

    def payload(self, parts: int) -> tuple[np.ndarray, ...]:
        """Return the payload, as `WorkerClient` does; it is written from now on, and is invalid until that is done."""
        buffers = super().payload(parts)
        for buffer in buffers:
            buffer.fill(np.nan)
        return buffers

    def commit(self, record: CommitRecord) -> Reply:
        """See `WorkerClient`."""
        self._account.due, requested = True, self._now
        last = record.epoch_end or (record.epoch, record.last + 1) == self.end
        self._windows.commits(record.steps, last=last, overlapped=record.overlapped)
        if self._keeps and not self._overlaps:
            self._account_of_state.require_recent(self.interval.seconds)
        reply = super().commit(record)
        if reply.refused:  # The optimizer has taken the steps, and no state is due after them.
            self._account_of_state.steps += record.steps
            self._windows.refused(record.steps)
        else:
            self._windows.applied(requested, self._now, reply.window)
            self._account_of_state.applied(self.sequence, record.steps, self.world.monotonic())
        return reply

    def keep_optimizer(self, state: OptimizerState, *, ahead: bool = False) -> None:
        """See `WorkerClient`."""
        content = state.content.tobytes()
        if ahead:
            self._watch.states.had(self._partition, content, self.sequence + 1)
            super().keep_optimizer(state, ahead=True)
            return
        if self._keeps:  # else it is the rule's own
            self._account_of_state.require_steps(_steps_in(state))
        self._watch.states.had(self._partition, content, self.sequence)
        super().keep_optimizer(state, ahead=ahead)
        # Otherwise, the server may have died before it was checked.
        if self._watch.serves(self._driver, self.incarnation):
            self._watch.states.require_kept(self._life, content)
        self._account_of_state.sent(self.sequence, self.world.monotonic())

    def fetch_optimizer(self) -> OptimizerState | None:
        """See `WorkerClient`."""
        before = self._watch.states.count(self._life)
        state = super().fetch_optimizer()
        self._watch.states.check_fetched(self._life, before, self._partition, state, self._fetched, self.sequence)
        if self._keeps:
            self._account_of_state.steps = 0 if state is None else _steps_in(state)
        return state

    @property
    def _now(self) -> float:
        now: float = self._scheduler.now
        return now

    now = _now

    @property
    def _partition(self) -> tuple[int, int]:
        return self._layout.number, self.worker

    @property
    def _life(self) -> tuple[Process, int, int]:
        return self._driver, self.incarnation, self.worker

    def _delivered(self, reply: CenterReply) -> Reply:
        delivered = super()._delivered(reply)
        assert delivered.center is not None
        self._watch.check_delivered(self._driver, self.worker, reply, delivered.center)
        if not self._overlaps:  # Otherwise, the reply counts from a later window on.
            self.least = self._watch.values.least((self._driver, reply.incarnation), reply.clock)
        return delivered


class WatchedSpreadClient(WatchedClient, SpreadWorkerClient):
    """A watched client of a center that is divided among shards."""


class WatchedGroup(RelayGroup):
    """A group whose member records what it passes to the relay, and what it receives."""

    def send(self, client: WorkerClient, commit: Commit) -> CenterReply | Ack:
        """See `RelayGroup`."""
        assert isinstance(client, WatchedClient)
        client.record_sent(commit)
        return super().send(client, commit)

    def _send_commit(self, client: WorkerClient, commit: Commit, link: RelayLink) -> CenterReply:
        assert isinstance(client, WatchedClient)
        requested = client.now
        reply = super()._send_commit(client, commit, link)
        client.see_reply_of_relay(requested, reply)
        return reply


class AccountedFormat(WorkerFormat):
    """A wire format that checks the residuals: decoded values and residuals must add up to the exact values."""

    def __init__(self, wire_format: str, size: int) -> None:
        super().__init__(wire_format, size)
        #: The server's values of the latest commit.
        self.read: list[np.ndarray] = []
        #: Whether a commit is to be encoded.
        self.due = False
        #: The exact values minus the decoded ones since the loop began, for each part.
        self._owed: list[np.ndarray] = []

    def begin(self) -> None:
        """Record the start of a loop, which has no residuals."""
        self._owed = []

    def encode(self, parts: tuple[np.ndarray, ...], memory: tuple[np.ndarray, ...] = ()) -> tuple[np.ndarray, ...]:
        """See `WorkerFormat`."""
        encoded, codec = super().encode(parts, memory), self._codec
        assert codec is not None
        if not self.due:
            raise Finding("residual", "a commit must be encoded once, however often it is sent. Received: once more")
        self.due = False
        self.read = [np.empty_like(part) for part in parts]
        self._owed = self._owed or [np.zeros(part.size) for part in parts]
        for number, (part, data) in enumerate(zip(parts, encoded, strict=True)):
            codec.decode(data, self.read[number])
            if codec.needs_error_feedback:
                self._owed[number] += part.astype(np.float64) - self.read[number]
                off, most = np.abs(self._owed[number] - self._residuals[number]).max(), 1e-5 * (1.0 + abs(part).max())
            else:
                off, most = np.abs(part - self.read[number]).max(), abs(part).max() / 256
            if off > most:  # This is not so for a NaN, which the server skips.
                text = f"what is rounded off must be kept for the next commit, or be little. Received: {off:.3g} more"
                raise Finding("residual", text)
        return encoded

    def restore_residuals(self, parts: tuple[np.ndarray, ...]) -> None:
        """See `WorkerFormat`."""
        super().restore_residuals(parts)
        if self._codec is not None and self._codec.needs_error_feedback:
            for owed, part, read in zip(self._owed, parts, self.read, strict=True):
                owed -= part.astype(np.float64) - read


def _steps_in(state: OptimizerState) -> int:
    """Return the steps of the optimizer in ``state``, behind the rule's own vectors."""
    return int(np.frombuffer(state.content[-16:].tobytes(), np.int64)[0])


class AccountOfState:
    """A record of the expected state of an attempt's optimizer, and of when it must be sent.

    Args:
        now: when the attempt began, seconds.
    """

    def __init__(self, now: float) -> None:
        #: Steps of the optimizer, including those of its initial state; steps whose commits are applied.
        self.steps = 0
        self._sent = now
        #: The loop's latest commit that is applied, and its time; and the commit after which a state was sent.
        self._applied, self._applied_at, self._kept = 0, 0.0, 0

    def begin(self) -> None:
        """Record the start of a loop, with a new optimizer."""
        self.steps = self._applied = self._kept = 0

    def applied(self, sequence: int, steps: int, now: float) -> None:
        """Record that a commit of ``steps`` steps is applied."""
        self._applied, self._applied_at, self.steps = sequence, now, self.steps + steps

    def sent(self, sequence: int, now: float) -> None:
        """Record that the state after a commit is sent."""
        self._kept, self._sent = sequence, now

    def require_steps(self, steps: int) -> None:
        """Check that a state has all steps of the commits before it, and no others."""
        if steps != self.steps:
            raise Finding("state", f"a state must have the {self.steps} steps that count. Received: {steps}")

    def require_recent(self, seconds: float) -> None:
        """Check, when the next commit is sent, that a state that was due after the previous one was sent."""
        if self._applied > self._kept and self._applied_at >= self._sent + seconds:
            raise Finding(
                "state", f"a state must be sent each {seconds:.3g} s. Received: none after commit {self._kept}"
            )


class CountingReplica:
    """A model with one element for each mini-batch, which each of its steps moves by one.

    Args:
        size: number of elements.
        element: returns the element of a mini-batch.
        compute: takes the time of a step, and returns what it adds to an element: its amount, or NaN.
        statistics: number of elements of its moving statistics, which follow the numbers of the elements.
        owner: numbers of layout, partition and attempt.
        loss: returns the loss of each sample of an epoch, if gradients are requested.
        least: returns the least number, set by the driver, with which steps must be taken.
    """

    def __init__(
        self,
        size: int,
        element: Callable[[VirtualBatch], int],
        compute: Callable[[int], float],
        statistics: int = 0,
        owner: tuple[int, ...] = (),
        loss: Callable[[int], float] = float,
        least: Callable[[], float] = float,
    ) -> None:
        self.size = size
        self.learning_rate = 1.0
        self._element, self._compute, self._loss, self._least = element, compute, loss, least
        self._value = 0.0
        self._theta = np.zeros(size, np.float32)
        self._statistics = np.zeros(statistics, np.float32)
        #: The attempt that took the first of the steps, the number of steps, and a value that each of them changes.
        self._steps: list[int] = [*owner, 0, 0]

    def load(self, vector: np.ndarray) -> None:
        """See `Replica`."""
        self._theta[...] = vector

    def read(self, out: np.ndarray) -> None:
        """See `Replica`."""
        out[...] = self._theta

    def moved(self, since: np.ndarray, out: np.ndarray) -> None:
        """See `Replica`."""
        np.subtract(self._theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """See `Replica`."""
        self._statistics[...] = vector

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """See `Replica`."""
        out[...] = self._statistics

    def set_values(self, values: np.ndarray) -> None:
        """See `WorkerReplica`."""
        self._value = value_in(values)

    def _require_value(self) -> None:
        if self._value < self._least():
            text = f"a worker must step with {self._least()}, which was set before its latest exchange"
            raise Finding("values", f"{text}. Received: {self._value}")

    def train(self, batches: Sequence[VirtualBatch]) -> np.ndarray:
        """See `Replica`."""
        self._require_value()
        for batch in batches:
            element = self._element(batch)
            self._move(batch, self._theta, element, self._compute(element))
            self._count(element)
            self._statistics += (element + 1 - self._statistics) / 4
        return np.zeros((len(batches), 1))

    def _move(self, batch: VirtualBatch, vector: np.ndarray, element: int, by: float) -> None:
        vector[element] += by

    def _count(self, element: int) -> None:
        self._steps[-2:] = [self._steps[-2] + 1, hash((self._steps[-1], element))]

    def read_optimizer(self) -> OptimizerState:
        """Return the state of an optimizer that records each of its steps."""
        content = np.array(self._steps, np.int64).view(np.uint8)
        return OptimizerState("steps", content, zlib.crc32(content.data))

    def load_optimizer(self, state: OptimizerState | None, example: VirtualBatch) -> str:
        """See `StatefulReplica`."""
        if state is None:
            return "none is kept"
        self._steps = state.content.view(np.int64).tolist()
        return ""

    def gradient(self, batch: VirtualBatch, out: np.ndarray) -> np.ndarray:
        """See `Replica`."""
        self._require_value()
        element = self._element(batch)
        step = self._compute(element)
        out[...] = 0.0
        self._move(batch, out, element, -step)
        self._count(element)
        self._statistics += (element + 1 - self._statistics) / 4
        return np.array([self._loss(batch.epoch)])


class TableReplica(CountingReplica):
    """A replica that moves the row of a mini-batch in each table as it moves the element.

    Args:
        places: place of each table in the vector.
        arguments, options: see `CountingReplica`.
    """

    def __init__(self, places: Sequence[Span], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = places

    def _move(self, batch: VirtualBatch, vector: np.ndarray, element: int, by: float) -> None:
        assert isinstance(batch, TableBatch)
        own = self._places[0].start + self._places[0].width * batch.local[0]
        found, expected = self._theta[own : own + 2].tolist(), [float(self._theta[element]), element + 1]
        if found != expected:
            raise Finding("rows", f"row {element} must be {expected} at the worker. Received: {found}")
        vector[element] += by
        for place, row in zip(self._places, batch.local, strict=True):
            vector[place.start + place.width * row] += by
