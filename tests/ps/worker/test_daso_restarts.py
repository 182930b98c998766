"""DASO with a killed server or a resumed job: the numbers are those of an undisturbed job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENT, patience, until
from support.ps.daso_members import run_members
from support.ps.daso_toys import (
    BATCHES,
    DASO,
    EPOCHS,
    START,
    WORKERS,
    assert_as_without_a_death,
    die,
    members_of,
)

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient


class Job:
    """A server process that has the center and saves snapshots."""

    def __init__(self, folder: Path, every: int, *, resume: bool = False) -> None:
        checkpoint = Checkpoint(str(folder), every=every)
        settings = ServerSettings(DASO, workers=WORKERS, deadlines=PATIENT, checkpoint=checkpoint)
        self.process = ServerProcess(settings, resume=resume, epochs=EPOCHS)
        self.process.start()
        self.driver = DriverClient(self.process.address, PATIENT)
        self.publish()

    def publish(self) -> None:
        self.driver.publish(START, model=b"the model")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.exited(patience(10))

    def kill_and_restart(self) -> None:
        self.kill()
        self.driver.close()
        self.process.restart()
        self.publish()


@contextmanager
def job_in(folder: Path, every: int, **options: Any) -> Iterator[Job]:
    job = Job(folder, every, **options)
    try:
        yield job
    finally:
        job.driver.close()
        job.process.close()


@pytest.mark.parametrize("every", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_members_continue_from_the_snapshot_of_a_killed_server(tmp_path: Path, every: int) -> None:
    """The snapshot is that of the previous round, or the first one, with which the members begin again."""
    with job_in(tmp_path, every) as job:
        members = members_of(job.process.address, DASO, WORKERS, EPOCHS, BATCHES)
        restarts: list[int] = []

        def watch(number: int, request: Any) -> None:
            if isinstance(request, CommitRecord) and request.epoch == 2 and not restarts:
                restarts.append(number)
                job.kill_and_restart()

        members[1].die = watch
        last = run_members(members)
        assert restarts
        assert_as_without_a_death(job.driver, last)


def test_a_job_continues_after_the_death_of_all_its_processes(tmp_path: Path) -> None:
    with job_in(tmp_path, every=1) as job:
        members = members_of(job.process.address, DASO, WORKERS, EPOCHS, BATCHES)

        def watch(number: int, request: Any) -> None:
            if isinstance(request, CommitRecord) and request.epoch == 3:
                die()

        for member in members:
            member.die = watch
        run_members(members, replaced=False)
        until(lambda: job.driver.observe(-1, 1.0).saved_clock == 3 * WORKERS)
        job.kill()
    with job_in(tmp_path, every=1, resume=True) as job:
        last = run_members(members_of(job.process.address, DASO, WORKERS, EPOCHS, BATCHES))
        assert_as_without_a_death(job.driver, last)
