"""A Spark job whose rule refuses commits: each row still counts once per epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import keras
import pytest
from pyspark.sql import SparkSession
from support.patience import patience
from support.present import present
from support.training.spark_jobs import counting_model, counting_rows, counts, step_callback_layer, total

from distkeras import Trainer
from distkeras.ps.rules import make

ROWS, EPOCHS, WORKERS = 61, 2, 2


def together(folder: Path, seconds: float) -> Callable[[int], None]:
    """Return an action for each step: wait until all workers are in a step, so all have pulled and none committed."""

    def action(step: int) -> None:
        (folder / str(os.getpid())).touch()
        deadline = time.monotonic() + seconds
        while len(list(folder.iterdir())) < WORKERS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other worker must begin within {seconds:g} s")
            time.sleep(0.01)

    return action


@pytest.mark.slow
def test_refused_mini_batches_are_trained_again(spark: SparkSession, tmp_path: Path) -> None:
    trainer = Trainer(
        counting_model(ROWS, step_callback_layer(together(tmp_path, patience(30)))),
        make("ringmaster", window=2, threshold=1, patience=None),
        worker_optimizer=keras.optimizers.SGD(1.0),
        loss=total,
        num_workers=WORKERS,
        batch_size=8,
        num_epoch=EPOCHS,
    )
    assert counts(trainer.train(counting_rows(spark, ROWS))) == [EPOCHS] * ROWS
    commits = trainer.commits.toPandas()
    assert commits.refusals.sum() > 0
    assert (commits.staleness == 0).all()
    assert commits.clock.tolist() == list(range(len(commits)))
    taken = trainer.ledger.selectExpr("sum(last_batch - first_batch + 1)")
    assert trainer.history.count() == present(taken.first())[0]
