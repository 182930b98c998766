"""Metrics of runs: every expected number is computed by hand in the comments."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from distkeras.analysis import metrics
from distkeras.ps.errors import ConfigurationError, EmptyDataError, LedgerError, MissingColumnError
from distkeras.ps.rules import make
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.virtual_job import Trace

START = pd.Timestamp("2026-01-01 12:00:00")


def history(
    *rows: tuple[float, int, float], epoch: list[int] | None = None, samples: list[int] | None = None
) -> pd.DataFrame:
    """Return a history with (seconds, worker, accuracy) for each step, in any order."""
    frame = pd.DataFrame(rows, columns=["at", "worker", "accuracy"])
    frame["timestamp"] = START + pd.to_timedelta(frame.pop("at"), unit="s")
    frame["iteration"] = frame.groupby("worker").cumcount()
    frame["epoch"] = 0 if epoch is None else epoch
    frame["samples"] = 10 if samples is None else samples
    frame["loss"] = 1 - frame["accuracy"]
    return frame


def commits(*rows: tuple[int, int, int, int]) -> pd.DataFrame:
    """Return commits with (worker, sequence, steps, staleness) each, in clock order."""
    frame = pd.DataFrame(rows, columns=["worker", "sequence", "steps", "staleness"])
    frame["clock"] = range(len(rows))
    return frame


def test_per_worker_orders_and_counts_seconds_from_the_first_step_of_all() -> None:
    frame = metrics.per_worker(history((2.0, 1, 0.5), (0.0, 0, 0.1), (5.0, 1, 0.6), (3.0, 0, 0.2)))
    assert list(frame["worker"]) == [0, 0, 1, 1]
    assert list(frame["seconds"]) == [0.0, 3.0, 2.0, 5.0]
    assert list(frame["accuracy"]) == [0.1, 0.2, 0.5, 0.6]


def test_an_average_is_weighted_by_samples_and_skips_empty_spans() -> None:
    # Span [0, 2): (.1 * 10 + .4 * 20) / 30 = .3 at (0 + 1) / 2 s. Span [2, 4): empty. Span [4, 6): .8 at 5 s.
    frame = metrics.averaged(history((0, 0, 0.1), (1, 1, 0.4), (5, 0, 0.8), samples=[10, 20, 30]), every=2)
    assert list(frame["seconds"]) == [0.5, 5.0]
    assert list(frame["accuracy"]) == pytest.approx([0.3, 0.8])
    assert list(frame["loss"]) == pytest.approx([0.7, 0.2])
    assert list(frame["samples"]) == [30, 30]
    assert list(frame["steps"]) == [2, 1]
    with pytest.raises(ConfigurationError, match="every"):
        metrics.averaged(frame, every=0)


def test_hardware_efficiency_is_the_number_of_seconds_per_epoch() -> None:
    run = history((0, 0, 0), (3, 1, 0), (4, 0, 0), (9, 1, 0), epoch=[0, 0, 1, 1])
    assert metrics.hardware_efficiency(run) == pytest.approx(4.5)


def test_staleness_histogram_has_no_gaps() -> None:
    log = commits((0, 0, 1, 0), (1, 0, 1, 3), (0, 1, 1, 1), (1, 1, 1, 3))
    counts = metrics.staleness_histogram(log)
    assert list(counts.index) == [0, 1, 2, 3]
    assert list(counts[0]) == [1, 1, 0, 0]
    assert list(counts[1]) == [0, 0, 0, 2]
    assert list(metrics.staleness_histogram(log, by_worker=False)["commits"]) == [1, 1, 0, 2]


def trace(name: str = "asgd", **options: Any) -> Trace:
    """Return a run of two alternating workers: a slope of 1 for four parameters, eta = .5, gradients of norm 2."""
    defaults: dict[str, Any] = {
        "workers": 2,
        "learning_rate": 0.5,
        "schedule": [0, 1, 0, 1],
        "measure_gap": True,
    } | options
    return simulate(make(name, window=1), np.zeros(4), lambda theta, worker: np.ones(4), **defaults)


def test_the_measures_of_a_trace_are_those_computed_by_hand() -> None:
    # Sent at clock 0; each later commit finds the center one step of .5 from what was sent. Its norm was 2.
    run = trace()
    assert metrics.values(run, "staleness").tolist() == [0, 1, 1, 1]
    assert metrics.values(run, "gap").tolist() == [0, 0.5, 0.5, 0.5]
    assert metrics.values(run, "normalized_gap").tolist() == [0, 0.25, 0.25, 0.25]
    assert metrics.values(run, "scale").tolist() == [1, 1, 1, 1]
    assert metrics.values(trace("dynsgd"), "scale").tolist() == [1, 0.5, 0.5, 0.5]
    # ADAG, s = 1 / (d^2 / gamma + 1): payloads of -.5 for each. d = 0, so s = 1; then d = .5 with gamma .25: 1 / 2;
    # then d is what the commit before moved, .5 / 2: 1 / (.0625 / .25 + 1) = .8, then d = .4: 1 / (.16 / .25 + 1).
    adag = simulate(make("adag", window=1, gamma=0.25), np.zeros(4), lambda theta, worker: np.ones(4), workers=2,
                    learning_rate=0.5, schedule=[0, 1, 0, 1])  # fmt: skip
    assert metrics.values(adag, "scale").tolist() == pytest.approx([1, 0.5, 0.8, 1 / 1.64])
    assert metrics.staleness_histogram(run)[1].tolist() == [0, 2]


def test_the_measures_of_commits_are_in_clock_order() -> None:
    log = commits((0, 0, 1, 0), (1, 0, 1, 3), (0, 1, 1, 1)).assign(gap=[0.0, None, 0.5])[::-1]
    assert metrics.values(log, "staleness").tolist() == [0, 3, 1]
    assert metrics.values(log, "gap").dropna().to_dict() == {0: 0.0, 2: 0.5}
    assert metrics.over_commits(log, "gap")["commit"].tolist() == [0, 2]
    with pytest.raises(MissingColumnError, match="normalized_gap"):
        metrics.values(log, "normalized_gap")
    with pytest.raises(ConfigurationError, match="`measure` must be one of staleness"):
        metrics.values(log, cast("Any", "wait"))
    with pytest.raises(ConfigurationError, match="measure_gap=True"):
        metrics.values(log.assign(gap=None), "gap")
    with pytest.raises(ConfigurationError, match="measure_gap=True"):
        metrics.values(trace(measure_gap=False), "normalized_gap")


def test_percentiles_are_taken_over_stretches_of_commits() -> None:
    # Stretches of 3, 3 and 2. Percentiles of (0, 1, 2): .2 and 1.8; of (5, 5, 8): 5 and 7.4; of (1, 2): 1.1, 1.9.
    log = commits(*((0, number, 1, value) for number, value in enumerate([0, 1, 2, 5, 8, 5, 1, 2])))
    frame = metrics.over_commits(log, "staleness", points=3)
    assert frame["commit"].tolist() == [1, 4, 6.5]
    assert frame["mean"].tolist() == [1, 6, 1.5]
    assert frame["low"].tolist() == pytest.approx([0.2, 5, 1.1])
    assert frame["high"].tolist() == pytest.approx([1.8, 7.4, 1.9])
    assert len(metrics.over_commits(log, "staleness")) == 8
    with pytest.raises(ConfigurationError, match="`points`"):
        metrics.over_commits(log, "staleness", points=0)


def test_a_recorded_schedule_is_the_order_of_commits() -> None:
    log = commits((0, 0, 1, 0), (2, 0, 1, 1), (1, 0, 1, 2), (2, 1, 1, 1))
    assert metrics.recorded_schedule(log[::-1]) == [0, 2, 1, 2]
    assert metrics.recorded_schedule(trace()) == [0, 1, 0, 1]
    for wrong in (log[1:], log.drop(index=2), pd.concat([log, log[2:3]])):
        with pytest.raises(LedgerError, match="each clock once"):
            metrics.recorded_schedule(wrong)
    for workers in ([0.0, 1, 0, 1], [0, -1, 0, 1]):
        with pytest.raises(ConfigurationError, match="integers of at least 0"):
            metrics.recorded_schedule(log.assign(worker=workers))
    with pytest.raises(EmptyDataError):
        metrics.recorded_schedule(log[:0])
    assert metrics.recorded_schedule(log.assign(trained_by=log["worker"])) == [0, 2, 1, 2]
    with pytest.raises(ConfigurationError, match=r"lends=False.*Received: 2 commits"):
        metrics.recorded_schedule(log.assign(trained_by=2))


def test_the_input_is_not_changed() -> None:
    run = history((1, 0, 0.1), (0, 1, 0.2))
    before = run.copy()
    metrics.per_worker(run)
    metrics.hardware_efficiency(run)
    pd.testing.assert_frame_equal(run, before)
