"""The loop on PyTorch compared with Keras' own ``train_on_batch``: the same mini-batches, the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import layers
from support.cases import examples
from support.training.step_models import CLASSES, FEATURES, MODELS, batches, dense, looping, several_outputs, state

from distkeras.data.batches import Batch, as_weight, flat_weight
from distkeras.keras_model.compiled_steps import model_inputs
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import ConfigurationError

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="the backend must be PyTorch")


def several_inputs() -> keras.Model:
    inputs = {name: keras.Input((FEATURES,), name=name) for name in ("one", "other")}
    hidden = layers.Concatenate()([layers.Dropout(0.5)(side) for side in inputs.values()])
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(hidden))
    model.compile("rmsprop", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


def eager() -> keras.Model:
    model = dense()
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    return model


BUILDS = {**MODELS, "several outputs": several_outputs, "several inputs": several_inputs, "eager": eager}


def for_model(model: keras.Model, batch: Batch) -> Batch:
    """Return a mini-batch with the same rows for each input and each output."""
    inputs, outputs = len(model.inputs), len(model.outputs)
    if inputs == outputs == 1:
        return batch
    weight = as_weight(flat_weight(batch.weight) * outputs)
    return Batch(0, batch.index, False, batch.x * inputs, batch.y * outputs, weight)


def trained_by_keras(model: keras.Model, data: list[Batch]) -> list[dict[str, Any]]:
    arguments = [model_inputs(model, batch.x, batch.y, batch.weight) for batch in data]
    return [dict(model.train_on_batch(x, y, sample_weight=weight, return_dict=True)) for x, y, weight in arguments]


@hypothesis.given(
    st.sampled_from(sorted(BUILDS)),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
@examples(15)
def test_drawn_windows_are_keras_own_steps(
    name: str, weighted: bool, in_stack: bool, windows: list[int], seed: int
) -> None:
    replica, plain = looping(BUILDS[name]), looping(BUILDS[name]).model
    made = batches(sum(windows), weighted=weighted, in_stack=in_stack, seed=seed)
    data = [for_model(plain, batch) for batch in made]
    ends = np.cumsum(windows)
    keras.utils.set_random_seed(seed)  # without seeds of their own, layers draw from PyTorch's generator
    rows = np.concatenate([replica.train(data[end - count : end]) for end, count in zip(ends, windows, strict=True)])
    keras.utils.set_random_seed(seed)
    expected = [[logs[name] for name in replica.reported] for logs in trained_by_keras(plain, data)]
    np.testing.assert_array_equal(rows, expected)
    for found, known in zip(state(replica), state(KerasReplica(plain)), strict=True):
        np.testing.assert_array_equal(found, known)


@pytest.mark.parametrize("name", ["sgd", "adam", "half", "dropout", "frozen"])
def test_gradients_are_keras_own(name: str) -> None:
    data = batches(3, weighted=True)
    one, other = looping(MODELS[name]), looping(MODELS[name], loops=False)
    found, known = np.empty(one.size, np.float32), np.empty(one.size, np.float32)
    for batch in data:
        keras.utils.set_random_seed(2)
        row = one.gradient(batch, found)
        keras.utils.set_random_seed(2)
        np.testing.assert_array_equal(row, other.gradient(batch, known))
        np.testing.assert_array_equal(found, known)
    assert np.any(found)
    for before, after in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(before, after)


class InPlace(keras.Sequential):
    """Changes its inputs in place, and reports a variable of its own, which the next step changes."""

    def __init__(self, inner: list[Any]) -> None:
        super().__init__(inner)
        self.total = keras.metrics.Sum(name="total")
        self.compilations = 0

    def train_step(self, data: Any) -> Any:
        import torch

        self.compilations += torch.compiler.is_compiling()
        x, y = data
        x -= 0.5
        self.zero_grad()
        loss = torch.nn.functional.mse_loss(self(x, training=True)[:, 0], y)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([variable.value.grad for variable in self.trainable_weights])
        self.total.update_state(x)
        return {"loss": loss.detach(), "of it": {"total": self.total.result(), "tenth": 0.1, "training": self.training}}


def in_place(**options: Any) -> keras.Model:
    model = InPlace([keras.Input((FEATURES,)), layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def floats(data: list[Batch]) -> list[Batch]:
    return [Batch(0, b.index, False, b.x, (b.y[0].astype(np.float32),), None) for b in data]


def test_a_step_of_the_users_own_may_change_its_inputs() -> None:
    data = floats(batches(4))
    replica, plain = looping(in_place), looping(in_place).model
    first = replica.train(data)
    replica.evaluate(data[0])  # leaves PyTorch's mode of training
    rows = np.concatenate([first, replica.train(data)])  # from the same memory
    tensors = [[keras.ops.convert_to_tensor(side[0].copy()) for side in (b.x, b.y)] for b in data * 2]
    plain.optimizer.build(plain.trainable_variables)
    expected = []
    for pair in tensors:
        plain.reset_metrics()
        logs = plain.train_step(pair)
        expected.append([float(logs["loss"]), float(logs["of it"]["total"]), 0.1, True])
    assert replica.metric_names == ("loss", "total", "tenth", "training")
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's own compiler reads it
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_is_compiled_if_and_only_if_the_user_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    import torch

    # PyTorch traces the step as ever; a machine without a C++ compiler cannot do what follows.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    options = {"jit_compile": True} if compiled else {}
    replica, other = looping(partial(in_place, **options)), looping(in_place)
    data = floats(batches(3))
    np.testing.assert_allclose(replica.train(data), other.train(data), rtol=1e-6)
    assert bool(replica.model.compilations) == compiled


def test_a_metric_that_a_step_does_not_report_is_refused() -> None:
    replica, data = looping(dense), batches(2)
    replica.prepare(data[0])
    replica.model.train_step = lambda _: {"loss": 0.0}
    with pytest.raises(ConfigurationError, match=r"none of \['accuracy'\]"):
        replica.train(data)
