"""The record of a job: the truth about its commits, in bounded size, however it came."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.training.recorded_job import BEGAN, RecordedJob, commits, steps

from distkeras.callbacks import Evaluation
from distkeras.dashboard.record import JobRecord
from distkeras.ps.events import Event
from distkeras.settings import JobFacts


def record(workers: int = 2, metrics: tuple[str, ...] = ("loss",), **facts: Any) -> JobRecord:
    return JobRecord(JobFacts("AGN()", workers, 2, **facts), metrics, BEGAN)


def follow(job: RecordedJob, look: float = 1.0) -> tuple[JobRecord, list[dict[str, Any]]]:
    """Return the record of a job that was looked at again and again, and all that it has sent."""
    found = JobRecord(job.facts, job.metrics, BEGAN)
    told = [found.whole()]
    for _, rows, history in job.pieces(look):
        found.add_commits(rows, history)
        more = found.more()
        told.append(found.whole() if more is None else more)
    return found, told


def put_together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """What a page has of it, as `static/state.js` puts it together."""
    state: dict[str, Any] = {}
    for message in json.loads(json.dumps(told, allow_nan=False)):
        if message["kind"] == "whole":
            state = message
            continue
        first = message["from"]
        for name, line in message["means"].items():
            state["means"][name] = state["means"][name][:first] + line
            for known, more in zip(state["lines"][name], message["lines"][name], strict=True):
                known[first:] = more
        for name, line in message["job"].items():
            state["job"][name] = state["job"][name][:first] + line
        for place, worker in enumerate(message["workers"]["worker"]):
            for name, column in message["workers"].items():
                state["workers"][name][worker] = column[place]
        state["events"] += message["events"]
        state["evaluations"] += message["evaluations"]
        state |= {name: message[name] for name in ("width", "used", "now", "staleness", "kinds", "pauses")}
    return state


def test_loss_is_the_mean_over_samples() -> None:
    found = record()
    rows = commits([{"worker": 0, "timestamp": BEGAN + 0.2}, {"worker": 1, "timestamp": BEGAN + 0.4}])
    history = steps(rows, [1.0, 4.0])
    history[:, 1] = 10, 30
    found.add_commits(rows, history)
    told = found.whole()
    assert told["lines"]["loss"] == [[1.0], [4.0]]
    assert told["means"]["loss"] == [3.25]
    assert told["job"]["samples"] == [40]
    assert told["now"]["samples"] == 40
    assert told["workers"]["samples"] == [10, 30]


def test_what_is_not_finite_or_was_skipped_counts_for_no_mean() -> None:
    found = record(metrics=("loss", "mae"))
    rows = commits(
        [
            {"worker": 0, "timestamp": BEGAN + 0.2},
            {"worker": 0, "timestamp": BEGAN + 0.3, "skipped": 1, "staleness": 50},
            {"worker": 1, "timestamp": BEGAN + 0.4},
        ]
    )
    history = np.column_stack([steps(rows, [2.0, 9.0, np.nan]), [1.0, 9.0, 5.0]])
    found.add_commits(rows, history)
    told = found.whole()
    assert told["means"] == {"loss": [2.0], "mae": [3.0]}
    assert told["lines"]["loss"] == [[2.0], [None]]
    assert told["workers"]["skipped"] == [1, 0]
    assert told["staleness"]["counts"] == [2]


def test_gap_and_scale_are_means_over_the_commits_that_have_them() -> None:
    found = record()
    rows = commits(
        [
            {"worker": 0, "timestamp": BEGAN + 0.1, "gap": 0.5, "scale": 0.25},
            {"worker": 1, "timestamp": BEGAN + 0.2, "scale": 0.75},
        ]
    )
    found.add_commits(rows, steps(rows, [1.0, 1.0]))
    told = found.whole()
    assert told["job"]["gap"] == [0.5]
    assert told["job"]["scale"] == [0.5]


@pytest.mark.parametrize(("seconds", "look"), [(40.0, 1.0), (40.0, 1000.0), (900.0, 20.0), (900.0, 130.0)])
def test_what_comes_bit_by_bit_is_what_comes_at_once(seconds: float, look: float) -> None:
    """Also where buckets are folded on the way."""
    job = RecordedJob(3, seconds, pause=1.5, died=(20.0, 30.0))
    _, told = follow(job, look)
    at_once = JobRecord(job.facts, job.metrics, BEGAN)
    at_once.add_commits(job.commits, job.steps)
    whole = json.loads(json.dumps(at_once.whole()))
    state = put_together(told)
    assert state["used"] == whole["used"] > 20
    for name in ("lines", "means", "job", "staleness", "facts", "events", "pauses"):
        assert state[name] == whole[name], name
    for name in ("commits", "samples", "epoch", "attempt", "state", "compute"):
        assert state["workers"][name] == pytest.approx(whole["workers"][name]), name


@pytest.mark.parametrize("workers", [1, 4, 200, 2000])
def test_a_long_job_of_many_workers_is_no_larger(workers: int) -> None:
    """A commit a worker in each of two hundred hours."""
    found = record(workers)
    rows = np.tile(commits([{}]), workers)
    rows["worker"] = np.arange(workers)
    for hour in range(200):
        rows["timestamp"] = BEGAN + 3600.0 * hour + np.arange(workers) / 100
        found.add_commits(rows, steps(rows, np.full(workers, 0.12345)))
    told = found.whole()
    assert told["now"]["commits"] == 200 * workers
    assert 75 <= told["used"] <= 600
    assert len(json.dumps(told)) < 4e6


def test_events_are_counted_and_the_latest_are_kept() -> None:
    found = record()
    found.whole()
    for number in range(700):
        kind = "takeover" if number % 2 else "refused"
        found.add_events([Event(BEGAN + number, "server", kind, number % 2, 7, f"<b>{number}</b>")])
    more = found.more()
    assert more is not None
    assert [row[5] for row in more["events"]] == [f"<b>{number}</b>" for number in range(200, 700)]
    assert more["kinds"] == {"refused": 350, "takeover": 350}
    assert more["workers"]["retries"] == [0, 350]
    assert found.more()["events"] == []  # type: ignore[index]  # there is something to tell


def test_events_outlive_that_commits_are_sent_again() -> None:
    found = record()
    found.add_events([Event(BEGAN, "server", "fenced", 1, 7, "a request is refused")])
    rows = commits([{"worker": 0, "timestamp": BEGAN + 1.0}])
    found.add_commits(rows, steps(rows, [1.0]))
    found.whole()
    found.clear()
    assert found.more() is None, "a page has to forget as well"
    told = found.whole()
    assert told["workers"]["fenced"] == [0, 1]
    assert told["workers"]["commits"] == [0, 0]
    assert told["used"] == 0
    assert len(told["events"]) == 1


def test_many_evaluations_are_thinned_out() -> None:
    found = record()
    for number in range(5000):
        found.add_evaluations([Evaluation(BEGAN + number, number, "EarlyStopping", {"loss": 1.0 / (1 + number)})])
    told = found.whole()
    assert 400 < len(told["evaluations"]) <= 1000
    assert told["evaluations"][0] == [0.0, 0, "EarlyStopping", {"loss": 1.0}]
    assert told["evaluations"][-1][1] > 4900


@pytest.mark.parametrize(("seconds", "incarnation", "pauses"), [(4.0, 2, 0), (8.0, 1, 0), (8.0, 2, 1)])
def test_a_pause_is_noted_where_another_server_continues(seconds: float, incarnation: int, pauses: int) -> None:
    found = record()
    rows = commits(
        [
            {"worker": 0, "timestamp": BEGAN + 10.0, "incarnation": 1},
            {"worker": 0, "timestamp": BEGAN + 10.0 + seconds, "incarnation": incarnation},
        ]
    )
    found.add_commits(rows, steps(rows, [1.0, 1.0]))
    told = found.whole()
    assert told["pauses"] == [[10.0, 10.0 + seconds, seconds]] * pauses
    assert told["used"] == 11 + seconds, "it is too short to be shortened"


def test_options_are_json() -> None:
    told = record(options={"learning_rate": 0.1, "staleness_max": float("inf")}).whole()
    assert told["facts"]["options"] == {"learning_rate": 0.1, "staleness_max": "inf"}


def test_days_between_two_drivers_are_shortened() -> None:
    """The commits before were another driver's, three days ago."""
    found = record()
    times = [BEGAN - 3 * 86400.0 + 10 * number for number in range(6)] + [BEGAN + 5.0 + number for number in range(6)]
    rows = commits([{"worker": 0, "timestamp": at, "incarnation": 1 + (at > BEGAN)} for at in times])
    for first in range(0, 12, 5):
        piece = rows[first : first + 5]
        found.add_commits(piece, steps(piece, np.ones(len(piece))))
    told = found.whole()
    assert told["width"] == 1.0
    assert told["used"] == 57
    assert told["pauses"] == [[50.0, 51.5, 3 * 86400.0 - 45.0]], "3 % of the time before it"
    found.add_events([Event(BEGAN + 10.0, "server", "fenced", 0, 7, "late")])
    assert 50 < found.whole()["events"][0][0] < 60


def test_history_that_was_lost_leaves_the_commits() -> None:
    found = record()
    rows = commits([{"worker": 0, "timestamp": BEGAN + 1.0}, {"worker": 1, "timestamp": BEGAN + 1.0}])
    found.add_commits(rows, np.empty((0, 3)))
    told = found.whole()
    assert told["now"]["commits"] == 2
    assert told["means"]["loss"] == [None, None]


def test_workers_come_and_go() -> None:
    found = record(3)
    found.set_table(np.array([[0, 10, 0, 0.0], [2, 12, 0, 0.0]]))
    assert found.whole()["workers"]["state"] == [1, 0, 1]
    found.set_table(np.array([[2, 15, 0, 0.0]]))
    more = found.more()
    assert more is not None
    assert more["workers"]["worker"] == [0, 2]
    assert more["workers"]["state"] == [2, 1]
    assert more["workers"]["attempt"] == [10, 15]
