"""Small models and mini-batches with which a backend's loop is compared with Keras' own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers

from distkeras.data.batches import Batch, Stack
from distkeras.data.rows import aligned
from distkeras.keras_model.replica import KerasReplica

ROWS, FEATURES, CLASSES = 8, 6, 3


def dense(*inner: keras.Layer, optimizer: Any = "sgd", dtype: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = inner or (layers.Dense(5, activation="relu", dtype=dtype),)
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES, activation="softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class OwnStep(keras.Sequential):
    """Reports a number of its own."""

    def train_step(self, *args: Any) -> Any:
        result = super().train_step(*args)
        if keras.backend.backend() != "jax":
            return result | {"twice": 2 * result["loss"]}
        logs, state = result
        return logs | {"twice": 2 * logs["loss"]}, state


def own_step() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = OwnStep([keras.Input((FEATURES,)), layers.Dense(CLASSES, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def frozen() -> keras.Model:
    model = dense(layers.Dense(5), layers.Dense(4))
    model.layers[0].trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def recurrent() -> keras.Model:
    return dense(layers.Reshape((2, 3)), layers.LSTM(4))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "sgd": dense,
    "adam": lambda: dense(optimizer=optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)),
    "schedule": lambda: dense(
        optimizer=optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9)
    ),
    "accumulated": lambda: dense(optimizer=optimizers.SGD(0.1, gradient_accumulation_steps=3)),
    "average": lambda: dense(optimizer=optimizers.Adam(use_ema=True, ema_overwrite_frequency=4)),
    "dropout": lambda: dense(layers.Dense(5), layers.Dropout(0.5)),
    "batch norm": lambda: dense(layers.Dense(5), layers.BatchNormalization()),
    "penalized": lambda: dense(layers.Dense(5, kernel_regularizer="l2", kernel_constraint="max_norm")),
    "half": lambda: dense(dtype="mixed_float16", optimizer=optimizers.LossScaleOptimizer(optimizers.SGD(0.1))),
    "own step": own_step,
    "frozen": frozen,
    "recurrent": recurrent,
}


def batches(count: int, *, weighted: bool = False, in_stack: bool = True, seed: int = 0) -> list[Batch]:
    chance = np.random.default_rng(seed)
    x, y = aligned((count, ROWS, FEATURES), np.dtype(np.float32)), aligned((count, ROWS), np.dtype(np.int32))
    x[...], y[...] = chance.normal(size=x.shape), chance.integers(0, CLASSES, y.shape)
    weight = aligned((count, ROWS), np.dtype(np.float32))
    weight[...] = chance.random(weight.shape)
    stack = Stack((x,), (y,), weight if weighted else None)
    made = [Batch(0, i, False, (x[i],), (y[i],), weight[i] if weighted else None) for i in range(count)]
    return [batch.placed_in(stack, place) for place, batch in enumerate(made)] if in_stack else made


def state(replica: KerasReplica) -> list[np.ndarray]:
    model = replica.model
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def looping(build: Callable[[], keras.Model], *, loops: bool = True) -> KerasReplica:
    keras.utils.set_random_seed(1)  # before the layers are created
    replica = KerasReplica(build())
    assert replica.loops
    replica.loops = loops
    return replica


def several_outputs() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dropout(0.5)(layers.Dense(4, activity_regularizer="l2")(inputs))
    outputs = [layers.Dense(CLASSES, activation="softmax", name=name)(hidden) for name in ("one", "other")]
    model = keras.Model(inputs, outputs)
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", [loss, loss], metrics=[["accuracy"], []], weighted_metrics=[[], ["accuracy"]])
    return model
