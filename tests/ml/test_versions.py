"""A stream that is scored with the latest version of a model, which another stream publishes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import PipelineModel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.patience import patience

from distkeras import KerasModel, KerasStreamModel, register_function
from distkeras.keras_model import archive
from distkeras.ps.checkpoint.versions import VersionFolder
from distkeras.ps.errors import ConfigurationError, DifferentJobError, NoVersionError, SnapshotError

ROWS = 8
IDENTITY = {"layout": [["gamma", [2]], ["beta", [2]], ["kernel", [2, 1]], ["bias", [1]]]}


def regressor() -> keras.Model:
    """Return a model with moving statistics."""
    layers = [keras.Input((2,)), keras.layers.BatchNormalization(epsilon=0.0), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def folder_at(path: Path, identity: Any = IDENTITY) -> VersionFolder:
    folder = VersionFolder(str(path), create=True)
    folder.take(identity, lambda: archive.with_optimizer(regressor()))
    return folder


def publish(folder: VersionFolder, number: int, keep: int = 2) -> None:
    """Publish a version that predicts ``number * (x0 + x1 - 2 * number) + 1``: its moving mean is ``number``."""
    vector = np.array([1, 1, 0, 0, number, number, 1], np.float32)
    folder.publish("training", number, vector, np.array([number, number, 1, 1], np.float32))
    folder.prune(keep)


def expected(number: int, features: list[float]) -> float:
    return number * (sum(features) - 2 * number) + 1.0


def arrive(spark: SparkSession, folder: Path, number: int) -> None:
    rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, 2)
    values = rows.select("id", F.array(F.col("id").cast("float"), F.lit(1.0).cast("float")).alias("features"))
    values.write.mode("append").parquet(str(folder))


def rows_arriving(spark: SparkSession, folder: Path) -> DataFrame:
    """Return the stream of these files, with two files per micro-batch."""
    schema = "id long, features array<float>"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 2).parquet(str(folder))


def run(scored: DataFrame, checkpoint: Path, each: Callable[[DataFrame, int], None]) -> None:
    writer = scored.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
    assert writer.trigger(availableNow=True).start().awaitTermination(int(patience(120)))


def predictions(rows: DataFrame) -> dict[int, tuple[int, float]]:
    """Return the version and the prediction of each id, after a check that the prediction is that version's."""
    found = rows.collect()
    for row in found:
        assert row["prediction"] == expected(row["version"], row["features"])
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: (row["version"], row["prediction"]) for row in found}


def versions(rows: DataFrame) -> set[int]:
    return {version for version, _ in predictions(rows).values()}


def test_each_micro_batch_is_scored_with_one_version(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, arriving = folder_at(tmp_path / "versions"), tmp_path / "arriving"
    publish(folder, 3)
    for number in range(2):
        arrive(spark, arriving, number)
    monkeypatch.chdir(tmp_path)  # the driver's folder is not that of the tasks
    scored = KerasStreamModel("versions").transform(rows_arriving(spark, arriving))
    assert scored.columns == ["id", "features", "prediction", "version"]
    seen: dict[int, set[int]] = {}
    numbers = iter(range(10, 30))

    def each(rows: DataFrame, batch: int) -> None:
        first = predictions(rows)
        assert len(first) == ROWS
        seen[batch] = {version for version, _ in first.values()}
        for number in islice(numbers, 4):  # more versions than are kept
            publish(folder, number)
        assert predictions(rows.unpersist()) == first

    run(scored, tmp_path / "checkpoint", each)
    assert seen == {0: {3}, 1: {13}}
    assert [version.number for version in folder.versions()] == [13, 16, 17]

    # The driver died before Spark recorded the second micro-batch as done: the same version scores it again.
    for name in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    arrive(spark, arriving, 2)
    run(scored, tmp_path / "checkpoint", each)
    assert seen == {0: {3}, 1: {13}, 2: {21}}


@pytest.mark.slow
def test_an_invalid_row_has_a_version_and_no_prediction(spark: SparkSession, tmp_path: Path) -> None:
    publish(folder_at(tmp_path / "versions"), 2)
    arrive(spark, tmp_path / "arriving", 0)
    rows = rows_arriving(spark, tmp_path / "arriving")
    broken = rows.selectExpr("id", "float(id) AS a", "CASE WHEN id = 5 THEN NULL ELSE 1.0f END AS b")
    options: dict[str, Any] = {"features_col": ["a", "b"], "handle_invalid": "keep", "invalid_col": "why"}
    scored = KerasStreamModel(tmp_path / "versions", version_col="by", **options).transform(broken)
    assert scored.columns == ["id", "a", "b", "prediction", "why", "by"]
    query = scored.writeStream.format("memory").queryName("kept").trigger(availableNow=True).start()
    assert query.awaitTermination(int(patience(60)))
    for row in spark.table("kept").collect():
        assert row["by"] == 2
        assert (row["prediction"] is None) == (row["why"] is not None) == (row["id"] == 5)
        if row["id"] != 5:
            assert row["prediction"] == expected(2, [row["a"], row["b"]])


@pytest.mark.slow
def test_a_static_dataframe_is_scored_with_the_version_at_the_call(spark: SparkSession, tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "versions")
    publish(folder, 1)
    arrive(spark, tmp_path / "rows", 0)
    rows = spark.read.parquet(str(tmp_path / "rows"))
    model = KerasStreamModel(tmp_path / "versions")
    before = model.transform(rows)
    publish(folder, 2)
    assert (versions(before), versions(model.transform(rows))) == ({1}, {2})
    assert model.published == [1, 2]
    assert model.predict([4.0, 1.0]) == expected(2, [4.0, 1.0])
    one = model.setParams(prediction_col="p").at(1)
    assert type(one) is KerasModel
    assert one.transform(rows).columns == ["id", "features", "p"]
    assert one.predict([4.0, 1.0]) == expected(1, [4.0, 1.0])
    for number in (3, 4, 5):
        publish(folder, number)
    labeled = rows.select("features", (F.col("features")[0] * 5 - 44).alias("label"))
    assert KerasStreamModel(tmp_path / "versions", label_col="label").evaluate(labeled)["loss"] == 0.0
    assert model.keras_model.get_weights()[-1].tolist() == [5.0**2 / 25]

    place = str(tmp_path / "pipeline")
    PipelineModel([KerasStreamModel(tmp_path / "versions", prediction_col="q")]).write().save(place)
    publish(folder, 6)
    loaded = PipelineModel.load(place)
    assert versions(loaded.transform(rows).withColumnRenamed("q", "prediction")) == {6}
    register_function(spark, "by_latest", loaded.stages[0])
    predicted = rows.selectExpr("features", "by_latest(features) AS p").collect()
    assert [row["p"] for row in predicted] == [expected(6, row["features"]) for row in predicted]


@pytest.mark.slow
def test_the_errors_state_the_reason(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NoVersionError, match="must have a version of a model"):
        KerasStreamModel(tmp_path / "versions")
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="must be a directory"):
        KerasStreamModel(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="`versions` must be set"):
        KerasStreamModel().at()
    folder = folder_at(tmp_path / "versions")
    publish(folder, 1)
    arrive(spark, tmp_path / "rows", 0)
    model = KerasStreamModel(tmp_path / "versions")
    with pytest.raises(ConfigurationError, match=r"`number` must be one of \[1\]. Received: number=3"):
        model.at(3)
    for column in ("id", "prediction"):  # which the model adds itself
        with pytest.raises(ConfigurationError, match="must name a new column"):
            model.copy().setParams(version_col=column).transform(rows_arriving(spark, tmp_path / "rows"))
    scored = model.transform(rows_arriving(spark, tmp_path / "rows"))
    for path in (tmp_path / "versions").iterdir():
        path.unlink()

    def failure(number: int) -> str:
        with pytest.raises(Exception, match="distkeras") as raised:
            run(scored, tmp_path / f"checkpoint-{number}", lambda rows, _: rows.foreach(lambda _: None))
        return str(raised.value)

    assert f"{NoVersionError.__qualname__}: " in failure(0)
    publish(folder_at(tmp_path / "versions", {"another": "model"}), 2)
    assert f"{DifferentJobError.__qualname__}: version 2 in " in failure(1)
    with pytest.raises(DifferentJobError, match="must be of the model that predicts"):
        model.transform(spark.read.parquet(str(tmp_path / "rows")))
