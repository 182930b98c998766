"""The compiled loop on JAX compared with Keras' own step: the same mini-batches, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import layers, optimizers
from support.present import present
from support.training.table_models import CASES, CutCase, batches_of, trained_by_rows, trained_dense

from distkeras.data.batches import Batch, Stack, aligned, as_weight, flat_weight
from distkeras.keras_model.jax_evaluation import JaxEvaluation, can_evaluate
from distkeras.keras_model.jax_steps import JaxSteps, can_loop
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import VariableVector
from distkeras.ml.evaluation import MetricSums, metric_states

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="the backend must be JAX")
ROWS, FEATURES, CLASSES = 8, 6, 3


def dense(*inner: keras.Layer, optimizer: Any = "sgd", dtype: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = inner or (layers.Dense(5, activation="relu", dtype=dtype),)
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES, activation="softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class OwnStep(keras.Sequential):
    """Reports a number of its own."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return logs | {"twice": 2 * logs["loss"]}, state


def own_step() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = OwnStep([keras.Input((FEATURES,)), layers.Dense(CLASSES, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def frozen() -> keras.Model:
    model = dense(layers.Dense(5), layers.Dense(4))
    model.layers[0].trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def recurrent() -> keras.Model:
    return dense(layers.Reshape((2, 3)), layers.LSTM(4))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "sgd": dense,
    "adam": lambda: dense(optimizer=optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)),
    "schedule": lambda: dense(
        optimizer=optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9)
    ),
    "accumulated": lambda: dense(optimizer=optimizers.SGD(0.1, gradient_accumulation_steps=3)),
    "average": lambda: dense(optimizer=optimizers.Adam(use_ema=True, ema_overwrite_frequency=4)),
    "dropout": lambda: dense(layers.Dense(5), layers.Dropout(0.5)),
    "batch norm": lambda: dense(layers.Dense(5), layers.BatchNormalization()),
    "penalized": lambda: dense(layers.Dense(5, kernel_regularizer="l2", kernel_constraint="max_norm")),
    "half": lambda: dense(dtype="mixed_float16", optimizer=optimizers.LossScaleOptimizer(optimizers.SGD(0.1))),
    "own step": own_step,
    "frozen": frozen,
    "recurrent": recurrent,
}


def batches(count: int, *, weighted: bool = False, in_stack: bool = True, seed: int = 0) -> list[Batch]:
    chance = np.random.default_rng(seed)
    x, y = aligned((count, ROWS, FEATURES), np.dtype(np.float32)), aligned((count, ROWS), np.dtype(np.int32))
    x[...], y[...] = chance.normal(size=x.shape), chance.integers(0, CLASSES, y.shape)
    weight = aligned((count, ROWS), np.dtype(np.float32))
    weight[...] = chance.random(weight.shape)
    stack = Stack((x,), (y,), weight if weighted else None)
    made = [Batch(0, i, False, (x[i],), (y[i],), weight[i] if weighted else None) for i in range(count)]
    return [batch.placed_in(stack, place) for place, batch in enumerate(made)] if in_stack else made


def state(replica: KerasReplica) -> list[np.ndarray]:
    model = replica.model
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def looping(build: Callable[[], keras.Model], *, loops: bool = True) -> KerasReplica:
    keras.utils.set_random_seed(1)  # before the layers are created
    replica = KerasReplica(build())
    assert replica.loops
    replica.loops = loops
    return replica


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_windows_of_any_length_are_keras_own_steps(build: Callable[[], keras.Model], weighted: bool) -> None:
    data = batches(12, weighted=weighted)
    one, other = looping(build), looping(build, loops=False)
    rows = [one.train(data[first:end]) for first, end in ((0, 1), (1, 4), (4, 12))]
    expected = other.train(data)
    assert one.metric_names == other.metric_names
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=1e-5, atol=1e-6)
    for found, known in zip(state(one), state(other), strict=True):
        np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [MODELS["sgd"], MODELS["adam"], MODELS["half"]], ids=["sgd", "adam", "half"])
def test_gradients_are_keras_own(build: Callable[[], keras.Model]) -> None:
    data = batches(3)
    one, other = looping(build), looping(build, loops=False)
    found, known = np.empty(one.size, np.float32), np.empty(one.size, np.float32)
    for batch in data:
        rows = one.gradient(batch, found), other.gradient(batch, known)
        np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)
    for before, after in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(before, after)


def test_one_compilation_serves_all_lengths_of_windows() -> None:
    replica, data = looping(dense), batches(40)
    replica.train(batches(1))  # builds optimizer and metrics
    steps = JaxSteps(replica.model)
    fewer = batches(33, seed=1)  # than the first stack has
    for window in (data[:1], data[1:8], data[8:30], data[30:40], fewer):
        assert steps.run(window, replica.reported, 2).shape == (len(window), 2)
    assert steps.traces == 1


def test_few_compilations_serve_stacks_of_any_length() -> None:
    """Three lengths are compiled as they are, and need no copy; then powers of two: 1, 2, 3, 4, 8, 16, 32."""
    replica = looping(dense)
    replica.train(batches(1))
    steps, other = JaxSteps(replica.model), looping(dense, loops=False)
    other.train(batches(1))
    for count in range(1, 33):
        data = batches(count, seed=count)
        np.testing.assert_allclose(steps.run(data, replica.reported, 2), other.train(data), rtol=1e-4, atol=1e-5)
    assert steps.traces == 7


def test_mini_batches_without_a_stack_are_trained_in_the_same_way() -> None:
    one, other = looping(dense), looping(dense)
    np.testing.assert_array_equal(one.train(batches(5)), other.train(batches(5, in_stack=False)))
    for found, known in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(found, known)


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "mixed_float16", "float16", "bfloat16"]))
@hypothesis.settings(max_examples=12, deadline=None)
def test_vectors_are_loaded_and_read_as_keras_assigns_each_variable(seed: int, dtype: str) -> None:
    """To the bit for any numbers: signed zeros, subnormal numbers, infinities and NaN are among them."""
    built = keras.Sequential([keras.Input((3,)), layers.Dense(4, dtype=dtype), layers.Dense(2, dtype=dtype)])
    vector, variables = VariableVector(built.trainable_variables), built.trainable_variables
    chance = np.random.default_rng(seed)
    loaded = chance.integers(0, 2**32, vector.layout.size, dtype=np.uint32).view(np.float32)
    loaded[np.isnan(loaded)] = 1.0  # of which a cast to half precision may keep other bits
    loaded[:5] = 0.0, -0.0, 1e-42, np.inf, np.nan
    before = chance.normal(size=loaded.shape).astype(np.float32)
    with np.errstate(all="ignore"):
        for variable, values in zip(variables, vector.layout.views(loaded), strict=True):
            variable.assign(values.copy())
    expected = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    for variable in variables:
        variable.assign(np.zeros(variable.shape, np.float32))
    vector.load(loaded)
    read, moved = np.empty_like(loaded), np.empty_like(loaded)
    vector.read(read)
    with np.errstate(all="ignore"):
        vector.moved(before, moved)
        for place, (known, variable) in enumerate(zip(expected, variables, strict=True)):
            assert np.array(keras.ops.convert_to_numpy(variable)).tobytes() == known.tobytes()
            assert vector.layout.views(read)[place].tobytes() == known.astype(np.float32).tobytes()
            difference = known.astype(np.float32) - vector.layout.views(before)[place]
            np.testing.assert_array_equal(vector.layout.views(moved)[place], difference)


def test_a_vector_that_was_loaded_is_not_overwritten() -> None:
    """A loop takes over the memory of the variables: a vector of the caller's must not be among it."""
    replica = looping(dense)
    center = np.random.default_rng(1).normal(size=replica.size).astype(np.float32)
    before = center.copy()
    replica.load(center)
    replica.train(batches(3))
    np.testing.assert_array_equal(center, before)
    replica.load(center)
    loaded = np.empty_like(center)
    replica.read(loaded)
    np.testing.assert_array_equal(loaded, before)


def test_models_that_cannot_loop_take_keras_own_steps() -> None:
    eager = dense()
    eager.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    uncompiled = dense()
    uncompiled.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    stateful = keras.Sequential([keras.Input(batch_shape=(ROWS, 2, 3)), layers.LSTM(4, stateful=True), layers.Dense(1)])
    stateful.compile("sgd", "mse")
    image = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)])
    image.compile("sgd", "mse")
    assert [can_loop(model) for model in (dense(), eager, uncompiled, stateful, image)] == [True, *[False] * 4]


#: JAX has no strings and no 64-bit integers, and the lazy optimizers need gradients that name rows.
BY_ROWS = sorted(name for name in CASES if "hashing" not in name and name != "lookups" and not name.startswith("lazy"))


@pytest.mark.parametrize("name", BY_ROWS)
def test_tables_that_travel_by_rows_are_trained_like_whole_tables(name: str) -> None:
    """Rows of small tables are added up in another order, so that only the last places differ."""
    case, data = CutCase.of(CASES[name].model()), batches_of(CASES[name].draw)
    assert case.cut.tables
    assert not case.cut.kept_dense, case.cut.kept_dense
    rows, dense = trained_by_rows(case, data), trained_dense(case, data)
    for field, found, expected in zip(dense._fields, rows, dense, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=field)


def several_outputs() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dropout(0.5)(layers.Dense(4, activity_regularizer="l2")(inputs))
    outputs = [layers.Dense(CLASSES, activation="softmax", name=name)(hidden) for name in ("one", "other")]
    model = keras.Model(inputs, outputs)
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", [loss, loss], metrics=[["accuracy"], []], weighted_metrics=[[], ["accuracy"]])
    return model


def part(batch: Batch, rows: int, outputs: int) -> Batch:
    """Return the first rows of a mini-batch, with the same labels for each output."""
    weights = [weight[:rows] for weight in flat_weight(batch.weight)] * outputs
    return replace(batch, x=(batch.x[0][:rows],), y=(batch.y[0][:rows],) * outputs, weight=as_weight(weights))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("build", [*MODELS.values(), several_outputs], ids=[*MODELS, "several outputs"])
def test_the_states_of_metrics_are_those_of_evaluate(build: Callable[[], keras.Model], weighted: bool) -> None:
    keras.utils.set_random_seed(1)
    model = build()
    rows, outputs = (ROWS, ROWS, ROWS, 3), len(model.outputs)
    data = [part(batch, n, outputs) for batch, n in zip(batches(4, weighted=weighted), rows, strict=True)]
    expected = np.sum([metric_states(model, batch) for batch in data], axis=0)
    assert can_evaluate(model)
    sums = MetricSums(model)
    for batch in data:
        sums.add(batch)
    np.testing.assert_allclose(present(sums.total()), expected, rtol=1e-6)


def test_one_compilation_evaluates_all_mini_batches_of_a_size() -> None:
    model, data = dense(), batches(5)
    evaluation = JaxEvaluation(model, data[0])
    for batch in data:
        evaluation.states(batch)
    assert evaluation.traces == 1


def test_models_of_which_keras_must_evaluate_each_mini_batch() -> None:
    class OwnTest(keras.Sequential):
        def test_step(self, state: Any, data: Any) -> Any:
            return super().test_step(state, data)

    own = OwnTest([keras.Input((FEATURES,)), layers.Dense(1)])
    own.compile("sgd", "mse")
    eager = dense()
    eager.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    image = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)])
    image.compile("sgd", "mse")
    assert [can_evaluate(model) for model in (own, eager, image)] == [False, False, True]
