"""Work that moves: one worker at a quarter of its speed, one partition with most rows, and a job in balance."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from bench.measure import Case, Factory
from bench.whole_job import WORKERS
from bench.workload import CLASSES, INPUTS, rows, session, silent_trainer
from distkeras.ps.rules import make

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

    from distkeras import Trainer

SECTION = "lending"
BATCH, WINDOW, EPOCHS = 128, 5, 6
#: Rows of the other partitions for each one of the largest, and the share of the time in which a slow worker runs.
UNEVEN, SHARE = 4, 0.25
#: Seconds of a cycle in which a slow worker runs and is stopped.
_CYCLE = 0.1
#: The largest part of the best time that a job may take, over the limit; and of the time without lending, in balance.
TARGET, BALANCED = 1 / 1.15, 0.98


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_lending, 8_000 if quick else 24_000)]


def model_of() -> keras.Model:
    """Return a compiled classifier, whose steps take some milliseconds."""
    import keras

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(500, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((INPUTS,)), *hidden, keras.layers.Dense(CLASSES, activation="softmax")])
    model.compile(keras.optimizers.SGD(1e-2), "sparse_categorical_crossentropy")
    return model


def rate_of(trainer: Trainer) -> float:
    """Return the samples a second from the first commit to the last one."""
    commits: Any = trainer.commits.toPandas()
    seconds = (commits["timestamp"].max() - commits["timestamp"].min()).total_seconds()
    samples = trainer.history.toPandas()["samples"].sum()
    return float(samples / seconds)


class SlowWorker:
    """Stops the process of one worker for most of the time, once it computes; a context."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        worker: psutil.Process | None = None
        while not self._over.is_set():
            if worker is None or not worker.is_running():
                worker = _busiest_worker()
                self._over.wait(_CYCLE)
                continue
            try:
                worker.send_signal(signal.SIGSTOP)
                self._over.wait(_CYCLE * (1 - SHARE))
                worker.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                worker = None
            self._over.wait(_CYCLE * SHARE)


def _busiest_worker() -> psutil.Process | None:
    """Return the process of a worker of this session that has begun to train, or None."""
    found: list[tuple[float, psutil.Process]] = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if "daemon" in command and process.children() == [] and "pyspark" in command:
                found.append((sum(process.cpu_times()[:2]), process))
        except psutil.NoSuchProcess:
            continue
    seconds, process = max(found, default=(0.0, None), key=lambda pair: pair[0])
    return process if seconds > 3.0 else None  # It has imported the backend.


def _frame(spark: SparkSession, count: int, shares: tuple[int, ...]) -> DataFrame:
    """Return rows in one partition for each share, which has that many of them."""
    import pandas as pd
    from pyspark.sql import functions as F

    x, y = rows(count)
    places = np.repeat(np.arange(len(shares)), [count * share // sum(shares) for share in shares])
    data = pd.DataFrame({"features": list(map(np.ndarray.tolist, x)), "label": y, "place": np.resize(places, count)})
    frame = spark.createDataFrame(data, "features array<float>, label int, place int")
    kept = frame.repartitionByRange(len(shares), F.col("place")).drop("place").cache()
    kept.count()
    return kept


def _rate(frame: DataFrame, slow: bool, lends: bool) -> float:
    from distkeras import Executors

    trainer = silent_trainer(
        model_of(),
        make("agn", window=WINDOW),
        WORKERS,
        BATCH,
        EPOCHS,
        partitioned_already=True,
        executors=Executors(lends=lends),
    )
    with SlowWorker() if slow else nullcontext():
        trainer.train(frame)
    return rate_of(trainer)


@contextmanager
def _lending(count: int) -> Iterator[list[Case]]:
    with session() as spark:
        even = _frame(spark, count, (1,) * WORKERS)
        uneven = _frame(spark, count, (UNEVEN, *(1,) * (WORKERS - 1)))
        case = partial(Case, SECTION, unit="samples/s", rounds=3)
        setting = (
            f"{WORKERS} workers, AGN, window {WINDOW}, batches of {BATCH}, {EPOCHS} epochs; naive: without lending"
        )
        balanced = partial(_rate, even, False, False)
        share = (WORKERS - 1 + SHARE) / WORKERS

        def of_slow() -> float:
            return share * balanced()

        yield [
            case(
                f"a worker at {SHARE:.0%} of its speed",
                ours=partial(_rate, even, True, True),
                limit=of_slow,
                naive=partial(_rate, even, True, False),
                target_limit=TARGET,
                note=f"{setting}; limit: {share:.0%} of the rate in balance; a worker is stopped in cycles",
            ),
            case(
                f"partitions with rows {UNEVEN} : 1",
                ours=partial(_rate, uneven, False, True),
                limit=balanced,
                naive=partial(_rate, uneven, False, False),
                target_limit=TARGET,
                note=f"{setting}; limit: the rate in balance",
            ),
            case(
                "partitions with equal rows",
                ours=partial(_rate, even, False, True),
                limit=None,
                naive=balanced,
                target_naive=BALANCED,
                note=setting,
            ),
        ]
