from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from distkeras.data.columns import Column
from distkeras.data.record_batches import ROWS_SETTING, rows_of_batch, sized_batches
from distkeras.data.spec import DataSpec


def spec(features: int) -> DataSpec:
    return DataSpec(features=(Column("x", (features,)),), labels=(Column("y", (), "int64"),), batch_size=4)


def lengths(df: DataFrame) -> list[int]:
    def count(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for record in records:
            yield pa.RecordBatch.from_arrays([pa.array([record.num_rows], pa.int64())], ["rows"])

    return [row["rows"] for row in df.mapInArrow(count, "rows long").collect()]


@pytest.mark.parametrize(
    ("features", "rows"),
    [(1, 10_000), (102, 10_000), (103, 9986), (784, 1334), (224 * 224 * 3, 16), (10**8, 16)],
)
def test_batches_have_a_size_in_bytes(features: int, rows: int) -> None:
    found = rows_of_batch(spec(features))
    assert found == rows
    if 16 < rows < 10_000:
        assert found * (4 * features + 8) <= 4 << 20 < (found + 1) * (4 * features + 8)


def test_spark_cuts_batches_of_that_size(spark: SparkSession) -> None:
    rows = spark.range(0, 5000, numPartitions=1)
    wide = spec(784)
    assert lengths(rows) == [5000]
    with sized_batches(spark, wide):
        assert lengths(rows) == [1334, 1334, 1334, 998]
    assert lengths(rows) == [5000]


def test_a_shuffle_is_planned_with_it_too(spark: SparkSession) -> None:
    """Spark plans what follows a shuffle anew, once that is over."""
    with sized_batches(spark, spec(784)):
        found = lengths(spark.range(0, 5000, numPartitions=2).repartition(1))
    assert sum(found) == 5000
    assert max(found) == 1334


def test_whoever_says_how_many_has_that_many(spark: SparkSession) -> None:
    spark.conf.set(ROWS_SETTING, "3000")
    try:
        with sized_batches(spark, spec(784)):
            assert lengths(spark.range(0, 5000, numPartitions=1)) == [3000, 2000]
        assert spark.conf.get(ROWS_SETTING) == "3000"
    finally:
        spark.conf.unset(ROWS_SETTING)


def test_what_is_set_meanwhile_stays(spark: SparkSession) -> None:
    try:
        with sized_batches(spark, spec(784)):
            spark.conf.set(ROWS_SETTING, "7")
        assert spark.conf.get(ROWS_SETTING) == "7"
    finally:
        spark.conf.unset(ROWS_SETTING)


def test_it_ends_with_an_error_as_well(spark: SparkSession) -> None:
    with pytest.raises(ZeroDivisionError), sized_batches(spark, spec(784)):
        raise ZeroDivisionError
    assert spark.conf.get(ROWS_SETTING) == "10000"
