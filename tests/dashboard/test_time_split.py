"""Tests of how time is split, with results computed by hand."""

from __future__ import annotations

import numpy as np
from support.training.recorded_job import commits

from distkeras.dashboard.record import TimeSplitter


def test_without_rounds_waiting_time_is_network_time() -> None:
    rows = commits(
        [
            {"worker": 0, "timestamp": 10.0},
            {"worker": 1, "timestamp": 11.0},
            {"worker": 0, "timestamp": 14.0, "wait": 1.0},
            # The wait is longer than the interval, because it includes a reconnection.
            {"worker": 1, "timestamp": 14.0, "wait": 5.0},
        ]
    )
    split = TimeSplitter(2, rounds=False).split(rows)
    np.testing.assert_allclose(split.compute, [0, 0, 3, 0])
    np.testing.assert_allclose(split.wire, [0, 0, 1, 3])
    np.testing.assert_allclose(split.wait, 0)


def test_in_rounds_the_first_worker_waits_for_the_last() -> None:
    rows = commits(
        [
            {"worker": 0, "timestamp": 10.0, "staleness": 0},
            {"worker": 1, "timestamp": 12.0, "staleness": 1},
            {"worker": 0, "timestamp": 15.0, "staleness": 0, "wait": 2.5},
            {"worker": 1, "timestamp": 16.0, "staleness": 1, "wait": 0.5},
        ]
    )
    split = TimeSplitter(2, rounds=True).split(rows)
    np.testing.assert_allclose(split.wait, [0, 0, 2.0, 0])
    np.testing.assert_allclose(split.wire, [0, 0, 0.5, 0.5])
    np.testing.assert_allclose(split.compute, [0, 0, 2.5, 3.5])


def test_parts_add_up_to_the_result_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    rows = commits(
        [
            {"worker": clock % 3, "timestamp": clock + rng.uniform(0, 0.5), "staleness": clock % 3, "wait": 0.4}
            for clock in range(30)
        ]
    )
    for rounds in (False, True):
        whole = TimeSplitter(3, rounds=rounds).split(rows)
        splitter = TimeSplitter(3, rounds=rounds)
        pieces = [splitter.split(rows[first : first + 4]) for first in range(0, 30, 4)]
        for name in whole._fields:
            np.testing.assert_allclose(np.concatenate([getattr(piece, name) for piece in pieces]), getattr(whole, name))


def test_time_between_two_attempts_is_not_counted() -> None:
    rows = commits(
        [
            {"worker": 0, "timestamp": 10.0, "attempt": 0},
            {"worker": 0, "timestamp": 90.0, "attempt": 3},
            {"worker": 0, "timestamp": 91.0, "attempt": 3, "wait": 0.25},
            {"worker": 0, "timestamp": 200.0, "attempt": 3, "incarnation": 2},
        ]
    )
    split = TimeSplitter(1, rounds=False).split(rows)
    np.testing.assert_allclose(split.compute, [0, 0, 0.75, 0])


def test_no_commits_take_no_time() -> None:
    assert [len(part) for part in TimeSplitter(2, rounds=True).split(commits([]))] == [0, 0, 0]
