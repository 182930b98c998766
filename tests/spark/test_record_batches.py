"""The number of rows of a DataFrame in each record batch that Spark sends to Python."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.spark.record_stream import ROWS_SETTING, in_sized_batches, rows_of_batch


def spec(features: int) -> DataSpec:
    return DataSpec(features=(Column("x", (features,)),), labels=(Column("y", (), "int64"),), batch_size=4)


def lengths(df: DataFrame) -> list[int]:
    def count(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for record in records:
            yield pa.RecordBatch.from_arrays([pa.array([record.num_rows], pa.int64())], ["rows"])

    return [row["rows"] for row in df.mapInArrow(count, "rows long").collect()]


@pytest.mark.parametrize(
    ("features", "rows"), [(1, 10_000), (102, 10_000), (103, 9986), (784, 1334), (224 * 224 * 3, 16), (10**8, 16)]
)
def test_batches_have_a_size_in_bytes(features: int, rows: int) -> None:
    found = rows_of_batch(spec(features).row_bytes)
    assert found == rows
    if 16 < rows < 10_000:
        assert found * (4 * features + 8) <= 4 << 20 < (found + 1) * (4 * features + 8)


def test_only_the_given_dataframe_has_batches_of_that_size(spark: SparkSession) -> None:
    rows = spark.range(0, 5000, numPartitions=1)
    sized = in_sized_batches(rows, spec(784).row_bytes)
    before = dict(spark.conf.getAll)
    assert lengths(sized) == [1334, 1334, 1334, 998]
    assert lengths(rows) == [5000]
    assert dict(spark.conf.getAll) == before
    assert SparkSession.getActiveSession() is spark


def test_batches_after_a_shuffle_have_that_size(spark: SparkSession) -> None:
    """Spark plans the stages after a shuffle once the shuffle is complete."""
    found = lengths(in_sized_batches(spark.range(0, 5000, numPartitions=2).repartition(1), spec(784).row_bytes))
    assert sum(found) == 5000
    assert max(found) == 1334


def test_the_users_own_setting_is_kept(spark: SparkSession) -> None:
    spark.conf.set(ROWS_SETTING, "3000")
    try:
        assert lengths(in_sized_batches(spark.range(0, 5000, numPartitions=1), spec(784).row_bytes)) == [3000, 2000]
    finally:
        spark.conf.unset(ROWS_SETTING)


def test_cached_rows_are_read_from_the_cache(spark: SparkSession) -> None:
    rows = spark.range(10).persist()
    try:
        plan = in_sized_batches(rows, spec(784).row_bytes)._jdf.queryExecution().withCachedData().toString()  # noqa: SLF001 - PySpark has no public access to a plan
    finally:
        rows.unpersist()
    assert "InMemoryRelation" in plan
