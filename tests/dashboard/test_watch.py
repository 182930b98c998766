"""Tests of watching a job of a real server: the journal contains what the server has recorded."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import patience
from support.ps.running_server import SIZE, Running
from support.training.recorded_job import RecordedJob

import distkeras.dashboard.watch as watching
from distkeras.callbacks import CallbackContext, Evaluation, JobLink, JobOver, TrainingSetup
from distkeras.dashboard.watch import JobWatch, read_since
from distkeras.ps.events import Events, report
from distkeras.ps.rules import make
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.results import JobOutcome, JobRecords
from distkeras.settings import JobFacts

FACTS = JobFacts("DOWNPOUR()", 2, 1)


def setup(facts: JobFacts = FACTS, events: Events | None = None) -> TrainingSetup:
    nothing: Any = None
    return TrainingSetup(("loss",), nothing, nothing, facts, events or Events())


def journal_messages(watch: JobWatch) -> list[dict[str, Any]]:
    return [json.loads(entry.data) for entry in read_since(watch.path)]


class ManualWatch:
    """A watch of a server that polls only when the test calls `poll`."""

    def __init__(self, running: Running, watch: JobWatch) -> None:
        self.driver, self.watch = running.driver, watch
        self.evaluations: list[Evaluation] = []
        self.link = JobLink(lambda call: call(self.driver), self.evaluations)

    def poll(self, link: JobLink | None = None) -> None:
        vars(self.watch)["_next_look"] = -math.inf  # The next poll is due, however long the last one took.
        status = self.driver.observe(-1, 0.0)
        nothing: Any = None
        self.watch.on_center(CallbackContext(status, 1.0, nothing, nothing, nothing, link=link or self.link))


def train(running: Running, worker: int, batches: int, attempt: int = 0) -> None:
    assert running.train(worker, [np.ones(SIZE)] * batches, attempt=attempt).ended() is None


def test_a_running_job_is_shown(tmp_path: Path) -> None:
    events = Events()
    watch = JobWatch(tmp_path / "journal.jsonl")
    watch.on_begin(setup(events=events))
    with Running(make("downpour")) as running:
        manual = ManualWatch(running, watch)
        manual.poll()
        train(running, 0, 5)
        manual.poll()
        train(running, 1, 7)
        log = logging.getLogger("distkeras.test")
        events.report(log, "takeover", "attempt %d took partition %d over", 3, 1, worker=1, attempt=3)
        manual.evaluations.append(Evaluation(0.0, 12, "Mine", {"loss": 0.5}))
        manual.poll()
        rows = JobRecords.drain(running.driver)
    whole, *more = journal_messages(watch)
    assert [message["kind"] for message in (whole, *more)] == ["whole", "more", "more", "more"]
    assert [message["now"]["state"] for message in (whole, *more)] == ["starting", "starting", "training", "training"]
    assert [message["now"]["commits"] for message in more] == [0, 5, len(rows.commits_array)] == [0, 5, 12]
    assert (more[-1]["now"]["saved_commits"], more[-1]["now"]["saved_seconds"]) == (
        None,
        None,
    )  # The job has no checkpoint.
    assert more[-1]["workers"]["worker"] == [1]
    assert more[-1]["workers"]["retries"] == [1]
    assert more[-1]["evaluations"][0][1:] == [12, "Mine", {"loss": 0.5}]
    assert [row[2:] for row in more[-1]["events"]] == [["takeover", 1, 3, "attempt 3 took partition 1 over"]]


def test_rows_that_come_and_go_are_shown() -> None:
    watch = JobWatch()
    watch.on_begin(replace(setup(), living=("users",)))
    with Running(make("downpour")) as running:
        status = replace(running.driver.observe(-1, 0.0), tables=np.array([[5.0, 9.0, 3.0, 1.0]]))
        nothing: Any = None
        link = JobLink(lambda call: call(running.driver), [])
        watch.on_center(CallbackContext(status, 1.0, nothing, nothing, nothing, link=link))
    assert [message["now"]["tables"] for message in journal_messages(watch)] == [{}, {"users": [5, 9, 3, 1]}]


def test_after_a_restart_from_an_older_snapshot_the_whole_job_is_sent(tmp_path: Path) -> None:
    """Poll one server, then another with fewer commits, then with more, but different, commits."""
    watch = JobWatch(tmp_path / "journal.jsonl")
    watch.on_begin(setup())
    counts = []
    for batches in (6, 3, 8):
        with Running(make("downpour")) as running:
            train(running, 0, batches)
            manual = ManualWatch(running, watch)
            manual.poll()
            manual.poll()
        counts.append(journal_messages(watch)[-1]["now"]["commits"])
    assert counts == [6, 3, 8]
    assert journal_messages(watch)[-1]["workers"]["commits"] in ([8], [])


def test_the_end_adds_everything_since_the_last_poll() -> None:
    job = RecordedJob(3, seconds=20.0)
    records = JobRecords(job.commits, job.steps, job.metrics)
    watch = JobWatch()
    watch.on_begin(setup(job.facts))
    watch.end(JobOutcome(records=records, facts=job.facts))
    (whole,) = journal_messages(watch)
    assert whole["now"]["state"] == "done"
    assert whole["now"]["commits"] == len(job.commits)
    assert whole["now"]["epochs"] == 2.0
    assert whole["workers"]["state"] == [2, 2, 2]


def test_the_start_of_a_job_has_phases() -> None:
    watch = JobWatch()
    watch.on_begin(setup())
    phases = []
    with Running(make("downpour")) as running:
        manual = ManualWatch(running, watch)
        phases.append(journal_messages(watch)[-1]["now"]["why"])
        manual.poll()
        phases.append(journal_messages(watch)[-1]["now"]["why"])
        client = running.client(0)
        client.join()
        manual.poll()
        phases.append(journal_messages(watch)[-1]["now"]["why"])
        client.close()
        train(running, 1, 2)
        manual.poll()
        now = journal_messages(watch)[-1]["now"]
    assert phases == ["starting the server", "spreading the data", "building the model, first steps"]
    assert (now["state"], now["why"]) == ("training", "")


def test_the_page_of_an_ended_job_ends_with_its_last_commit() -> None:
    job = RecordedJob(2, seconds=10.0)
    watch = JobWatch()
    watch.take(JobOutcome(records=JobRecords(job.commits, job.steps, job.metrics), facts=job.facts))
    assert journal_messages(watch)[0]["now"]["at"] == pytest.approx(np.ptp(job.commits["timestamp"]), abs=0.01)


def test_workers_of_a_failed_job_have_not_finished() -> None:
    job = RecordedJob(2, seconds=10.0)
    watch = JobWatch()
    watch.take(JobOutcome(records=JobRecords(job.commits, job.steps, job.metrics), facts=job.facts, failure="no luck"))
    assert journal_messages(watch)[0]["workers"]["state"] == [1, 1]


@pytest.mark.parametrize(
    ("outcome", "state", "why"),
    [
        ({"stopped": "enough"}, "stopped", "enough"),
        ({"failure": "WorkerError: no <b>luck</b>"}, "failed", "WorkerError: no <b>luck</b>"),
        ({"failure": "KeyboardInterrupt: "}, "interrupted", "KeyboardInterrupt: "),
        ({"stopped": "enough", "failure": "LedgerError: a gap"}, "failed", "LedgerError: a gap"),
    ],
)
def test_the_outcome_of_a_job_is_shown(outcome: dict[str, Any], state: str, why: str) -> None:
    watch = JobWatch()
    watch.on_begin(setup())
    watch.end(JobOutcome(facts=FACTS, **outcome))
    assert (journal_messages(watch)[-1]["now"]["state"], journal_messages(watch)[-1]["now"]["why"]) == (state, why)


def test_an_ended_job_is_shown_from_its_records() -> None:
    job = RecordedJob(2, seconds=10.0)
    records = JobRecords(job.commits, job.steps, job.metrics)
    watch = JobWatch()
    watch.take(JobOutcome())
    assert journal_messages(watch) == []
    watch.take(JobOutcome(records=records, facts=job.facts))
    (whole,) = journal_messages(watch)
    assert whole["now"]["commits"] == len(job.commits)
    assert whole["metrics"] == ["loss", "accuracy"]


def test_an_unwritable_journal_does_not_end_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    watch = JobWatch(folder / "journal.jsonl")
    watch.on_begin(setup())
    (folder / "journal.jsonl").unlink()
    folder.rmdir()
    with Running(make("downpour")) as running:
        manual = ManualWatch(running, watch)
        manual.poll()
        manual.poll()
        assert caplog.text.count("the dashboard's journal cannot be written") == 1
        folder.mkdir()
        train(running, 0, 2)
        manual.poll()
    assert journal_messages(watch)[-1]["now"]["commits"] == 2


def test_an_error_in_the_dashboard_does_not_end_the_job(caplog: pytest.LogCaptureFixture) -> None:
    watch = JobWatch()
    watch.on_begin(setup(JobFacts("DOWNPOUR()", 1, 1)))  # Only one of the two workers trains.
    with Running(make("downpour")) as running:
        train(running, 1, 2)
        ManualWatch(running, watch).poll()
    assert "the dashboard has failed" in caplog.text


def test_a_poll_after_the_job_has_ended_is_ignored() -> None:
    def over(call: Callable[[DriverClient], Any]) -> Any:
        raise JobOver

    watch = JobWatch()
    watch.on_begin(setup())
    with Running(make("downpour")) as running:
        train(running, 0, 1)
        with pytest.raises(JobOver):
            ManualWatch(running, watch).poll(JobLink(over, []))
    watch.end(JobOutcome(facts=FACTS))
    assert journal_messages(watch)[-1]["now"]["state"] == "done"


def test_slow_polls_are_less_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll takes some time, and the next one is due when that is the allowed share: later than this test lasts."""
    monkeypatch.setattr(watching, "_SHARE", 1e-12)
    watch = JobWatch()
    watch.on_begin(setup())
    calls = []
    with Running(make("downpour")) as running:
        train(running, 0, 3)
        manual = ManualWatch(running, watch)
        link = JobLink(lambda call: calls.append(1) or call(running.driver), [])
        manual.poll(link)
        count = len(calls)
        status = running.driver.observe(-1, 0.0)
        nothing: Any = None
        watch.on_center(CallbackContext(status, 1.0, nothing, nothing, nothing, link=link))
    assert count == len(calls) == 2


def test_events_are_identified_by_their_time() -> None:
    events = Events(most=3)
    log = logging.getLogger("distkeras.test")
    assert events.since(0) == ([], 0)
    for number in range(5):
        events.report(log, "stall", "%d", number)
    found, count = events.since(1)
    assert [event.text for event in found] == ["2", "3", "4"]
    assert count == 5
    assert events.since(5) == ([], 5)
    report(log, "stall", "elsewhere")
    assert events.since(4)[1] == 5


def test_a_change_wakes_a_reader() -> None:
    watch = JobWatch()
    woken = threading.Event()

    def read() -> None:
        with watch.changed:
            ready.set()
            if watch.changed.wait(patience(10)):
                woken.set()

    ready = threading.Event()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert ready.wait(patience(10))
    watch.on_begin(setup())
    thread.join(patience(10))
    assert woken.is_set()
