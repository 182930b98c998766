"""Attributes outside of configurations: each rebuilt copy has them, wherever a model travels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from support.cases import rest_slow
from support.draws.worker import plan_of

from distkeras import Trainer
from distkeras.keras_model import archive, mapped_tables
from distkeras.keras_model.archive import from_bytes
from distkeras.keras_model.attributes import (
    attributes_of,
    attributes_of_model,
    set_attributes,
    set_attributes_of_model,
)
from distkeras.keras_model.optimizers import inner_optimizer, with_learning_rate
from distkeras.keras_model.recipe import model_identity
from distkeras.keras_model.replica_cache import fingerprint
from distkeras.keras_model.tables import cut
from distkeras.ml.model import KerasModel
from distkeras.ps.errors import ConfigurationError
from distkeras.training.plan import CenterCopy, Publication
from distkeras.training.run import PreparedJob
from distkeras.training.stream import _to_publish
from distkeras.transformers import ModelPredictor
from distkeras.transformers.files import from_json, to_json


@keras.saving.register_keras_serializable("attributes")
class Scaled(keras.layers.Layer):
    """Multiplies by a class attribute or a table, which an instance may replace."""

    factor = 1.0
    table: Any = None

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor if self.table is None else inputs * keras.ops.convert_to_tensor(self.table)


@keras.saving.register_keras_serializable("attributes")
class Weighted(keras.losses.Loss):
    """A squared error times an attribute."""

    weight = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


@keras.saving.register_keras_serializable("attributes")
class Alpha(keras.Model):
    """Scales its loss by an argument of ``compile``."""

    beta = 0.0

    def compile(self, *args: Any, alpha: float = 1.0, **keywords: Any) -> None:
        super().compile(*args, **keywords)
        self.alpha = alpha

    def compute_loss(self, *args: Any, **keywords: Any) -> Any:
        return self.alpha * super().compute_loss(*args, **keywords) + self.beta


def alpha() -> keras.Model:
    inputs = keras.Input((3,))
    model = Alpha(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse", alpha=3.0)
    model.beta = 3.0
    return model


def scaled(**attributes: Any) -> keras.Model:
    layer = Scaled()
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
    for name, value in attributes.items():
        setattr(layer, name, value)
    model.compile("sgd", "mse")
    return model


def weighted() -> keras.Model:
    loss = Weighted()
    loss.weight = 3.0
    model = scaled()
    model.compile("sgd", loss)
    return model


def excluding(**variables: Any) -> keras.Model:
    model = scaled()
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**variables or {"var_list": [model.layers[-1].kernel]})
    model.compile(optimizer, "mse")
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "an argument of an own compile": alpha,
    "a factor of a layer": lambda: scaled(factor=0.1),
    "a table of a layer": lambda: scaled(table=np.array([1.0, 2.0, 3.0], np.float32)),
    "a weight of a loss": weighted,
    "excluded variables": excluding,
    "excluded names": lambda: excluding(var_names=["kernel"]),
    "input_shape": lambda: compiled(keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])),
    "input_dim": lambda: compiled(keras.Sequential([keras.layers.Dense(2, input_dim=3)])),
}


def compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse", run_eagerly=True)  # nothing here is worth a trace
    return model


@pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`")
@pytest.mark.parametrize("name", rest_slow(MODELS, "a factor of a layer"))
def test_the_rebuilt_model_takes_the_given_ones_step(name: str) -> None:
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    trainer = Trainer(model, "downpour")
    rebuilt = trainer.recipe.build(trainer.model_file, to_train=True)
    x, y = np.random.default_rng(0).normal(size=(4, 3)), np.ones((4, 2))
    before = model.get_weights()
    results = [(one.train_on_batch(x, y, return_dict=True)["loss"], *one.get_weights()) for one in (model, rebuilt)]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize("name", [pytest.param("a factor of a layer", marks=pytest.mark.slow), "a table of a layer"])
def test_predictors_have_the_attributes(name: str) -> None:
    model = MODELS[name]()
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    expected = model.predict(x, verbose=0)
    for copy in (ModelPredictor(keras_model=model).keras_model, KerasModel(model).keras_model):
        np.testing.assert_allclose(copy.predict(x, verbose=0), expected, rtol=1e-6)


def looked_up() -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,))
    numbered = Scaled(name="numbered")
    numbered.factor = 2.0
    embedded = keras.layers.Embedding(300, 3, name="table")(numbered(ids))
    layer = Scaled(name="scaled")
    layer.factor = 0.1
    return compiled(keras.Model(ids, keras.layers.Dense(1)(layer(keras.layers.Flatten()(embedded)))))


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="tables stay dense on PyTorch")
def test_a_model_whose_tables_travel_by_rows_has_the_attributes() -> None:
    trainer = Trainer(looked_up(), "downpour")
    model = trainer.recipe.build(trainer.model_file)
    worker = cut(model, trainer.recipe, window=2, batch_size=4, choose=["table"], shapes=[(2,)])
    assert worker.worker is not None
    assert from_bytes(worker.model_file).get_layer("scaled").factor == 0.1
    assert from_bytes(worker.worker.ids_file).get_layer("numbered").factor == 2.0


@pytest.mark.slow
def test_a_model_whose_tables_are_in_files_has_the_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "FILE_BYTES_MIN", 1000)
    packed = ModelPredictor(keras_model=looked_up()).packed_model
    parts, _ = mapped_tables.split_tables(from_bytes(packed.data, packed.objects), packed.objects)
    assert from_bytes(parts.rest).get_layer("scaled").factor == 0.1
    assert from_bytes(parts.ids).get_layer("numbered").factor == 2.0


@pytest.mark.slow
def test_versions_of_a_stream_have_the_attributes() -> None:
    trainer = Trainer(scaled(factor=0.1), "downpour", batch_size=2)
    plan = plan_of(trainer, pa.table({"features": [[1.0, 2.0, 3.0]] * 2, "label": [[0.0, 1.0]] * 2}))
    job = PreparedJob(plan, Publication(plan), CenterCopy(plan))
    assert from_bytes(_to_publish(job), compiled=True).layers[0].factor == 0.1


@pytest.mark.slow
def test_attributes_are_part_of_what_identifies_a_job() -> None:
    keras.utils.set_random_seed(1)
    plain, changed, again = (Trainer(scaled(factor=factor), "downpour") for factor in (1.0, 0.1, 0.1))
    identities = [json.dumps(model_identity(trainer.model_file)) for trainer in (plain, changed, again)]
    assert identities[0] != identities[1] == identities[2]
    optimizers = [Trainer(excluding(var_names=[name]), "downpour") for name in ("kernel", "bias")]
    models = [trainer.recipe.build(trainer.model_file) for trainer in optimizers]
    described = [json.dumps(t.recipe.identity(m)) for t, m in zip(optimizers, models, strict=True)]
    assert described[0] != described[1]
    for trainer, model in zip(optimizers, models, strict=True):
        assert fingerprint(trainer.recipe, archive.read_config(trainer.model_file), model) is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(st.text(), parts),
    max_leaves=5,
)


@drawn(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    loss, copy = Weighted(), Weighted()
    loss.note = value
    set_attributes(copy, json.loads(json.dumps(attributes_of(loss, copy))))
    assert vars(copy)["note"] == value
    assert type(vars(copy)["note"]) is type(value)


@pytest.mark.parametrize(
    "value",
    [np.arange(6).reshape(2, 3), np.float32(0.1), np.bool_(True), {1, 2}, frozenset("ab"), re.compile("a", re.I)],
)
def test_other_values_arrive_as_they_were(value: Any) -> None:
    loss, copy = Weighted(), Weighted()
    loss.note = value
    set_attributes(copy, json.loads(json.dumps(attributes_of(loss, copy))))
    assert type(vars(copy)["note"]) is type(value)
    np.testing.assert_array_equal(vars(copy)["note"], value)


def test_a_model_without_the_owner_is_an_error() -> None:
    model = scaled()
    with pytest.raises(ConfigurationError, match="`model` must have the layer '/other'"):
        set_attributes_of_model(model, [[["/other"], "factor", 1.0]])
    with pytest.raises(ConfigurationError, match="`model` must have the attribute 'factor'"):
        set_attributes_of_model(model, [[["", "missing"], "factor", 1.0]])
    assert attributes_of_model(model, model) == []


@pytest.mark.parametrize("scaled_loss", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_learning_rate_is_all_that_changes(scaled_loss: bool) -> None:
    model = excluding(var_names=["kernel"])
    given = model.optimizer
    given = keras.optimizers.LossScaleOptimizer(given, initial_scale=8.0) if scaled_loss else given
    copies = [with_learning_rate(given, rate) for rate in (0.01, 0.1)]
    assert [float(inner_optimizer(copy).learning_rate) for copy in copies] == pytest.approx([0.01, 0.1])
    x, y = np.random.default_rng(0).normal(size=(4, 3)), np.ones((4, 2))
    results = []
    for optimizer in (given, copies[1]):
        keras.utils.set_random_seed(1)
        model = scaled()
        model.compile(optimizer, "mse")
        model.train_on_batch(x, y)
        results.append(model.get_weights())
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_optimizer_is_saved_with_its_attributes_or_refused() -> None:
    by_name = excluding(var_names=["kernel"]).optimizer
    saved = json.loads(json.dumps(to_json(by_name, "worker_optimizer")))
    again = from_json(saved, "worker_optimizer")
    pattern = "_exclude_from_weight_decay_pattern"
    assert vars(again)[pattern] == vars(by_name)[pattern] == re.compile("kernel")
    with pytest.raises(
        ConfigurationError, match=r"`worker_optimizer` must be an optimizer that excludes .* `var_names`"
    ):
        to_json(excluding().optimizer, "worker_optimizer")


class Free(keras.Model):
    """A model whose inputs are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def get_config(self) -> dict[str, Any]:
        return {}


def test_a_model_without_known_inputs_is_refused_by_name() -> None:
    model = Free()
    model(np.zeros((1, 3)))
    with pytest.raises(ConfigurationError, match=r"`model` must have inputs and outputs: .* of Free"):
        Trainer(model, "downpour", worker_optimizer="sgd", loss="mse")
    with pytest.raises(ConfigurationError, match=r"`model` must have inputs and outputs: .* of Sequential"):
        archive.require_inputs(keras.Sequential([keras.layers.Dense(1)]))
