"""DASO on Spark: its trace is the simulator's, and a death, or an option that cannot work, is one error."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.spark_jobs import (
    assert_nothing_left,
    committed,
    counting_model,
    counting_rows,
    once_at_step,
    step_callback_layer,
    total,
)

from distkeras import Callback, CallbackContext, Network, Trainer
from distkeras.data.batches import Batch
from distkeras.data.schema import data_spec
from distkeras.data.source import BatchSource
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError, EmptyDataError, MemberLostError
from distkeras.ps.rules.daso import Daso
from distkeras.ps.simulation.daso import DasoTrace, simulate_daso

SIZE, ROWS, BATCH, ETA = 6, 20, 8, 0.02  # of a worker: three mini-batches, the last one short
STEPS = -(-ROWS // BATCH)
X = np.random.default_rng(0).normal(size=(4 * ROWS, SIZE)).astype(np.float32)
Y = (X @ np.arange(SIZE) + np.random.default_rng(1).normal(size=len(X))).astype(np.float32)


def linear_model() -> keras.Model:
    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.linspace(-1, 1, SIZE, dtype=np.float32)[:, None]])
    model.compile(keras.optimizers.SGD(ETA), "mse")
    return model


def partitions(spark: SparkSession, workers: int) -> DataFrame:
    """`ROWS` rows for each worker, in order."""
    rows = list(zip(X.tolist(), Y.tolist(), strict=True))[: workers * ROWS]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, workers), "features array<float>, label float")


def job(daso: Daso, workers: int, epochs: int) -> Trainer:
    return Trainer(
        linear_model(), daso, num_workers=workers, batch_size=BATCH, num_epoch=epochs, partitioned_already=True
    )


def batches_of(trainer: Trainer, df: DataFrame, worker: int) -> Iterator[Batch]:
    """What the worker trains on."""
    spec = data_spec(linear_model(), df.schema, **trainer.settings.data_arguments)
    part = slice(worker * ROWS, (worker + 1) * ROWS)
    features = pa.FixedSizeListArray.from_arrays(pa.array(X[part].ravel()), SIZE).cast(pa.list_(pa.float32()))
    record = pa.RecordBatch.from_arrays([features, pa.array(Y[part])], ["features", "label"])
    with BatchSource(iter([record]), spec, worker=worker) as source:
        yield from source


def simulated(trainer: Trainer, df: DataFrame, daso: Daso, workers: int, epochs: int) -> tuple[DasoTrace, np.ndarray]:
    """The simulator's trace of the job, and the losses of each worker's mini-batches, ``(workers, steps)``."""
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


def assert_as_simulated(spark: SparkSession, daso: Daso, workers: int, epochs: int) -> DasoTrace:
    df = partitions(spark, workers)
    trainer = job(daso, workers, epochs)
    model = trainer.train(df)
    trace, losses = simulated(trainer, df, daso, workers, epochs)
    history = trainer.history.orderBy("worker", "iteration").toPandas()
    np.testing.assert_array_equal(history.loss.to_numpy().reshape(workers, -1), losses)
    np.testing.assert_array_equal(model.get_weights()[0].ravel(), trace.mean)
    # Each mini-batch counts once.
    steps = list(range(STEPS))
    assert committed(trainer) == {(worker, epoch): steps for worker in range(workers) for epoch in range(epochs)}
    assert_nothing_left()
    return trace


def test_its_trace_is_the_simulators_to_the_bit(spark: SparkSession) -> None:
    trace = assert_as_simulated(spark, Daso(nodes=2, interval=2, patience=1, threshold=0.9), workers=2, epochs=5)
    assert trace.phase[[0, 3, -1]].tolist() == ["warm_up", "cycling", "cool_down"]
    assert set(trace.interval) == {1, 2}
    assert (trace.merged >= 0).any()


def test_the_workers_of_one_host_are_one_node(spark: SparkSession) -> None:
    df = partitions(spark, 2)
    trainer = job(Daso(), workers=2, epochs=2)
    model = trainer.train(df)
    trace, _ = simulated(trainer, df, Daso(), 2, 2)
    np.testing.assert_array_equal(model.get_weights()[0].ravel(), trace.mean)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"nodes": 2}, {"num_workers": 3}, "multiple of the rule's `nodes`, 2. Received: num_workers=3"),
    ({}, {"num_workers": 9}, "`num_workers` must be at most 2"),
    ({"warm_up": 2}, {"num_epoch": 2}, "`num_epoch` must be at least those of warm-up and cool-down, 2 [+] 1"),
    ({}, {"max_skipped": 1}, "`max_skipped` must be 0"),
    ({}, {"network": Network(server="cluster")}, "`server` must be 'driver'"),
]


@pytest.mark.parametrize(("hyper", "options", "message"), REFUSED)
def test_what_cannot_work_is_an_error_before_work_starts(
    spark: SparkSession, hyper: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    trainer = Trainer(linear_model(), Daso(**hyper), **{"num_workers": 2, "num_epoch": 2, **options})
    with pytest.raises(ConfigurationError, match=message):
        trainer.train(partitions(spark, 2))


def test_a_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`checkpoint` must be None"):
        job(Daso(), 2, 2).train(partitions(spark, 2), checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker_optimizer": "adam"}, "`worker_optimizer` must be SGD without momentum"),
        ({"staleness_bound": 1}, "`staleness_bound` is for rules without rounds"),
        ({"learning_rate": 0.1}, "set it in `worker_optimizer`"),
        ({"network": Network(wire_format="bfloat16")}, "`wire_format` must be 'float32'"),
        ({"tables": "embedding"}, '`tables` must be "auto" or "dense"'),
        ({"network": Network(overlap=True)}, "`overlap` is for rules that go on"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(linear_model(), "daso", **options)


def test_a_partition_without_rows_is_an_error(spark: SparkSession) -> None:
    rows = [([0.0] * SIZE, float(worker)) for worker in (0, 1) for _ in range(ROWS)]
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, 2), "features array<float>, label float")
    with pytest.raises(EmptyDataError, match="needs rows in every partition") as caught:
        job(Daso(nodes=2), 2, 2).train(df.where("label = 0"))
    assert caught.value.worker == 1
    assert_nothing_left()


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_member_is_one_error_that_names_it(spark: SparkSession, tmp_path: Path, nodes: int) -> None:
    marker = tmp_path / "killed"
    hook = step_callback_layer(once_at_step(marker, 4, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    trainer = Trainer(
        counting_model(41, hook),
        Daso(nodes=nodes),
        worker_optimizer=keras.optimizers.SGD(1.0),
        loss=total,
        num_workers=2,
        batch_size=4,
        num_epoch=3,
    )
    with pytest.raises(MemberLostError, match="does not go on after the death of") as caught:
        trainer.train(counting_rows(spark, 41))
    assert marker.exists()
    assert caught.value.worker in (0, 1)
    assert caught.value.step is not None
    assert_nothing_left()


class StopAtOnce(Callback):
    """Ends the job with its first commits."""

    def __init__(self) -> None:
        super().__init__(every_commits=1)

    def on_center(self, context: CallbackContext) -> None:
        context.stop("enough")


def test_a_job_that_ends_early_ends_for_all_after_the_same_epoch(spark: SparkSession) -> None:
    trainer = job(Daso(nodes=2, warm_up=1, cool_down=1), workers=2, epochs=500)
    trainer.train(partitions(spark, 2), callbacks=[StopAtOnce()])
    assert trainer.stopped == "enough"
    epochs = [max(epoch for worker, epoch in committed(trainer) if worker == own) for own in (0, 1)]
    assert epochs[0] == epochs[1] < 499
    assert_nothing_left()
