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
    """One more file, whole from the first moment that it is seen, or in place of one: the one-hot ``rows``.

    Spark takes files in the order of their times, which the system keeps too coarsely for two that are written at once.
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
    """The stream of these files: a micro-batch for each."""
    schema = "features array<float>, label float"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def forget_last_commit(checkpoint: Path) -> int:
    """Take Spark's note back that a micro-batch was done, as if the driver had died before; return its number."""
    commits = checkpoint / "query" / "commits"
    number = max(int(path.name) for path in commits.glob("[0-9]*"))
    (commits / str(number)).unlink()
    (commits / f".{number}.crc").unlink(missing_ok=True)
    return number
