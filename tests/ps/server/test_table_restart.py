"""A killed server continues from its snapshots while rows travel: tables end as in a dense exchange."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience, until
from support.present import present
from support.ps.toy_tables import TableBatch, TableJob, ToyTables, gradient_of, table_worker

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.worker.loop import run_worker

SHAPES = (TableShape("users", 300, 3, 8), TableShape("items", 9, 2, 8))
RULE = make("downpour", window=2)
#: Mini-batches of each worker.
BATCHES = 120


def some_model() -> ToyTables:
    rng = np.random.default_rng(1)
    rows = tuple(rng.normal(size=(shape.rows, shape.width)).astype(np.float32) for shape in SHAPES)
    return ToyTables(rng.normal(size=4).astype(np.float32), SHAPES, rows)


def some_batches(worker: int = 0) -> list[TableBatch]:
    rng, found = np.random.default_rng(worker), list[TableBatch]()
    for index in range(BATCHES):
        ids = tuple(rng.integers(0, shape.rows, 4) for shape in SHAPES)
        found.append(TableBatch(0, index, index == BATCHES - 1, ids, rng.normal(size=4)))
    return found


class Job:
    """A server process with snapshots of a model with tables, and workers in threads."""

    def __init__(self, folder: Path, *, workers: int = 1, every: int = 3, **options: Any) -> None:
        self.model = some_model()
        #: The mini-batch at which the workers wait.
        self.limit = BATCHES
        checkpoint = Checkpoint(str(folder), every=every)
        self.process = ServerProcess(
            ServerSettings(RULE, workers=workers, deadlines=PATIENT, checkpoint=checkpoint, tables=SHAPES), **options
        )
        self.process.start()
        self.connect()
        self.threads: list[threading.Thread] = []
        self.errors: list[Exception] = []

    def connect(self) -> None:
        """Connect a driver, which publishes the initial rows again."""
        self.driver = DriverClient(self.process.address, PATIENT)
        rows = list(zip(SHAPES, self.model.rows, strict=True))
        self.driver.publish(self.model.dense, np.empty(0, np.float32), b"the model", (), rows)

    def start(self, worker: int = 0, *, attempt: int = 0) -> None:
        """Start a worker."""
        gradient = gradient_of(self.model.dense.size, SHAPES)

        def gated_gradient(theta: np.ndarray, batch: TableBatch) -> np.ndarray:
            until(lambda: batch.index < self.limit)
            return gradient(theta, batch)

        def run() -> None:
            try:
                client, welcome, begin = table_worker(
                    self.process.address,
                    RULE,
                    self.model,
                    some_batches(worker),
                    worker=worker,
                    attempt=attempt,
                    gradient=gated_gradient,
                    deadlines=PATIENT,
                )
                run_worker(client, welcome, begin)
                client.close()
            except Exception as error:  # noqa: BLE001 - `join` asserts that there is none
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def at_clock(self, clock: int) -> None:
        """Wait until ``clock`` commits are applied."""
        until(lambda: self.driver.observe(clock - 1, 1.0).clock >= clock)

    def at_snapshot(self, clock: int) -> None:
        """Wait for a snapshot after more than ``clock`` commits."""
        until(lambda: self.driver.observe(-1, 0.0).saved_clock > clock)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.exited(patience(10))

    def revive(self) -> None:
        self.driver.close()
        self.process.restart()
        self.connect()

    def join(self) -> None:
        self.limit = BATCHES
        for thread in self.threads:
            thread.join(patience(60))
            assert not thread.is_alive()
        assert self.errors == []

    def result(self) -> np.ndarray:
        """Return the dense vector and all tables as one vector."""
        tables = [self.driver.table(number, shape).reshape(-1) for number, shape in enumerate(SHAPES)]
        return np.concatenate([self.driver.center().center, *tables])

    def batches_of(self, worker: int) -> list[int]:
        """Return the mini-batches of ``worker`` in the order in which they were committed."""
        commits = self.driver.drain().commits.view(COMMIT)
        own = commits[commits["worker"] == worker]
        ranges = own[["first_batch", "last_batch"]].tolist()
        return [batch for first, last in ranges for batch in range(first, last + 1)]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.limit = BATCHES
        self.driver.close()
        self.process.close()


def dense_result(data: Sequence[TableBatch]) -> np.ndarray:
    """Return the result of one worker's dense exchange."""
    job = TableJob(RULE, some_model(), [data], by_rows=False)
    while job.pending:
        job.commit(0)
    return job.result()


def test_a_killed_server_continues_with_the_rows_of_its_snapshot(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start()
        clock = 0
        for job.limit in (20, 60, 100):
            job.at_snapshot(clock)
            job.limit += 20
            job.at_clock(clock + 3)
            job.kill()
            job.revive()
            assert present(job.process.resumed).clock > clock
            clock = present(job.process.resumed).clock
        job.join()
        np.testing.assert_array_equal(job.result(), dense_result(some_batches()))
        assert job.batches_of(0) == list(range(BATCHES))


@pytest.mark.parametrize("workers", [2, 3])
def test_another_driver_continues_with_the_saved_rows(tmp_path: Path, workers: int) -> None:
    """The number of workers is the same or another one."""
    with Job(tmp_path, workers=2) as job:
        job.limit = 40
        for worker in range(2):
            job.start(worker, attempt=100 + worker)
        job.at_clock(40)
        expected = job.result()
        job.process.close()
    with Job(tmp_path, workers=workers, resume=True) as job:
        resumed = present(job.process.resumed)
        assert (resumed.clock, resumed.exact) == (40, workers == 2)
        np.testing.assert_array_equal(job.result(), expected)
        for worker in range(workers):
            job.start(worker)
        job.join()
        if resumed.exact:
            assert [job.batches_of(worker) for worker in range(2)] == [list(range(BATCHES))] * 2
        assert not np.array_equal(job.result(), expected)
