"""A worker that gets its slot late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import pytest
from pyspark.sql import SparkSession
from support.patience import patience
from support.training.spark_jobs import (
    assert_nothing_left,
    committed,
    counting_model,
    counting_rows,
    counts,
    expected_ranges,
    step_callback_layer,
    total,
)

from distkeras import Trainer
from distkeras.ps.rules import make

ROWS, BATCH, EPOCHS = 41, 4, 2


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert_nothing_left()


def waits_for_file(path: Path | str) -> Callable[..., None]:
    """Return an action that waits for a file."""
    path, looks = str(path), int(patience(600))  # workers cannot import `support`

    def wait(*_: object) -> None:
        pause = threading.Event()
        for _look in range(looks):
            if Path(path).exists():
                return
            pause.wait(0.1)
        raise TimeoutError(path)

    return wait


def occupy_a_slot(spark: SparkSession, started: Path, go: str) -> threading.Thread:
    """Start a thread with a Spark job of one task; return when it runs. It ends when the file ``go`` exists."""
    begin, wait = str(started), waits_for_file(go)

    def hold(_: int) -> None:
        Path(begin).touch()
        wait()

    thread = threading.Thread(target=lambda: spark.sparkContext.parallelize([0], 1).foreach(hold), daemon=True)
    thread.start()
    waits_for_file(started)()
    return thread


@pytest.mark.slow
def test_a_worker_that_gets_its_slot_late_trains_its_partition(spark: SparkSession, tmp_path: Path) -> None:
    """An asynchronous rule begins with the workers that have a slot; a later worker trains its own partition."""
    go = str(tmp_path / "go")

    def release(step: int) -> None:
        if step == 5:
            Path(go).touch()

    other = occupy_a_slot(spark, tmp_path / "started", go)
    trainer = Trainer(
        counting_model(ROWS, step_callback_layer(release)),
        make("downpour", window=1),
        worker_optimizer=keras.optimizers.SGD(1.0),
        loss=total,
        num_workers=2,
        batch_size=BATCH,
        num_epoch=EPOCHS,
    )
    model = trainer.train(counting_rows(spark, ROWS))
    other.join(patience(60))
    assert not other.is_alive()
    assert counts(model) == [EPOCHS] * ROWS
    ledger = trainer.ledger.toPandas()
    first = ledger.groupby("worker").clock.min()
    assert sorted(first)[0] == 0
    assert sorted(first)[1] >= 5
    history = trainer.history.toPandas()
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert committed(trainer) == expected_ranges(sizes, EPOCHS, BATCH)
