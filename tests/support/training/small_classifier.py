"""A small classifier, mini-batches for it, and its weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from distkeras.data.batches import Batch
from distkeras.keras_model.replica import KerasReplica

ROWS = 16


def mini(x: tuple[np.ndarray, ...], y: tuple[np.ndarray, ...], weight: np.ndarray | None = None) -> Batch:
    return Batch(0, 0, False, x, y, weight)


def batches(count: int, rows: int = ROWS, weighted: bool = False, seed: int = 0) -> list[Batch]:
    draw = np.random.default_rng(seed)
    return [
        mini(
            (draw.normal(size=(rows, 6)).astype(np.float32),),
            (draw.integers(0, 3, rows),),
            draw.uniform(0.5, 2, rows).astype(np.float32) if weighted else None,
        )
        for _ in range(count)
    ]


def classifier(
    optimizer: keras.optimizers.Optimizer | str = "sgd",
    *extra: Any,
    dtype: str | None = None,
    seed: int = 1,
    **compiled: Any,
) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", dtype=dtype),
            *extra,
            layers.Dense(3, activation="softmax", dtype="float32" if dtype else None),
        ]
    )
    compiled = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compiled}
    model.compile(optimizer, **compiled)
    return model


def weights(replica: KerasReplica) -> np.ndarray:
    out = replica.layout.empty()
    replica.read(out)
    return out
