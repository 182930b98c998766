"""The window that is chosen from what exchanges take; here by a clock that the test turns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.toy_model import ToyReplica, batches

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.messages import CommitRecord
from distkeras.ps.protocol.requests import CollectRequest, PostRequest, PullRequest, Reply
from distkeras.ps.rules import Rule, make
from distkeras.ps.worker.auto_window import LONGEST, MEASURED, AutoWindow
from distkeras.ps.worker.loop import work


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def windows_of(rule: Rule, *, step: float, exchange: float, count: int, **options: Any) -> list[tuple[int, bool]]:
    """The steps of each commit of a worker whose steps and exchanges take so long, and whether each was posted."""
    clock = Clock()
    windows = AutoWindow(rule, now=clock, **options)
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
    found = windows_of(make("agn", window=4), step=2.0, exchange=5.0, count=MEASURED + 3, share=0.1)
    assert found == [(4, False)] * (MEASURED + 1) + [(23, False)] * 2


def test_what_is_asked_for_is_what_comes() -> None:
    assert windows_of(make("agn", window=1), step=1.0, exchange=3.0, count=MEASURED + 2, share=0.5)[-1] == (3, False)
    assert windows_of(make("agn", window=1), step=1.0, exchange=3.0, count=MEASURED + 2, share=0.25)[-1] == (9, False)


def test_a_whole_epoch_is_no_window_to_measure_with() -> None:
    found = windows_of(make("agn", window=None), step=1.0, exchange=1.0, count=MEASURED + 2, share=0.5)
    assert found == [(10, False)] * (MEASURED + 1) + [(1, False)]


def test_overlapped_exchanges_are_hidden_behind_the_window() -> None:
    # 5 seconds behind steps of 2: three of them. While they are measured, they are waited for.
    found = windows_of(make("agn", window=1), step=2.0, exchange=5.0, count=MEASURED + 3, overlap=True)
    assert found == [(1, False)] * (MEASURED + 1) + [(3, True)] * 2


def test_an_exchange_that_takes_for_ever_gets_the_longest_window() -> None:
    assert windows_of(make("agn"), step=1e-12, exchange=60.0, count=MEASURED + 2)[-1] == (LONGEST, False)


@pytest.mark.parametrize("rule", ["asgd", "ssgd", "averaging", "easgd", "zealous_downpour", "ormo", "dana_dc"])
def test_rules_that_need_their_window_refuse(rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        AutoWindow(make(rule))


@pytest.mark.parametrize("rule", [make("downpour"), make("dynsgd"), make("adag", normalize=False)], ids=str)
def test_rules_whose_steps_grow_with_the_window_refuse(rule: Rule) -> None:
    with pytest.raises(ConfigurationError, match="adds up the steps of a window"):
        AutoWindow(rule)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan")])
def test_what_is_no_share(share: float) -> None:
    with pytest.raises(ConfigurationError, match="communication_share"):
        AutoWindow(make("agn"), share)
