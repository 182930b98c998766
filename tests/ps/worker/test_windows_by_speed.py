"""Windows by speed at a worker: the reply to a commit contains the length of the next window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.present import present
from support.ps.clocks import HandWorld
from support.ps.running_server import SIZE, Running
from support.ps.toy_model import ToyReplica, batches, toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.protocol.loop import CollectRequest, CommitRecord, Compute, PostRequest, PullRequest, Reply
from distkeras.ps.rules import Rule, make
from distkeras.ps.worker.loop import work

BY_SPEED: dict[str, Any] = {"window": "by_speed", "window_max": 8}


def windows_of(
    rule: Rule, replies: list[Reply], *, pulled: int = 0, epochs: int = 1, size: int = 200, overlap: bool = False
) -> list[int]:
    """Return the steps of each commit; replies to commits are ``replies``, and later ones contain no window."""
    payload = np.empty(1)
    source = batches(range(size), epochs=epochs)
    loop = work(rule, ToyReplica(1, 0.1), source, lambda: (payload.copy(),), overlap=overlap)
    steps: list[int] = []
    remaining: Iterator[Reply] = iter(replies)
    request: Any = next(loop)
    center = np.zeros(1)
    try:
        while True:
            commit = request.commit if isinstance(request, PostRequest) else request
            reply: Reply | None = None
            if isinstance(commit, CommitRecord):
                steps.append(commit.steps)
            if isinstance(request, PullRequest):
                reply = Reply(center=center.copy(), window=pulled)
            elif isinstance(request, (CommitRecord, CollectRequest)):
                reply = next(remaining, Reply())._replace(center=center.copy())
            request = loop.send(reply)
    except StopIteration:
        return steps


def replies_with(*windows: int) -> list[Reply]:
    return [Reply(window=window) for window in windows]


def test_each_window_has_the_length_in_the_previous_reply() -> None:
    steps = windows_of(make("downpour", **BY_SPEED), replies_with(3, 8, 1, 70), pulled=5)
    assert steps[:5] == [5, 3, 8, 1, 70]


def test_a_reply_without_a_window_does_not_change_the_window() -> None:
    assert windows_of(make("downpour", **BY_SPEED), replies_with(0, 3, 0, 2), size=24) == [8, 8, 3, 3, 2]
    assert windows_of(make("mla", window="by_speed"), [], size=110) == [50, 50, 10]


def test_a_window_ends_with_its_epoch_and_the_next_one_has_the_length_in_the_reply() -> None:
    assert windows_of(make("downpour", **BY_SPEED), replies_with(4, 4, 3), size=10, epochs=2) == [8, 2, 4, 3, 3]


def test_a_refused_window_keeps_its_mini_batches() -> None:
    rule = make("ringmaster", **BY_SPEED)
    refused = Reply(refused=True, window=2)
    assert windows_of(rule, [refused, refused, *replies_with(3)], size=14) == [8, 8, 8, 3, 3]


def test_a_rule_that_pulls_first_gets_its_window_with_the_acknowledgement() -> None:
    assert windows_of(make("aeasgd", **BY_SPEED), replies_with(3, 2), pulled=8, size=15) == [8, 3, 2, 2]


def test_an_overlapped_window_has_the_length_in_the_reply_that_it_begins_with() -> None:
    # The reply to the first commit arrives when the second window ends.
    assert windows_of(make("downpour", **BY_SPEED), replies_with(3, 5, 2), size=26, overlap=True) == [8, 8, 3, 5, 2]


class ManualWorker:
    """A worker's client and loop, which sends one commit in each turn."""

    def __init__(self, running: Running, clock: HandWorld, worker: int, **options: Any) -> None:
        self._running, self._clock = running, clock
        self.client, welcome, begin = toy_client(
            running.address, running.rule, np.zeros(100), worker=worker, size=SIZE, deadlines=PATIENT, **options
        )
        self._loop = begin(welcome)
        next(self._loop)
        self._request: Any = self._compute(self.client.pull())

    def _compute(self, reply: Reply | None) -> Any:
        request = self._loop.send(reply)
        while isinstance(request, (Compute, CollectRequest)):
            request = self._loop.send(self.client.collect() if isinstance(request, CollectRequest) else None)
        return request

    def turn(self, seconds: float) -> None:
        """Apply the commit when the clock is at ``seconds``, and then compute the next window."""
        self._clock.now = seconds
        clock = present(self._running.server.center).clock
        if isinstance(self._request, PostRequest):
            self.client.post(self._request.commit)
            assert self._running.driver.observe(clock, patience(20)).clock == clock + 1
            self._request = self._compute(None)
            return
        if isinstance(self._request, PullRequest):
            self._request = self._loop.send(self.client.pull())
        self._request = self._compute(self.client.commit(self._request))

    def close(self) -> None:
        self.client.wait_for_posted()
        self.client.close()


@pytest.mark.parametrize(("name", "wire_format"), [("downpour", "int8"), ("mla", "bfloat16"), ("aeasgd", "float32")])
def test_a_slow_worker_receives_its_shorter_windows(name: str, wire_format: str) -> None:
    clock = HandWorld()
    with Running(make(name, **BY_SPEED), workers=2, world=clock) as running:
        fast, slow = (ManualWorker(running, clock, worker, wire_format=wire_format) for worker in range(2))
        fast.turn(8.0)
        fast.turn(16.0)
        slow.turn(16.0)  # 8 steps in 16 s: half as fast
        slow.turn(32.0)  # 4 steps in 16 s: a quarter
        slow.turn(40.0)  # 2 steps in 8 s
        fast.turn(56.0)  # 8 steps in 40 s: now this worker is slower, by a fifth
        slow.turn(56.0)  # 2 steps in 16 s
        fast.turn(57.0)
        assert steps_by_worker(running) == ([8, 8, 8, 6], [8, 4, 2, 2])
        fast.close()
        slow.close()


def test_overlapped_windows_change_one_window_later() -> None:
    clock = HandWorld()
    with Running(make("downpour", **BY_SPEED), workers=2, world=clock) as running:
        fast, slow = (ManualWorker(running, clock, worker, overlap=True) for worker in range(2))
        fast.turn(8.0)
        slow.turn(32.0)  # 8 steps in 32 s: a quarter of the fast worker's speed; the second window is computed before
        slow.turn(64.0)  # 8 steps in 32 s
        slow.turn(72.0)  # 2 steps in 8 s
        slow.turn(80.0)
        assert steps_by_worker(running) == ([8], [8, 8, 2, 2])
        fast.close()
        slow.close()


def test_the_next_pull_contains_the_window_of_a_lost_reply() -> None:
    clock = HandWorld()
    with Running(make("downpour", **BY_SPEED), workers=2, world=clock) as running:
        fast, slow = (ManualWorker(running, clock, worker) for worker in range(2))
        fast.turn(8.0)
        released = present(running.server.center).release

        def cut_connection_and_release(
            worker: int, attempt: int, wants: Sequence[np.ndarray] = (), outs: Sequence[np.ndarray | None] = ()
        ) -> Any:
            present(running.server.center).release = released
            present(slow.client.channel).hang_up()
            return released(worker, attempt, wants, outs)

        present(running.server.center).release = cut_connection_and_release
        slow.turn(32.0)
        slow.turn(40.0)
        assert steps_by_worker(running) == ([8], [8, 2])
        fast.close()
        slow.close()


def steps_by_worker(running: Running) -> tuple[list[int], list[int]]:
    rows = running.driver.drain().commits.view(COMMIT)
    first, second = (rows["steps"][rows["worker"] == worker].tolist() for worker in range(2))
    return first, second
