"""Stages on disk: as Spark ML has them, and written over under Spark Connect, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.ml.util import DefaultParamsWritable, DefaultParamsWriter, MLWriter

from distkeras.spark.cluster import context_of
from distkeras.spark.failures import short_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Bytes of a row: well below what Parquet and a Connect message take.
_CHUNK_BYTES = 8 << 20


def save_archive(spark: SparkSession, data: bytes, path: str) -> None:
    """Writes an archive below the folder of a saved stage."""
    rows = [
        (start // _CHUNK_BYTES, bytearray(data[start : start + _CHUNK_BYTES]))
        for start in range(0, len(data), _CHUNK_BYTES)
    ]
    spark.createDataFrame(rows, "part int, data binary").coalesce(1).write.parquet(f"{path}/model")


def load_archive(spark: SparkSession, path: str) -> bytes:
    """What `save_archive` has written there."""
    rows = spark.read.parquet(f"{path}/model").orderBy("part").collect()
    return b"".join(bytes(row["data"]) for row in rows)


class StageWriter(MLWriter):
    """Spark ML's writer, which cannot overwrite where there is no JVM to ask."""

    @short_errors
    def save(self, path: str) -> None:
        """Saves below ``path``; in place of what is there, after `overwrite`."""
        if self.shouldOverwrite and context_of(self.sparkSession) is None:
            # Spark's overwrite leaves nothing of the old folder, on every filesystem.
            self.sparkSession.createDataFrame([], "value string").write.mode("overwrite").text(path)
            self.saveImpl(path)
        else:
            super().save(path)


class ParamsWriter(StageWriter, DefaultParamsWriter):
    """Writes a stage that is parameters only."""


class ParamsWritable(DefaultParamsWritable):
    """A stage that is parameters only."""

    def write(self) -> MLWriter:
        """Writes Spark ML's metadata."""
        return ParamsWriter(self)  # type: ignore[arg-type]  # mixed into classes of parameters only
