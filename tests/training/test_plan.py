"""Decisions of the driver before any work starts."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from distkeras import Trainer
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.ps.settings import ServerSettings
from distkeras.training.requirements import require_size


def model_with(value: float, layer: str, index: int) -> keras.Model:
    """Return a model of three layers, of which the second one is frozen, with ``value`` among its weights."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3, name="first"),
            keras.layers.Dense(3, name="frozen", trainable=False),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(1, name="last"),
        ]
    )
    weights = model.get_layer(layer).get_weights()
    weights[index].flat[-1] = value
    model.get_layer(layer).set_weights(weights)
    return model


def trainer_of(model: keras.Model) -> Trainer:
    return Trainer(model, "downpour", worker_optimizer="sgd", loss="mse", num_workers=1)


@pytest.mark.parametrize(
    ("value", "layer", "index", "name"),
    [
        (np.nan, "first", 0, "first/kernel"),
        pytest.param(np.inf, "last", 1, "last/bias", marks=pytest.mark.slow),
        (np.nan, "norm", 2, "norm/moving_mean"),
        (np.inf, "norm", 3, "norm/moving_variance"),
        pytest.param(np.nan, "frozen", 0, "frozen/kernel", marks=pytest.mark.slow),
    ],
)
def test_the_error_for_a_model_with_a_nan_names_the_variable(value: float, layer: str, index: int, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"`model` must have finite weights.*{value} in element .*{name}'"):
        trainer_of(model_with(value, layer, index))


def test_an_infinity_in_a_frozen_weight_is_not_an_error() -> None:
    assert trainer_of(model_with(-np.inf, "frozen", 1))


def test_the_error_for_a_model_that_is_too_large_names_a_remedy() -> None:
    model = model_with(0.0, "first", 0)
    model.compile("sgd", "mse")
    server = ServerSettings(rule=make("downpour"), workers=1, max_body=3 << 20)
    require_size(server, KerasReplica(model).size, bytes(1 << 20))
    with pytest.raises(ConfigurationError, match=r"at most 2 MiB.*`frozen_weights`. Received: 3 MiB"):
        require_size(server, KerasReplica(model).size, bytes(2 << 20))
