"""The window that is chosen from the duration of exchanges, measured here by a manual clock."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ps.toy_model import ToyReplica, batches

from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.protocol.loop import CollectRequest, CommitRecord, PostRequest, PullRequest, Reply
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import AUTO, WINDOW_MAX
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.worker.loop import MEASURED, AutoWindow, work


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def windows_of(rule: Rule, *, step: float, exchange: float, count: int, **options: Any) -> list[tuple[int, bool]]:
    """Return the steps of each commit and whether it was posted, for steps and exchanges of these durations."""
    clock = ManualClock()
    windows = AutoWindow(replace(rule, window=AUTO), now=clock, **options)
    steps = itertools.count()

    def gradient(theta: np.ndarray, value: int) -> np.ndarray:
        # The first step includes the compilation.
        clock.seconds += 100.0 if next(steps) == 0 else step
        return theta

    payload = np.empty(1)
    loop = work(
        rule,
        ToyReplica(1, 0.1, gradient),
        batches(range(100_000)),
        lambda: (payload.copy(),),
        overlap=options.get("overlap", False),
        windows=windows,
    )
    commits: list[tuple[int, bool]] = []
    request: Any = next(loop)
    center = np.ones(1)
    while len(commits) < count:
        commit = request.commit if isinstance(request, PostRequest) else request
        if isinstance(commit, CommitRecord):
            commits.append((commit.last - commit.first + 1, isinstance(request, PostRequest)))
        if isinstance(request, CommitRecord):
            clock.seconds += exchange
        waited_for = isinstance(request, (PullRequest, CommitRecord, CollectRequest))
        reply = Reply(center=center.copy()) if waited_for else None
        request = loop.send(reply)
    return commits


def test_communication_takes_at_most_its_share_of_the_time() -> None:
    # lambda >= (1 - .1) / .1 * 5 / 2 = 22.5
    commits = windows_of(make("agn"), step=2.0, exchange=5.0, count=MEASURED + 3)
    assert commits == [(10, False)] * (MEASURED + 1) + [(23, False)] * 2


def test_the_share_of_communication_can_be_set() -> None:
    assert windows_of(make("agn"), step=1.0, exchange=3.0, count=MEASURED + 2, share=0.5)[-1] == (3, False)
    assert windows_of(make("agn"), step=1.0, exchange=3.0, count=MEASURED + 2, share=0.25)[-1] == (9, False)


def test_exchanges_are_measured_with_the_rules_default_window() -> None:
    commits = windows_of(make("agn"), step=1.0, exchange=1.0, count=MEASURED + 2, share=0.5)
    assert commits == [(10, False)] * (MEASURED + 1) + [(1, False)]


def test_overlapped_exchanges_are_hidden_behind_the_window() -> None:
    # An exchange of 5 s is hidden by three steps of 2 s. The worker waits for exchanges while they are measured.
    commits = windows_of(make("agn"), step=2.0, exchange=5.0, count=MEASURED + 3, overlap=True)
    assert commits == [(10, False)] * (MEASURED + 1) + [(3, True)] * 2


def test_the_window_of_a_very_long_exchange_is_the_longest_window() -> None:
    assert windows_of(make("agn"), step=1e-12, exchange=60.0, count=MEASURED + 2)[-1] == (WINDOW_MAX, False)


@pytest.mark.parametrize("name", ["ssgd", "averaging", "easgd", "zealous_downpour"])
def test_rules_that_need_their_window_refuse_an_automatic_window(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`window` must be a number: rule '{name}'"):
        make(name, window="auto")


@pytest.mark.parametrize("name", ["asgd", "ormo", "dana_dc"])
def test_gradient_rules_refuse_an_automatic_window(name: str) -> None:
    with pytest.raises(ConfigurationError, match="commits every gradient"):
        make(name, window="auto")


@pytest.mark.parametrize(("workers", "window"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (64, 1)])
@pytest.mark.parametrize(("name", "options"), [("downpour", {}), ("dynsgd", {}), ("adag", {"normalize": False})])
def test_workers_whose_steps_add_up_share_eight_mini_batches(
    name: str, options: dict[str, Any], workers: int, window: int
) -> None:
    rule = make(name, window="auto", **options)
    assert WorkerSettings(rule, workers).rule == replace(rule, window=window)
    assert ServerSettings(rule, workers).rule == rule


def test_a_measured_window_stays_the_choice_of_each_worker() -> None:
    assert WorkerSettings(make("agn", window="auto"), 4).rule.window == "auto"


def test_another_text_is_refused_as_a_window() -> None:
    with pytest.raises(ConfigurationError, match='`window` must be a number of steps, "auto", "by_speed", or None'):
        make("agn", window="often")


def test_a_window_in_steps_cannot_be_measured() -> None:
    with pytest.raises(ConfigurationError, match="`window` must be 'auto'"):
        AutoWindow(make("agn", window=3))


def test_a_rule_cannot_compute_before_its_automatic_window_is_chosen() -> None:
    rule = make("agn", window="auto")
    with pytest.raises(LocalProtocolError, match="window='auto'"):
        rule.due(rule.start(ToyReplica(1, 0.1, lambda theta, value: theta), np.zeros(1)))
