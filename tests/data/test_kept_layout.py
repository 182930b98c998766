"""Which rows lie where an earlier job has put them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras.data.columns import Column
from distkeras.data.kept_layout import KeptLayout
from distkeras.data.ordering import partitioned
from distkeras.data.spec import DataSpec


@pytest.fixture
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    """Kept by Spark."""
    kept = spark.range(40).select(F.col("id").alias("x"), (F.col("id") % 2).alias("y")).persist()
    yield kept
    kept.unpersist()


def laid_out(df: DataFrame, workers: int = 2, seed: int = 0) -> DataFrame:
    return partitioned(df, DataSpec((Column("x"),), (Column("y"),), seed=seed), workers)


def test_the_same_rows_in_the_same_order_lie_there(rows: DataFrame) -> None:
    layout = KeptLayout()
    first = layout.of(laid_out(rows))
    assert layout.of(laid_out(rows.select("*"))) is first
    assert [row.asDict() for row in first.collect()] == [row.asDict() for row in laid_out(rows).collect()]
    assert first.rdd.getNumPartitions() == 2


@pytest.mark.parametrize("options", [{"seed": 1}, {"workers": 3}])
def test_another_order_is_another_layout(rows: DataFrame, options: dict[str, int]) -> None:
    layout = KeptLayout()
    first = layout.of(laid_out(rows))
    assert layout.of(laid_out(rows, **options)) is not first


def test_other_rows_are_another_layout(rows: DataFrame) -> None:
    layout = KeptLayout()
    first = layout.of(laid_out(rows))
    assert layout.of(laid_out(rows.where("x > 3"))) is not first


def test_rows_that_are_kept_anew_may_be_others(rows: DataFrame) -> None:
    layout = KeptLayout()
    first = layout.of(laid_out(rows))
    rows.unpersist()
    again = laid_out(rows)
    assert layout.of(again) is again
    rows.persist()
    assert layout.of(laid_out(rows)) not in (first, again)


def test_what_is_drawn_from_kept_rows_may_be_others_each_time(rows: DataFrame) -> None:
    drawn = laid_out(rows.where(F.rand() >= 0))
    assert KeptLayout().of(drawn) is drawn


def test_what_reads_a_source_as_well_may_be_others(spark: SparkSession, rows: DataFrame) -> None:
    more = laid_out(rows.union(spark.range(3).select("id", "id")))
    assert KeptLayout().of(more) is more
