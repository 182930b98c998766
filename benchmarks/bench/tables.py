"""Tables by rows, compared with plain Keras, with the dense exchange, and with a small table.

The full section takes about half an hour, and ``--only`` selects cases by a part of their names, such as "dense:" or
": 4000000 rows, SGD". A training case has few rounds, and only one for a large table.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.measure import Case, Factory
from bench.processes import PATIENCE, Caller
from bench.whole_job import WORKERS, python_workers
from bench.workload import fit_rate, kept_frame, session, silent_trainer, steady_rate
from distkeras import Trainer
from distkeras.ps import rules
from distkeras.ps.checkpoint.checkpointer import Checkpoint

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

SECTION = "tables"
#: Ids of a row, width of the table, rows of a mini-batch, mini-batches of a window, and epochs; the first epoch is not
#: measured.
IDS, WIDTH, BATCH, WINDOW, EPOCHS = 4, 64, 512, 10, 20
#: The optimizers, with a learning rate at which no training diverges.
OPTIMIZERS = {"SGD": 0.01, "Adagrad": 0.01}
#: Rows of a table that stays dense with ``tables="auto"``.
FEW = 2_000
#: From this number of rows on, the time must not grow.
SOME = 100_000
#: Rows of a table of a gigabyte: a round takes minutes.
MANY = 4_000_000
#: Rows from which a case has one round, and the rounds of smaller tables.
_LARGE, _ROUNDS = 1_000_000, 2
_NOTE = f"epochs >= 2; DOWNPOUR, window {WINDOW}"
#: Windows with different ids, for the rows of a window in NumPy alone.
_WINDOWS = 16
#: Seconds between two polls of the workers' memory.
_POLL_SECONDS = 0.05

Frames = Callable[..., "DataFrame"]


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    sizes = (FEW, 20_000) if quick else (FEW, SOME, 1_000_000, MANY)
    count = 100_000 if quick else 200_000
    return [
        *(partial(_table, rows, count) for rows in sizes),
        partial(_snapshots, sizes[-2], count, 20 if quick else 100),
        partial(_memory, sizes[-1], count),
    ]


def model_of(rows: int, optimizer: str) -> keras.Model:
    """Return a compiled classifier over rows of ids, with one table."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    ids = keras.Input((IDS,), dtype="int32")
    table = layers.Embedding(rows, WIDTH, name="table")
    hidden = layers.Dense(32, activation="relu")(layers.Flatten()(table(ids)))
    model = keras.Model(ids, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(getattr(keras.optimizers, optimizer)(OPTIMIZERS[optimizer]), "binary_crossentropy")
    return model


def data_of(rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 ids ``(count, IDS)``, uniform, which is the worst case, and float32 labels ``(count,)``."""
    rng = np.random.default_rng(0)
    return rng.integers(0, rows, (count, IDS), np.int32), rng.integers(0, 2, count).astype(np.float32)


@contextmanager
def _frames(count: int, **config: str) -> Iterator[Frames]:
    """Yield a function that makes a cached DataFrame of ids below a number: of ``count`` rows, or a part of them."""
    arrow = {"spark__sql__execution__arrow__pyspark__enabled": "true"}
    with session(spark__driver__maxResultSize="0", **arrow, **config) as spark:
        kept = dict[tuple[int, int], "DataFrame"]()

        def frame(rows: int, part: int = 1) -> DataFrame:
            if (rows, part) not in kept:
                kept[rows, part] = kept_frame(spark, *data_of(rows, count // part), "array<int>", "float")
            return kept[rows, part]

        yield frame


@contextmanager
def _table(rows: int, count: int) -> Iterator[list[Case]]:
    kinds = [(optimizer, workers) for optimizer in OPTIMIZERS for workers in (1, 2)]
    two = [kind for kind in kinds if kind[1] == WORKERS]
    with _frames(count) as frame:
        yield [
            *(_beside_keras(rows, *kind, frame, count) for kind in kinds),
            *(_beside_dense(rows, *kind, frame) for kind in (kinds if rows == FEW else two) if rows < MANY),
            *(_beside_bare(rows, *kind, frame) for kind in two if rows == MANY),
        ]


def _rate(rows: int, optimizer: str, workers: int, frame: Frames) -> float:
    tables = ["table"] if rows > FEW else "auto"  # More rows must travel by rows.
    return steady(model_of(rows, optimizer), workers, frame(rows), tables)


def _case(kind: str, rows: int, optimizer: str, workers: int, frame: Frames, **options: Any) -> Case:
    ours = partial(_rate, rows, optimizer, workers, frame)
    settings = {"once": rows >= _LARGE, "rounds": _ROUNDS} | options
    return Case(SECTION, f"{kind}: {_name(rows, optimizer, workers)}", "samples/s", ours, **settings)


def _beside_keras(rows: int, optimizer: str, workers: int, frame: Frames, count: int) -> Case:
    note = (
        f"{_NOTE}; limit: {FEW} rows; naive: fit with steps_per_execution 1 or 10, the faster one, on both cores, in a "
        "process of its own"
    )
    return _case(
        *("plain Keras", rows, optimizer, workers, frame),
        limit=partial(_rate, FEW, optimizer, workers, frame) if rows > FEW else None,
        naive=partial(plain_rate, rows, optimizer, count),
        target_limit=0.7 if rows > FEW else None,
        target_naive=50.0 if rows == MANY else None,
        note=note,
    )


def _beside_dense(rows: int, optimizer: str, workers: int, frame: Frames) -> Case:
    # A whole table of 256 MB takes seconds to train a window and to exchange: its rate needs fewer of them.
    part, epochs = (20, 5) if rows >= _LARGE else (1, EPOCHS)
    return _case(
        *("dense", rows, optimizer, workers, frame),
        limit=None,
        naive=lambda: steady(model_of(rows, optimizer), workers, frame(rows, part), "dense", epochs=epochs),
        target_naive=1.0 if rows > FEW else 0.95,
        note=f"{_NOTE}; naive: the whole table travels",
    )


def _beside_bare(rows: int, optimizer: str, workers: int, frame: Frames) -> Case:
    return _case(
        *("bare NumPy", rows, optimizer, workers, frame),
        limit=lambda: with_bare_rows(_rate(FEW, optimizer, workers, frame), workers, bare_seconds(rows)),
        target_limit=0.7,
        note=f"{_NOTE}; limit: {FEW} rows, and in each window NumPy's unique, gather, add and scatter of {rows} rows",
    )


def bare_seconds(rows: int, windows: int = 64) -> float:
    """Return the processor seconds that NumPy takes for the rows of one window, at worker and server."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, (_WINDOWS, WINDOW * BATCH * IDS), np.int32)
    table, moved = np.zeros((rows, WIDTH), np.float32), np.full((ids.shape[1], WIDTH), 1e-3, np.float32)
    spent = 0.0
    for number in range(-_WINDOWS, windows):  # negative numbers warm up the memory
        began = time.thread_time()
        touched, _ = np.unique(ids[number % _WINDOWS], return_inverse=True)
        table[touched] += moved[: touched.size]
        _ = table[touched]  # These are the rows of a reply.
        spent += (time.thread_time() - began) * (number >= 0)
    return spent / windows


def with_bare_rows(rate: float, workers: int, seconds: float) -> float:
    """Return ``rate``, in samples a second, lowered as if each window took a worker ``seconds`` more."""
    samples = workers * WINDOW * BATCH
    return samples / (samples / rate + seconds)


def _name(rows: int, optimizer: str, workers: int) -> str:
    return f"{rows} rows, {optimizer}, {workers} worker{'s' * (workers > 1)}"


@contextmanager
def _snapshots(rows: int, count: int, every: int) -> Iterator[Case]:
    touched = rows // 100
    with _frames(count) as frame:

        def rate(checkpoint: Checkpoint | None = None) -> float:
            return steady(model_of(rows, "SGD"), 2, frame(touched), ["table"], checkpoint)

        def ours() -> float:
            with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as folder:
                return rate(Checkpoint(folder, every, keep=1000))  # This keeps the first snapshot to the end.

        name = f"snapshots every {every} commits: {_name(rows, 'SGD', 2)}"
        note = (
            f"{_NOTE}, from the first snapshot on, which has all rows; limit: no snapshots; one row in a hundred "
            "changes from one snapshot to the next"
        )
        yield Case(SECTION, name, "samples/s", ours, rate, target_limit=0.9, rounds=_ROUNDS, note=note)


@contextmanager
def _memory(rows: int, count: int) -> Iterator[Case]:
    small = min(SOME, rows // 2)
    # A reused worker process would have the memory of the previous model.
    with _frames(count, spark__python__worker__reuse="false") as frame:

        def workers_of(table: int) -> float:
            """Return how many workers a gibibyte would hold."""
            return (1 << 30) / peak_of_workers(model_of(table, "SGD"), frame(small))

        sides = (partial(workers_of, rows), partial(workers_of, small))
        name, once = f"peak memory of a worker: {rows} rows", rows == MANY
        note = f"limit: {small} rows; the same ids; SGD, 1 worker, window {WINDOW}"
        yield Case(SECTION, name, "workers/GiB", *sides, target_limit=0.95, once=once, note=note)


def _plain(rows: int, optimizer: str, count: int) -> float:
    model, (x, y) = model_of(rows, optimizer), data_of(rows, count)
    rates = []
    for steps in (1, 10):  # in one call; of a large table, one step takes a second
        model.steps_per_execution = steps
        model.make_train_function(force=True)
        first = slice(steps * BATCH)
        model.fit(x[first], y[first], batch_size=BATCH, verbose=0)  # The first call traces the steps.
        rates.append(fit_rate(model, x, y, BATCH))
    return max(rates)


def plain_rate(rows: int, optimizer: str, count: int) -> float:
    """Return the samples a second of plain Keras, in a separate process, whose memory is freed with it.

    Fewer than ``count`` samples are used for a large table, with which a step takes a second.
    """
    count = min(count, BATCH * max(10, min(400, 40_000_000 // rows)))
    with Caller() as process:
        return float(process.call(_plain, rows, optimizer, count))


def steady(
    model: keras.Model,
    workers: int,
    frame: DataFrame,
    tables: Any,
    checkpoint: Checkpoint | None = None,
    epochs: int = EPOCHS,
) -> float:
    """Return the `steady_rate` of one training; with a ``checkpoint``, from its first snapshot on."""
    trainer = _trainer(model, workers, tables, epochs)
    trainer.train(frame, checkpoint=checkpoint)
    written = [file.stat().st_mtime for file in Path(checkpoint.uri).glob("*snapshot*")] if checkpoint else [0.0]
    return steady_rate(trainer, min(written))


def _trainer(model: keras.Model, workers: int, tables: Any, epochs: int) -> Trainer:
    return silent_trainer(model, rules.make("downpour", window=WINDOW), workers, BATCH, epochs, tables=tables)


def peak_of_workers(model: keras.Model, frame: DataFrame) -> int:
    """Return the peak memory of a Python worker of Spark, in bytes, while the model is trained by rows."""
    peaks, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(_POLL_SECONDS):
            peaks.append(_workers_peak())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        _trainer(model, 1, ["table"], 2).train(frame)
    finally:
        ended.set()
        thread.join(PATIENCE)
    return max(peaks)


def _workers_peak() -> int:
    """Return the largest peak memory of Spark's Python worker processes, from the kernel."""
    peak = 0
    for pid in python_workers():
        with suppress(OSError):  # The process has ended.
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peak = max([peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))])
    return peak
