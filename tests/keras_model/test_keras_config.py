"""The settings of ``keras.config``: they travel with a model, and the driver's own stay as they are."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from distkeras import Trainer
from distkeras.analysis.keras_gradient import KerasGradient
from distkeras.data.batches import Batch
from distkeras.keras_model import archive, mapped_tables
from distkeras.keras_model.keras_config import applied, from_text, settings_now, to_text, use
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.ml.model import KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.transformers import ModelPredictor


@pytest.fixture(autouse=True)
def settings_that_are_restored() -> Iterator[None]:
    with applied(settings_now()):
        before = settings_now()
        yield
        use(before)


def model_of(policy: str) -> keras.Model:
    """Return a model with a composite layer, made under a global policy."""
    keras.utils.set_random_seed(1)
    with applied({"dtype_policy": policy}):
        layers = [
            keras.Input((4, 2)),
            keras.layers.Bidirectional(keras.layers.GRU(3)),
            keras.layers.Dense(2),
        ]
        return keras.Sequential(layers)


#: Getters and switches of ``keras.config`` that do not travel, and why.
EXCUSED = {
    "backend": "it is chosen before Keras is imported, and a recipe names it",
    "nnx_enabled": "JAX reads it on import, and no public function sets it",
    "max_epochs": "it limits calls of `fit`, for debugging",
    "max_steps_per_epoch": "it limits calls of `fit`, `evaluate` and `predict`, for debugging",
    "interactive_logging": "it concerns what is printed",
    "traceback_filtering": "it concerns the text of errors",
    "unsafe_deserialization": "it permits code: a recipe names the model whose code it permits",
}


def test_every_setting_travels_or_has_a_reason_not_to() -> None:
    """A getter is a function without parameters that changes nothing; a switch has two functions."""
    found = set()
    for name, function in vars(keras.config).items():
        if inspect.isfunction(function) and not name.startswith("set_"):
            for part in ("enable_", "disable_", "is_"):
                name = name.removeprefix(part)
            found.add(name.removesuffix("_enabled"))
    excused = {name.removesuffix("_enabled") for name in EXCUSED}
    assert found <= {*settings_now(), *excused}, found - {*settings_now(), *excused}
    assert not {*settings_now()} & excused


def test_settings_are_applied_in_a_context_only() -> None:
    before = settings_now()
    other = {"epsilon": 1e-3, "floatx": "float64", "image_data_format": "channels_first"}
    other |= {"dtype_policy": "mixed_float16", "flash_attention": False}
    with pytest.raises(ZeroDivisionError), applied(other):
        _ = 1 / int(settings_now() != other)
    assert settings_now() == before
    seen: list[Any] = []
    with applied(other):
        thread = threading.Thread(target=lambda: seen.append(settings_now()["dtype_policy"]))
        thread.start()
        thread.join()
    assert seen != ["mixed_float16"], "the policy belongs to a thread"


def test_settings_arrive_as_text_and_invalid_ones_are_refused() -> None:
    assert from_text(to_text(settings_now())) == settings_now()
    assert from_text(b"") == from_text(b"a comment") == from_text(b"[1]") == {}
    for settings in ({"backend": "jax"}, {"epsilon": "small"}, {"flash_attention": 1}, {"floatx": 16}):
        with pytest.raises(ConfigurationError, match=r"settings must be those of `keras.config`"):
            from_text(to_text(settings))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_a_worker_computes_under_the_global_policy(policy: str) -> None:
    """The worker's process has the default policy; so has the driver when it builds."""
    x, y = np.random.default_rng(0).normal(size=(4, 4, 2)), np.ones((4, 2))
    model = model_of(policy)
    with applied({"dtype_policy": policy}):
        model.compile("adam", "mse")
        file = archive.to_bytes(model)
        recipe = recipe_of(model, file)
        rebuilt_under = settings_now()["dtype_policy"]
    assert rebuilt_under == policy
    before = settings_now()
    rebuilt = recipe.build(file)
    assert settings_now() == before
    assert type(rebuilt.optimizer) is type(model.optimizer)
    assert [layer.dtype_policy.name for layer in rebuilt._flatten_layers()] == [  # noqa: SLF001 - there is no public list of layers at every depth
        layer.dtype_policy.name
        for layer in model._flatten_layers()  # noqa: SLF001 - the same
    ]
    recipe.begin_task()
    losses = [one.train_on_batch(x, y) for one in (model, rebuilt)]
    assert losses[0] == losses[1]
    for ours, theirs in zip(rebuilt.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_drivers_settings_stay_as_they_are() -> None:
    keras.config.set_epsilon(1e-3)
    model = model_of("float32")
    trainer = Trainer(model, "downpour", worker_optimizer="sgd", loss="mse")
    keras.config.set_epsilon(1e-5)
    keras.config.set_floatx("float64")
    before = settings_now()
    trainer.recipe.build(trainer.model_file)
    assert settings_now() == before
    assert trainer.recipe.settings["epsilon"] == 1e-3


def test_one_row_is_predicted_under_the_settings_of_the_model() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.UnitNormalization()])
    model.compile("sgd", "mse")
    keras.config.set_epsilon(0.5)
    fitted = KerasModel(model)
    expected = fitted.predict([1e-3, 1e-3])
    keras.config.set_epsilon(1e-7)
    assert fitted.predict([1e-3, 1e-3]) == expected


def test_lambdas_need_the_users_permission() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: 2 * x), keras.layers.Dense(1)])
    with pytest.raises(ConfigurationError, match="enable_unsafe_deserialization"):
        Trainer(model, "downpour", worker_optimizer="sgd", loss="mse")
    keras.config.enable_unsafe_deserialization()
    try:
        trainer = Trainer(model, "downpour", worker_optimizer="sgd", loss="mse")
    finally:
        permission = "safe_mode_saving"
        from keras.src.backend.common import global_state

        global_state.set_global_attribute(permission, None)
    x = np.ones((1, 2))
    rebuilt = trainer.recipe.build(trainer.model_file)
    np.testing.assert_allclose(rebuilt.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
    with pytest.raises(ConfigurationError, match="enable_unsafe_deserialization"):
        archive.from_bytes(trainer.model_file)


def test_the_drivers_replicas_make_losses_under_the_settings_of_the_model() -> None:
    keras.config.set_epsilon(0.25)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="zeros")])
    trainer = Trainer(model, "downpour", worker_optimizer="sgd", loss=keras.losses.MeanAbsolutePercentageError())
    keras.config.set_epsilon(1e-7)
    keras.config.set_floatx("float64")
    replica = KerasReplica.of(trainer.recipe, trainer.model_file)  # every callback's copy is made so
    x = (np.ones((4, 2), np.float32),)
    assert replica.evaluate(Batch(0, 0, True, x, (np.zeros((4, 1), np.float32),), None))["loss"] == 200.0
    assert replica.model._compile_loss.dtype == "float32"  # noqa: SLF001 - Keras has no public one


def test_a_gradient_evaluates_under_the_settings_of_its_construction() -> None:
    keras.config.set_epsilon(0.25)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    x, y = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)
    gradient = KerasGradient(model, x, y, loss="mean_absolute_percentage_error", batch_size=4)
    keras.config.set_epsilon(1e-7)
    assert gradient.evaluate(gradient.theta0)["loss"] == 800.0


def test_a_lambda_below_a_wide_table_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "FILE_BYTES_MIN", 1000)
    ids = keras.Input((2,), dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(300, 3)(ids))
    model = keras.Model(ids, keras.layers.Lambda(lambda x: 2 * x)(embedded))
    keras.config.enable_unsafe_deserialization()
    try:
        packed = ModelPredictor(keras_model=model).packed_model
    finally:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute("safe_mode_saving", None)
    assert mapped_tables.has_wide_tables(model)
    assert not packed._maps  # noqa: SLF001 - the choice of the way
    assert archive.from_bytes(packed.data, trusted=packed.trusted)
