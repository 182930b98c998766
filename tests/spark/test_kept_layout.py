"""Kept layouts: a job reads the layout of an earlier job only if its own would be the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import partitioned
from distkeras.spark.kept_layout import Arrangement, KeptLayout

#: Pairs of layouts that are drawn without `--pairs`: by default, and in the slow test.
FEW, MANY = 4, 200


@pytest.fixture
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    """Yield a cached DataFrame."""
    kept = spark.range(40).select(F.col("id").alias("x"), (F.col("id") % 2).alias("y")).persist()
    yield kept
    kept.unpersist()


def lay_out(
    layout: KeptLayout | None, source: DataFrame, label: str = "y", *, workers: int = 2, seed: int = 0
) -> DataFrame:
    """Lay out rows as the trainer does; without ``layout`` as in a first job."""
    spec = DataSpec((Column("x"),), (Column(label),), seed=seed)
    df = partitioned(source, spec, workers)
    if layout is None:
        return df
    return layout.of(df, Arrangement(source, ("x", label), (spec.columns, seed, workers)))


def places(df: DataFrame) -> list[tuple[Any, ...]]:
    """Return each row with its partition and its column names, in the order of the rows."""
    return [tuple(row.asDict().items()) for row in df.select(F.spark_partition_id().alias("partition"), "*").collect()]


def test_a_layout_of_the_same_rows_in_the_same_order_is_reused(rows: DataFrame) -> None:
    layout = KeptLayout()
    first = lay_out(layout, rows)
    assert lay_out(layout, rows.select("*")) is first
    assert places(first) == places(lay_out(None, rows))
    assert first.rdd.getNumPartitions() == 2


@pytest.mark.slow
def test_selected_and_renamed_columns_have_their_own_layout(rows: DataFrame) -> None:
    layout = KeptLayout()
    first = lay_out(layout, rows)
    named = rows.withColumnRenamed("y", "target").select("target", "x")
    assert lay_out(layout, named, "target") is not first
    assert lay_out(layout, named, "target") is lay_out(layout, named, "target")
    assert places(lay_out(layout, named, "target")) == places(lay_out(None, named, "target"))


@pytest.mark.slow
def test_columns_that_swapped_their_names_are_other_columns(rows: DataFrame) -> None:
    layout = KeptLayout()
    lay_out(layout, rows)
    swapped = rows.select(F.col("y").alias("x"), F.col("x").alias("y"))
    assert places(lay_out(layout, swapped)) == places(lay_out(None, swapped))


@pytest.mark.parametrize("options", [{"seed": 1}, {"workers": 3}])
def test_another_order_has_another_layout(rows: DataFrame, options: dict[str, Any]) -> None:
    layout = KeptLayout()
    first = lay_out(layout, rows)
    assert lay_out(layout, rows, **options) is not first


def test_rows_that_are_cached_again_are_laid_out_again(rows: DataFrame) -> None:
    layout = KeptLayout()
    first = lay_out(layout, rows)
    rows.unpersist()
    assert lay_out(layout, rows) is not first
    assert layout._kept is not None  # noqa: SLF001 - rows that are not cached do not remove the earlier layout
    rows.persist()
    assert lay_out(layout, rows) is not first


def test_another_setting_of_the_session_has_another_layout(spark: SparkSession, rows: DataFrame) -> None:
    layout = KeptLayout()
    first = lay_out(layout, rows)
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        assert lay_out(layout, rows) is not first
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


@pytest.mark.parametrize(
    "derived",
    [
        lambda rows: rows.where("x > 3"),
        lambda rows: rows.where(F.rand() >= 0),
        lambda rows: rows.select("x", (F.col("y") + 1).alias("y")),
        lambda rows: rows.select("x", F.current_timestamp().cast("long").alias("y")),
        lambda rows: rows.union(rows),
        lambda rows: rows.sample(0.5),
        lambda rows: rows.limit(4),
        lambda rows: rows.join(rows.select(F.col("x").alias("other")), F.col("x") == F.col("other")).select("x", "y"),
    ],
)
def test_computed_rows_are_laid_out_each_time(rows: DataFrame, derived: Callable[[DataFrame], DataFrame]) -> None:
    layout = KeptLayout()
    made = derived(rows)
    assert lay_out(layout, made) is not lay_out(layout, made)


@pytest.mark.slow
def test_a_subquery_is_evaluated_again(spark: SparkSession, rows: DataFrame) -> None:
    """The table of a subquery is not among the plan's leaves."""
    layout = KeptLayout()
    rows.createOrReplaceTempView("kept_rows")
    spark.range(5).write.mode("overwrite").saveAsTable("limits")
    query = "select * from kept_rows where x < (select max(id) from limits)"
    try:
        assert len(places(lay_out(layout, spark.sql(query)))) == 4
        spark.range(11).write.mode("overwrite").saveAsTable("limits")
        assert len(places(lay_out(layout, spark.sql(query)))) == 10
    finally:
        spark.sql("drop table limits")
        spark.catalog.dropTempView("kept_rows")


def test_cached_rows_that_spark_has_dropped_are_laid_out_again(rows: DataFrame) -> None:
    """Rows that were lost with an executor, or unpersisted as RDDs, are computed again from the current data."""
    layout = KeptLayout()
    first = lay_out(layout, rows)
    assert lay_out(layout, rows) is first
    for rdd in rows.sparkSession.sparkContext._jsc.getPersistentRDDs().values():  # noqa: SLF001 - PySpark has no public access
        rdd.unpersist()
    assert lay_out(layout, rows) is not first


def test_an_ambiguous_name_is_refused_again(rows: DataFrame) -> None:
    layout = KeptLayout()
    lay_out(layout, rows)
    twice = rows.select("x", "y", F.col("y").alias("X"))
    assert layout.of(rows, Arrangement(twice, ("x", "y"), 0)) is rows


# Drawn pairs: the rows are the same with and without the cache

Change = Callable[[DataFrame], DataFrame]
CHANGES: dict[str, Change] = {
    "as it is": lambda df: df,
    "all columns": lambda df: df.select("*"),
    "other order": lambda df: df.select("w", "y", "x"),
    "swapped": lambda df: df.select("x", F.col("y").alias("w"), F.col("w").alias("y")),
    "rotated": lambda df: df.select(F.col("w").alias("x"), F.col("x").alias("y"), F.col("y").alias("w")),
    "twice": lambda df: df.select("x", "y", F.col("y").alias("w")),
    "by name": lambda df: df.withColumnRenamed("x", "z").withColumnRenamed("y", "x").withColumnRenamed("z", "y"),
    "under an alias": lambda df: df.alias("t").select("t.x", "t.y", "t.w"),
    "filtered": lambda df: df.where("x % 3 != 1"),
    "filtered otherwise": lambda df: df.where("x % 3 != 2"),
    "cast": lambda df: df.withColumn("x", F.col("x").cast("int")),
    "computed": lambda df: df.withColumn("y", F.col("y") * 2),
    "limited by a table": lambda df: df.where("x < (select max(id) from changing)"),
    "listed in a table": lambda df: df.where("x in (select id from changing)"),
    "joined with a table": lambda df: df.join(df.sparkSession.table("changing"), F.col("x") == F.col("id")).drop("id"),
    "without duplicates": lambda df: df.dropDuplicates(["y"]).select("x", "y", "w").where("x < 0"),
    "kept again": lambda df: df.withColumn("y", F.col("y") + 1).persist(),
    "kept columns swapped": lambda df: df.select("x", F.col("y").alias("w"), F.col("w").alias("y")).persist(),
}


# The seed of the few pairs is one with which a layout is reused.
@pytest.mark.parametrize(("pairs", "seed"), [(FEW, 4), pytest.param(MANY, 20, marks=pytest.mark.slow)])
def test_the_second_of_two_drawn_jobs_reads_the_same_rows_as_alone(
    spark: SparkSession, pairs: int, seed: int, pytestconfig: pytest.Config
) -> None:
    """The second of two jobs that differ in one setting reads the same rows as it would alone."""
    pairs = pytestconfig.getoption("--pairs") or pairs
    draw = random.Random(seed)
    base = spark.range(24).selectExpr("id as x", "id % 4 as y", "id % 5 + 0.5 as w").persist()
    spark.range(7).write.mode("overwrite").saveAsTable("changing")
    layout, reused = KeptLayout(), 0
    before: DataFrame | None = None
    try:
        for number in range(pairs):
            if draw.random() < 0.2:
                spark.range(draw.randrange(3, 20)).write.mode("overwrite").saveAsTable("changing")
            if draw.random() < 0.1:
                base.unpersist()
                base.persist()
            name = draw.choice(list(CHANGES))
            source = CHANGES[name](base)
            label = draw.choice(["y", "y", "w"])
            options = {"workers": draw.choice([1, 1, 2]), "seed": draw.choice([0, 0, 1])}
            for _ in range(draw.choice([1, 2])):
                found = lay_out(layout, source, label, **options)
                reused += found is before
                assert places(found) == places(lay_out(None, source, label, **options)), (number, name, label, options)
                before = found
    finally:
        spark.catalog.clearCache()
        spark.sql("drop table changing")
    assert reused > pairs // 20
