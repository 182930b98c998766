"""The window that is chosen from what exchanges take; here by a clock that the test turns."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ps.toy_model import ToyReplica, batches

from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.protocol.messages import CollectRequest, CommitRecord, PostRequest, PullRequest, Reply
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import AUTO
from distkeras.ps.worker.loop import LONGEST, MEASURED, AutoWindow, work


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def windows_of(rule: Rule, *, step: float, exchange: float, count: int, **options: Any) -> list[tuple[int, bool]]:
    """The steps of each commit of a worker whose steps and exchanges take so long, and whether each was posted."""
    clock = Clock()
    windows = AutoWindow(replace(rule, window=AUTO), now=clock, **options)
    steps = itertools.count()

    def gradient(theta: np.ndarray, value: int) -> np.ndarray:
        # The first step compiles.
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
    found: list[tuple[int, bool]] = []
    request: Any = next(loop)
    center = np.ones(1)
    while len(found) < count:
        commit = request.commit if isinstance(request, PostRequest) else request
        if isinstance(commit, CommitRecord):
            found.append((commit.last - commit.first + 1, isinstance(request, PostRequest)))
        if isinstance(request, CommitRecord):
            clock.seconds += exchange
        waited_for = isinstance(request, (PullRequest, CommitRecord, CollectRequest))
        reply = Reply(center=center.copy()) if waited_for else None
        request = loop.send(reply)
    return found


def test_communication_keeps_to_its_share() -> None:
    # lambda >= (1 - .1) / .1 * 5 / 2 = 22.5
    found = windows_of(make("agn"), step=2.0, exchange=5.0, count=MEASURED + 3)
    assert found == [(10, False)] * (MEASURED + 1) + [(23, False)] * 2


def test_what_is_asked_for_is_what_comes() -> None:
    assert windows_of(make("agn"), step=1.0, exchange=3.0, count=MEASURED + 2, share=0.5)[-1] == (3, False)
    assert windows_of(make("agn"), step=1.0, exchange=3.0, count=MEASURED + 2, share=0.25)[-1] == (9, False)


def test_it_is_measured_with_the_window_that_the_rule_has_by_default() -> None:
    found = windows_of(make("agn"), step=1.0, exchange=1.0, count=MEASURED + 2, share=0.5)
    assert found == [(10, False)] * (MEASURED + 1) + [(1, False)]


def test_overlapped_exchanges_are_hidden_behind_the_window() -> None:
    # 5 seconds behind steps of 2: three of them. While they are measured, they are waited for.
    found = windows_of(make("agn"), step=2.0, exchange=5.0, count=MEASURED + 3, overlap=True)
    assert found == [(10, False)] * (MEASURED + 1) + [(3, True)] * 2


def test_an_exchange_that_takes_forever_gets_the_longest_window() -> None:
    assert windows_of(make("agn"), step=1e-12, exchange=60.0, count=MEASURED + 2)[-1] == (LONGEST, False)


@pytest.mark.parametrize("name", ["ssgd", "averaging", "easgd", "zealous_downpour"])
def test_rules_that_need_their_window_refuse(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`window` must be a number: rule '{name}'"):
        make(name, window="auto")


@pytest.mark.parametrize("name", ["asgd", "ormo", "dana_dc"])
def test_gradient_rules_commit_every_gradient(name: str) -> None:
    with pytest.raises(ConfigurationError, match="commits every gradient"):
        make(name, window="auto")


@pytest.mark.parametrize(("name", "options"), [("downpour", {}), ("dynsgd", {}), ("adag", {"normalize": False})])
def test_rules_whose_steps_grow_with_the_window_refuse(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="adds up the steps of a window"):
        make(name, window="auto", **options)


def test_another_text_is_no_window() -> None:
    with pytest.raises(ConfigurationError, match='`window` must be a number of steps, "auto", "by_speed", or None'):
        make("agn", window="often")


def test_a_window_in_steps_is_not_measured() -> None:
    with pytest.raises(ConfigurationError, match="`window` must be 'auto'"):
        AutoWindow(make("agn", window=3))


def test_a_worker_does_not_step_under_a_window_that_is_not_chosen() -> None:
    rule = make("agn", window="auto")
    with pytest.raises(LocalProtocolError, match="window='auto'"):
        rule.due(rule.start(ToyReplica(1, 0.1, lambda theta, value: theta), np.zeros(1)))
