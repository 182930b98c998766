from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.present import present

from distkeras.analysis import metrics
from distkeras.data import datasets


@pytest.mark.slow
def test_to_dataframe_and_parquet_agree(spark: SparkSession, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4100, 5), dtype=np.uint8)
    y = np.arange(4100) % 10
    frame = datasets.to_dataframe(spark, x, y)
    assert frame.dtypes == [("features", "array<float>"), ("label", "int")]
    rows: Any = frame.toPandas()
    np.testing.assert_allclose(np.stack(rows["features"]), x / 255.0, rtol=1e-6)
    np.testing.assert_array_equal(rows["label"], y)
    stored = spark.read.parquet(datasets.write_parquet(tmp_path / "set", x, y, files=3))
    assert stored.dtypes == frame.dtypes
    assert stored.count() == 4100
    assert stored.exceptAll(frame).isEmpty()


def test_labels_may_be_floats_and_columns_may_have_other_names(spark: SparkSession) -> None:
    frame = datasets.to_dataframe(
        spark, np.full((3, 2), 7, np.int64), np.array([0.5, 1, 2]), features_col="x", label_col="y"
    )
    assert frame.dtypes == [("x", "array<float>"), ("y", "float")]
    assert present(frame.first()).x == [7.0, 7.0]


def test_metrics_accept_spark_dataframes(spark: SparkSession) -> None:
    columns = "worker int, epoch int, iteration long, timestamp timestamp, loss double, accuracy double, samples long"
    run = spark.sql("SELECT * FROM VALUES (1), (2), (4)").selectExpr(
        "0 worker",
        "0 epoch",
        "cast(col1 as long) iteration",
        "timestamp_seconds(1700000000 + col1 * 2) timestamp",
        "cast(col1 as double) loss",
        "col1 / 4D accuracy",
        "10L samples",
    )
    assert [f"{name} {kind}" for name, kind in run.dtypes] == columns.replace("long", "bigint").split(", ")
    assert list(metrics.per_worker(run)["seconds"]) == [0.0, 2.0, 6.0]
    assert metrics.hardware_efficiency(run) == 6.0
