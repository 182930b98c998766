"""Small models, data and checks for tests that train on Spark.

The *counting model* turns "every row exactly once" into weights: a linear model without a bias over one-hot rows, whose
loss is the sum of its outputs. Under plain SGD with a learning rate of 1, row i moves weight i by exactly -1, each time
it is trained on, in every batch and order. All numbers are small integers, so float32 is exact.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pyspark.sql import DataFrame, SparkSession

from distkeras import Trainer
from distkeras.data.batches import Batch, DataSpec
from distkeras.data.ordering import partitioned
from distkeras.data.source import BatchSource
from support.patience import patience, until
from support.processes import descendants


def total(y_true: Any, y_pred: Any) -> Any:
    """Return the counting model's loss."""
    return keras.ops.sum(y_pred)


# Workers cannot import this module, as if the function were defined in a notebook, and receive it by value.
total.__module__ = "__main__"


def counting_model(rows: int, *hooks: keras.Layer) -> keras.Model:
    """Return the counting model; ``hooks`` are layers that return their input."""
    inputs = keras.Input((rows,))
    hidden: Any = inputs
    for hook in hooks:
        hidden = hook(hidden)
    return keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(hidden))


def counting_rows(spark: SparkSession, rows: int) -> DataFrame:
    """Return one-hot rows."""
    return table(spark, np.eye(rows, dtype=np.float32), np.zeros(rows))


def counts(model: keras.Model) -> list[float]:
    """Return how often each row was trained on."""
    return (-model.get_weights()[0].ravel()).tolist()


def table(spark: SparkSession, x: np.ndarray, y: np.ndarray) -> DataFrame:
    """Return a DataFrame with the columns ``features`` (array of float) and ``label`` (int, or array of float)."""
    label = "int" if y.dtype.kind in "iu" else "float"
    kind = label if y.ndim == 1 else f"array<{label}>"
    return spark.createDataFrame(list(zip(x.tolist(), y.tolist(), strict=True)), f"features array<float>, label {kind}")


def column(df: DataFrame, name: str) -> np.ndarray:
    """Return a column of numbers, arrays or vectors, in the order of the column ``id``."""
    values = [row[name] for row in df.orderBy("id").select(name).collect()]
    return np.array([value.toArray() if hasattr(value, "toArray") else value for value in values])


def blobs(rows: int = 256, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return two distant clouds of points in the plane: ``(rows, 2)`` float32, and int32 classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows).astype(np.int32)
    points = rng.normal(size=(rows, 2)) + 3.0 * (2 * labels[:, None] - 1)
    return points.astype(np.float32), labels


def wrong_model() -> keras.Model:
    """Return a linear classifier for `blobs` that is wrong about nearly every point before training."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
    model.set_weights([np.array([[0.1, -0.1], [0.1, -0.1]], np.float32), np.zeros(2, np.float32)])
    return model


def image_classifier() -> keras.Model:
    """Return a small network for Fashion-MNIST with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )


def accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows whose largest output is at the label."""
    return float((model.predict(x, verbose=0).argmax(-1) == y).mean())


def batches_of(df: DataFrame, spec: DataSpec) -> Iterator[Batch]:
    """Yield the mini-batches of the only worker of a job, read on the driver."""
    with BatchSource(iter(partitioned(df, spec, 1).toArrow().to_batches()), spec, worker=0) as source:
        yield from source


def expected_ranges(sizes: dict[int, int], epochs: int, batch_size: int) -> dict[tuple[int, int], list[int]]:
    """Return the numbers of the mini-batches of each worker and epoch; ``sizes`` are rows by worker."""
    return {
        (worker, epoch): list(range(-(-rows // batch_size)))
        for worker, rows in sizes.items()
        for epoch in range(epochs)
        if rows
    }


def committed(trainer: Trainer) -> dict[tuple[int, int], list[int]]:
    """Return the numbers of the mini-batches in the ledger for each worker and epoch, in clock order."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in sorted(trainer.ledger.collect(), key=lambda row: row["clock"]):
        own = found.setdefault((row["worker"], row["epoch"]), [])
        own.extend(range(row["first_batch"], row["last_batch"] + 1))
    return found


def servers() -> list[int]:
    """Return the process ids of the running parameter servers that this process has started."""
    return [process.pid for process in descendants("distkeras.ps")]


def assert_nothing_left() -> None:
    """Check that no server process and no thread of a job is left."""
    for thread in threading.enumerate():
        if thread.name.startswith("distkeras-"):
            thread.join(patience(10))  # The thread may be about to end.
            assert not thread.is_alive(), thread
    assert servers() == []


def assert_no_jobs(spark: SparkSession) -> None:
    """Check that Spark runs no job; another thread updates its tracker shortly after the end of a job."""
    until(lambda: not list(spark.sparkContext.statusTracker().getActiveJobsIds()))


def step_callback_layer(action: Any) -> keras.Layer:
    """Return a layer that returns its input and calls ``action(step)`` in each training step of a worker, from 0.

    It does nothing in the driver, which takes a step before the first job. The class is local: workers get it by value.
    """

    @keras.saving.register_keras_serializable("tests")
    class Hook(keras.layers.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.supports_jit = False  # a Python call cannot be compiled
            self.steps = 0

        def act(self) -> np.float32:
            from pyspark import TaskContext

            if TaskContext.get() is None:
                return np.float32(0)
            action(self.steps)
            self.steps += 1
            return np.float32(0)

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x
            import tensorflow as tf

            nothing = tf.numpy_function(self.act, [], tf.float32)
            nothing.set_shape(())
            return x + nothing

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return Hook()


def wait_at_step(step: int, file: Path) -> Any:
    """Return an action for `step_callback_layer` that waits at ``step`` until ``file`` exists."""
    seconds = patience(60)

    def action(now: int) -> None:
        deadline = time.monotonic() + seconds
        while now == step and not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(file)
            time.sleep(0.01)

    return action


def once_at_step(marker: Path, step: int, act: Any) -> Any:
    """Return an action for `step_callback_layer` that calls ``act()`` at ``step``, in the first process to reach it."""
    path = str(marker)

    def action(now: int) -> None:
        if now == step:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            act()

    return action
