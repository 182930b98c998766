"""The worker's loop, one for every rule: a generator that yields requests and receives the replies.

It opens no socket and reads no clock that affects the result; a socket client or a simulation drives it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, Protocol

import numpy as np

from distkeras.ps.errors import LeaseLostError, MemberLostError
from distkeras.ps.protocol.loop import (
    NO_FLOATS,
    NO_ROWS,
    CollectRequest,
    CommitRecord,
    Compute,
    FetchRequest,
    KeepRequest,
    Loop,
    PostRequest,
    ProbeRequest,
    PullRequest,
    Reply,
    Request,
    TakenRequest,
)
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules.base import AUTO, CALL_STEPS_MAX, WINDOW_MAX, BatchLike, Replica, Rule, Vector
from distkeras.ps.transport.worker_client import RestartFromCenter, WorkerClient
from distkeras.ps.validate import invalid
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper
from distkeras.ps.worker.tables import TableWindows, require_table_windows

log = logging.getLogger(__name__)

#: The number of windows that are measured, after a first one in which the model is compiled.
MEASURED = 5
#: Steps of a window during the measurement, if the rule's window is a whole epoch.
_MEASURED_WINDOW = 10


class AutoWindow:
    """One worker's communication window, chosen from the duration of its first exchanges.

    With C seconds for a step and X for an exchange (medians), a window of lambda steps spends X / (X + lambda C) of the
    time on communication: the smallest lambda is chosen that keeps this within ``share``. If exchanges overlap with
    compute, it is the smallest lambda that hides them: lambda C >= X.

    Args:
        share: the share of the time, in (0, 1).
        overlap: exchanges will overlap with compute, but not during the measurement.
        now: clock, seconds.

    Attributes:
        rule: the rule, with the current window.
        chosen: whether the window was chosen from the measurement.
    """

    def __init__(
        self, rule: Rule, share: float = 0.1, *, overlap: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        if rule.window != AUTO:
            raise invalid("window", rule.window, repr(AUTO))
        self.rule = dataclasses.replace(rule, window=type(rule).window or _MEASURED_WINDOW)
        self.chosen = False
        self._share, self._overlap, self._now = share, overlap, now
        self._step_seconds: list[float] = []
        self._exchange_seconds: list[float] = []
        self._began, self._warming_up = 0.0, True
        #: Steps and seconds of the present window.
        self._steps_taken, self._compute_seconds = 0, 0.0

    def start(self) -> None:
        """Note that compute or an exchange begins."""
        self._began = self._now()

    def computed(self, steps: int) -> None:
        """Note that ``steps`` steps of a window have ended."""
        self._steps_taken += steps
        self._compute_seconds += self._now() - self._began

    def exchanged(self) -> Rule:
        """Note that a window's exchange has ended, and return `rule`."""
        took, step = self._now() - self._began, self._compute_seconds / self._steps_taken
        self._steps_taken, self._compute_seconds = 0, 0.0
        if self._warming_up:
            self._warming_up = False
        elif not self.chosen:
            self._exchange_seconds.append(took)
            self._step_seconds.append(step)
            if len(self._step_seconds) == MEASURED:
                self._choose(statistics.median(self._step_seconds), statistics.median(self._exchange_seconds))
        return self.rule

    def _choose(self, step: float, exchange: float) -> None:
        hidden = 1.0 if self._overlap else (1 - self._share) / self._share
        window = min(max(1, math.ceil(hidden * exchange / max(step, 1e-9))), WINDOW_MAX)
        self.rule, self.chosen = dataclasses.replace(self.rule, window=window), True
        text = "the communication window is %d: a step takes %.3g ms, an exchange %.3g ms"
        log.info(text, window, 1e3 * step, 1e3 * exchange)


class WorkerReplica(Replica, Protocol):
    """A `Replica` whose model may carry moving statistics."""

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """Set the moving statistics; keep no reference to ``vector``."""

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """Write the moving statistics into ``out``."""

    def set_values(self, values: np.ndarray) -> None:
        """Set numbers for the next steps: rows of place and value; place 0 is the learning rate."""


def work(  # noqa: PLR0913 - independent facts of one worker, which callers name
    rule: Rule,
    replica: WorkerReplica,
    batches: Iterator[BatchLike],
    payload: Callable[[], tuple[Vector, ...]],
    *,
    moving_statistics: int = 0,
    overlap: bool = False,
    windows: AutoWindow | None = None,
    keeper: OptimizerKeeper | None = None,
    tables: TableWindows | None = None,
    now: Callable[[], float] | None = time.time,
    leaving: Callable[[], bool] = lambda: False,
) -> Loop:
    """Train on ``batches`` until they end, or a reply asks to stop, in windows that never cross the end of an epoch.

    The last window is shorter if the batches end within it.

    Args:
        rule: the update rule; its worker half runs here.
        payload: returns the buffers for the next commit.
        moving_statistics: size of the moving statistics, 0 for none.
        overlap: compute the next window while a commit is in flight (`Rule.begin_overlapped_window`). A window then
            begins from the reply to the previous commit. The staleness of its commit counts all commits since that
            reply, including the worker's own commit in flight: 1 for a single worker, 2n - 1 if n workers take turns.
            The worker keeps its own moving statistics, because those in the reply lack its latest window. One commit is
            in flight at a time.
        windows: chooses the window; None: the rule's window is used.
        keeper: sends the optimizer's state at intervals, and takes over that of an earlier loop; None: neither.
        tables: the windows of tables that travel by rows, with their ``batches`` and ``payload``; None: no tables do.
        now: clock for the history's time stamps, seconds since the epoch; None: no history is kept.
        leaving: returns whether the loop ends with the window that has begun, after which the keeper sends the state.

    Yields:
        `PullRequest`, `CommitRecord`, `CollectRequest` and `ProbeRequest`, each of which needs a `Reply`;
        `PostRequest` and `Compute`; the requests of ``keeper``.
    """
    if tables is not None:
        require_table_windows(rule, overlap=overlap or windows is not None)
    pulled = _answered((yield PullRequest() if tables is None else PullRequest(tables.wants)))
    if pulled.stopping:
        return
    worker = _Worker(
        rule,
        replica,
        pulled,
        payload,
        moving_statistics=moving_statistics,
        overlap=overlap,
        windows=windows,
        keeper=keeper,
        tables=tables,
        now=now,
    )
    state, begun = worker.state, keeper is None
    group: Sequence[BatchLike] = ()
    for group in _batch_groups(batches, lambda: worker.rule.steps_until_due(state)):
        if keeper is not None and not begun:
            yield from keeper.begin(group[0], state)
            begun = True
        yield Compute(len(group))
        worker.compute(group)
        due = group[-1].last or worker.rule.due(state)
        if not due and worker.rule.probes:
            state.occupied = _answered((yield ProbeRequest())).occupied
            due = worker.rule.due(state)
        if due:
            continues = yield from worker.exchange(group[-1])
            if not continues or leaving():
                break
    yield from worker.end(group)
    if keeper is not None and begun:
        yield from keeper.end(leaving=leaving())


#: A part of the loop, which returns whether the loop continues.
_Exchange = Generator[Request, Reply | None, bool]


class _Worker:
    """The replica, the rule's state, the window that is being computed, and the latest center; see `work`."""

    def __init__(  # noqa: PLR0913 - those of `work`
        self,
        rule: Rule,
        replica: WorkerReplica,
        pulled: Reply,
        payload: Callable[[], tuple[Vector, ...]],
        *,
        moving_statistics: int,
        overlap: bool,
        windows: AutoWindow | None,
        keeper: OptimizerKeeper | None,
        tables: TableWindows | None,
        now: Callable[[], float] | None,
    ) -> None:
        #: Returns the vector that the rule sees as the center, from a reply.
        self._center = _center if tables is None else tables.vector
        self._tables = tables
        self.rule = rule if windows is None else windows.rule
        self.traits = rule.traits
        self.state = self.rule.start(replica, self._center(pulled))
        self.state.learning_rate = self.state.previous_learning_rate = pulled.learning_rate
        self.state.window = pulled.window
        if pulled.moving_statistics.size:
            replica.load_moving_statistics(pulled.moving_statistics)
        #: The version of the driver's values that the replica has.
        self._version = 0
        #: Whether a commit is in flight: posted, and its reply not collected yet.
        self.posted = False
        self._replica, self._payload, self._windows, self._now = replica, payload, windows, now
        self._keeper = keeper
        self._moving_statistics, self._overlap = moving_statistics, overlap
        self._latest = pulled
        self._first = 0
        #: The mini-batches of the present window, if the rule may refuse its commit.
        self._window: list[BatchLike] = []
        self._history: list[np.ndarray] = []
        self._take_values(pulled)

    def compute(self, group: Sequence[BatchLike]) -> None:
        """Take one step of the window for each mini-batch."""
        state, windows, now = self.state, self._windows, self._now
        if state.steps == 0:
            self._first, state.payload = group[0].index, self._payload()
        if windows is not None:
            windows.start()
        if self.rule.may_refuse:
            self._window += group
        metrics = self.rule.compute(self._replica, state, group)
        state.used_learning_rate = state.learning_rate
        state.steps += len(group)
        if windows is not None:
            windows.computed(len(group))
        if now is not None:
            stamps = np.array([[now(), batch.size] for batch in group], np.float64)
            self._history.append(np.concatenate([stamps, metrics], axis=1))

    def end(self, group: Sequence[BatchLike]) -> Loop:
        """Commit the steps since the last exchange, which ended with ``group``, and collect the last reply."""
        if self.state.steps:  # the mini-batches have ended within an epoch: another worker trains the next one
            yield from self.exchange(group[-1])
        if self.posted:
            yield CollectRequest()

    def exchange(self, end: BatchLike) -> _Exchange:
        """Commit the window, whose last mini-batch is ``end``, and begin the next one."""
        windows = self._windows
        if windows is not None:
            windows.start()
        statistics = self._read_statistics()  # before those of a reply are loaded
        if self.traits.pull_first:
            continues = yield from self._pull_and_commit(end, statistics)
        elif self._overlap and (windows is None or windows.chosen):
            continues = yield from self._post(end, statistics)
        else:
            continues = yield from self._commit(end, statistics)
        if continues and windows is not None and not self.posted:
            self.rule = windows.exchanged()
        if continues and self._keeper is not None and not self.posted:
            self._keeper.capture()
            yield from self._keeper.send()
        self._end_window()
        return continues

    def _end_window(self) -> None:
        state = self.state
        self._history.clear()
        self._window = []
        state.steps, state.due_early, state.occupied, state.payload = 0, False, True, ()

    def _read_statistics(self) -> np.ndarray:
        if not self._moving_statistics:
            return NO_FLOATS
        statistics = np.empty(self._moving_statistics, np.float32)
        self._replica.read_moving_statistics(statistics)
        return statistics

    def _pull_and_commit(self, end: BatchLike, statistics: np.ndarray) -> _Exchange:
        """Pull the center, compute the payload from it, and commit; the reply is only an acknowledgement."""
        pulled = _answered((yield PullRequest()))
        self.rule.elastic_exchange(self._replica, self.state, _center(pulled))
        self._take_reply(pulled)
        acknowledged = _answered((yield self._record(end, statistics)))
        self._take_values(pulled)
        self._take_window(acknowledged)
        return not acknowledged.stopping

    def _commit(self, end: BatchLike, statistics: np.ndarray) -> _Exchange:
        """Commit, and begin the next window from the center in the reply."""
        self.rule.fill_payload(self._replica, self.state)
        self._latest = reply = _answered((yield self._record(end, statistics)))
        while reply.refused and not reply.stopping:
            yield from self._compute_again(reply)
            self.rule.fill_payload(self._replica, self.state)
            self._latest = reply = _answered((yield self._record(end, self._read_statistics())))
        if reply.stopping:
            return False
        self.rule.receive(self._replica, self.state, self._center(reply))
        self._take_reply(reply)
        self._take_values(reply)
        self._take_window(reply)
        return True

    def _compute_again(self, refused: Reply) -> Loop:
        """Compute the window's mini-batches again, from the center in the reply ``refused``."""
        self.rule.receive(self._replica, self.state, self._center(refused))
        self._take_reply(refused)
        self._take_values(refused)
        batches = self._window
        self._end_window()
        for first in range(0, len(batches), CALL_STEPS_MAX):
            group = batches[first : first + CALL_STEPS_MAX]
            yield Compute(len(group))
            self.compute(group)

    def _post(self, end: BatchLike, statistics: np.ndarray) -> _Exchange:
        """Post the commit, and begin the next window from the reply to the previous commit."""
        if self.posted:
            self._latest = _answered((yield CollectRequest()))
            if self._keeper is not None:
                yield from self._keeper.send()
        if self._keeper is not None:
            self._keeper.capture()
        self.rule.fill_payload(self._replica, self.state)
        yield PostRequest(self._record(end, statistics))
        self.posted = True
        if self._latest.stopping:
            return False
        self.rule.begin_overlapped_window(self._replica, self.state, _center(self._latest))
        self._take_rate(self._latest)
        self._take_values(self._latest)
        self._take_window(self._latest)
        return True

    def _record(self, end: BatchLike, statistics: np.ndarray) -> CommitRecord:
        parts = self.state.payload
        moved = touched = wants = tuple[np.ndarray, ...]()
        if self._tables is not None:
            dense, moved = self._tables.moved(parts[0])
            parts, touched, wants = (dense,), self._tables.touched, self._tables.wants
        return CommitRecord(
            epoch=end.epoch,
            first=self._first,
            last=end.index,
            epoch_end=end.last,
            wants_center=not self.traits.pull_first,
            learning_rate=0.0 if self.traits.gradient else self._replica.learning_rate,
            scale=self.state.scale,
            parts=parts,
            moving_statistics=statistics,
            history=np.concatenate(self._history) if self._history else NO_ROWS,
            checksum=end.checksum,
            overlapped=self.posted,
            touched=touched,
            moved=moved,
            wants=wants,
        )

    def _take_reply(self, reply: Reply) -> None:
        self._take_rate(reply)
        if reply.moving_statistics.size and not self.traits.keeps_replica:
            self._replica.load_moving_statistics(reply.moving_statistics)

    def _take_values(self, reply: Reply) -> None:
        """Set what the driver has set for all workers, before the next window."""
        if reply.version > self._version:
            self._version = reply.version
            self._replica.set_values(reply.values)

    def _take_window(self, reply: Reply) -> None:
        """Set the length of the next window from the reply to an applied commit."""
        self.state.window = reply.window or self.state.window

    def _take_rate(self, reply: Reply) -> None:
        self.state.previous_learning_rate, self.state.learning_rate = self.state.learning_rate, reply.learning_rate


def _batch_groups(batches: Iterator[BatchLike], limit: Callable[[], int]) -> Iterator[Sequence[Any]]:
    """Yield consecutive batches of one epoch, at most ``limit()`` at a time."""
    for head in batches:
        group = [head]
        for batch in () if head.last else islice(batches, limit() - 1):
            group.append(batch)
            if batch.last:
                break
        yield group


def _answered(reply: Reply | None) -> Reply:
    assert reply is not None, "the driver of the loop must answer a request"
    return reply


def _center(reply: Reply) -> Vector:
    assert reply.center is not None, "the driver of the loop must answer a pull with the center"
    return reply.center


def run_worker(client: WorkerClient, welcome: Welcome, begin: Callable[[Welcome], Loop]) -> None:
    """Drive the worker's loop to its end, then leave.

    A new loop begins, at the partition's progress, if the server was restarted from a snapshot without the latest
    commits, if another attempt has held the lease meanwhile, after a skipped commit, and after the loss of a worker
    with which this one exchanges. If the job ends early, no new loop begins.

    Args:
        begin: returns the loop that continues from ``welcome``.
    """
    while not welcome.finished:
        client.forget_residuals()
        try:
            # `begin` may send requests, and raise these errors too.
            with closing(ended_loop() if welcome.stopping else begin(welcome)) as loop:
                return _drive(client, loop)
        except RestartFromCenter as restart:
            welcome = restart.welcome
        except (LeaseLostError, MemberLostError):
            # If this attempt ended successfully, Spark could take its result and stop the attempt that holds the lease.
            welcome = client.rejoin()


def _drive(client: WorkerClient, loop: Loop) -> None:
    """Answer the loop's requests until it ends, then leave."""
    try:
        reply: Reply | None = None
        while True:
            reply = _answer(client, loop.send(reply))
    except StopIteration:
        client.leave()
    finally:
        client.wait_for_posted()


def _answer(client: WorkerClient, request: Request) -> Reply | None:
    match request:
        case Compute():
            return None
        case CommitRecord():
            return client.commit(request)
        case PullRequest():
            return client.pull(request.wants)
        case PostRequest():
            client.post(request.commit)
            return None
        case CollectRequest():
            return client.collect()
        case ProbeRequest():
            return Reply(occupied=client.occupied())
        case FetchRequest():
            return Reply(optimizer=client.fetch_optimizer())
        case KeepRequest():
            client.keep_optimizer(request.state, ahead=request.ahead)
            return None
        case TakenRequest():
            client.report_optimizer(request.problem)
            return None


def ended_loop() -> Loop:
    yield from ()
