"""A table that no process may hold: trained on Spark, saved, exported and predicted from, in limited memory.

Two jobs have the same rows of data. The ids of the first one are those of a small table; what a process of the second
one has more than the same process of the first one is for the table.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self
from unittest.mock import patch

import psutil

from bench.measure import Case
from bench.processes import PATIENCE
from bench.whole_job import WORKERS, python_workers
from bench.workload import session, silent_trainer
from distkeras.ps.errors import DistkerasError
from distkeras.ps.rules import make
from distkeras.ps.world.processes import Child

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

#: The width of the table, rows of a mini-batch, mini-batches of a window, and commits between two snapshots.
WIDTH, BATCH, WINDOW, EVERY = 128, 512, 10, 50
#: Rows of the small table.
FEW = 1_000
SHARDS = 4
#: The part of the table's bytes that a process may need for it. Files of rows take some hundred megabytes of buffers.
SHARE = 0.75
#: The learning rate, a power of two: all sums are exact, in any order.
RATE = 2.0**-10
#: A label that no prediction reaches, so that the gradient of each element is 1 or -1.
_FAR = 1e6
_POLL_SECONDS = 0.05

#: The peak memory of each kind of process, in bytes.
Peaks = dict[str, int]
#: ``spawn(most)`` starts a server's process that may have ``most`` bytes of data, as each of its children.
Spawn = Callable[[int], Child]


class Watch:
    """Samples the memory that belongs to each process alone, without pages of files, until it is closed."""

    def __init__(self, phase: str) -> None:
        self._phase, self.peaks = phase, defaultdict[str, int](int)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            for kind, pid in _processes():
                with suppress(OSError, StopIteration):  # The process has ended.
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    nbytes = next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
                    name = f"{self._phase}, {kind}"
                    self.peaks[name] = max(self.peaks[name], nbytes)


def _processes() -> Iterator[tuple[str, int]]:
    yield "driver", os.getpid()
    tasks, own = python_workers(), psutil.Process()
    yield from (("Spark task", child.pid) for child in own.children(recursive=True) if child.pid in tasks)
    for child in own.children():
        with suppress(psutil.NoSuchProcess):
            if "distkeras.ps" in child.cmdline():
                shards = child.children()
                yield "sequencer" if shards else "server", child.pid
                for shard in shards:
                    yield "shard", shard.pid


def model_of(rows: int, folder: str) -> keras.Model:
    """Return a compiled model that adds up a row of its table; each row moves by `RATE`, up or down, at each visit."""
    import keras

    from distkeras.layers import WideEmbedding

    layers = keras.layers
    ids = keras.Input((1,), dtype="int64")
    vector = layers.Flatten()(WideEmbedding(rows, WIDTH, folder, scale=0.0, name="table")(ids))
    total = layers.Dense(1, use_bias=False, kernel_initializer="ones", trainable=False)(vector)
    bias = layers.Dense(1)(layers.Rescaling(0.0)(vector))
    model = keras.Model(ids, layers.Add()([total, bias]))
    model.compile(keras.optimizers.SGD(RATE), keras.losses.MeanAbsoluteError(reduction="sum"))
    return model


def data_of(spark: SparkSession, count: int, rows: int) -> DataFrame:
    """Return ``count`` ids below ``rows``, each equally often, with labels of two signs."""
    columns = [f"id % {rows} AS features", f"IF(id % 2 = 0, {_FAR}, -{_FAR}) AS label"]
    return spark.range(0, count, 1, WORKERS).selectExpr(*columns)


def trained(spark: SparkSession, count: int, rows: int, shards: int, *, saves: bool = True) -> tuple[int, Peaks]:
    """Return how many rows are saved and predicted as expected, and peaks of memory."""
    from distkeras import Checkpoint, Network
    from distkeras.transformers import ModelPredictor

    frame = data_of(spark, count, rows)
    with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as folder:
        model, rule = model_of(rows, f"{folder}/rows"), make("downpour", window=WINDOW)
        trainer = silent_trainer(model, rule, WORKERS, BATCH, 1, network=Network(shards=shards))
        checkpoint = Checkpoint(f"{folder}/checkpoint", every=EVERY) if saves else None
        with Watch("training") as training:
            model = trainer.train(frame, checkpoint=checkpoint)
        layer = model.get_layer("table")
        exported = spark.read.parquet(layer.rows).count()
        if exported != rows:
            raise ValueError(f"{rows} rows must be saved. Received: {exported}")
        with Watch("prediction") as prediction:
            predicted = ModelPredictor(model, batch_size=BATCH).transform(frame)
            moved = WIDTH * RATE * (count // rows)
            right = f"prediction[0] = IF(features % 2 = 0, {moved}, -{moved})"
            found = predicted.where(right).select("features").distinct().count()
    return found, training.peaks | prediction.peaks


@contextmanager
def limited(spawn: Spawn, most: int) -> Iterator[None]:
    """Start all servers, also those after a loss, with ``most`` bytes of memory."""
    with ExitStack() as stack:
        for module in ("training.run", "ps.server.process"):
            stack.enter_context(patch(f"distkeras.{module}.spawn_server", lambda *_: spawn(most)))
        yield


@contextmanager
def table_case(section: str, rows: int, idle: int, spawn: Spawn) -> Iterator[Case]:
    """Yield the case of a table of ``rows`` rows; ``idle`` bytes of memory has a server without one."""
    nbytes = 4 * WIDTH * rows
    most, notes = idle + nbytes, list[str]()

    def ours(spark: SparkSession) -> float:
        try:
            with limited(spawn, most):
                trained(spark, rows, rows, 1, saves=False)
        except DistkerasError as error:
            notes.append(f"with {most / 1e6:.0f} MB a process, one server ends the job: {error.message}")
        else:
            raise ValueError(f"one server must need more than {most} bytes")
        with limited(spawn, most):
            _, before = trained(spark, rows, FEW, SHARDS)
            found, peaks = trained(spark, rows, rows, SHARDS)
        pairs = (f"{kind} {before[kind] / 1e6:.0f} and {peak / 1e6:.0f} MB" for kind, peak in peaks.items())
        notes.append(f"peaks with {FEW} and with all rows: {', '.join(pairs)}")
        greedy = [kind for kind, peak in peaks.items() if peak - before[kind] > SHARE * nbytes]
        if greedy:
            raise ValueError(f"no process may need {SHARE:.0%} of the table for it. Received: {'; '.join(notes)}")
        return float(found)

    with session(spark__python__worker__reuse="false") as spark:
        yield Case(
            section,
            f"limited memory, a table of {nbytes / 1e6:.3g} MB, {SHARDS} shards",
            "trained rows",
            partial(ours, spark),
            lambda: float(rows),
            target_limit=1.0,
            once=True,
            note=lambda: "; ".join(notes),
        )
