"""DASO jobs on Spark, compared with the simulator. As a program: two nodes of two workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from distkeras import Trainer
from distkeras.data.batches import Batch
from distkeras.data.model_columns import data_spec
from distkeras.data.source import BatchSource
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.rules.daso import Daso
from support.ps.daso_simulator import DasoTrace, simulate_daso
from support.training.spark_jobs import assert_nothing_left, committed, once_at_step, step_callback_layer

SIZE, ROWS, BATCH, ETA = 6, 20, 8, 0.02  # For each worker: three mini-batches, of which the last is short.
STEPS = -(-ROWS // BATCH)
X = np.random.default_rng(0).normal(size=(4 * ROWS, SIZE)).astype(np.float32)
Y = (X @ np.arange(SIZE) + np.random.default_rng(1).normal(size=len(X))).astype(np.float32)


def linear_model(*hooks: keras.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((SIZE,)), *hooks, keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.linspace(-1, 1, SIZE, dtype=np.float32)[:, None]])
    model.compile(keras.optimizers.SGD(ETA), "mse")
    return model


def partitions(spark: SparkSession, workers: int) -> DataFrame:
    """Return a DataFrame with `ROWS` rows for each worker, in order."""
    rows = list(zip(X.tolist(), Y.tolist(), strict=True))[: workers * ROWS]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, workers), "features array<float>, label float")


def job(daso: Daso, workers: int, epochs: int, *hooks: keras.Layer) -> Trainer:
    return Trainer(
        linear_model(*hooks), daso, num_workers=workers, batch_size=BATCH, num_epoch=epochs, partitioned_already=True
    )


def batches_of(trainer: Trainer, df: DataFrame, worker: int) -> Iterator[Batch]:
    """Yield the worker's mini-batches."""
    spec = data_spec(linear_model(), df.schema, **trainer.settings.data_arguments)
    part = slice(worker * ROWS, (worker + 1) * ROWS)
    features = pa.FixedSizeListArray.from_arrays(pa.array(X[part].ravel()), SIZE).cast(pa.list_(pa.float32()))
    record = pa.RecordBatch.from_arrays([features, pa.array(Y[part])], ["features", "label"])
    with BatchSource(iter([record]), spec, worker=worker) as source:
        yield from source


def simulated(trainer: Trainer, df: DataFrame, daso: Daso, workers: int, epochs: int) -> tuple[DasoTrace, np.ndarray]:
    """Return the simulator's trace of the job, and the losses of each worker's mini-batches, ``(workers, steps)``."""
    replica = KerasReplica(linear_model())
    batches = [batches_of(trainer, df, worker) for worker in range(workers)]
    losses: list[list[float]] = [[] for _ in range(workers)]
    sizes: list[int] = []

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        batch, out = next(batches[worker]), np.empty(SIZE, np.float32)
        replica.load(theta)
        losses[worker].append(float(replica.gradient(batch, out)[0]))
        if worker == 0:
            sizes.append(batch.size)
        return out

    def mean_loss(theta: np.ndarray) -> float:
        return float(np.average([own[-STEPS:] for own in losses], weights=[sizes[-STEPS:]] * workers))

    start = np.empty(SIZE, np.float32)
    replica.read(start)
    nodes = daso.nodes or 1
    trace = simulate_daso(
        daso,
        start,
        gradient,
        nodes=nodes,
        devices=workers // nodes,
        learning_rate=replica.learning_rate,
        epochs=epochs,
        batches=STEPS,
        loss=mean_loss,
        dtype=np.float32,
    )
    return trace, np.array(losses)


def assert_as_simulated(
    spark: SparkSession, daso: Daso, workers: int, epochs: int, *hooks: keras.Layer, **options: Any
) -> DasoTrace:
    """Train a model with ``hooks``, with these options of `train`, and compare the job with the simulator."""
    df = partitions(spark, workers)
    trainer = job(daso, workers, epochs, *hooks)
    model = trainer.train(df, **options)
    trace, losses = simulated(trainer, df, daso, workers, epochs)
    history = trainer.history.orderBy("worker", "iteration").toPandas()
    np.testing.assert_array_equal(history.loss.to_numpy().reshape(workers, -1), losses)
    np.testing.assert_array_equal(model.get_weights()[0].ravel(), trace.mean)
    # Each mini-batch counts once.
    steps = list(range(STEPS))
    assert committed(trainer) == {(worker, epoch): steps for worker in range(workers) for epoch in range(epochs)}
    assert_nothing_left()
    return trace


def killing_layer(marker: Path, step: int) -> keras.Layer:
    """Return a layer that kills the first worker that reaches that step."""
    return step_callback_layer(once_at_step(marker, step, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def main(folder: Path) -> None:
    spark = (
        SparkSession.builder.master("local[4,2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    trace = assert_as_simulated(spark, Daso(nodes=2, interval=2, patience=1, threshold=0.9), workers=4, epochs=6)
    assert set(trace.group) == {-1, 0, 1}
    marker = folder / "killed"
    assert_as_simulated(spark, Daso(nodes=2, interval=2), 4, 5, killing_layer(marker, 7))
    assert marker.exists()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
