"""Validation rows that were kept from an earlier job equal those that would be read now, for drawn histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras.data.batches import Batch
from distkeras.data.columns import Column
from distkeras.data.source import collect
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import DistkerasError
from distkeras.spark.kept_layout import KeptRows
from distkeras.training import bound_data

#: Histories that are drawn by default and in the slow test, and the jobs of each.
FEW, MANY, JOBS = 4, 60, 4
CHANGED_SETTINGS = {
    "spark.sql.session.timeZone": "Asia/Tokyo",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.caseSensitive": "true",
}


class World:
    """The data of a history of jobs: files, a table, a view, cached rows of each, and settings."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.drawn = spark, folder, 0
        self.write()
        self.fill()
        self.view()
        self.keep()

    def write(self) -> None:
        """Replace the files without Spark's knowledge."""
        self.drawn += 1
        x = np.arange(8) + 100 * self.drawn
        pq.write_table(pa.table({"x": x, "y": x % 3, "w": x / 2.0, "at": x * 10**9}), self.folder / "rows.parquet")

    def fill(self) -> None:
        """Replace the rows of a table through Spark."""
        self.drawn += 1
        made = self.spark.range(6).selectExpr(f"id + {self.drawn} as x", "id % 3 as y", "id * 1.5 as w", "id as at")
        made.write.mode("overwrite").saveAsTable("kept_rows_table")

    def view(self) -> None:
        """Replace the view."""
        self.drawn += 1
        made = self.spark.range(5).selectExpr(f"id * {self.drawn} as x", "id % 2 as y", "id + 0.5 as w", "id as at")
        made.createOrReplaceTempView("kept_rows_view")

    def keep(self) -> None:
        """Cache rows of all of them, and rows that are random or depend on settings."""
        files = self.spark.read.parquet(str(self.folder))
        self.kept = {
            "files": files.persist(),
            "table": self.spark.table("kept_rows_table").persist(),
            "view": self.spark.table("kept_rows_view").persist(),
            "random": files.withColumn("x", F.rand()).persist(),
            "hours": files.withColumn("x", F.hour(F.timestamp_seconds(F.col("x") * 3600))).persist(),
        }

    def forget(self) -> None:
        """Unpersist all rows."""
        for df in self.kept.values():
            df.unpersist()

    def keep_again(self) -> None:
        """Cache the current rows."""
        self.forget()
        self.keep()

    def keep_the_same(self) -> None:
        """Cache the rows of the same DataFrames again."""
        self.forget()
        for df in self.kept.values():
            df.persist()

    def change_settings(self) -> None:
        """Change each setting to its other value."""
        for name, value in CHANGED_SETTINGS.items():
            if self.spark.conf.get(name) == value:
                self.spark.conf.unset(name)
            else:
                self.spark.conf.set(name, value)

    def drop(self) -> None:
        """Drop the cached rows, which Spark computes again when they are read."""
        for rdd in self.spark.sparkContext._jsc.getPersistentRDDs().values():  # noqa: SLF001 - PySpark has no public access
            rdd.unpersist()

    def begin(self) -> None:
        """Restore the initial settings and cache the current rows."""
        for name in CHANGED_SETTINGS:
            self.spark.conf.unset(name)
        self.keep_again()

    def close(self) -> None:
        """Restore the session."""
        self.begin()
        self.forget()
        self.spark.sql("drop table kept_rows_table")
        self.spark.catalog.dropTempView("kept_rows_view")


CHANGES = (
    World.write,
    World.fill,
    World.view,
    World.forget,
    World.keep_again,
    World.keep_the_same,
    World.change_settings,
    World.drop,
)
SOURCES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "as they are": lambda df: df,
    "in another order": lambda df: df.select("w", "at", "y", "x"),
    "swapped": lambda df: df.select(F.col("y").alias("x"), F.col("x").alias("y"), "w"),
    "the same column twice": lambda df: df.select("x", F.col("x").alias("y"), "w"),
    "names that differ in case": lambda df: df.select("x", "y", "w", F.col("w").alias("X")),
    "under an alias": lambda df: df.alias("t").select("t.x", "t.y", "t.w"),
    "filtered": lambda df: df.where("x % 2 = 0"),
    "none": lambda df: df.where("x < -1"),
    "random": lambda df: df.withColumn("w", F.rand(7)),
    "of a zone": lambda df: df.withColumn("w", F.hour(F.timestamp_seconds("at")).cast("double")),
    "divided": lambda df: df.withColumn("w", F.expr("cast(x as tinyint)")),
    "in an outer session": lambda df: DataFrame(df._jdf, df.sparkSession.newSession()),  # noqa: SLF001 - rows of one session with settings of another
}


def result(read: Callable[[], Batch]) -> Any:
    """Return the rows that ``read`` returns, or the error that it raises."""
    try:
        batch = read()
    except DistkerasError as error:
        return type(error), error.message
    except PySparkException as error:  # the text has numbers that Spark never repeats
        return type(error)
    return [array.tolist() for array in (*batch.x, *batch.y)], batch.checksum


@contextmanager
def world_of(spark: SparkSession, folder: Path) -> Iterator[World]:
    folder.mkdir(exist_ok=True)
    world = World(spark, folder)
    try:
        yield world
    finally:
        world.close()


@pytest.mark.parametrize("histories", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_kept_rows_equal_the_rows_that_would_be_read(spark: SparkSession, tmp_path: Path, histories: int) -> None:
    reused = [0]

    @settings(
        max_examples=histories,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # shrinking a history takes long
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        kept: KeptRows[Batch] = KeptRows()
        world.begin()
        with mock.patch.object(bound_data, "_VALIDATION", kept):
            for _ in range(JOBS):
                for change in data.draw(st.lists(st.sampled_from(CHANGES), max_size=1)):
                    change(world)
                of, how = data.draw(st.sampled_from(sorted(world.kept))), data.draw(st.sampled_from(sorted(SOURCES)))
                label = Column(data.draw(st.sampled_from(["y", "w"])), classes=data.draw(st.sampled_from([None, 2, 3])))
                most = data.draw(st.sampled_from([3, 100]))
                spec = DataSpec((Column("x"),), (label,), seed=data.draw(st.integers(0, 1)))
                source = SOURCES[how](world.kept[of])
                alone = replace(spec, shuffle=False, batch_size=most)
                expected = result(lambda: collect(source, alone, most))  # noqa: B023 - called at once
                for _ in range(2):
                    before = kept._kept  # noqa: SLF001 - the test counts reuses
                    found = result(lambda: bound_data.validation_rows(source, spec, most))  # noqa: B023 - called at once
                    reused[0] += before is not None and kept._kept is before  # noqa: SLF001 - see above
                    assert found == expected, (of, how, label, most)

    with world_of(spark, tmp_path / "rows") as world:
        check()
    assert reused[0] > histories
