"""Tests of a job's limits on its server: time, memory, and the size of its log."""

from __future__ import annotations

import time

import pytest
from job_server.conftest import ManualClock
from job_server.runner.conftest import RunnerHarness
from support.patience import patience, until

from distkeras.job_server.errors import JobState
from distkeras.job_server.runner.files import read_piece


@pytest.mark.parametrize("todo", ["wait", "stubborn wait"])
def test_a_driver_that_exceeds_its_time_is_ended_without_a_successor(office: RunnerHarness, todo: str) -> None:
    job = office.add(todo)  # According to the database, the driver started long ago.
    job = office.ended(job, office.open(run_max=3600.0))
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert "3600 s" in str(job.error)


def test_a_job_that_exceeds_its_memory_is_ended_without_a_successor(office: RunnerHarness) -> None:
    job = office.add("grow wait")
    job = office.ended(job, office.open(memory_max=48 << 20))
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert "at most 48 MB of memory" in str(job.error)


def test_a_driver_that_finished_in_time_is_done(office: RunnerHarness, clock: ManualClock) -> None:
    """The job is done even if the end is noticed late, or by another server."""
    clock.now = time.time()
    runner = office.open(run_max=patience(3600.0))
    job = office.add("wait linger")
    office.tick_until((office.folder(job).path / "waits").exists, runner)
    office.tick_until(lambda: office.look(job).state is JobState.TRAINING, runner)
    office.go_on(job)
    office.tick_until(office.folder(job).result(attempt=1).exists, runner)
    assert office.ended(job, runner).state is JobState.DONE


def test_a_log_is_truncated_and_continued(office: RunnerHarness) -> None:
    job = office.add("print wait")
    runner, folder = office.open(log_max=20_000), office.folder(job)
    runner.tick()
    # The driver has printed everything, so that nothing is added while the log is truncated.
    until((office.folder(job).path / "waits").exists)
    size = folder.log.stat().st_size
    runner.tick()
    text = folder.log.read_text()
    assert 9_000 < len(text) <= 20_000
    assert text.startswith("… what came before was left out\nline ")
    assert text.endswith("line 9999\n")
    end = folder.log.stat().st_size
    assert read_piece(folder.log, size) == (b"", end)  # A reader from before continues at the end.
    office.go_on(job)
    assert office.ended(job, runner).state is JobState.DONE
    assert folder.log.read_text() == text + "the end\n"
    assert read_piece(folder.log, end) == (b"the end\n", end + 8)
