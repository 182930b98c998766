"""Models, rows and the Spark session that several sections measure with."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch
from distkeras.data.columns import Column
from distkeras.data.shuffling import EpochOrder
from distkeras.data.spec import DataSpec

if TYPE_CHECKING:
    import keras
    from pyspark.sql import SparkSession

    from distkeras import Trainer

#: Hidden layers between 784 inputs and 10 classes: M has 4.8 million parameters (19.2 MB), S 0.12 million (0.47 MB).
HIDDEN = {"M": (1000, 2000, 1000), "S": (128, 128)}
INPUTS, CLASSES = 784, 10
WORKERS = 2
#: Seconds for another process to answer, or to end.
PATIENCE = 300.0


def build(name: str) -> keras.Model:
    """Model M or S, the same weights each time, compiled."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for units in HIDDEN[name]]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(CLASSES, activation="softmax")])
    # So small a rate that no rule diverges on labels that mean nothing.
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random float32 ``(count, 784)`` in [0, 1), and int32 classes ``(count,)``."""
    rng = np.random.default_rng(0)
    return rng.random((count, INPUTS), np.float32), rng.integers(0, CLASSES, count, np.int32)


def mini_batches(x: np.ndarray, y: np.ndarray, size: int, window: int) -> list[Batch]:
    """The whole batches of a shuffled epoch, cut for windows of so many, as the data plane cuts it."""
    features, label = Column("features", (INPUTS,)), Column("label", (), "int32")
    order = EpochOrder(DataSpec((features,), (label,), None, size), worker=0, window=window)
    count = len(x) // size
    cut = order.cut((x[: count * size], y[: count * size]), 0, epoch=1)
    return [rows.batch(1, index, index == count - 1) for index, rows in enumerate(cut)]


def bare_loop(model: keras.Model, batch: int) -> Callable[[Any, Any], None]:
    """Compiles ``(k, batch, 784), (k, batch)`` to k training steps of ``model`` in a loop that does nothing else."""
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
    """Samples a second of plain `fit` over one epoch, without what goes before the epoch."""
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


def steady_rate(trainer: Trainer, since: float = 0.0) -> float:
    """Samples a second from when every worker has ended its first epoch to when the first one has ended its last.

    Nothing counts before ``since``, seconds since the epoch.
    """
    history: Any = trainer.history.toPandas()
    stamps = history["timestamp"]
    begin = stamps[history["epoch"] == 0].groupby(history["worker"]).max().max()
    begin = max(begin, begin.fromtimestamp(since))  # both are in local time
    end = stamps.groupby(history["worker"]).max().min()
    counted = history["samples"][(stamps > begin) & (stamps <= end)].sum()
    return float(counted / (end - begin).total_seconds())


def answer(pipe: Connection) -> Any:
    """What another process sends."""
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a process must answer within {PATIENCE:g} s")
    return pipe.recv()  # an end without an answer raises EOFError; the process has said why


@contextmanager
def session(master: str = f"local[{WORKERS},4]", **config: str) -> Iterator[SparkSession]:
    """Two slots on this machine, and record batches of a good size for wide rows.

    Args:
        master: where tasks run.
        config: more of it, each ``__`` for a dot.
    """
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(master)
        .appName("distkeras bench")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(WORKERS))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2000")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for name, value in config.items():
        builder = builder.config(name.replace("__", "."), value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
