"""Several trainers in threads of one driver: each has its own server, and they do not affect each other."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest
from pyspark.sql import SparkSession
from support.patience import patience
from support.training.spark_jobs import assert_nothing_left, counting_model, counting_rows, counts, total

from distkeras import Trainer
from distkeras.ps.rules import make

BATCH, EPOCHS, TRAINERS = 4, 2, 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_trainers_train_concurrently(spark: SparkSession) -> None:
    outcomes: dict[int, Any] = {}

    def train(number: int) -> None:
        rows = 30 + number  # so that no trainer's model fits another's server
        try:
            trainer = Trainer(
                counting_model(rows),
                make("downpour", window=1 + number),
                worker_optimizer=keras.optimizers.SGD(1.0),
                loss=total,
                num_workers=2,
                batch_size=BATCH,
                num_epoch=EPOCHS,
            )
            model = trainer.train(counting_rows(spark, rows))
            outcomes[number] = (counts(model), trainer.history.toPandas().samples.sum())
        except BaseException as error:  # noqa: BLE001 - the assertion reports it
            outcomes[number] = error

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(250))
    assert outcomes == {number: ([EPOCHS] * (30 + number), EPOCHS * (30 + number)) for number in range(TRAINERS)}
    assert_nothing_left()
