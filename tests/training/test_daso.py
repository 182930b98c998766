"""DASO on Spark: it has the simulator's trace, repeats an epoch after a death, and refuses invalid options."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.programs import output_of
from support.training.daso_jobs import (
    ROWS,
    SIZE,
    assert_as_simulated,
    job,
    killing_layer,
    linear_model,
    partitions,
    simulated,
)
from support.training.spark_jobs import assert_nothing_left, committed, servers

from distkeras import Callback, CallbackContext, Checkpoint, Network, Trainer
from distkeras.ps.errors import ConfigurationError, EmptyDataError
from distkeras.ps.rules.daso import Daso


@pytest.mark.slow
def test_the_workers_of_one_host_are_one_node(spark: SparkSession) -> None:
    df = partitions(spark, 2)
    trainer = job(Daso(), workers=2, epochs=2)
    model = trainer.train(df)
    trace, _ = simulated(trainer, df, Daso(), 2, 2)
    np.testing.assert_array_equal(model.get_weights()[0].ravel(), trace.mean)


REFUSED: list[Any] = [
    ({"nodes": 2}, {"num_workers": 3}, "multiple of the rule's `nodes`, 2. Received: num_workers=3"),
    pytest.param({}, {"num_workers": 9}, "`num_workers` must be at most 2", marks=pytest.mark.slow),
    pytest.param(
        {"warm_up": 2},
        {"num_epoch": 2},
        "`num_epoch` must be at least those of warm-up and cool-down, 2 [+] 1",
        marks=pytest.mark.slow,
    ),
    pytest.param({}, {"max_skipped": 1}, "`max_skipped` must be 0", marks=pytest.mark.slow),
    pytest.param({}, {"network": Network(server="cluster")}, "`server` must be 'driver'", marks=pytest.mark.slow),
    pytest.param({}, {"network": Network(tls=True)}, "`tls` must be False", marks=pytest.mark.slow),
    pytest.param({}, {"tables": "embedding"}, '`tables` must be "auto" or "dense"', marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hyper", "options", "message"), REFUSED)
def test_options_that_daso_excludes_are_refused_before_work_starts(
    spark: SparkSession, hyper: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    trainer = Trainer(linear_model(), Daso(**hyper), **{"num_workers": 2, "num_epoch": 2, **options})
    with pytest.raises(ConfigurationError, match=message):
        trainer.train(partitions(spark, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker_optimizer": "adam"}, "`worker_optimizer` must be SGD without momentum"),
        ({"staleness_bound": 1}, "`staleness_bound` is for rules without rounds"),
        ({"learning_rate": 0.1}, "set the rate in `worker_optimizer`"),
        ({"network": Network(wire_format="bfloat16")}, "`wire_format` must be 'float32'"),
        ({"network": Network(overlap=True)}, "`overlap` must be False"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(linear_model(), "daso", **options)


@pytest.mark.slow
def test_a_partition_without_rows_is_an_error(spark: SparkSession) -> None:
    rows = [([0.0] * SIZE, float(worker)) for worker in (0, 1) for _ in range(ROWS)]
    df = spark.createDataFrame(spark.sparkContext.parallelize(rows, 2), "features array<float>, label float")
    with pytest.raises(EmptyDataError, match="needs rows in every partition") as caught:
        job(Daso(nodes=2), 2, 2).train(df.where("label = 0"))
    assert caught.value.worker == 1
    assert_nothing_left()


#: In the cycling phase, an exchange is in progress at the end of each epoch.
DASO = Daso(nodes=2, interval=2, patience=1, threshold=0.9)


@pytest.mark.parametrize("step", [7, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 4, 13))])
def test_a_killed_member_changes_no_number(spark: SparkSession, tmp_path: Path, step: int) -> None:
    """The trace is that of the simulator, to the bit; the steps are of each phase."""
    marker = tmp_path / "killed"
    trace = assert_as_simulated(spark, DASO, 2, 5, killing_layer(marker, step))
    assert marker.exists()
    assert trace.phase[[0, 3, -1]].tolist() == ["warm_up", "cycling", "cool_down"]
    assert set(trace.interval) == {1, 2}
    assert (trace.merged >= 0).any()


class KillTheServer(Callback):
    """A callback that kills the server once, after the first round."""

    def __init__(self) -> None:
        super().__init__(every_commits=1)
        self.killed: list[int] = []

    def on_center(self, context: CallbackContext) -> None:
        if not self.killed:
            self.killed = servers()
            os.kill(self.killed[0], signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_server_changes_no_number(spark: SparkSession, tmp_path: Path) -> None:
    killer = KillTheServer()
    checkpoint = Checkpoint(str(tmp_path), every=1)
    assert_as_simulated(spark, DASO, 2, 5, checkpoint=checkpoint, callbacks=[killer])
    assert killer.killed


@pytest.mark.slow
def test_two_nodes_of_two_workers_train(tmp_path: Path) -> None:
    output_of("-m", "support.training.daso_jobs", tmp_path, seconds=280)


class StopAtOnce(Callback):
    """A callback that ends the job with its first commits."""

    def __init__(self) -> None:
        super().__init__(every_commits=1)

    def on_center(self, context: CallbackContext) -> None:
        context.stop("enough")


@pytest.mark.slow
def test_all_members_of_a_job_that_ends_early_end_after_the_same_epoch(spark: SparkSession) -> None:
    trainer = job(Daso(nodes=2, warm_up=1, cool_down=1), workers=2, epochs=500)
    trainer.train(partitions(spark, 2), callbacks=[StopAtOnce()])
    assert trainer.stopped == "enough"
    epochs = [max(epoch for worker, epoch in committed(trainer) if worker == own) for own in (0, 1)]
    assert epochs[0] == epochs[1] < 499
    assert_nothing_left()
