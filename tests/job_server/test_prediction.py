"""Tests of the driver of a predict job on the Spark session of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.training.spark_jobs import table

from distkeras.job_server.description import PredictionDescription
from distkeras.job_server.driver import predict
from distkeras.job_server.runner.files import JobFolder, read_progress
from distkeras.keras_model import archive
from distkeras.ps.errors import ConfigurationError, MissingColumnError

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "mse")  # Predictions do not need the optimizer's state.
    return model


@pytest.fixture
def folder(tmp_path: Path, model: keras.Model, spark: SparkSession) -> JobFolder:
    folder = JobFolder(tmp_path / "job")
    folder.path.mkdir()
    folder.sent_model.write_bytes(archive.to_bytes(model))
    table(spark, X, np.arange(40)).write.parquet(str(tmp_path / "rows of ours"))
    return folder


def run(spark: SparkSession, folder: JobFolder, attempt: int = 1, **options: Any) -> dict[str, Any]:
    places = tuple(f"file://{folder.path.parent / name}" for name in ("rows of ours", "scored"))
    description = PredictionDescription.from_json({"data": "x", "output": "y", "options": options})
    return predict(spark, folder, description, places, attempt)  # type: ignore[arg-type]  # two of them


def scored(spark: SparkSession, folder: JobFolder) -> Any:
    return spark.read.parquet(str(folder.path.parent / "scored")).orderBy("label").toPandas()


def test_rows_are_written_with_the_models_predictions(
    spark: SparkSession, folder: JobFolder, model: keras.Model
) -> None:
    assert run(spark, folder, output_col="p", batch_size=7) == {"rows": 40}
    found = scored(spark, folder)
    assert list(found.columns) == ["features", "label", "p"]
    np.testing.assert_allclose(np.stack(found["p"].to_list()), model.predict(X, verbose=0), rtol=1e-5)
    rows = read_progress(folder.progress, 0)[0]
    assert (rows[0]["kind"], rows[0]["attempt"]) == ("predicting", 1)
    assert (rows[-1]["kind"], rows[-1]["rows"]) == ("predicted", 40)


def test_existing_output_is_not_overwritten(spark: SparkSession, folder: JobFolder) -> None:
    there = folder.path.parent / "scored"
    there.mkdir()
    (there / "mine").write_text("mine")
    for attempt in (1, 2):  # The same holds for a later driver, if the first one had not started to write.
        with pytest.raises(ConfigurationError, match="must not exist yet"):
            run(spark, folder, attempt)
    assert [path.name for path in there.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_later_driver_replaces_the_partial_output_of_the_previous_one(spark: SparkSession, folder: JobFolder) -> None:
    run(spark, folder)
    there = folder.path.parent / "scored"
    (there / "_SUCCESS").unlink()
    (there / "part-of-the-one-before.parquet").write_bytes(b"half")
    assert run(spark, folder, 2) == {"rows": 40}
    assert len(scored(spark, folder)) == 40
    assert not (there / "part-of-the-one-before.parquet").exists()


def test_a_column_that_is_missing_is_named_before_anything_is_written(spark: SparkSession, folder: JobFolder) -> None:
    with pytest.raises(MissingColumnError, match="nothing"):
        run(spark, folder, features_col="nothing")
    assert not (folder.path.parent / "scored").exists()
    assert not folder.begun.exists()
