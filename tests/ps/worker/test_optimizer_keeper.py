"""The optimizer state of a worker: when it is sent, and the state that a later loop begins with; without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.ps.toy_model import ToyBatch, ToyReplica, batches

from distkeras.ps.protocol.loop import (
    CollectRequest,
    CommitRecord,
    Compute,
    FetchRequest,
    KeepRequest,
    Loop,
    OptimizerState,
    PostRequest,
    PullRequest,
    Reply,
    TakenRequest,
)
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import work
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, SaveInterval


class ManualClock:
    """A manual clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class CountingReplica(ToyReplica):
    """A replica whose optimizer state is the number of its steps."""

    def __init__(self, clock: ManualClock, *, stateless: bool = False) -> None:
        super().__init__(1, 0.1)
        self.steps, self._clock, self._stateless = 0, clock, stateless
        self.loaded: list[Any] = []

    def train(self, batches: Sequence[ToyBatch]) -> np.ndarray:
        self.steps += len(batches)
        self._clock.seconds += 1.0 * len(batches)
        return super().train(batches)

    def read_optimizer(self) -> OptimizerState | None:
        return None if self._stateless else OptimizerState("count", np.array([self.steps], np.uint8), 0)

    def load_optimizer(self, state: OptimizerState | None, example: Any) -> str | None:
        self.loaded.append((None if state is None else int(state.content[0]), example.index))
        if self._stateless:
            return None
        if state is None:
            return "none is kept"
        self.steps = int(state.content[0])
        return ""


def welcome(sequence: int = 0, optimizer: int = 0) -> Welcome:
    return Welcome(1, 0, sequence, 0, 0, sequence, False, optimizer=optimizer)


def drive(  # noqa: C901 - one case for each request
    loop: Loop, clock: ManualClock, kept: int = 0, costs: float = 0.0
) -> list[Any]:
    """Return the requests of a loop: commits with their last mini-batch, and states, which take ``costs`` s each."""
    requests: list[Any] = []
    reply: Reply | None = None
    try:
        while True:
            request = loop.send(reply)
            reply = Reply(center=np.zeros(1), optimizer=OptimizerState("count", np.array([kept], np.uint8), 0))
            match request:
                case CommitRecord():
                    requests.append(("commit", request.last))
                case PostRequest():
                    requests.append(("post", request.commit.last))
                    reply = None
                case CollectRequest():
                    requests.append("collect")
                case PullRequest():
                    requests.append("pull")
                case Compute():
                    reply = None
                case KeepRequest():
                    requests.append(("keep", int(request.state.content[0])))
                    clock.seconds += costs
                    reply = None
                case FetchRequest():
                    requests.append("fetch")
                case TakenRequest():
                    requests.append(("taken", request.problem))
                    reply = None
    except StopIteration:
        return requests


def train(
    steps: int, *, at: Welcome | None = None, overlap: bool = False, **options: Any
) -> tuple[list[Any], CountingReplica]:
    clock = ManualClock()
    replica = CountingReplica(clock, stateless=options.pop("stateless", False))
    rule = make(options.pop("rule", "downpour"), **options.pop("hyper", {"window": 2}))
    keeper = OptimizerKeeper(rule, replica, SaveInterval(options.pop("share", 0.02), now=clock), at or welcome())
    loop = work(
        rule, replica, batches(np.ones((steps, 1))), lambda: (np.zeros(1),), overlap=overlap, keeper=keeper, now=None
    )
    return drive(loop, clock, **options), replica


def test_a_state_follows_the_commit_that_it_belongs_to() -> None:
    requests, _ = train(4)
    assert requests == ["pull", ("commit", 1), ("keep", 2), ("commit", 3), ("keep", 4)]


def test_with_overlap_a_state_is_read_before_the_next_window_and_sent_after_the_commit_is_applied() -> None:
    requests, _ = train(8, overlap=True)
    first = ["pull", ("post", 1), "collect", ("keep", 2), ("post", 3), "collect", ("post", 5)]
    assert requests == [*first, "collect", ("keep", 6), ("post", 7), "collect"]


def test_the_state_of_a_rule_that_pulls_first_follows_the_acknowledgement() -> None:
    requests, _ = train(2, rule="adag", hyper={"window": 1, "algorithm": 13})
    assert requests == ["pull", "pull", ("commit", 0), ("keep", 1), "pull", ("commit", 1), ("keep", 2)]


def test_sending_states_takes_a_share_of_the_time() -> None:
    """Each state takes two seconds, and the share is a fifth: eight seconds of work between two states."""
    requests, _ = train(40, share=0.2, costs=2.0)
    assert [entry[1] for entry in requests if entry[0] == "keep"] == [2, 10, 18, 26, 34]


def test_one_slow_state_does_not_change_the_interval() -> None:
    clock = ManualClock()
    interval = SaveInterval(0.5, now=clock)
    seconds = []
    for took in (3.0, 100.0, 4.0, 5.0):
        interval.sent(took)
        seconds.append(interval.seconds)
    assert seconds == [3.0, 3.0, 4.0, 5.0]


def test_there_is_at_least_a_second_between_two_states() -> None:
    clock = ManualClock()
    interval = SaveInterval(now=clock)
    due = []
    for clock.seconds in (0.0, 0.9, 1.0, 1.1, 1.9, 2.0):
        due.append(interval.due())
        if due[-1]:
            interval.sent(0.001)
    assert due == [False, False, True, False, False, True]


def test_in_rounds_the_share_is_divided_among_all_workers() -> None:
    seconds = []
    for rule in ("downpour", "averaging"):
        interval = SaveInterval.of(make(rule), 4, now=ManualClock())
        interval.sent(1.0)
        seconds.append(interval.seconds)
    assert seconds == pytest.approx([49.0, 199.0])


def test_an_optimizer_without_a_state_sends_nothing() -> None:
    requests, replica = train(4, at=welcome(3), stateless=True)
    assert requests == ["pull", ("commit", 1), ("commit", 3)]
    assert replica.loaded == [(None, 0)]


def test_the_first_loop_fetches_no_state() -> None:
    requests, replica = train(1)
    assert requests == ["pull", ("commit", 0), ("keep", 1)]
    assert replica.loaded == []


def test_a_later_loop_loads_the_kept_state_before_its_first_step() -> None:
    requests, replica = train(2, at=welcome(5, optimizer=4), kept=41)
    assert requests == ["pull", "fetch", ("taken", ""), ("commit", 1), ("keep", 43)]
    assert replica.loaded == [(41, 0)]


def test_a_later_loop_reports_that_no_state_was_kept() -> None:
    requests, _ = train(2, at=welcome(5))
    assert requests == ["pull", ("taken", "none is kept"), ("commit", 1), ("keep", 2)]
