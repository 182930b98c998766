"""Resuming: only the same job, with the same model, compilation and rows, continues from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.small_jobs import SPARSE, sgd
from support.training.spark_jobs import blobs, table

from distkeras import Trainer
from distkeras.ps.errors import DifferentJobError, LedgerError

pytestmark = pytest.mark.usefixtures("nothing_left")


def trainer_of(activation: str = "tanh", **options: Any) -> Trainer:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, activation=activation), keras.layers.Dense(2, activation="softmax")]
    options = {"worker_optimizer": sgd(0.1), "loss": SPARSE, "num_workers": 2, "batch_size": 16} | options
    return Trainer(keras.Sequential([keras.Input((2,)), *layers]), "downpour", **options)


@pytest.fixture(scope="module")
def ended(clouds: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> tuple[keras.Model, Path]:
    """Return the trained model of a job, and the job's checkpoint."""
    folder = tmp_path_factory.mktemp("ended")
    return trainer_of().train(clouds, checkpoint=folder), folder


def test_another_job_cannot_resume_a_completed_job(
    clouds: DataFrame, spark: SparkSession, tmp_path: Path, ended: tuple[keras.Model, Path]
) -> None:
    trained = ended[0]
    shutil.copytree(ended[1], tmp_path, dirs_exist_ok=True)
    for other, difference in (
        (trainer_of("relu"), r"`model\.config\.layers\.1\.config\.activation` must be 'tanh'.* Received: 'relu'"),
        (trainer_of(worker_optimizer=sgd(0.2)), r"`compilation\.optimizer\.config\.learning_rate` must be 0\.1"),
        (trainer_of(partitioned_already=True), "`partitioned_already` must be False"),
    ):
        with pytest.raises(DifferentJobError, match=difference):
            other.train(clouds, checkpoint=tmp_path, resume=True)
    with pytest.raises(LedgerError, match="the input has not returned the same rows as before: checksum"):
        trainer_of().train(table(spark, *blobs(seed=5)), checkpoint=tmp_path, resume=True)
    again = trainer_of()
    for found, expected in zip(
        again.train(clouds, checkpoint=tmp_path, resume=True).get_weights(), trained.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert again.resumed is not None
    assert again.resumed.exact


@pytest.mark.slow
def test_other_rows_are_found_before_any_work_with_another_number_of_workers(
    clouds: DataFrame, spark: SparkSession, tmp_path: Path, ended: tuple[keras.Model, Path]
) -> None:
    shutil.copytree(ended[1], tmp_path, dirs_exist_ok=True)
    saved = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    x, y = blobs()
    x[100, 0] += 1
    with pytest.raises(
        LedgerError, match=r"has not returned the same rows as before: checksum 0x[0-9a-f]{8} of all rows"
    ):
        trainer_of(num_workers=3, num_epoch=2).train(table(spark, x, y), checkpoint=tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.glob("snapshot-*")) == saved
    more = trainer_of(num_workers=3, num_epoch=2)
    more.train(clouds, checkpoint=tmp_path, resume=True)
    assert more.resumed is not None
    assert (more.resumed.exact, more.resumed.epoch) == (False, 1)
    again = trainer_of(num_workers=3, num_epoch=3)  # the commits of two workers are still in the ledger
    again.train(clouds, checkpoint=tmp_path, resume=True)
    assert again.resumed is not None
    assert again.resumed.exact


@pytest.mark.slow
def test_other_rows_are_found_with_an_empty_partition(spark: SparkSession, tmp_path: Path) -> None:
    """Equal rows share a partition, so two of the four partitions are empty."""
    x, y = np.repeat([[0.0, 1.0], [2.0, 3.0]], 16, axis=0).astype(np.float32), np.repeat([0, 1], 16).astype(np.int32)
    first = trainer_of(num_workers=4)
    first.train(table(spark, x, y), checkpoint=tmp_path)
    trained = {row["worker"] for row in first.commits.collect()}
    assert len(trained) < 4
    others = table(spark, x + 1, y)
    with pytest.raises(
        LedgerError, match=r"has not returned the same rows as before: checksum 0x[0-9a-f]{8} of all rows"
    ):
        trainer_of(num_workers=3, num_epoch=2).train(others, checkpoint=tmp_path, resume=True)
    trainer_of(num_workers=3, num_epoch=2).train(table(spark, x, y), checkpoint=tmp_path, resume=True)
