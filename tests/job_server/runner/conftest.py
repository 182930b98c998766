"""A fixture of jobs and of a runner that the test steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.job_server.runner_process import STUB
from support.patience import until

from distkeras.job_server.errors import FINAL
from distkeras.job_server.runner.files import JobFiles, JobFolder
from distkeras.job_server.runner.processes import ProcessId
from distkeras.job_server.runner.runner import JobRunner
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Account
from distkeras.job_server.store.jobs import JobStore, StoredJob


class RunnerHarness:
    """A store of jobs with a runner that the test steps."""

    def __init__(self, store: JobStore, files: JobFiles, ann: Account) -> None:
        self.store, self.files, self.ann = store, files, ann
        self.runner = self.open()

    def open(self, clock: Callable[[], float] = time.monotonic, **options: Any) -> JobRunner:
        values: dict[str, Any] = {"slots": 4, "driver_command": STUB, "grace": 0.0} | options
        settings = Settings(**values)
        return JobRunner(self.store, self.files, settings, clock)

    def add(self, todo: str, account: Account | None = None, kind: str = "train") -> StoredJob:
        description = {"name": todo, "order": {"kind": kind, "data": "file:///nowhere"}}
        job = self.store.add(account or self.ann, todo, description, 0, Settings())
        self.files.of(job.id).path.mkdir()
        return job

    def look(self, job: StoredJob) -> StoredJob:
        return self.store.get(self.ann, job.id)

    def folder(self, job: StoredJob) -> JobFolder:
        return self.files.of(job.id)

    def tick_until(self, condition: Callable[[], object], runner: JobRunner | None = None) -> None:
        def tick_and_check() -> object:
            (runner or self.runner).tick()
            return condition()

        until(tick_and_check)

    def ended(self, job: StoredJob, runner: JobRunner | None = None) -> StoredJob:
        self.tick_until(lambda: self.look(job).state in FINAL, runner)
        return self.look(job)

    def waits(self, job: StoredJob) -> None:
        self.tick_until((self.folder(job).path / "waits").exists)

    def go_on(self, job: StoredJob) -> None:
        (self.folder(job).path / "go-on").touch()


@pytest.fixture
def office(store: JobStore, people: dict[str, Account], tmp_path: Path) -> Iterator[RunnerHarness]:
    office = RunnerHarness(store, JobFiles(tmp_path / "files"), people["ann"])
    yield office
    for job in store.active():  # A failed test may have left running jobs.
        driver = ProcessId.parse(job.driver)
        if driver is not None:
            driver.kill_session()
