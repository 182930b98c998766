"""Plain Keras, and a rule on Spark."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart.results import RunResult
from quickstart.runs import BATCH_SIZE, WORKERS, RunConfig, WorkSize

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession


def build(size: WorkSize) -> keras.Model:
    """The thesis' MLP, the same weights each time."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for units in size.hidden]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")])


def compiled(model: keras.Model, rate: float) -> keras.Model:
    """``model``, compiled with plain SGD."""
    import keras

    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(run: RunConfig, size: WorkSize, train: tuple[Any, Any], test: tuple[Any, Any]) -> RunResult:
    """Plain Keras in this process, with all cores, recorded step by step like the rules' runs."""
    import keras
    import numpy as np
    import pandas as pd

    rows: list[tuple[Any, ...]] = []

    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        epoch = 0
        samples = 0
        sums = np.zeros(2)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch, self.samples, self.sums = epoch, 0, np.zeros(2)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Keras tells means over the epoch so far.
            now = time.time()
            size = min(BATCH_SIZE, len(train[0]) - self.samples)
            self.samples += size
            sums = np.array([logs["loss"], logs["accuracy"]]) * self.samples
            loss, accuracy = (sums - self.sums) / size
            self.sums = sums
            rows.append((0, self.epoch, len(rows), now, loss, accuracy, size))

    model = compiled(build(size), run.rate)
    began = time.monotonic()
    model.fit(*train, batch_size=BATCH_SIZE, epochs=size.epochs, verbose=0, callbacks=[Recorder()])
    seconds = time.monotonic() - began
    history = pd.DataFrame(rows, columns=["worker", "epoch", "iteration", "timestamp", "loss", "accuracy", "samples"])
    history["timestamp"] = pd.to_datetime(history["timestamp"], unit="s")
    accuracy = model.evaluate(*test, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
    return RunResult(run, model, history, accuracy, seconds)


def distribute(run: RunConfig, size: WorkSize, spark: SparkSession, data: Path) -> RunResult:
    """A rule on Spark, and its model's accuracy, computed on Spark too."""
    from distkeras import Trainer
    from distkeras.ps import rules
    from distkeras.transformers import AccuracyEvaluator, ModelPredictor

    assert run.rule is not None
    trainer = Trainer(
        compiled(build(size), run.rate),
        rules.make(run.rule, **run.options),
        num_workers=WORKERS,
        batch_size=BATCH_SIZE,
        num_epoch=size.epochs,
    )
    model = trainer.train(spark.read.parquet(str(data / "train")))
    predicted = ModelPredictor(model).transform(spark.read.parquet(str(data / "test")))
    accuracy = AccuracyEvaluator().evaluate(predicted)
    return RunResult(
        run, model, trainer.history.toPandas(), accuracy, trainer.timings["total"], trainer.commits.toPandas()
    )


def session() -> SparkSession:
    """Two slots and four attempts of a task: `local[2]` would never retry one."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{WORKERS},4]")
        .appName("distkeras quickstart")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(WORKERS))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    return spark
