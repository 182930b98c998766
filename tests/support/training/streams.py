"""Streams of files with one-hot rows, for the counting model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession


def arrive(folder: Path, number: int, rows: Sequence[int], size: int) -> None:
    """Add one file with the one-hot ``rows`` to the folder, or replace one; it appears atomically.

    Spark orders files by their modification times, which may be equal for two files written at once, so each file is
    dated one second after the latest.
    """
    folder.mkdir(exist_ok=True)
    latest = max((path.stat().st_mtime_ns for path in folder.glob("*.parquet")), default=0)
    features = pa.array(np.eye(size, dtype=np.float32)[list(rows)].tolist(), pa.list_(pa.float32()))
    columns = {"features": features, "label": pa.array(np.zeros(len(rows), np.float32))}
    pq.write_table(pa.table(columns), folder / f".{number:04}.parquet")
    draft = folder / f".{number:04}.parquet"
    later = max(draft.stat().st_mtime_ns, latest + 1_000_000_000)
    os.utime(draft, ns=(later, later))
    draft.rename(folder / f"{number:04}.parquet")


def arriving(spark: SparkSession, folder: Path) -> DataFrame:
    """Return the stream of these files, with a micro-batch for each file."""
    schema = "features array<float>, label float"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def forget_last_commit(checkpoint: Path) -> int:
    """Remove Spark's record that the last micro-batch is complete, as if the driver had died; return its number."""
    commits = checkpoint / "query" / "commits"
    number = max(int(path.name) for path in commits.glob("[0-9]*"))
    (commits / str(number)).unlink()
    (commits / f".{number}.crc").unlink(missing_ok=True)
    return number
