"""Cached rows: a second job reads the layout that the first job wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.small_jobs import EPOCHS, ROWS, counter
from support.training.spark_jobs import assert_nothing_left, counting_rows, counts


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


@pytest.mark.slow
def test_cached_rows_are_laid_out_once(spark: SparkSession) -> None:
    rows = counting_rows(spark, ROWS)
    train(rows)
    assert shuffles(spark, lambda: train(rows)) == 1
    rows.persist()
    assert shuffles(spark, lambda: train(rows)) == 1
    assert shuffles(spark, lambda: train(rows, batch_size=4)) == 0
    rows.unpersist()
    assert shuffles(spark, lambda: train(rows)) == 1
