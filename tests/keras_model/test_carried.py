"""Properties of a model that its configuration lacks are refused by name; other models are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from distkeras import Trainer
from distkeras.keras_model import archive
from distkeras.keras_model.attributes import lost
from distkeras.keras_model.optimizers import require_independent
from distkeras.keras_model.recipe import recipe_of
from distkeras.ps.errors import ConfigurationError


def if_keras_has(optimizer: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if Keras is too old to have an optimizer of this name."""
    return pytest.mark.skipif(not hasattr(keras.optimizers, optimizer), reason=f"this Keras has no {optimizer}")


@keras.saving.register_keras_serializable("carried")
class Scaled(layers.Layer):
    """A layer whose `get_config` omits the factor, and that counts its calls."""

    def __init__(self, factor: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.factor, self.calls = factor, 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return self.factor * x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config()}


@keras.saving.register_keras_serializable("carried")
class Lookahead(keras.optimizers.SGD):
    """An optimizer that stores the weights of its fifth step, and pulls back to them in every fifth step."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        due = keras.ops.cast(self.iterations % 5 == 4, variable.dtype)
        first = keras.ops.cast(self.iterations == 4, variable.dtype)
        self.assign(slow, slow + first * (variable - slow))
        self.assign_add(variable, due * 0.5 * (slow - variable))


@keras.saving.register_keras_serializable("carried")
class Coupled(keras.optimizers.SGD):
    """An optimizer with weight decay within the momentum: it depends on weights, and stores none."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient + 0.01 * variable, variable, learning_rate)


@keras.saving.register_keras_serializable("carried")
class Halved(keras.optimizers.SGD):
    """An optimizer whose steps are half as long as those of the class that it extends."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, 0.5 * learning_rate)


@keras.saving.register_keras_serializable("carried")
class Named(keras.optimizers.SGD):
    """An optimizer with the steps of the class that it extends."""


def network(*more: Any) -> keras.Model:
    inner = [layers.Dense(4, name="first"), layers.BatchNormalization(), *more]
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3, "softmax")])


def changed(change: Callable[[keras.Model], Any], *more: Any) -> keras.Model:
    model = network(*more)
    change(model)
    model.compile("adam", "mse")
    return model


def excluding(**variables: Any) -> keras.Model:
    optimizer, model = keras.optimizers.AdamW(), network()
    optimizer.exclude_from_weight_decay(**variables or {"var_list": [model.layers[0].bias]})
    model.compile(optimizer, "mse")
    return model


def constrain(model: keras.Model) -> None:
    model.layers[0].kernel.constraint = keras.constraints.NonNeg()


def regularize(model: keras.Model) -> None:
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)


def replace_train_step(model: keras.Model) -> None:
    model.train_step = lambda data: {}


def with_optimizer(optimizer: Any) -> keras.Model:
    model = network()
    model.compile(optimizer, "mse")
    return model


def several() -> keras.Model:
    rates = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {"first/.*": keras.optimizers.Adam()})
    return with_optimizer(keras.optimizers.MultiOptimizer(rates))


def stateful() -> keras.Model:
    inner = [layers.LSTM(3, stateful=True, name="memory"), layers.Dense(1)]
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 2)), *inner])
    model.compile("sgd", "mse")
    return model


def text_model() -> keras.Model:
    inputs = keras.Input((1,), dtype="string")
    words = layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot", name="words")
    model = keras.Model(inputs, layers.Dense(2)(words(inputs)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: changed(constrain), "'first'.*kernel.*constraint is NonNeg"),
        pytest.param(lambda: changed(regularize), "'first'.*kernel.*regularizer is L2", marks=pytest.mark.slow),
        (lambda: changed(replace_train_step), "the model.train_step is"),
        pytest.param(
            lambda: with_optimizer(keras.optimizers.SGD(use_ema=True)),
            "must not have `use_ema`.*AdamW",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: with_optimizer(keras.optimizers.ScheduleFreeAdamW()),
            "'schedule_free_adam_?w.*', whose .*momentum.*AdamW",
            marks=if_keras_has("ScheduleFreeAdamW"),
        ),
        (lambda: with_optimizer(Lookahead(0.1, name="ahead")), "'ahead.*whose steps without gradient move weights"),
        pytest.param(several, "one optimizer for all weights", marks=if_keras_has("MultiOptimizer")),
        pytest.param(stateful, r"stateful=False.*\['memory'\]", marks=pytest.mark.slow),
        (text_model, "TextVectorization, belong into the data.*'string_lookup.*' of StringLookup"),
    ],
)
def test_a_property_that_workers_would_lose_is_refused_by_name(make: Callable[[], keras.Model], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){named}"):
        Trainer(make(), "downpour")


def test_accumulation_is_refused_for_a_gradient_rule() -> None:
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match=r"without momentum, weight decay, accumulation or steps of its own"):
        Trainer(network(), "asgd", worker_optimizer=optimizer, loss="mse")


def frozen_base() -> list[Any]:
    base = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.BatchNormalization()])
    base.trainable = False
    return [base]


SOUND: dict[str, Callable[[], list[Any]]] = {
    "a frozen base": frozen_base,
    "a frozen layer": lambda: [layers.BatchNormalization(trainable=False), layers.Dropout(0.5, seed=1)],
    "regularized": lambda: [layers.Dense(5, kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(1))],
    "recurrent": lambda: [layers.Reshape((3, 2)), layers.Bidirectional(layers.LSTM(2, dropout=0.2, seed=1))],
    "attention": lambda: [layers.Reshape((3, 2)), layers.SpectralNormalization(layers.Conv1D(2, 2)), layers.Flatten()],
    "half precision": lambda: [layers.Dense(4, dtype="mixed_float16")],
}


@pytest.mark.parametrize(
    "make_layers",
    [
        pytest.param(make, id=name, marks=() if name == "a frozen layer" else pytest.mark.slow)
        for name, make in SOUND.items()
    ],
)
def test_a_valid_model_is_accepted_new_trained_and_loaded(make_layers: Callable[[], list[Any]]) -> None:
    model = keras.Sequential([keras.Input((6,)), *make_layers(), layers.Dense(3)])
    model.compile(keras.optimizers.AdamW(), "mse", metrics=["mae", keras.metrics.CosineSimilarity()])
    assert Trainer(model, "downpour")
    model.fit(np.ones((4, 6)), np.zeros((4, 3)), verbose=0, callbacks=[keras.callbacks.EarlyStopping("loss")])
    assert Trainer(model, "downpour")
    assert Trainer(archive.from_bytes(archive.to_bytes(model), compiled=True), "downpour")


@pytest.mark.slow
def test_a_counter_of_a_layer_is_accepted() -> None:
    model = changed(lambda _: None, Scaled())
    model.fit(np.zeros((4, 6)), np.zeros((4, 3)), verbose=0)
    assert Trainer(model, "downpour")


def keras_objects() -> list[Any]:
    kinds = [*vars(keras.losses).values(), *vars(keras.optimizers).values(), *vars(keras.metrics).values()]
    found: list[Any] = []
    for kind in kinds:
        if isinstance(kind, type) and hasattr(kind, "get_config") and kind.__name__ not in ("Loss", "Optimizer"):
            for arguments in ({}, {"num_classes": 3}, {"recall": 0.5}, {"precision": 0.5}):
                try:
                    found.append(kind(**arguments))
                    break
                except (TypeError, ValueError, NotImplementedError):
                    continue
    return found


def test_objects_of_keras_are_described_by_their_configurations() -> None:
    objects = keras_objects()
    assert len(objects) > 60
    for given in objects:
        rebuilt = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(given))
        assert lost(given, rebuilt) is None, given


@pytest.mark.parametrize(
    "optimizer",
    [
        Coupled(0.1, momentum=0.9),
        pytest.param("adam", marks=pytest.mark.slow),
        pytest.param("lion", marks=pytest.mark.slow),
        pytest.param("adafactor", marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_that_stores_no_weights_is_accepted(optimizer: Any) -> None:
    require_independent(keras.optimizers.get(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("ftrl", "steps without gradient move weights"),
        pytest.param("schedulefreeadamw", "begins as a function", marks=if_keras_has("ScheduleFreeAdamW")),
    ],
)
def test_an_optimizer_that_stores_weights_is_refused(optimizer: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"must not store weights: .*{text}"):
        require_independent(keras.optimizers.get(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        (keras.optimizers.SGD(0.1, clipnorm=0.1), True),
        pytest.param(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), True, marks=pytest.mark.slow),
        pytest.param(Named(0.1, clipvalue=0.1, loss_scale_factor=4.0), True, marks=pytest.mark.slow),
        (keras.optimizers.SGD(0.1, momentum=0.9), False),
        pytest.param(Halved(0.1), False, marks=pytest.mark.slow),
        pytest.param(keras.optimizers.LossScaleOptimizer(Halved(0.1)), False, marks=pytest.mark.slow),
        pytest.param(Coupled(0.1), False, marks=pytest.mark.slow),
        pytest.param(keras.optimizers.Adam(0.1), False, marks=pytest.mark.slow),
    ],
)
def test_a_rule_that_takes_its_own_steps_refuses_an_optimizer_with_other_steps(optimizer: Any, plain: bool) -> None:
    model = with_optimizer(optimizer)
    for rule in ("asgd", "eamsgd"):
        if plain:
            Trainer(model, rule)
        else:
            with pytest.raises(ConfigurationError, match="`worker_optimizer` must be SGD"):
                Trainer(model, rule)


def test_flags_of_compile_reach_the_workers() -> None:
    model = network()
    for flags in ({"run_eagerly": True}, {"jit_compile": True}):
        model.compile("sgd", "mse", **flags)
        file = archive.to_bytes(model)
        built = recipe_of(model, file).build(file)
        assert {name: getattr(built, name) for name in flags} == flags


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="elsewhere devices do not decide")
def test_workers_compile_as_the_driver_does_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    for compiled in (True, False):
        model = network()
        if compiled:
            model.compile("sgd", "mse")
        file = archive.to_bytes(model)
        recipe = recipe_of(model, file, loss="mse")
        with monkeypatch.context() as patched:
            patched.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])
            assert network().jit_compile
            assert not recipe.build(file).jit_compile


def test_an_unscaled_loss_stays_unscaled() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        for scaled in (True, False):
            model.compile("sgd", "mse", auto_scale_loss=scaled)
            file = archive.to_bytes(model)
            built = recipe_of(model, file).build(file)
            assert isinstance(built.optimizer, keras.optimizers.LossScaleOptimizer) is scaled
    finally:
        keras.config.set_dtype_policy(before)
