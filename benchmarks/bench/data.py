"""The section "data": from DataFrames to shuffled mini-batches on the executors."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bench.measure import Case, Factory
from bench.whole_job import WORKERS
from bench.workload import CLASSES, INPUTS, rows, session
from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import partitioned
from distkeras.data.source import BatchSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SECTION = "data"
BATCH = 128
REPLAYS = 60
TURNS = 3
#: The share of the rows for the path over Python rows, which is slow.
FEW = 0.25


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_spark, 8_000 if quick else 40_000)]


def _spec(epochs: int = 1) -> DataSpec:
    # Rewindable: the rows are retained for later epochs, as in nearly every job.
    features, label = Column("features", (INPUTS,)), Column("label", (), "int32", classes=CLASSES)
    return DataSpec((features,), (label,), None, BATCH, epochs, rewindable=True)


@contextmanager
def _spark(count: int) -> Iterator[list[Case]]:
    with session() as spark, tempfile.TemporaryDirectory(prefix="distkeras-bench-") as directory:
        frames = _frames(spark, count, directory)
        found = [_first_pass(kind, frame, count) for kind, frame in frames.items()]
        found.append(_order(frames["cached arrays"], count))
        found.append(_replay(frames["cached arrays"], count))
        for run in (run for case in found for run in (case.ours, case.limit, case.naive) if run):
            run()
        yield found


def _frames(spark: SparkSession, count: int, directory: str) -> dict[str, DataFrame]:
    """Return the same rows cached as arrays, in Parquet, and cached as ML vectors."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql.functions import col

    from distkeras.data.datasets import write_parquet

    def parquet(name: str) -> DataFrame:
        # Separate paths: Spark reads every plan that equals a cached one from the cache.
        return spark.read.parquet(write_parquet(Path(directory) / name, *rows(count), files=WORKERS))

    frames = {
        "cached arrays": parquet("arrays").cache(),
        "Parquet": parquet("parquet"),
        "cached ML vectors": parquet("vectors")
        .select(array_to_vector(col("features")).alias("features"), "label")
        .cache(),
    }
    for frame in frames.values():
        frame.write.format("noop").mode("overwrite").save()
    return frames


def _first_pass(kind: str, frame: DataFrame, count: int) -> Case:
    plan = partitioned(frame, _spec(), WORKERS)
    few = frame.limit(int(count * FEW)).cache()
    row_count = few.count()

    def naive(size: int = BATCH) -> float:
        def batches(records: Iterable[Any]) -> Iterator[int]:
            features, labels, found = [], [], 0
            for row in records:
                features.append(np.asarray(row.features, np.float32))
                labels.append(row.label)
                if len(features) == size:
                    order = np.random.permutation(size)
                    batch = np.asarray(features)[order], np.asarray(labels)[order]
                    found += min(map(len, batch))
                    features, labels = [], []
            yield found + len(features)

        began = time.perf_counter()
        found = few.repartition(WORKERS).rdd.mapPartitions(batches).collect()
        return _rate(sum(found), row_count, began)

    ours, limit = partial(_rows_per_second, plan, _spec(), count), partial(_drain, plan, count)
    note = "limit: the same rows in the same order, without reading them; naive: repartition and rdd.mapPartitions"
    return Case(SECTION, f"first pass, {kind}", "rows/s", ours, limit, naive, 0.8, 6.0, TURNS, note)


def _order(frame: DataFrame, count: int) -> Case:
    anyhow = frame.select("features", "label").repartition(WORKERS)
    ours, limit = (partial(_drain, each, count) for each in (partitioned(frame, _spec(), WORKERS), anyhow))
    note = "limit: plain repartition, without reading the rows"
    return Case(SECTION, "what a reproducible order costs", "rows/s", ours, limit, note=note)


def _replay(frame: DataFrame, count: int) -> Case:
    plan = partitioned(frame, _spec(), WORKERS)
    ours = partial(_rows_per_second, plan, _spec(1 + REPLAYS), count, replay=True)
    first = partial(_rows_per_second, plan, _spec(), count)
    return Case(SECTION, "later epochs", "rows/s", ours, None, first, target_naive=10.0, note="naive: the first pass")


def _drain(frame: DataFrame, count: int) -> float:
    """Return the rows a second of a job in which Spark sends all rows, and Python discards them."""

    def drain(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"rows": [sum(record.num_rows for record in records)]})

    began = time.perf_counter()
    found = frame.mapInArrow(drain, "rows long").collect()
    return _rate(sum(row["rows"] for row in found), count, began)


def _rows_per_second(frame: DataFrame, spec: DataSpec, count: int, *, replay: bool = False) -> float:
    """Return the rows a second as mini-batches: of the whole job, or with ``replay`` of the epochs after the first."""

    def drain(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found, began = 0, time.time()
        with BatchSource(records, spec, worker=0) as source:
            for batch in source:
                found += batch.size
                if batch.last and batch.epoch == 0:
                    began = time.time()
        yield pa.RecordBatch.from_pydict({"rows": [found], "began": [began], "ended": [time.time()]})

    began = time.perf_counter()
    tasks = frame.mapInArrow(drain, "rows long, began double, ended double").collect()
    if not replay:
        return _rate(sum(task["rows"] for task in tasks), count * spec.epochs, began)
    seconds = max(task["ended"] for task in tasks) - min(task["began"] for task in tasks)
    return float((sum(task["rows"] for task in tasks) - count) / seconds)


def _rate(found: int, expected: int, began: float) -> float:
    seconds = time.perf_counter() - began
    if found != expected:
        raise ValueError(f"every row must come once. Received: {found} rows of {expected}")
    return found / seconds
