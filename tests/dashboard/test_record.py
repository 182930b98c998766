"""Tests of the record of a job: it is exact about the commits, bounded in size, and independent of how they arrived."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.training.recorded_job import BEGAN, RecordedJob, commits, steps

from distkeras.callbacks import Evaluation
from distkeras.dashboard.record import CurrentStatus, JobRecord
from distkeras.ps.checkpoint.checkpointer import SNAPSHOT_FAILED, SNAPSHOTS_RESUMED
from distkeras.ps.events import Event
from distkeras.settings import JobFacts


def record(workers: int = 2, metrics: tuple[str, ...] = ("loss",), **facts: Any) -> JobRecord:
    return JobRecord(JobFacts("AGN()", workers, 2, **facts), metrics, BEGAN)


def follow(job: RecordedJob, interval: float = 1.0) -> tuple[JobRecord, list[dict[str, Any]]]:
    """Return the record of a job that was updated many times, and all messages that it has sent."""
    found = JobRecord(job.facts, job.metrics, BEGAN)
    page = [found.whole()]
    for _, rows, history in job.pieces(interval):
        found.add_commits(rows, history)
        more = found.more()
        page.append(found.whole() if more is None else more)
    return found, page


def put_together(page: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the page's data after these messages, combined as `static/state.js` does it."""
    state: dict[str, Any] = {}
    for message in json.loads(json.dumps(page, allow_nan=False)):
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


@pytest.mark.parametrize("by", ["event", "another server"])
def test_snapshots_fail_until_one_is_written(by: str) -> None:
    """The server that failed reports when it succeeds; one that has replaced it only has more commits saved."""
    found = record()

    def fails() -> bool:
        return bool(found.whole()["now"]["snapshots_fail"])

    def happen(text: str) -> None:
        found.add_events([Event(BEGAN, "server", "snapshot", None, None, text)])

    found.now = CurrentStatus("training", "", BEGAN, saved_clock=3)
    happen("a damaged snapshot is skipped: x")
    assert not fails()
    for _ in range(2):
        happen(f"{SNAPSHOT_FAILED}, and will be tried again: no room")
        assert fails()
    if by == "event":
        happen(SNAPSHOTS_RESUMED)
    else:
        found.now = replace(found.now, saved_clock=4)
    assert not fails()


def test_loss_is_the_mean_over_samples() -> None:
    found = record()
    rows = commits([{"worker": 0, "timestamp": BEGAN + 0.2}, {"worker": 1, "timestamp": BEGAN + 0.4}])
    history = steps(rows, [1.0, 4.0])
    history[:, 1] = 10, 30
    found.add_commits(rows, history)
    page = found.whole()
    assert page["lines"]["loss"] == [[1.0], [4.0]]
    assert page["means"]["loss"] == [3.25]
    assert page["job"]["samples"] == [40]
    assert page["now"]["samples"] == 40
    assert page["workers"]["samples"] == [10, 30]


def test_a_row_has_what_its_worker_or_helper_has_trained() -> None:
    found = record(helpers=1)
    own, of_loan = {"worker": 0, "attempt": 5}, {"worker": 0, "lease": 2, "attempt": 6}
    rows = commits(
        [
            {**own, "timestamp": BEGAN + 1.0},
            {**of_loan, "timestamp": BEGAN + 2.0, "trained_by": 1},
            {**of_loan, "timestamp": BEGAN + 3.5, "trained_by": 1, "wait": 0.5},
            {**own, "timestamp": BEGAN + 4.0},
            {"worker": 0, "lease": 3, "attempt": 7, "timestamp": BEGAN + 5.0, "trained_by": 2},
            {"worker": 1, "lease": 4, "attempt": 8, "timestamp": BEGAN + 6.0, "trained_by": 9, "epoch": 1},
        ]
    )
    found.add_commits(rows, steps(rows, [1.0, 2.0, 2.0, 1.0, 5.0, 7.0]))
    page = found.whole()
    assert page["workers"]["commits"] == [2, 3, 1]
    assert page["workers"]["compute"] == [3.0, 1.0, 0.0]
    assert page["workers"]["wire"] == [0.0, 0.5, 0.0]
    assert [value for value in page["lines"]["loss"][2] if value is not None] == [5.0]
    assert page["now"]["rows"] is None
    found.set_table(np.array([[1.0, 6.0, 2.0, 0.0], [2.0, 7.0, 1.0, 0.0], [9.0, 8.0, 1.0, 0.0]]))
    assert found.whole()["workers"]["state"] == [2, 1, 1]


def test_nan_and_skipped_commits_do_not_count_in_a_mean() -> None:
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
    page = found.whole()
    assert page["means"] == {"loss": [2.0], "mae": [3.0]}
    assert page["lines"]["loss"] == [[2.0], [None]]
    assert page["workers"]["skipped"] == [1, 0]
    assert page["staleness"]["counts"] == [2]


def test_gap_and_scale_are_means_over_the_commits_that_have_them() -> None:
    found = record()
    rows = commits(
        [
            {"worker": 0, "timestamp": BEGAN + 0.1, "gap": 0.5, "scale": 0.25},
            {"worker": 1, "timestamp": BEGAN + 0.2, "scale": 0.75},
        ]
    )
    found.add_commits(rows, steps(rows, [1.0, 1.0]))
    page = found.whole()
    assert page["job"]["gap"] == [0.5]
    assert page["job"]["scale"] == [0.5]


@pytest.mark.parametrize(("seconds", "interval"), [(40.0, 1.0), (40.0, 1000.0), (900.0, 20.0), (900.0, 130.0)])
def test_many_small_messages_equal_one_complete_message(seconds: float, interval: float) -> None:
    """The two are equal even if buckets are folded between the messages."""
    job = RecordedJob(3, seconds, pause=1.5, died=(20.0, 30.0))
    _, page = follow(job, interval)
    at_once = JobRecord(job.facts, job.metrics, BEGAN)
    at_once.add_commits(job.commits, job.steps)
    whole = json.loads(json.dumps(at_once.whole()))
    state = put_together(page)
    assert state["used"] == whole["used"] > 20
    for name in ("lines", "means", "job", "staleness", "facts", "events", "pauses"):
        assert state[name] == whole[name], name
    for name in ("commits", "samples", "epoch", "attempt", "state", "compute"):
        assert state["workers"][name] == pytest.approx(whole["workers"][name]), name


@pytest.mark.parametrize("workers", [1, 4, 200, 2000])
def test_a_long_job_of_many_workers_has_a_bounded_size(workers: int) -> None:
    """Each worker commits once in each of two hundred hours."""
    found = record(workers)
    rows = np.tile(commits([{}]), workers)
    rows["worker"] = np.arange(workers)
    for hour in range(200):
        rows["timestamp"] = BEGAN + 3600.0 * hour + np.arange(workers) / 100
        found.add_commits(rows, steps(rows, np.full(workers, 0.12345)))
    page = found.whole()
    assert page["now"]["commits"] == 200 * workers
    assert 75 <= page["used"] <= 600
    assert len(json.dumps(page)) < 4e6


def test_all_events_are_counted_and_the_latest_are_kept() -> None:
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


def test_events_are_kept_when_commits_are_sent_again() -> None:
    found = record()
    found.add_events([Event(BEGAN, "server", "fenced", 1, 7, "a request is refused")])
    rows = commits([{"worker": 0, "timestamp": BEGAN + 1.0}])
    found.add_commits(rows, steps(rows, [1.0]))
    found.whole()
    found.clear()
    assert found.more() is None, "a page discards its data as well"
    page = found.whole()
    assert page["workers"]["fenced"] == [0, 1]
    assert page["workers"]["commits"] == [0, 0]
    assert page["used"] == 0
    assert len(page["events"]) == 1


def test_the_number_of_evaluations_is_bounded() -> None:
    found = record()
    for number in range(5000):
        found.add_evaluations([Evaluation(BEGAN + number, number, "EarlyStopping", {"loss": 1.0 / (1 + number)})])
    page = found.whole()
    assert 400 < len(page["evaluations"]) <= 1000
    assert page["evaluations"][0] == [0.0, 0, "EarlyStopping", {"loss": 1.0}]
    assert page["evaluations"][-1][1] > 4900


@pytest.mark.parametrize(("seconds", "incarnation", "pauses"), [(4.0, 2, 0), (8.0, 1, 0), (8.0, 2, 1)])
def test_a_pause_before_another_server_continues_is_recorded(seconds: float, incarnation: int, pauses: int) -> None:
    found = record()
    rows = commits(
        [
            {"worker": 0, "timestamp": BEGAN, "incarnation": 1},
            {"worker": 0, "timestamp": BEGAN + 10.0, "incarnation": 1},
            {"worker": 0, "timestamp": BEGAN + 10.0 + seconds, "incarnation": incarnation},
        ]
    )
    found.add_commits(rows, steps(rows, [1.0, 1.0, 1.0]))
    page = found.whole()
    assert page["pauses"] == [[10.0, 10.0 + seconds, seconds]] * pauses
    assert page["used"] == 11 + seconds, "the pause is too short to be shortened"


def test_options_are_valid_json() -> None:
    page = record(options={"learning_rate": 0.1, "staleness_max": float("inf")}).whole()
    assert page["facts"]["options"] == {"learning_rate": 0.1, "staleness_max": "inf"}


def test_a_pause_of_days_between_two_drivers_is_shortened() -> None:
    """The earlier commits were made by another driver three days ago."""
    found = record()
    times = [BEGAN - 3 * 86400.0 + 10 * number for number in range(6)] + [BEGAN + 5.0 + number for number in range(6)]
    rows = commits([{"worker": 0, "timestamp": at, "incarnation": 1 + (at > BEGAN)} for at in times])
    for first in range(0, 12, 5):
        piece = rows[first : first + 5]
        found.add_commits(piece, steps(piece, np.ones(len(piece))))
    page = found.whole()
    assert page["width"] == 1.0
    assert page["used"] == 57
    assert page["pauses"] == [[50.0, 51.5, 3 * 86400.0 - 45.0]], "3 % of the time before the pause"
    found.add_events([Event(BEGAN + 10.0, "server", "fenced", 0, 7, "late")])
    assert 50 < found.whole()["events"][0][0] < 60


def test_commits_are_counted_after_their_history_was_lost() -> None:
    found = record()
    rows = commits([{"worker": 0, "timestamp": BEGAN + 1.0}, {"worker": 1, "timestamp": BEGAN + 1.0}])
    found.add_commits(rows, np.empty((0, 3)))
    page = found.whole()
    assert page["now"]["commits"] == 2
    assert page["means"]["loss"] == [None]
    assert page["now"]["rows"] is None


def test_workers_appear_and_disappear() -> None:
    found = record(3)
    found.set_table(np.array([[0, 10, 0, 0.0], [2, 12, 0, 0.0]]))
    assert found.whole()["workers"]["state"] == [1, 0, 1]
    found.set_table(np.array([[2, 15, 0, 0.0]]))
    more = found.more()
    assert more is not None
    assert more["workers"]["worker"] == [0, 2]
    assert more["workers"]["state"] == [2, 1]
    assert more["workers"]["attempt"] == [10, 15]


def test_time_on_the_page_begins_with_the_first_commit() -> None:
    found = JobRecord(JobFacts("AGN()", 1, 2), ("loss",), BEGAN - 43.0)
    found.add_events([Event(BEGAN - 40.0, "server", "stall", None, None, "no worker has joined")])
    found.add_evaluations([Evaluation(BEGAN - 1.0, 0, "EarlyStopping", {"loss": 2.5})])
    before = found.whole()
    assert before["now"]["start"] is None
    assert [before["events"][0][0], before["evaluations"][0][0]] == [3.0, 42.0]
    rows = commits([{"worker": 0, "timestamp": BEGAN}, {"worker": 0, "timestamp": BEGAN + 2.5, "epoch": 1}])
    found.add_commits(rows, steps(rows, [2.0, 1.0]))
    assert found.more() is None, "the events are sent again with their new times"
    page = found.whole()
    assert page["means"]["loss"] == [2.0, None, 1.0]
    assert page["now"]["start"] == 43.0
    assert [page["events"][0][0], page["evaluations"][0][0]] == [-40.0, -1.0]


def test_an_event_within_a_shortened_pause_is_shown_at_its_end() -> None:
    found = record()
    times = [BEGAN, BEGAN + 100.0, BEGAN + 1100.0]
    rows = commits([{"worker": 0, "timestamp": at, "incarnation": 1 + (at > BEGAN + 100.0)} for at in times])
    found.add_commits(rows, steps(rows, [1.0, 1.0, 1.0]))
    found.add_events([Event(BEGAN + at, "server", "stall", None, None, "") for at in (50.0, 600.0, 1101.0)])
    assert [row[0] for row in found.whole()["events"]] == [50.0, 103.0, 104.0]


def test_the_first_epoch_counts_the_rows() -> None:
    found = record()
    rows = commits([{"worker": worker, "timestamp": BEGAN, "epoch": epoch} for epoch in (0, 1) for worker in (0, 1)])
    history = steps(rows, [1.0] * 4)
    found.add_commits(rows[:3], history[:3])
    assert found.whole()["now"]["rows"] is None, "worker 1 is still in the first epoch"
    found.add_commits(rows[3:], history[3:])
    assert found.whole()["now"]["rows"] == 64
