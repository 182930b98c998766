"""Frozen layers and variables of a rebuilt model: it trains like the user's, also once they are unfrozen."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers
from support.cases import rest_slow
from support.training.small_classifier import mini

from distkeras.keras_model.archive import from_bytes, to_bytes, with_optimizer
from distkeras.keras_model.attributes import lost_from_model
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica


def sequential() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, name="base"), layers.BatchNormalization(), layers.Dense(2)]
    )


def nested() -> keras.Model:
    base = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(3)], name="base")
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(base(inputs)))


def composite() -> keras.Model:
    base = layers.Bidirectional(layers.SimpleRNN(2), name="base")
    return keras.Sequential([keras.Input((4,)), layers.Reshape((2, 2)), base, layers.Dense(2)])


def set_model(model: keras.Model, trainable: bool) -> None:
    model.trainable = trainable
    if not trainable:
        model.layers[-1].trainable = True  # the top is trained: a model without anything to train is refused
        model._trainable = True  # noqa: SLF001 - while `trainable` is False, a model lists no variable


def set_layer(model: keras.Model, trainable: bool) -> None:
    model.get_layer("base").trainable = trainable


def set_variable(model: keras.Model, trainable: bool) -> None:
    model.get_layer("base").weights[0].trainable = trainable


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[keras.Model, bool], None]]] = {
    "a layer": (sequential, set_layer),
    "a variable": (sequential, set_variable),
    "an inner model": (nested, set_layer),
    "a variable of an inner model": (nested, set_variable),
    "a composite layer": (composite, set_layer),
    "all but the last": (nested, set_model),
}


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)  # nothing here is worth a trace
    return model


def fit(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    model.fit(x, y, batch_size=len(x), epochs=1, shuffle=False, verbose=0)


@pytest.mark.parametrize("case", rest_slow(CASES, "an inner model"))
def test_a_trained_model_can_be_unfrozen_as_the_given_one(case: str) -> None:
    make, set_trainable = CASES[case]
    keras.utils.set_random_seed(5)
    given = make()
    set_trainable(given, False)
    compiled(given)
    file = to_bytes(given)
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(8, 4)).astype("float32"), draw.normal(size=(8, 2)).astype("float32")
    trained = recipe_of(given, file).build(file)
    assert lost_from_model(given, trained) is None
    KerasReplica(trained).train([mini((x,), (y,))])
    fit(given, x, y)
    for model in (given, trained):
        set_trainable(model, True)
        fit(compiled(model), x, y)
    again = from_bytes(to_bytes(trained))
    for one, other, third in zip(given.weights, trained.weights, again.weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(third, other)
    assert len(trained.trainable_variables) == len(again.trainable_variables) == len(given.trainable_variables)


@pytest.mark.slow
def test_an_optimizer_with_state_is_loaded_for_what_is_trainable() -> None:
    given = sequential()
    set_variable(given, False)
    given.compile(keras.optimizers.Adam(0.1), "mse")
    fit(given, np.ones((4, 4), np.float32), np.ones((4, 2), np.float32))
    loaded = from_bytes(with_optimizer(given), compiled=True)
    for mine, theirs in zip(loaded.optimizer.variables, given.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert int(loaded.optimizer.iterations) == 1


def test_an_archive_of_a_model_without_frozen_parts_is_as_keras_writes_it() -> None:
    assert b"distkeras" not in to_bytes(sequential())
