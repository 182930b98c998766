"""Embeddings whose rows travel, compared with plain Keras and with the dense exchange of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.measure import Case, Factory
from bench.workload import PATIENCE, answer, fit_rate, session, steady_rate
from distkeras import Monitoring, Trainer
from distkeras.ps import rules

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

SECTION = "tables"
#: Ids of a row, width of the table, rows of a mini-batch, mini-batches of a window, and epochs, of which the first one
#: is not measured.
IDS, WIDTH, BATCH, WINDOW, EPOCHS = 4, 64, 512, 10, 10
#: The optimizers, with a rate at which nothing diverges.
OPTIMIZERS = {"SGD": 0.01, "Adagrad": 0.01}


def cases(quick: bool) -> list[Factory]:
    """All cases of the section."""
    tables = (2_000, 20_000) if quick else (2_000, 100_000, 1_000_000, 4_000_000)
    return [partial(_table, rows, 40_000 if quick else 200_000) for rows in tables]


def model_of(rows: int, optimizer: str) -> keras.Model:
    """Return a compiled classifier over rows of ids, with one table."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    ids = keras.Input((IDS,), dtype="int32")
    hidden = layers.Dense(32, activation="relu")(layers.Flatten()(layers.Embedding(rows, WIDTH, name="table")(ids)))
    model = keras.Model(ids, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(getattr(keras.optimizers, optimizer)(OPTIMIZERS[optimizer]), "binary_crossentropy")
    return model


def data_of(rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 ids ``(count, IDS)``, uniform, which is the worst case, and float32 labels ``(count,)``."""
    rng = np.random.default_rng(0)
    return rng.integers(0, rows, (count, IDS), np.int32), rng.integers(0, 2, count).astype(np.float32)


@contextmanager
def _table(rows: int, count: int) -> Iterator[list[Case]]:
    x, y = data_of(rows, count)
    plain = min(count, BATCH * max(20, min(400, 40_000_000 // rows)))  # of a large table, a step takes a second
    with session(spark__driver__maxResultSize="0") as spark:
        frame = spark.createDataFrame(_pandas(x, y), "features array<int>, label float").repartition(2).cache()
        frame.count()
        kinds = [(optimizer, workers) for optimizer in OPTIMIZERS for workers in (1, 2)]
        yield [
            *(_beside_keras(rows, *kind, frame, plain) for kind in kinds),
            *(_beside_dense(rows, *kind, frame) for kind in kinds if 2_000 < rows <= 100_000),
        ]


def _pandas(x: np.ndarray, y: np.ndarray) -> Any:
    import pandas as pd

    return pd.DataFrame({"features": x.tolist(), "label": y})


def _beside_dense(rows: int, optimizer: str, workers: int, frame: DataFrame) -> Case:
    return Case(
        SECTION,
        f"{_name(rows, optimizer, workers)}, and dense",
        "samples/s",
        lambda: steady(rows, optimizer, workers, frame, "auto"),
        None,
        lambda: steady(rows, optimizer, workers, frame, "dense"),
        target_naive=1.0,
        note=f"epochs >= 2; DOWNPOUR, window {WINDOW}; naive: the whole table travels",
    )


def _name(rows: int, optimizer: str, workers: int) -> str:
    return f"{rows} rows, {optimizer}, {workers} worker{'s' * (workers > 1)}"


def _plain(rows: int, optimizer: str, count: int, sender: Connection) -> None:
    """Send the samples a second of plain Keras."""
    sender.send(fit_rate(model_of(rows, optimizer), *data_of(rows, count), BATCH))


def plain_rate(rows: int, optimizer: str, count: int) -> float:
    """Return the samples a second of plain Keras, in a process of its own: its memory ends with it."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_plain, args=(rows, optimizer, count, sender))
    process.start()
    sender.close()
    rate: float = answer(receiver)
    process.join(PATIENCE)
    return rate


def _beside_keras(rows: int, optimizer: str, workers: int, frame: DataFrame, plain: int) -> Case:
    return Case(
        SECTION,
        _name(rows, optimizer, workers),
        "samples/s",
        lambda: steady(rows, optimizer, workers, frame, "auto"),
        None,
        lambda: plain_rate(rows, optimizer, plain),
        target_naive=50.0 if rows == 4_000_000 else None,
        note=f"epochs >= 2; DOWNPOUR, window {WINDOW}; naive: fit on both cores, in a process of its own",
    )


def steady(rows: int, optimizer: str, workers: int, frame: DataFrame, tables: str) -> float:
    """The `steady_rate` of one training."""
    trainer = Trainer(
        model_of(rows, optimizer),
        rules.make("downpour", window=WINDOW),
        tables=tables,
        num_workers=workers,
        batch_size=BATCH,
        num_epoch=EPOCHS,
        monitoring=Monitoring(progress=False),
    )
    trainer.train(frame)
    return steady_rate(trainer)
