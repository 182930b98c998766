"""Plain Keras, and a rule on Spark."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstart.comparison.runs import BATCH_SIZE, RunConfig, RunResult, WorkSize
from quickstart.machine import WORKERS
from quickstart.plain_keras import best_of, rates_here

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession

#: Rows of the epochs in which the speed of `fit` is measured.
_MEASURED_ROWS = 5_000


def build(size: WorkSize) -> keras.Model:
    """The thesis' MLP, the same weights each time."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for units in size.hidden]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")])


def compiled(model: keras.Model, rate: float, steps: int, steps_per_execution: int = 1) -> keras.Model:
    """Return ``model``, compiled with plain SGD, whose rate falls from ``rate`` to 0 within so many steps.

    At a constant rate the weights keep moving around a minimum, and the accuracy at the last step is that of one random
    point: with the same training loss, it may be several points below that of its neighbors. A rate that falls to 0
    averages these points, for plain Keras and for every rule.
    """
    import keras

    falling = keras.optimizers.schedules.PolynomialDecay(rate, steps, end_learning_rate=0.0)
    options = {"metrics": ["accuracy"], "steps_per_execution": steps_per_execution}
    model.compile(keras.optimizers.SGD(falling), "sparse_categorical_crossentropy", **options)
    return model


def steps_of(size: WorkSize, workers: int) -> int:
    """Return the number of steps that each of ``workers`` takes, which share the rows evenly."""
    return size.epochs * math.ceil(size.rows / workers / BATCH_SIZE)


def fit(run: RunConfig, size: WorkSize, train: tuple[Any, Any], test: tuple[Any, Any]) -> RunResult:
    """Plain Keras in this process, with all cores and the fastest `steps_per_execution`, recorded like the rules' runs.

    The history has one row for each execution.
    """
    import keras
    import numpy as np
    import pandas as pd

    x, y = (array[:_MEASURED_ROWS] for array in train)
    best = best_of(rates_here(partial(_compiled_for_fit, size, run.rate), x, y, BATCH_SIZE)).steps
    rows: list[tuple[Any, ...]] = []

    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        epoch = 0
        samples = 0
        sums = np.zeros(2)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch, self.samples, self.sums = epoch, 0, np.zeros(2)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # `batch` is the last one of the execution; Keras reports means over the epoch so far.
            now = time.time()
            samples = min(BATCH_SIZE * (batch + 1), len(train[0]))
            count, self.samples = samples - self.samples, samples
            sums = np.array([logs["loss"], logs["accuracy"]]) * samples
            loss, accuracy = (sums - self.sums) / count
            self.sums = sums
            rows.append((0, self.epoch, len(rows), now, loss, accuracy, count))

    model = _compiled_for_fit(size, run.rate, best)
    began = time.monotonic()
    model.fit(*train, batch_size=BATCH_SIZE, epochs=size.epochs, verbose=0, callbacks=[Recorder()])
    seconds = time.monotonic() - began
    history = pd.DataFrame(rows, columns=["worker", "epoch", "iteration", "timestamp", "loss", "accuracy", "samples"])
    history["timestamp"] = pd.to_datetime(history["timestamp"], unit="s")
    accuracy = model.evaluate(*test, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
    return RunResult(replace(run, options={"steps_per_execution": best}), model, history, accuracy, seconds)


def _compiled_for_fit(size: WorkSize, rate: float, steps_per_execution: int) -> keras.Model:
    return compiled(build(size), rate, steps_of(size, 1), steps_per_execution)


def distribute(run: RunConfig, size: WorkSize, spark: SparkSession, data: Path) -> RunResult:
    """A rule on Spark, and its model's accuracy, computed on Spark too."""
    from distkeras import Trainer
    from distkeras.ps import rules
    from distkeras.transformers import AccuracyEvaluator, ModelPredictor

    assert run.rule is not None
    trainer = Trainer(
        compiled(build(size), run.rate, steps_of(size, WORKERS)),
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
