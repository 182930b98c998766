"""A killed server continues from its snapshots while rows travel: tables end as in a dense exchange."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, until
from support.present import present
from support.ps.running_server import WorkerThread
from support.ps.served_job import ServedJob
from support.ps.toy_tables import TableBatch, TableJob, ToyTables, gradient_of, table_worker

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient

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


class Job(ServedJob):
    """A server process with snapshots of a model with tables."""

    def __init__(self, folder: Path, *, workers: int = 1, **options: Any) -> None:
        self.model = some_model()
        #: The mini-batch at which the workers wait.
        self.limit = BATCHES
        checkpoint = Checkpoint(str(folder), every=3)
        settings = ServerSettings(RULE, workers=workers, deadlines=PATIENT, checkpoint=checkpoint, tables=SHAPES)
        super().__init__(settings, **options)

    def publish(self, driver: DriverClient) -> None:
        rows = list(zip(SHAPES, self.model.rows, strict=True))
        driver.publish(self.model.dense, np.empty(0, np.float32), b"the model", (), rows)

    def start(self, worker: int = 0, **options: Any) -> None:
        """Start a worker; ``options`` are those of `table_worker`."""
        gradient = gradient_of(self.model.dense.size, SHAPES)

        def gated_gradient(theta: np.ndarray, batch: TableBatch) -> np.ndarray:
            until(lambda: batch.index < self.limit)
            return gradient(theta, batch)

        options |= {"worker": worker, "gradient": gated_gradient, "deadlines": PATIENT}
        data = some_batches(worker)
        self.workers.append(WorkerThread(lambda: table_worker(self.process.address, RULE, self.model, data, **options)))

    def at_snapshot(self, clock: int) -> None:
        """Wait for a snapshot after more than ``clock`` commits."""
        until(lambda: self.driver.observe(-1, 0.0).saved_clock > clock)

    def join(self) -> None:
        self.limit = BATCHES
        super().join()

    def result(self) -> np.ndarray:
        """Return the dense vector and all tables as one vector."""
        tables = [self.driver.table(number, shape).reshape(-1) for number, shape in enumerate(SHAPES)]
        return np.concatenate([self.driver.center().center, *tables])

    def __exit__(self, *exc_info: object) -> None:
        self.limit = BATCHES
        super().__exit__(*exc_info)


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
        assert job.batches_of(0) == [(0, batch) for batch in range(BATCHES)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
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
            assert [job.batches_of(worker) for worker in range(2)] == [[(0, batch) for batch in range(BATCHES)]] * 2
        assert not np.array_equal(job.result(), expected)
