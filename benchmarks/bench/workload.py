"""The models, rows and Spark session of several sections."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.whole_job import WORKERS
from distkeras.data.batches import Batch, DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import EpochOrder

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

    from distkeras import Trainer

INPUTS, CLASSES = 784, 10


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random float32 ``(count, 784)`` in [0, 1), and int32 classes ``(count,)``."""
    rng = np.random.default_rng(0)
    return rng.random((count, INPUTS), np.float32), rng.integers(0, CLASSES, count, np.int32)


def mini_batches(x: np.ndarray, y: np.ndarray, size: int, window: int, epoch: int = 1) -> list[Batch]:
    """Return the full batches of epoch 1, cut as by the data plane for windows; ``epoch`` is the number they have."""
    features, label = Column("features", (INPUTS,)), Column("label", (), "int32")
    order = EpochOrder(DataSpec((features,), (label,), None, size), worker=0, window=window)
    count = len(x) // size
    cut = order.cut((x[: count * size], y[: count * size]), 0, epoch=1)
    return [rows.batch(epoch, index, index == count - 1) for index, rows in enumerate(cut)]


def bare_loop(model: keras.Model, batch: int) -> Callable[[Any, Any], None]:
    """Return a compiled loop of k training steps of ``model``; its arguments are ``(k, batch, 784), (k, batch)``."""
    import tensorflow as tf

    def loop(x: Any, y: Any) -> Any:
        def step(i: Any) -> tuple[Any]:
            model.train_step((x[i], y[i]))
            return (i + 1,)

        return tf.while_loop(lambda i: i < tf.shape(x)[0], step, (0,), parallel_iterations=1)

    model.optimizer.build(model.trainable_variables)
    specs = tf.TensorSpec((None, batch, INPUTS), tf.float32), tf.TensorSpec((None, batch), tf.int32)
    concrete = tf.function(loop, autograph=False).get_concrete_function(*specs)

    def run(x: Any, y: Any) -> None:
        concrete(x, y)[0].numpy()

    return run


def fit_rate(model: keras.Model, x: np.ndarray, y: np.ndarray, batch: int) -> float:
    """Return the samples a second of plain `fit` over one epoch, without the time before the epoch."""
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        began = 0.0
        seconds = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds = time.perf_counter() - self.began

    clock = Clock()
    model.fit(x, y, batch_size=batch, verbose=0, callbacks=[clock])
    return len(x) / clock.seconds


def silent_trainer(model: keras.Model, rule: Any, workers: int, batch: int, epochs: int, **options: Any) -> Trainer:
    """Return a trainer that shows no progress."""
    from distkeras import Monitoring, Trainer

    options |= {"num_workers": workers, "batch_size": batch, "num_epoch": epochs}
    return Trainer(model, rule, monitoring=Monitoring(progress=False), **options)


def steady_rate(trainer: Trainer, since: float = 0.0) -> float:
    """Return the samples a second from the end of every worker's first epoch to the first end of a worker's last epoch.

    The time before ``since``, in seconds since the epoch, is not counted.
    """
    history: Any = trainer.history.toPandas()
    stamps = history["timestamp"]
    begin = stamps[history["epoch"] == 0].groupby(history["worker"]).max().max()
    begin = max(begin, begin.fromtimestamp(since))  # Both are in local time.
    end = stamps.groupby(history["worker"]).max().min()
    counted = history["samples"][(stamps > begin) & (stamps <= end)].sum()
    return float(counted / (end - begin).total_seconds())


def kept_frame(spark: SparkSession, x: Any, y: np.ndarray, features: str, label: str) -> DataFrame:
    """Return rows of columns of these types, cached in a partition for each worker."""
    import pandas as pd

    data = pd.DataFrame({"features": list(map(np.ndarray.tolist, x)), "label": y})
    frame = spark.createDataFrame(data, f"features {features}, label {label}").repartition(WORKERS).cache()
    frame.count()
    return frame


@contextmanager
def session(master: str = f"local[{WORKERS},4]", **config: str) -> Iterator[SparkSession]:
    """Yield a session with two slots on this machine, and record batches of a good size for wide rows.

    ``config`` has further settings, with ``__`` for each dot.
    """
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, bool | float | int | str | None] = {
        "spark.driver.memory": "4g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(WORKERS),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **{name.replace("__", "."): value for name, value in config.items()},
    }
    spark = SparkSession.builder.master(master).appName("distkeras bench").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
