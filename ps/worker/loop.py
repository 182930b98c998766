"""The worker's loop, once, for every rule: a generator that yields requests and is sent the replies.

It opens no socket and reads no clock that matters to the result; a socket client or a simulation drives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from distkeras.ps.protocol.messages import NO_FLOATS, NO_ROWS, CommitRecord
from distkeras.ps.protocol.requests import CollectRequest, Compute, Loop, PostRequest, ProbeRequest, PullRequest, Reply
from distkeras.ps.rules.base import Replica, Rule, Vector, WorkerState
from distkeras.ps.worker.auto_window import AutoWindow


class BatchLike(Protocol):
    """What the loop needs to know of a mini-batch; the rest is the replica's business."""

    @property
    def epoch(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def last(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def checksum(self) -> int: ...


class WorkerReplica(Replica, Protocol):
    """A `Replica` whose model may carry moving statistics."""

    def load_moving_statistics(self, vector: np.ndarray) -> None: ...
    def read_moving_statistics(self, out: np.ndarray) -> None: ...


def work(
    rule: Rule,
    replica: WorkerReplica,
    batches: Iterator[BatchLike],
    payload: Callable[[], tuple[Vector, ...]],
    *,
    moving_statistics: int = 0,
    overlap: bool = False,
    windows: AutoWindow | None = None,
    now: Callable[[], float] | None = time.time,
) -> Loop:
    """Trains on ``batches`` until they end, or a reply says so, in windows that never cross an epoch's end.

    Args:
        rule: the update rule; its worker half runs here.
        replica: the model.
        batches: mini-batches in order, each with its epoch, its index within it, and whether it is the epoch's last.
        payload: gives the buffers that the next commit ships.
        moving_statistics: size of the moving statistics, 0 for none.
        overlap: compute the next window while a commit and its reply travel (`Rule.begin_overlapped_window`). What a
            worker is sent is then one window older, and so counted in the staleness; it keeps its own moving
            statistics, for those of the reply lack its latest window's. One commit is under way at a time.
        windows: chooses the rule's window from what the first ones take; None: it is the rule's.
        now: stamps the history, seconds since the epoch; None: no history is kept.

    Yields:
        `PullRequest`, `CommitRecord`, `CollectRequest` and `ProbeRequest`, each to be answered by a `Reply`;
        `PostRequest` and `Compute`.
    """
    rule = rule if windows is None else windows.rule
    traits = rule.traits
    pull_first, gradient, probes = traits.pull_first, traits.gradient, traits.probes
    reply = yield PullRequest()
    center, stopping = _center(reply), _answered(reply).stopping
    if stopping:
        return
    state = rule.start(replica, center)
    state.learning_rate = state.previous_learning_rate = _answered(reply).learning_rate
    if _answered(reply).moving_statistics.size:
        replica.load_moving_statistics(_answered(reply).moving_statistics)
    rows: list[np.ndarray] = []
    first, posted = 0, False

    def limit() -> int:
        return rule.steps_until_due(state)

    for group in _batch_groups(batches, limit):
        yield Compute(len(group))
        if state.steps == 0:
            first, state.payload = group[0].index, payload()
        if windows is not None:
            windows.start()
        metrics = rule.compute(replica, state, group)
        state.steps += len(group)
        if windows is not None:
            windows.computed(len(group))
        if now is not None:
            stamps = np.array([[now(), batch.size] for batch in group], np.float64)
            rows.append(np.concatenate([stamps, metrics], axis=1))
        end = group[-1]
        due = end.last or rule.due(state)
        if probes and not due:
            state.occupied = _answered((yield ProbeRequest())).occupied
            due = rule.due(state)
        if not due:
            continue
        if windows is not None:
            windows.start()
        measured = NO_FLOATS
        if moving_statistics:
            measured = np.empty(moving_statistics, np.float32)
            replica.read_moving_statistics(measured)
        if pull_first:
            reply = yield PullRequest()
            rule.elastic_exchange(replica, state, _center(reply))
            _take_in(rule, replica, state, reply)
        else:
            if posted:
                reply = yield CollectRequest()
                center, stopping = _center(reply), _answered(reply).stopping
            rule.fill_payload(replica, state)
        commit = CommitRecord(
            epoch=end.epoch,
            first=first,
            last=end.index,
            epoch_end=end.last,
            wants_center=not pull_first,
            learning_rate=0.0 if gradient else replica.learning_rate,
            scale=state.scale,
            parts=state.payload,
            moving_statistics=measured,
            history=np.concatenate(rows) if rows else NO_ROWS,
            checksum=end.checksum,
            overlapped=posted,
        )
        if overlap and (windows is None or windows.chosen):
            yield PostRequest(commit)
            posted = True
            if stopping:
                break
            rule.begin_overlapped_window(replica, state, center)
            _take_rate(state, reply)
        else:
            reply = yield commit
            if _answered(reply).stopping:
                return
            if not pull_first:
                center = _center(reply)
                rule.receive(replica, state, center)
                _take_in(rule, replica, state, reply)
            if windows is not None:
                rule = windows.exchanged()
        rows.clear()
        state.steps, state.due_early, state.occupied, state.payload = 0, False, True, ()
    if posted:
        yield CollectRequest()


def _batch_groups(batches: Iterator[BatchLike], limit: Callable[[], int]) -> Iterator[Sequence[Any]]:
    """Consecutive batches of one epoch, at most ``limit()`` at a time."""
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


def _center(reply: Reply | None) -> Vector:
    center = _answered(reply).center
    assert center is not None, "the driver of the loop must answer a pull with the center"
    return center


def _take_in(rule: Rule, replica: WorkerReplica, state: WorkerState, reply: Reply | None) -> None:
    _take_rate(state, reply)
    moving_statistics = _answered(reply).moving_statistics
    if moving_statistics.size and not rule.traits.keeps_replica:
        replica.load_moving_statistics(moving_statistics)


def _take_rate(state: WorkerState, reply: Reply | None) -> None:
    state.previous_learning_rate, state.learning_rate = state.learning_rate, _answered(reply).learning_rate
