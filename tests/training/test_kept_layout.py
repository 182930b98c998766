"""Cached rows: a second job reads the layout that the first job wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.small_jobs import EPOCHS, ROWS, counter
from support.training.spark_jobs import assert_nothing_left, counting_rows, counts

from distkeras.data.batches import Batch
from distkeras.data.columns import Column
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import BadValueError
from distkeras.training.bound_data import validation_rows


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert_nothing_left()


def shuffles(spark: SparkSession, job: Callable[[], Any]) -> int:
    """Return the number of shuffles that ``job`` starts; Spark numbers them."""
    context: Any = spark.sparkContext
    numbers = context._jsc.sc()  # noqa: SLF001 - PySpark has no public access to it
    first = numbers.newShuffleId()
    job()
    return int(numbers.newShuffleId()) - first - 1


def train(df: DataFrame, **options: Any) -> None:
    model = counter(**options).train(df)
    np.testing.assert_array_equal(counts(model), np.full(ROWS, EPOCHS))


def test_cached_rows_are_laid_out_once(spark: SparkSession) -> None:
    rows = counting_rows(spark, ROWS)
    train(rows)
    assert shuffles(spark, lambda: train(rows)) == 1
    rows.persist()
    assert shuffles(spark, lambda: train(rows)) == 1
    assert shuffles(spark, lambda: train(rows, batch_size=4)) == 0
    rows.unpersist()
    assert shuffles(spark, lambda: train(rows)) == 1


def test_cached_validation_rows_are_read_once_and_checked_each_time(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(float(number), number % 3) for number in range(20)], "x double, y int").persist()

    def read(classes: int | None = None, count_max: int = 10, **options: Any) -> Batch:
        spec = DataSpec((Column("x"),), (Column("y", dtype="int32", classes=classes),), **options)
        return validation_rows(rows, spec, count_max)

    first = read()
    expected = first.x[0].copy()
    assert shuffles(spark, read) == 0
    assert shuffles(spark, lambda: read(batch_size=7, epochs=3)) == 0
    first.x[0][:] = -1.0  # changes only this caller's copy
    np.testing.assert_array_equal(read().x[0], expected)
    assert (read(count_max=4).size, read(seed=3).size) == (4, 10)
    with pytest.raises(BadValueError):
        read(classes=2, count_max=20)
    assert read(classes=3, count_max=20).size == 20
    with pytest.raises(BadValueError):
        read(classes=2, count_max=20)
    rows.unpersist()
    assert shuffles(spark, read) == 1
