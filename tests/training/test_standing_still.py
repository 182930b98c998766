"""A server that is suspended during a job: the job waits for it, then replaces it, and reports no other error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest
from pyspark.sql import SparkSession
from support.patience import PATIENT, brief, until
from support.ps.clocks import LateWorld
from support.training.spark_jobs import (
    assert_no_jobs,
    assert_nothing_left,
    counting_model,
    counting_rows,
    counts,
    total,
)

from distkeras import Checkpoint, Network, Trainer
from distkeras.callbacks import Callback, CallbackContext
from distkeras.ps.server.process import ServerProcess
from distkeras.training.progress import Progress
from distkeras.training.supervisor import Supervisor

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, EPOCHS = 41, 4, 20


@pytest.fixture(autouse=True)
def nothing_left(spark: SparkSession) -> Iterator[None]:
    yield
    assert_nothing_left()
    assert_no_jobs(spark)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each server that starts adds its process id."""
    started: list[int] = []
    start = ServerProcess.start

    def recorded(process: ServerProcess) -> None:
        start(process)
        started.append(process.pid)

    monkeypatch.setattr(ServerProcess, "start", recorded)
    return started


def trainer(epochs: int = EPOCHS, shards: int = 1, **deadlines: float) -> Trainer:
    return Trainer(
        counting_model(ROWS),
        "downpour",
        worker_optimizer=keras.optimizers.SGD(1.0),
        loss=total,
        num_workers=2,
        batch_size=BATCH,
        num_epoch=epochs,
        network=Network(shards=shards),
        deadlines=replace(PATIENT, handshake=brief(1), **deadlines),
    )


def on_first_status(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Make the driver call ``act`` when it receives the first status."""
    real = Progress.update
    done: list[object] = []

    def update(progress: Progress, status: Any) -> None:
        if not done:
            done.append(act())
        real(progress, status)

    monkeypatch.setattr(Progress, "update", update)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_suspended_server_with_a_checkpoint_is_replaced_and_every_mini_batch_counts_once(
    spark: SparkSession, pids: list[int], shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's clock is advanced by the standstill deadline only while the first server is suspended."""
    world = LateWorld()
    monkeypatch.setattr("distkeras.training.run.Supervisor", partial(Supervisor, world=world))

    def suspend() -> None:
        os.kill(pids[0], signal.SIGSTOP)
        until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED)
        world.ahead = PATIENT.standstill

    on_first_status(monkeypatch, suspend)
    job = trainer(shards=shards)
    model = job.train(counting_rows(spark, ROWS), checkpoint=Checkpoint(str(tmp_path / "saved"), every=5))
    assert counts(model) == [EPOCHS] * ROWS
    kinds = [row["kind"] for row in job.events.collect()]
    assert kinds.count("standstill") == 1
    assert kinds.count("restart") == 1


@pytest.mark.slow
def test_the_error_of_a_job_is_the_one_that_ended_it_and_not_a_later_one(spark: SparkSession, pids: list[int]) -> None:
    class Raises(Callback):
        def on_center(self, context: CallbackContext) -> None:
            os.kill(pids[0], signal.SIGSTOP)
            raise ValueError("not good enough")

    job = trainer(epochs=1_000_000, reconnect=brief(1))
    with pytest.raises(ValueError, match="not good enough"):
        job.train(counting_rows(spark, ROWS), callbacks=[Raises(every_commits=1)])
    assert "lost" in [row["kind"] for row in job.events.collect()]
