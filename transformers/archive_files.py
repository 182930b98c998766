"""A ``.keras`` archive on the filesystem of a Spark session: rows of Parquet, beside Spark ML's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
