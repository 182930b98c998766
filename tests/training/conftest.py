"""Fixtures: small DataFrames, and the check that a job leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.small_jobs import ROWS
from support.training.spark_jobs import assert_nothing_left, blobs, counting_rows, table


@pytest.fixture
def nothing_left() -> Iterator[None]:
    yield
    assert_nothing_left()


@pytest.fixture(scope="module")
def ones(spark: SparkSession) -> DataFrame:
    return counting_rows(spark, ROWS).cache()


@pytest.fixture(scope="module")
def clouds(spark: SparkSession) -> DataFrame:
    return table(spark, *blobs()).cache()
