"""Models that score a stream of arriving files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience
from support.programs import environment

from distkeras import KerasEstimator, KerasModel
from distkeras.ps.errors import ConfigurationError, DifferentJobError

ROWS = 16
SCHEMA = "id int, features array<float>"


def classifier() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def features(ids: range) -> np.ndarray:
    return np.stack([np.random.default_rng(number).normal(size=3) for number in ids]).astype(np.float32)


def arrive(folder: Path, number: int) -> None:
    """Add a file to the folder atomically."""
    ids = range(number * ROWS, (number + 1) * ROWS)
    table = pa.table(
        {"id": pa.array(ids, pa.int32()), "features": pa.array(features(ids).tolist(), pa.list_(pa.float32()))}
    )
    pq.write_table(table, folder / f".{number}.parquet")
    (folder / f".{number}.parquet").rename(folder / f"{number}.parquet")


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))


def assert_each_once(spark: SparkSession, folder: Path, files: int, model: keras.Model) -> None:
    """Assert that each row of ``files`` files was written once, with its prediction and its features."""
    out = spark.read.parquet(str(folder)).orderBy("id").collect()
    ids = range(files * ROWS)
    assert Counter(row["id"] for row in out) == Counter(ids)
    expected = model.predict(features(ids), verbose=0)
    np.testing.assert_allclose([row["probability"].toArray() for row in out], expected, atol=1e-6)
    np.testing.assert_array_equal([row["prediction"] for row in out], expected.argmax(axis=1))
    np.testing.assert_array_equal([row["features"] for row in out], features(ids))


@pytest.mark.slow
def test_arriving_files_are_scored_once_across_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    model, arriving = classifier(), tmp_path / "arriving"
    arriving.mkdir()
    fitted = KerasModel(model)

    def start(**trigger: Any) -> Any:
        writer = fitted.transform(stream(spark, arriving)).writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(**trigger)
        return writer.start(str(tmp_path / "out"))

    arrive(arriving, 0)
    arrive(arriving, 1)
    query = start(availableNow=True)
    assert query.awaitTermination(int(patience(60)))
    arrive(arriving, 2)
    query = start(processingTime="0 seconds")
    while not query.lastProgress or query.lastProgress["batchId"] < 2:
        assert query.exception() is None
        query.awaitTermination(1)  # one poll; the limit is the timeout of the test
    query.stop()  # possibly in the middle of a micro-batch
    arrive(arriving, 3)
    assert start(availableNow=True).awaitTermination(int(patience(60)))
    assert_each_once(spark, tmp_path / "out", 4, model)


@pytest.mark.slow
def test_an_estimator_trains_on_a_stream_and_its_model_scores_it(spark: SparkSession, tmp_path: Path) -> None:
    arriving = tmp_path / "arriving"
    arriving.mkdir()
    arrive(arriving, 0)
    arrive(arriving, 1)
    files = stream(spark, arriving)
    rows = files.selectExpr("features", "CASE WHEN id = 3 THEN NULL ELSE id % 2 END AS label")
    estimator = KerasEstimator(classifier(), num_workers=1, handle_invalid="skip")
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "trigger": {"availableNow": True}}
    with pytest.raises(ConfigurationError, match="`fitStream` has none of"):
        estimator.copy().setParams(validation_split=0.5).fitStream(rows, **options)
    training = estimator.fitStream(rows, **options)
    assert training.awaitTermination(patience(120))
    assert training.lastProgress is not None
    assert (training.lastProgress.batch, training.lastProgress.clock) == (1, 2)
    fitted = training.model()
    assert isinstance(fitted, KerasModel)
    assert fitted.transform(files).isStreaming
    assert {"prediction", "probability"} < set(fitted.transform(files).columns)


@pytest.mark.slow
def test_a_stream_does_not_go_on_with_its_columns_in_another_order(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "arriving"
    folder.mkdir()
    arrive(folder, 0)
    rows = stream(spark, folder).selectExpr(
        *(f"features[{n}] AS {name}" for n, name in enumerate("abc")), "id % 2 AS label"
    )
    options: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "trigger": {"availableNow": True}}
    estimator = KerasEstimator(classifier(), num_workers=1, features_col=["a", "b", "c"])
    assert estimator.fitStream(rows, **options).awaitTermination(patience(120))
    with pytest.raises(
        DifferentJobError, match=r"`features\.0\.0` must be 'a', as in .* Received: 'b'; also different:"
    ):
        estimator.setParams(features_col=["b", "a", "c"]).fitStream(rows, **options)
    with pytest.raises(
        DifferentJobError, match=r"`features\.0` must be \['a', 'b', 'c'\].* Received: 'features'"
    ) as failure:
        estimator.setParams(features_col="features").fitStream(
            rows.selectExpr("array(a, b, c) AS features", "label"), **options
        )
    assert "distkeras_features" not in str(failure.value)


#: A program that scores files one at a time until it is killed.
DRIVER = """
import sys
from pyspark.sql import SparkSession
from distkeras import KerasModel
folder = sys.argv[1]
spark = (SparkSession.builder.master("local[2,2]").config("spark.ui.enabled", "false")
         .config("spark.ui.showConsoleProgress", "false").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
arriving = (spark.readStream.schema("id int, features array<float>").option("maxFilesPerTrigger", 1)
            .parquet(f"{folder}/arriving"))
query = (KerasModel.load(f"{folder}/model").transform(arriving).writeStream.format("parquet")
         .option("checkpointLocation", f"{folder}/checkpoint").start(f"{folder}/out"))
query.awaitTermination()
"""


@pytest.mark.slow
def test_each_row_is_scored_once_if_the_driver_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    model, arriving = classifier(), tmp_path / "arriving"
    arriving.mkdir()
    KerasModel(model).save(str(tmp_path / "model"))
    files = 40
    for number in range(files // 2):
        arrive(arriving, number)
    for batches in (2, 6):  # killed twice, in the middle of a micro-batch
        command = [sys.executable, "-c", DRIVER, str(tmp_path)]
        driver = subprocess.Popen(command, env=environment(), start_new_session=True)
        try:
            deadline = time.monotonic() + patience(120)
            while len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) < batches:
                assert driver.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # Python, the JVM and its workers
            driver.wait(patience(30))
    for number in range(files // 2, files):
        arrive(arriving, number)
    writer = KerasModel.load(str(tmp_path / "model")).transform(stream(spark, arriving)).writeStream.format("parquet")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    assert writer.start(str(tmp_path / "out")).awaitTermination(int(patience(200)))
    assert_each_once(spark, tmp_path / "out", files, model)
