"""The section "data": from DataFrames to shuffled mini-batches on the executors."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bench.measure import Case, Factory
from bench.workload import CLASSES, INPUTS, PATIENCE, WORKERS, answer, rows, session
from distkeras.data.columns import Column
from distkeras.data.ordering import partitioned
from distkeras.data.source import BatchSource
from distkeras.data.spec import DataSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SECTION = "data"
BATCH = 128
REPLAYS = 60
TURNS = 3
#: The share of the rows for the path over Python rows, which is slow.
FEW = 0.25
#: Rows of the case about memory, and its budget: a sixth of their size.
MEMORY_ROWS, SPOOL_BYTES = 30_000, 16 << 20
#: Memory of an executor, the part that Spark reserves, and `spark.memory.fraction` of the rest.
EXECUTOR_MIB, RESERVED_MIB, FRACTION = 512, 300, 0.1
#: For the case about data beyond memory: the ratio of data to the executors' memory, and the epochs.
TIMES, EPOCHS = 10, 3
COLUMNS = Column("features", (INPUTS,)), Column("label", (), "int32", classes=CLASSES)


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_spark, 8_000 if quick else 40_000), _memory, _beyond_memory]


def _spec(epochs: int = 1, spool_bytes: int = 256 << 20) -> DataSpec:
    # Rewindable: the rows are retained for later epochs, as in nearly every job.
    features, label = COLUMNS
    return DataSpec((features,), (label,), None, BATCH, epochs, spool_bytes=spool_bytes, rewindable=True)


@contextmanager
def _spark(count: int) -> Iterator[list[Case]]:
    with session() as spark, tempfile.TemporaryDirectory(prefix="distkeras-bench-") as directory:
        frames = _frames(spark, count, directory)
        found = [_first_pass(kind, frame, count) for kind, frame in frames.items()]
        found.append(_order(frames["cached arrays"], count))
        found.append(_replay(frames["cached arrays"], count))
        for case in found:
            for side in (case.ours, case.limit, case.naive):
                if side is not None:
                    side()
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

    def naive() -> float:
        size = BATCH

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

    return Case(
        SECTION,
        f"first pass, {kind}",
        "rows/s",
        lambda: _rows_per_second(plan, _spec(), count),
        lambda: _drain(plan, count),
        naive,
        target_limit=0.8,
        target_naive=6.0,
        turns=TURNS,
        note="limit: the same rows in the same order, without reading them; naive: repartition and rdd.mapPartitions",
    )


def _order(frame: DataFrame, count: int) -> Case:
    ordered = partitioned(frame, _spec(), WORKERS)
    anyhow = frame.select("features", "label").repartition(WORKERS)
    return Case(
        SECTION,
        "what a reproducible order costs",
        "rows/s",
        lambda: _drain(ordered, count),
        lambda: _drain(anyhow, count),
        note="limit: plain repartition, without reading the rows",
    )


def _replay(frame: DataFrame, count: int) -> Case:
    plan = partitioned(frame, _spec(), WORKERS)
    return Case(
        SECTION,
        "later epochs",
        "rows/s",
        lambda: _rows_per_second(plan, _spec(1 + REPLAYS), count, replay=True),
        None,
        lambda: _rows_per_second(plan, _spec(), count),
        target_naive=10.0,
        note="naive: the first pass",
    )


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


@contextmanager
def _memory() -> Iterator[Case]:
    """Yield the case of anonymous memory, without mapped files, whose pages the kernel can reclaim."""
    with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as directory:
        path = str(Path(directory) / "rows.arrow")
        _write_stream(path)

        def ours() -> float:
            receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
            process = multiprocessing.get_context("spawn").Process(target=_peak, args=(path, directory, sender))
            process.start()
            sender.close()
            peak = answer(receiver)
            process.join(PATIENCE)
            return float(_bound() / peak)

        ours()
        yield Case(
            SECTION,
            "memory against its bound",
            "bound/peak",
            ours,
            lambda: 1.0,
            target_limit=1.0,
            note="one worker, two epochs, six times the budget of the spool; bound: as `BatchSource` states it",
        )


@contextmanager
def _beyond_memory() -> Iterator[Case]:
    """Yield the case of rows that fit neither Spark's memory nor a worker's: both put them into files."""
    from distkeras.data.datasets import write_parquet

    each = int((EXECUTOR_MIB - RESERVED_MIB) * FRACTION) << 20
    count = TIMES * WORKERS * each // sum(column.row_bytes for column in COLUMNS)
    config = {"spark__executor__memory": f"{EXECUTOR_MIB}m", "spark__memory__fraction": str(FRACTION)}
    with (
        tempfile.TemporaryDirectory(prefix="distkeras-bench-") as directory,
        session(f"local-cluster[{WORKERS},1,{EXECUTOR_MIB}]", **config) as spark,
    ):
        frame = spark.read.parquet(write_parquet(Path(directory) / "rows", *rows(count), files=4 * WORKERS))
        plan = partitioned(frame, _spec(), WORKERS)
        case = Case(
            SECTION,
            f"{TIMES} times the executors' memory, {EPOCHS} epochs",
            "rows/s",
            lambda: _rows_per_second(plan, _spec(EPOCHS, each), count),
            lambda: _rows_per_second(plan, _spec(1, each), count),
            target_limit=1.0,
            turns=TURNS,
            note=f"{EXECUTOR_MIB} MiB an executor, of which Spark and the spool may each fill {each >> 20}; "
            "limit: the first pass alone",
        )
        case.ours()
        yield case


def _write_stream(path: str) -> None:
    """Write a partition as Spark would send it: an Arrow stream in record batches of 2000 rows."""
    x, y = rows(2000)
    offsets = pa.array(np.arange(len(x) + 1, dtype=np.int32) * INPUTS)
    batch = pa.RecordBatch.from_arrays(
        [pa.ListArray.from_arrays(offsets, pa.array(x.reshape(-1))), pa.array(y)], names=["features", "label"]
    )
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        for _ in range(MEMORY_ROWS // len(x)):
            stream.write_batch(batch)


def _bound() -> int:
    """Return the memory that the docstring of `BatchSource` allows, in bytes."""
    row = sum(column.row_bytes for column in COLUMNS)
    return SPOOL_BYTES + 16 * BATCH * row + (8 << 20) + 2 * (8 << 20) + 2 * 2000 * row + 8 * MEMORY_ROWS


def _peak(path: str, directory: str, sender: Connection) -> None:
    """Send the peak of the memory that draining a source takes in addition to that of this fresh process."""

    def drain(batches: int | None) -> None:
        with pa.OSFile(path) as file:
            stream = itertools.islice(pa.ipc.open_stream(file), batches)
            with BatchSource(stream, _spec(2, SPOOL_BYTES), worker=0, directory=directory) as source:
                for _ in source:
                    pass

    drain(1)  # Libraries load some of their parts on first use.
    before, most, over = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    drain(None)
    over.set()
    watcher.join()
    sender.send(most - before)


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
