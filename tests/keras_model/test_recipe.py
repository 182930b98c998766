"""The recipe, from which a worker rebuilds the driver's model; each one is pickled, as Spark does."""

from __future__ import annotations

import pickle
from typing import Any

import keras
import numpy as np
import pytest
from pyspark import cloudpickle

from distkeras.keras_model import archive
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.recipe import recipe_of
from distkeras.ps.errors import ConfigurationError


def network(*layers: Any) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2, activation="softmax")])


def rebuild(model: keras.Model, *, train: bool = False, **arguments: Any) -> keras.Model:
    """Return the compiled model that another process would rebuild; ``train`` rebuilds it for training."""
    names = ("optimizer", "loss", "metrics", "loss_weights", "weighted_metrics", "objects")
    given: dict[str, Any] = dict.fromkeys(names) | arguments
    file = archive.to_bytes(model)
    recipe = recipe_of(model, file, **given)
    arrived = pickle.loads(cloudpickle.dumps(recipe))
    return arrived.build(file, to_train=train)


class TestOptimizer:
    def test_default_is_plain_sgd(self) -> None:
        optimizer = rebuild(network(), loss="mse").optimizer
        assert isinstance(optimizer, keras.optimizers.SGD)
        assert optimizer.momentum == 0

    def test_the_default_is_the_models_own(self) -> None:
        model = network()
        model.compile(keras.optimizers.Adam(0.02, beta_1=0.8), "mse")
        optimizer = rebuild(model).optimizer
        assert isinstance(optimizer, keras.optimizers.Adam)
        assert float(optimizer.learning_rate) == pytest.approx(0.02)
        assert optimizer.beta_1 == pytest.approx(0.8)

    def test_an_argument_has_precedence(self) -> None:
        model = network()
        model.compile("adam", "mse")
        assert isinstance(rebuild(model, optimizer="rmsprop").optimizer, keras.optimizers.RMSprop)

    def test_a_used_optimizer_is_rebuilt_without_its_state(self) -> None:
        model = network()
        model.compile(keras.optimizers.Adam(0.02), "mse")
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
        assert int(model.optimizer.iterations) == 1
        assert int(rebuild(model).optimizer.iterations) == 0

    @pytest.mark.parametrize("policy", [None, pytest.param("mixed_float16", marks=pytest.mark.slow)])
    def test_the_models_own_optimizer_continues_from_its_state(self, policy: str | None) -> None:
        model = network(keras.layers.Dense(4, "tanh", dtype=policy))
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        optimizer = keras.optimizers.Adam(schedule, global_clipnorm=1.0)
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if policy else optimizer, "mse")
        x = np.random.default_rng(0).normal(size=(4, 3))
        for _ in range(3):
            model.train_on_batch(x, np.eye(2)[[0, 1, 0, 1]])
        rebuilt = rebuild(model, train=True)
        assert int(inner_optimizer(rebuilt.optimizer).iterations) == 3
        for one in (model, rebuilt):
            one.train_on_batch(x, np.eye(2)[[0, 1, 0, 1]])
        for theirs, mine in zip(rebuilt.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-6)
        assert not recipe_of(model, archive.to_bytes(model), optimizer="adam").optimizer_state

    @pytest.mark.slow
    def test_the_state_is_kept_if_some_of_its_variables_no_longer_train(self) -> None:
        model = network(keras.layers.Dense(4))
        model.compile("adam", "mse")
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
        model.layers[0].trainable = False
        rebuilt = rebuild(model, train=True).optimizer
        for mine, theirs in zip(model.optimizer.variables, rebuilt.variables, strict=True):
            np.testing.assert_array_equal(np.array(mine), np.array(theirs))

    @pytest.mark.slow
    def test_the_state_of_other_variables_is_dropped(self) -> None:
        model = network(keras.layers.Dense(4, trainable=False))
        model.compile("adam", "mse")
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
        model.layers[0].trainable = True  # Keras itself would not train on
        assert int(rebuild(model, train=True).optimizer.iterations) == 0

    def test_a_schedule_is_kept(self) -> None:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
        optimizer = rebuild(network(), loss="mse", optimizer=keras.optimizers.SGD(schedule)).optimizer
        assert optimizer.get_config()["learning_rate"]["config"]["initial_learning_rate"] == 0.5

    @pytest.mark.parametrize("bad", ["sdg", {"class": 1}])
    def test_an_unknown_optimizer_is_refused(self, bad: dict[str, int] | str) -> None:
        with pytest.raises(ConfigurationError, match="must be"):
            rebuild(network(), loss="mse", optimizer=bad)

    def test_an_object_that_is_not_an_optimizer_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="`worker_optimizer` must be an optimizer of Keras 3"):
            rebuild(network(), loss="mse", optimizer=object())


class TestLossAndMetrics:
    def test_a_missing_loss_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="`loss` must be given, or the model be compiled with one"):
            rebuild(network())

    def test_a_function_of_a_notebook_is_sent_by_value(self) -> None:
        factor = 3.0

        def scaled(y_true: Any, y_pred: Any) -> Any:
            return factor * keras.ops.mean(y_pred)

        model = rebuild(network(), loss=scaled)
        predicted = np.full((4, 2), 0.5, np.float32)
        loss = model.compute_loss(None, predicted, keras.ops.convert_to_tensor(predicted))
        assert float(loss) == pytest.approx(1.5)

    def test_objects_keep_their_configuration(self) -> None:
        loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.25)
        model = rebuild(network(), loss=loss, metrics=(keras.metrics.TopKCategoricalAccuracy(2, name="top"),))
        assert model.loss.label_smoothing == 0.25
        figures = model.evaluate(np.ones((2, 3)), np.eye(2), verbose=0, return_dict=True)
        assert figures["top"] == 1.0

    def test_loss_weights_and_weighted_metrics_are_kept(self) -> None:
        inputs = keras.Input((3,))
        heads = [keras.layers.Dense(1, name=name)(inputs) for name in "ab"]
        model = rebuild(
            keras.Model(inputs, heads),
            loss={"a": "mse", "b": "mae"},
            loss_weights={"a": 2.0, "b": 0.0},
            weighted_metrics={"a": ["mse"]},
        )
        x, y = np.ones((4, 3)), [np.zeros((4, 1)), np.full((4, 1), 1e3)]
        figures = model.evaluate(x, y, verbose=0, return_dict=True)
        assert figures["loss"] == pytest.approx(2 * float(np.mean(model.predict(x, verbose=0)[0] ** 2)), rel=1e-5)
        assert "a_mse" in figures

    def test_the_default_is_the_models_own(self) -> None:
        model = network()
        model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
        rebuilt = rebuild(model)
        assert rebuilt.loss == "categorical_crossentropy"
        assert "accuracy" in rebuilt.evaluate(np.ones((2, 3)), np.eye(2), verbose=0, return_dict=True)


class TestCustomObjects:
    def test_a_registered_layer_is_sent_by_value(self) -> None:
        @keras.saving.register_keras_serializable("recipe")
        class Plus(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return x + 1

        model = network(Plus())
        rebuilt = rebuild(model, loss="mse")
        x = np.ones((1, 3), np.float32)
        np.testing.assert_array_equal(rebuilt.predict(x, verbose=0), model.predict(x, verbose=0))

    def test_an_unregistered_class_must_be_in_custom_objects(self) -> None:
        class Minus(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return x - 1

        model = network(Minus())
        with pytest.raises(ConfigurationError, match="Keras said: Could not locate class 'Minus'"):
            rebuild(model, loss="mse")
        assert rebuild(model, loss="mse", objects={"Minus": Minus}).layers[0].__class__.__name__ == "Minus"

    def test_a_registered_class_within_a_given_object_is_sent(self) -> None:
        @keras.saving.register_keras_serializable("recipe")
        class Halving(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step: Any) -> Any:
                return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

            def get_config(self) -> dict[str, Any]:
                return {}

        @keras.saving.register_keras_serializable("recipe")  # type: ignore[untyped-decorator]  # Keras has no types
        def spread(y_true: Any, y_pred: Any) -> Any:
            return keras.ops.max(y_pred, axis=-1)

        model = network()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(Halving()))
        metrics = {"spread": [keras.metrics.MeanMetricWrapper(spread)]}
        recipe = recipe_of(model, archive.to_bytes(model), optimizer=optimizer, loss="mse", metrics=metrics)
        assert recipe.objects == {"recipe>Halving": Halving, "recipe>spread": spread}

    def test_only_the_classes_of_the_model_are_sent(self) -> None:
        @keras.saving.register_keras_serializable("recipe")
        class NotInTheModel(keras.layers.Layer):
            pass

        file = archive.to_bytes(network())
        assert recipe_of(network(), file, loss="mse").objects == {}


def test_a_backend_other_than_that_of_the_process_is_refused() -> None:
    file = archive.to_bytes(network())
    recipe = recipe_of(network(), file, loss="mse")
    other = "jax" if recipe.backend != "jax" else "torch"
    with pytest.raises(ConfigurationError, match="Keras must run on the backend"):
        type(recipe)(other, recipe.objects, recipe.arguments).build(file)


def test_the_weights_are_not_in_the_closure() -> None:
    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
    recipe = recipe_of(model, archive.to_bytes(model), loss="mse")
    assert len(cloudpickle.dumps(recipe)) < 20_000


def test_a_wrapped_optimizer_can_be_rebuilt_more_than_once() -> None:
    """Keras modifies the configuration of a `LossScaleOptimizer` when it reads it."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25)), "mse")
    data = archive.to_bytes(model)
    recipe = recipe_of(
        model, data, optimizer=None, loss=None, metrics=None, loss_weights=None, weighted_metrics=None, objects=None
    )
    for _ in range(2):
        assert float(recipe.build(data).optimizer.inner_optimizer.learning_rate) == 0.25


def test_workers_compute_with_the_drivers_settings_of_keras() -> None:
    """Losses read `epsilon` while they compute; a reused worker may still have the value of an earlier job."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = keras.config.epsilon()
    keras.config.set_epsilon(1e-3)
    try:
        file = archive.to_bytes(model)
        recipe = recipe_of(model, file)
        keras.config.set_epsilon(before)
        recipe.build(file)
        assert keras.config.epsilon() == before
        recipe.begin_task()
        assert keras.config.epsilon() == 1e-3
    finally:
        keras.config.set_epsilon(before)
