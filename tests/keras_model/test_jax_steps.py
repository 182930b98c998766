"""The compiled loop on JAX compared with Keras' own step: the same mini-batches, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.present import present
from support.training.step_models import (
    FEATURES,
    MODELS,
    ROWS,
    batches,
    dense,
    looping,
    several_outputs,
    state,
)
from support.training.table_models import CASES, CutCase, batches_of, trained_by_rows, trained_dense

from distkeras.data.batches import Batch, as_weight, flat_weight
from distkeras.keras_model.jax_evaluation import JaxEvaluation, can_evaluate
from distkeras.keras_model.jax_steps import JaxSteps, can_loop
from distkeras.ml.evaluation import MetricSums, metric_states

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="the backend must be JAX")


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
