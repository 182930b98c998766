"""Optimizer, loss and metrics: the errors for invalid values name the argument."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.ps.errors import ConfigurationError


def model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def recipe(objects: Any = None, **given: Any) -> Recipe:
    made = model()
    nothing = dict.fromkeys(("optimizer", "loss", "metrics", "loss_weights", "weighted_metrics"))
    options: dict[str, Any] = {**nothing, "loss": "mse", **given}
    return recipe_of(made, archive.to_bytes(made), objects=objects, **options)


class OwnLoss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_pred)


class OwnMetric(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_pred)


class OwnOptimizer(keras.optimizers.SGD):
    pass


class WithoutConfig(keras.losses.Loss):
    def __init__(self, factor: float) -> None:
        super().__init__()

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


#: Each argument, its public name, and invalid values.
REFUSED: list[tuple[str, str, tuple[Any, ...]]] = [
    ("optimizer", "worker_optimizer", (0, 5, "", [], {}, True, np.zeros(2))),
    ("loss", "loss", (0, 5, "", [], {}, True, np.zeros(2), math.nan)),
    ("metrics", "metrics", (0, "", [5], [["mae", 1.5]])),
    ("loss_weights", "loss_weights", ("", math.nan, [1, "a"], [], {"a": None})),
]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optimizer": "adamm"}, r"`worker_optimizer` must be a name that Keras knows.*'Adam'.*Received: 'adamm'"),
        ({"loss": "krossentropy"}, r"`loss` must be a name that Keras knows.*Received: 'krossentropy'"),
        ({"metrics": ["accuracy", "recal"]}, r"`metrics` must be a name that Keras knows.*Received: 'recal'"),
        ({"weighted_metrics": ["recal"]}, r"`weighted_metrics` must be a name"),
        ({"optimizer": keras.optimizers.Adam}, r"`worker_optimizer` must be made: `Adam\(\)`.*the class"),
        ({"loss": keras.losses.MeanSquaredError}, r"`loss` must be made: `MeanSquaredError\(\)`"),
        ({"metrics": [keras.metrics.Recall]}, r"`metrics` must be made: `Recall\(\)`"),
        ({"optimizer": lambda: None}, r"`worker_optimizer` must be an optimizer of Keras 3"),
        ({"optimizer": object()}, r"`worker_optimizer` must be an optimizer of Keras 3"),
        ({"loss": object()}, r"`loss` must be a name, a function or an object"),
        ({"loss": WithoutConfig(2.0)}, r"`loss` must be of Keras' classes.*Received: WithoutConfig"),
        *(({name: bad}, f"^`{public}` must be") for name, public, values in REFUSED for bad in values),
        ({"objects": [OwnLoss]}, r"`custom_objects` must be a dictionary"),
        ({"objects": {"OwnLoss": 3}}, r"`custom_objects` must be a dictionary"),
    ],
)
def test_the_error_for_an_invalid_value_names_the_argument(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        recipe(**given).build(archive.to_bytes(model()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"loss": OwnLoss()},
        {"metrics": [OwnMetric(), "accuracy"]},
        {"optimizer": OwnOptimizer(0.5)},
        {"loss": {"dense": OwnLoss()}},
    ],
)
def test_a_custom_class_need_not_be_registered(given: dict[str, Any]) -> None:
    made = recipe(**given)
    assert len(made.objects) == 1
    made.build(archive.to_bytes(model()))


def test_an_unregistered_inner_optimizer_is_refused() -> None:
    """The recipe contains only the class of the outer optimizer."""

    class Inner(keras.optimizers.SGD):
        pass

    with pytest.raises(ConfigurationError, match=r"`worker_optimizer`.*registered.*Received: LossScaleOptimizer"):
        recipe(optimizer=keras.optimizers.LossScaleOptimizer(Inner(0.1))).build(archive.to_bytes(model()))
