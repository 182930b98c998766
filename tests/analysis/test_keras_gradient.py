"""The gradient function of a Keras model, compared with GradientTape and, in the simulator, with train_on_batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from distkeras.analysis.keras_gradient import KerasGradient
from distkeras.ps.errors import BadValueError, ConfigurationError, EmptyDataError, ShapeError
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma

ROWS, BATCH = 50, 8
SPARSE = "sparse_categorical_crossentropy"


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(rows, 6)).astype(np.float32), draw.integers(0, 3, rows).astype(np.int32)


def classifier(*extra: keras.Layer) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), *extra, layers.Dense(3, activation="softmax")]
    )


def gradient(model: keras.Model | None = None, **options: Any) -> KerasGradient:
    x, y = data()
    return KerasGradient(model or classifier(), x, y, **{"loss": SPARSE, "batch_size": BATCH, **options})


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="GradientTape is TensorFlow's")
@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=pytest.mark.slow), np.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_equals_that_of_gradient_tape(dtype: type[float], weighted: bool) -> None:
    import tensorflow as tf

    weight = np.random.default_rng(5).uniform(0.5, 2, ROWS) if weighted else None
    function = gradient(workers=2, sample_weight=weight)
    theta = (function.theta0 + np.random.default_rng(1).normal(0, 0.1, function.size)).astype(dtype)
    before = theta.copy()
    model = function.model_with(theta)
    loss = keras.losses.SparseCategoricalCrossentropy()
    for number in range(3):
        for worker in (0, 1):
            batch = function.batch(worker, number)
            with tf.GradientTape() as tape:
                value = loss(batch.y[0], model(batch.x[0]), sample_weight=batch.weight)
            parts = tape.gradient(value, [v.value for v in model.trainable_variables])
            expected = np.concatenate([part.numpy().ravel() for part in parts])
            got = function(theta, worker)
            assert got.dtype == dtype
            assert np.abs(expected).max() > 1e-2
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(theta, before)


@pytest.mark.parametrize("rule", [pytest.param("asgd", marks=pytest.mark.slow), "downpour"])
def test_one_simulated_worker_equals_train_on_batch(rule: str) -> None:
    """The results differ by float32 rounding in 20 steps: the simulator subtracts in double precision."""
    function = gradient()
    plain = classifier()
    plain.compile(keras.optimizers.SGD(0.1), SPARSE)
    for number in range(20):
        batch = function.batch(0, number)
        plain.train_on_batch(batch.x[0], batch.y[0])
    trace = simulate(rule, function.theta0, function, workers=1, learning_rate=0.1, schedule=[0] * 20)
    trained = function.model_with(trace.theta)
    weights = trained.get_weights(), plain.get_weights(), classifier().get_weights()
    for got, expected, start in zip(*weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(got - start).max() > 1e-2


def run(function: KerasGradient) -> np.ndarray:
    options: dict[str, Any] = {"workers": 3, "learning_rate": 0.05, "timing": Gamma(), "steps": 30, "dtype": np.float32}
    return simulate("dana_zero", function.theta0, function, **options).theta


@pytest.mark.slow
def test_runs_with_one_seed_are_bitwise_equal_and_a_restart_repeats_the_run() -> None:
    # The random state of Dropout and the moving averages must be reset, too.
    own = 1 if keras.backend.backend() == "torch" else None  # Otherwise Keras draws from PyTorch's global generator.
    model = classifier(layers.Dropout(0.3, seed=own), layers.BatchNormalization())
    first, second, other = (gradient(model, workers=3, seed=seed) for seed in (4, 4, 5))
    theta = run(first)
    np.testing.assert_array_equal(run(second), theta)
    assert np.abs(run(other) - theta).max() > 1e-4
    averages = first.model_with(theta).layers[2].moving_mean.numpy()
    assert np.abs(averages).max() > 1e-3
    assert np.abs(run(first) - theta).max() > 1e-4  # It continues from its previous state.
    first.restart()
    np.testing.assert_array_equal(run(first), theta)
    np.testing.assert_array_equal(first.model_with(theta).layers[2].moving_mean.numpy(), averages)


@pytest.mark.parametrize("split", [False, True])
def test_each_epoch_is_a_permutation_of_all_rows_of_the_worker(split: bool) -> None:
    x = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], 6, axis=1)
    function = KerasGradient(
        classifier(), x, data()[1], loss=SPARSE, batch_size=BATCH, workers=3, split=split, sample_weight=np.ones(ROWS)
    )
    seen = {}
    for worker in range(3):
        own = np.arange(worker, ROWS, 3) if split else np.arange(ROWS)
        count = -(-len(own) // BATCH)
        assert worker > 0 or function.batches_per_epoch == count
        for epoch in range(2):
            batches = [function.batch(worker, epoch * count + index) for index in range(count)]
            assert [batch.last for batch in batches] == [False] * (count - 1) + [True]
            assert {(batch.epoch, batch.size) for batch in batches[:-1]} == {(epoch, BATCH)}
            seen[worker, epoch] = np.concatenate([batch.x[0][:, 0] for batch in batches]).astype(int)
            assert sorted(seen[worker, epoch]) == own.tolist()
            assert (np.concatenate([batch.y[0] for batch in batches]) == data()[1][seen[worker, epoch]]).all()
    orders = {tuple(order) for order in seen.values()}
    assert len(orders) == 6


def test_mini_batches_may_be_requested_by_number_in_any_order() -> None:
    function = gradient(workers=2)
    late = function.batch(1, 17).x[0]
    function.batch(1, 2)
    np.testing.assert_array_equal(function.batch(1, 17).x[0], late)


def test_loss_and_evaluate_equal_those_of_keras() -> None:
    function = gradient(metrics=["accuracy"])
    x, y = data()
    plain = classifier()
    plain.compile("sgd", SPARSE, metrics=["accuracy"])
    expected = plain.evaluate(x, y, verbose=0, return_dict=True)
    assert function.evaluate(function.theta0) == pytest.approx(expected, rel=1e-5)
    assert function.loss(function.theta0.astype(np.float64)) == pytest.approx(expected["loss"], rel=1e-5)
    other = plain.evaluate(x[:9], y[:9], verbose=0, return_dict=True)
    assert function.evaluate(function.theta0, x[:9], y[:9]) == pytest.approx(other, rel=1e-5)
    np.testing.assert_array_equal(function.theta0, np.concatenate([weights.ravel() for weights in plain.get_weights()]))


def test_the_users_model_is_not_changed() -> None:
    model = classifier()
    before = model.get_weights()
    function = gradient(model)
    function(function.theta0 + 1, 0)
    for got, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not model.compiled


@pytest.mark.slow
def test_a_model_may_have_several_inputs_and_outputs() -> None:
    first, second = keras.Input((6,)), keras.Input((2,))
    hidden = layers.Concatenate()([first, second])
    model = keras.Model([first, second], [layers.Dense(1)(hidden), layers.Dense(2)(hidden)])
    draw = np.random.default_rng(2)
    x = [draw.normal(size=(ROWS, 6)), draw.normal(size=(ROWS, 2))]
    y = [draw.normal(size=(ROWS, 1)), draw.normal(size=(ROWS, 2))]
    function = KerasGradient(model, x, y, loss="mse", batch_size=BATCH)
    trace = simulate("asgd", function.theta0, function, workers=1, learning_rate=0.05, schedule=[0] * 20)
    assert function.loss(trace.theta) < 0.8 * function.loss(function.theta0)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batch_size": 0}, ConfigurationError, "`batch_size` must be"),
        ({"workers": True}, ConfigurationError, "`workers` must be"),
        ({"seed": -1}, ConfigurationError, "`seed` must be"),
        ({"workers": ROWS + 1, "split": True}, ConfigurationError, "`workers` must be at most"),
        ({"sample_weight": np.ones(ROWS - 1)}, ShapeError, "equally many rows"),
        ({"loss": None}, ConfigurationError, "`loss` must be"),
        ({"loss": "mse"}, ConfigurationError, "fit the data"),
    ],
)
def test_invalid_arguments_are_refused(
    change: dict[str, Any], error: type[ConfigurationError] | type[ShapeError], match: str
) -> None:
    with pytest.raises(error, match=match):
        gradient(**change)


def test_invalid_data_is_refused() -> None:
    x, y = data()
    with pytest.raises(EmptyDataError):
        KerasGradient(classifier(), x[:0], y[:0], loss=SPARSE)
    x[3, 2] = np.nan
    with pytest.raises(BadValueError, match="`x` must be finite"):
        KerasGradient(classifier(), x, y, loss=SPARSE)


def test_invalid_calls_are_refused() -> None:
    function = gradient()
    with pytest.raises(ConfigurationError, match="`worker` must be"):
        function(function.theta0, 1)
    with pytest.raises(ConfigurationError, match="`theta` must have shape"):
        function(function.theta0[1:], 0)
    with pytest.raises(ConfigurationError, match="`x` and `y`"):
        function.evaluate(function.theta0, data()[0])


@pytest.mark.slow
def test_losses_of_several_outputs_are_means_over_rows() -> None:
    """`evaluate` takes 2000 rows at a time; the last row's loss must not count as much as those of all others."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(2001, 2)).astype(np.float32)
    x[-1] = 10
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [layers.Dense(1, name=name)(inputs) for name in "ab"])
    model.compile("sgd", ["mse", "mae"])
    function = KerasGradient(model, x, [x[:, :1], x[:, 1:]])
    expected = model.evaluate(x, [x[:, :1], x[:, 1:]], batch_size=2001, verbose=0, return_dict=True)
    found = function.evaluate(function.theta0)
    assert found == pytest.approx(expected, rel=1e-5)
    assert function.evaluate(function.theta0, x, [x[:, :1], x[:, 1:]]) == found
