"""Rows of any length: what an open input costs if all rows have one length, and what padding costs if they differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.measure import Case, Factory
from bench.whole_job import WORKERS
from bench.workload import kept_frame, session, silent_trainer, steady_rate
from distkeras import Padding
from distkeras.ps.rules import make

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

SECTION = "lengths"
#: Numbers of a step, the steps of rows of one length, and the fewest and the most steps of rows that differ.
NUMBERS, EQUAL, FEWEST, MOST = 4, 50, 10, 500
BATCH, WINDOW = 32, 10
#: Epochs of rows of one length, and of rows that differ: seconds for which both workers train at the same time.
EPOCHS = {"convolution": (80, 16), "LSTM": (16, 4)}


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_lengths, kind, 800 if quick else 1_600) for kind in EPOCHS]


def model_of(kind: str, steps: int | None) -> keras.Model:
    """Return a compiled classifier of rows of so many ``steps``; None: of any number."""
    import keras

    keras.utils.set_random_seed(0)
    rows = keras.Input((steps, NUMBERS))
    if kind == "LSTM":
        hidden: Any = keras.layers.LSTM(32)(rows)
    else:
        filtered = keras.layers.Conv1D(32, 5, padding="same", activation="relu")(rows)
        hidden = keras.layers.GlobalMaxPooling1D()(keras.layers.Conv1D(32, 5, activation="relu")(filtered))
    model = keras.Model(rows, keras.layers.Dense(10, activation="softmax")(hidden))
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    return model


def _rate(kind: str, steps: int | None, frame: DataFrame, epochs: int, padding: Padding | None = None) -> float:
    model, rule = model_of(kind, steps), make("agn", window=WINDOW)
    trainer = silent_trainer(model, rule, WORKERS, BATCH, epochs, padding=padding)
    trainer.train(frame)
    return steady_rate(trainer)


@contextmanager
def _lengths(kind: str, count: int) -> Iterator[list[Case]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(FEWEST, MOST + 1, count)
    numbers, labels = rng.random((count, MOST * NUMBERS), np.float32), rng.integers(0, 10, count)
    numbers *= np.arange(MOST * NUMBERS) < lengths[:, None] * NUMBERS  # This is the column padded with 0.
    cut = [row[: length * NUMBERS] for row, length in zip(numbers, lengths, strict=True)]
    with session() as spark:
        kept = partial(kept_frame, spark, y=labels, features="array<float>", label="int")
        equal, padded, ragged = map(kept, (numbers[:, : EQUAL * NUMBERS], numbers, cut))
        some, few = EPOCHS[kind]
        longest = f"rows padded to {MOST} steps, {1 - lengths.mean() / MOST:.0%} of which are padding"
        sides: dict[str, tuple[Any, ...]] = {
            f"rows of {EQUAL} steps": (some, equal, None, equal, EQUAL, f"an input of {EQUAL} steps"),
            f"rows of {FEWEST} to {MOST} steps": (few, ragged, Padding(), padded, MOST, longest),
            f"rows of {FEWEST} to {MOST} steps in buckets": (few, ragged, Padding(bucket=True), padded, MOST, longest),
        }
        case = partial(Case, SECTION, unit="samples/s", limit=None, rounds=3)
        yield [
            case(
                f"{kind}, an open input, {name}",
                ours=partial(_rate, kind, None, rows, epochs, padding),
                naive=partial(_rate, kind, steps, plain, epochs),
                note=f"{WORKERS} workers, AGN, window {WINDOW}, batches of {BATCH}, epochs >= 2; naive: {note}",
            )
            for name, (epochs, rows, padding, plain, steps, note) in sides.items()
        ]
