"""The gradient of a replica, which is that of plain SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.training.small_classifier import batches, classifier, mini, weights

from distkeras.keras_model.archive import to_bytes
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica


@pytest.mark.parametrize(
    ("optimizer", "weighted"),
    [
        ("adam", True),
        pytest.param("sgd", False, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("sgd", True), ("adam", False)]),
    ],
)
def test_the_gradient_equals_one_step_of_plain_sgd(optimizer: str, weighted: bool) -> None:
    """For every compiled optimizer, the gradient is -(change)/(learning rate) of one SGD step."""
    (batch,) = batches(1, weighted=weighted)
    eta = 0.5
    reference = KerasReplica(classifier(keras.optimizers.SGD(eta)))
    start = weights(reference)
    row = reference.train([batch])
    replica = KerasReplica(classifier(optimizer))
    gradient = np.full(replica.size, np.nan, np.float32)
    measured = replica.gradient(batch, gradient)
    np.testing.assert_allclose(gradient, (start - weights(reference)) / eta, atol=2e-6)
    np.testing.assert_allclose(measured, row[0], rtol=1e-6)
    np.testing.assert_array_equal(weights(replica), start)


@pytest.mark.slow
def test_the_gradient_does_not_change_the_training() -> None:
    first, second, third = batches(3)
    momentum, alone = (KerasReplica(classifier(keras.optimizers.SGD(0.1, momentum=0.9))) for _ in range(2))
    momentum.train([first])
    momentum.gradient(third, momentum.layout.empty())
    momentum.train([second])
    alone.train([first, second])
    np.testing.assert_allclose(weights(momentum), weights(alone), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_gradient_is_clipped_and_ignores_constraints() -> None:
    (batch,) = batches(1)
    replica = KerasReplica(classifier(keras.optimizers.SGD(1.0, global_clipnorm=1e-3)))
    out = replica.layout.empty()
    replica.gradient(batch, out)
    assert np.linalg.norm(out) == pytest.approx(1e-3, rel=1e-4)

    constrained = layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(1e-3))
    held = KerasReplica(classifier("sgd", constrained))
    start = weights(held)
    held.gradient(batch, held.layout.empty())
    np.testing.assert_array_equal(weights(held), start)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clipping", "clip"),
    [
        pytest.param(
            {"clipvalue": 0.01}, lambda arrays: [np.clip(a, -0.01, 0.01) for a in arrays], marks=pytest.mark.slow
        ),
        pytest.param(
            {"clipnorm": 0.05},
            lambda arrays: [a * min(1, 0.05 / np.linalg.norm(a)) for a in arrays],
            marks=pytest.mark.slow,
        ),
        (
            {"global_clipnorm": 0.1},
            lambda arrays: [a * min(1, 0.1 / np.sqrt(sum(np.square(b).sum() for b in arrays))) for a in arrays],
        ),
    ],
)
def test_steps_and_gradients_have_the_clipping_of_the_worker_optimizer(
    clipping: dict[str, float], clip: Callable[..., Any]
) -> None:
    """The replica is built from a recipe, as on an executor."""
    (batch,) = batches(1)
    plain = KerasReplica(classifier("sgd"))
    raw = plain.layout.empty()
    plain.gradient(batch, raw)
    expected = np.concatenate([np.ravel(array) for array in clip(plain.layout.views(raw))])
    assert np.abs(expected - raw).max() > 0.01

    model = classifier("sgd")
    archive = to_bytes(model)
    recipe = recipe_of(model, archive, optimizer=keras.optimizers.SGD(1.0, **clipping))
    replica = KerasReplica(recipe.build(archive))
    start, out = weights(replica), replica.layout.empty()
    replica.gradient(batch, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)
    replica.train([batch])
    np.testing.assert_allclose(start - weights(replica), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")  # the unused output has no loss
def test_the_gradient_of_an_embedding_and_of_unused_weights_is_dense() -> None:
    keras.utils.set_random_seed(7)
    ids, spare = keras.Input((4,), dtype="int32"), keras.Input((2,))
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(5, 3)(ids))
    model = keras.Model([ids, spare], [layers.Dense(1)(pooled), layers.Dense(1)(spare)])
    model.compile("sgd", loss=["mse", None])
    rows = np.array([[1, 1, 2, 0], [1, 3, 3, 3]], np.int32)
    batch = mini((rows, np.ones((2, 2), np.float32)), (np.ones((2, 1), np.float32),) * 2)
    replica = KerasReplica(model)
    out = np.full(replica.size, np.nan, np.float32)
    start = weights(replica)
    replica.gradient(batch, out)
    replica.train([batch])
    np.testing.assert_allclose(out, (start - weights(replica)) / 0.01, atol=2e-5)
    table = replica.layout.views(out)[0]
    assert np.all(table[4] == 0)
    assert np.all(table[1] != 0)


@pytest.mark.slow
def test_an_overflow_under_mixed_float16_is_a_zero_gradient() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**100)
        replica = KerasReplica(classifier(optimizer))
        out = np.full(replica.size, np.nan, np.float32)
        replica.gradient(batches(1)[0], out)
        assert not out.any()
    finally:
        keras.config.set_dtype_policy("float32")
