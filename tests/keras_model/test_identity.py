"""The identity of a model: the same code has the same identity, and a model that trains differently another."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

from distkeras.keras_model import archive
from distkeras.keras_model.recipe import layout_identity, model_identity, recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.checkpoint.store import differences


def branched(activation: str = "relu", units: int = 3, name: str | None = None, rate: float = 0.5) -> keras.Model:
    inputs = keras.Input((4,))
    left = layers.Dense(units, activation=activation, name=name)(inputs)
    right = layers.Dropout(rate)(layers.BatchNormalization()(layers.Dense(units)(inputs)))
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([left, right])))


def nested(activation: str = "tanh") -> keras.Model:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=activation)])
    return keras.Sequential([keras.Input((5, 4)), layers.TimeDistributed(inner), layers.Bidirectional(layers.GRU(2))])


def own_loss(true: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.square(true - predicted), -1)


def identity(model: keras.Model, **options: Any) -> dict[str, Any]:
    file = archive.to_bytes(model)
    arguments = {"optimizer": "adam", "loss": "mse", "metrics": None, "loss_weights": None, "weighted_metrics": None}
    recipe = recipe_of(model, file, objects=None, **(arguments | options))
    replica = KerasReplica(recipe.build(file))
    found = {
        "model": model_identity(file),
        "layout": layout_identity(replica.layout),
        "compilation": recipe.identity(replica.model),
    }
    return dict(json.loads(json.dumps(found)))


@functools.cache
def usual() -> dict[str, Any]:
    return identity(branched())


@pytest.mark.parametrize("build", [branched, nested])
def test_the_same_code_has_the_same_identity_again_in_one_process(build: Callable[[], keras.Model]) -> None:
    first, second = build(), build()
    assert first.layers[-1].name != second.layers[-1].name  # Keras continues its numbering
    assert identity(first) == identity(second)


def test_names_and_weights_are_not_in_the_identity() -> None:
    model = branched(name="other")
    assert identity(model) == usual()
    model.set_weights([weights + 1 for weights in model.get_weights()])
    assert identity(model) == usual()


def test_the_name_of_an_optimizer_means_its_defaults() -> None:
    assert identity(branched(), optimizer=keras.optimizers.Adam()) == usual()


class OwnLoss(keras.losses.Loss):
    """A loss of the user's own, which Keras names."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return own_loss(y_true, y_pred)


@pytest.mark.parametrize(
    "part",
    [
        lambda: {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())},
        lambda: {"loss": OwnLoss()},
    ],
)
def test_names_that_keras_numbers_are_not_in_the_identity(part: Callable[[], dict[str, Any]]) -> None:
    first, second = (identity(branched(), **part()) for _ in range(2))
    assert first == second


def test_a_name_of_the_users_own_is_in_the_identity() -> None:
    other = identity(branched(), metrics=[keras.metrics.MeanSquaredError(name="own")])
    assert other != identity(branched(), metrics=[keras.metrics.MeanSquaredError()])


@pytest.mark.parametrize(
    ("other", "options", "path"),
    [
        (branched("tanh"), {}, "model.config.layers.3.config.activation"),
        (branched(units=4), {}, "layout.0.1.1"),
        (branched(rate=0.25), {}, "model.config.layers.4.config.rate"),
        (branched(), {"loss": "mae"}, "compilation.loss"),
        (branched(), {"loss": own_loss}, "compilation.loss"),
        (branched(), {"optimizer": "sgd"}, "compilation.optimizer.class_name"),
        (branched(), {"optimizer": keras.optimizers.Adam(0.5)}, "compilation.optimizer.config.learning_rate"),
        (branched(), {"metrics": ["mae"]}, "compilation.metrics"),
    ],
)
def test_a_model_that_trains_differently_has_another_identity(
    other: keras.Model, options: dict[str, Any], path: str
) -> None:
    found = [place for place, _, _ in differences(identity(other, **options), usual())]
    assert path in found


def test_an_inner_layer_is_in_the_identity() -> None:
    found = list(differences(identity(nested("relu")), identity(nested())))
    assert [(own, saved) for _, own, saved in found] == [("relu", "tanh")]
