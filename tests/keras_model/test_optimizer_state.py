"""The state of an optimizer passes to the next replica, to the bit; a state that does not fit is not loaded."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from support.cases import rest_slow
from support.present import present
from support.training.small_classifier import batches, weights

from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.keras_model.replica import KerasReplica, has_state
from distkeras.keras_model.replica_cache import ReplicaCache
from distkeras.ps.protocol.loop import OptimizerState

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "amsgrad on a schedule": lambda: keras.optimizers.Adam(SCHEDULE, amsgrad=True),
    "accumulated gradients": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), dynamic_growth_steps=2),
}


def network(optimizer: Any, *, units: int = 7, dtype: Any = None) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(units, activation="relu", dtype=dtype),
            layers.Dense(3, activation="softmax", dtype=dtype),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def replica_of(optimizer: Any, **options: Any) -> KerasReplica:
    return KerasReplica(network(optimizer, **options))


def loaded(replica: KerasReplica, start: np.ndarray) -> KerasReplica:
    replica.load(start)
    return replica


@pytest.mark.parametrize("name", rest_slow(OPTIMIZERS, "amsgrad on a schedule", "momentum"))
def test_the_next_replica_trains_as_the_first_one_would_have(name: str) -> None:
    make = OPTIMIZERS[name]
    data = batches(7)
    first = replica_of(make())
    first.train(data[:3])
    state, start = present(first.read_optimizer()), weights(first)
    second = loaded(replica_of(make()), start)
    assert second.load_optimizer(state, data[3]) == ""
    again = present(second.read_optimizer())
    assert (again.layout, again.content.tobytes()) == (state.layout, state.content.tobytes())
    assert second.learning_rate == first.learning_rate
    np.testing.assert_array_equal(second.train(data[3:]), first.train(data[3:]))
    np.testing.assert_array_equal(weights(second), weights(first))


@pytest.mark.slow
def test_the_state_includes_the_position_of_a_schedule() -> None:
    first = replica_of(keras.optimizers.SGD(SCHEDULE))
    first.train(batches(4))
    second = replica_of(keras.optimizers.SGD(SCHEDULE))
    assert (first.learning_rate, second.learning_rate) == pytest.approx((0.025, 0.1))
    assert second.load_optimizer(first.read_optimizer(), batches(1)[0]) == ""
    assert second.learning_rate == first.learning_rate


@pytest.mark.slow
def test_plain_sgd_has_no_state() -> None:
    replica = replica_of(keras.optimizers.SGD(0.1))
    replica.train(batches(2))
    assert not has_state(replica.model.optimizer)
    assert replica.read_optimizer() is None
    assert replica.load_optimizer(None, batches(1)[0]) is None


def test_a_missing_state_is_reported() -> None:
    assert replica_of(keras.optimizers.Adam()).load_optimizer(None, batches(1)[0]) == "none is kept"


def adam_state() -> OptimizerState:
    replica = replica_of(keras.optimizers.Adam(0.01))
    replica.train(batches(2))
    return present(replica.read_optimizer())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(lambda: keras.optimizers.Adam(0.01), {"units": 8}, marks=pytest.mark.slow),
        pytest.param(lambda: keras.optimizers.Nadam(0.01), {}, marks=pytest.mark.slow),
        (lambda: keras.optimizers.Adam(0.01, amsgrad=True), {}),
        pytest.param(lambda: keras.optimizers.Adam(0.01), {"dtype": "float64"}, marks=pytest.mark.slow),
    ],
    ids=["size", "optimizer", "variables", "dtype"],
)
def test_the_state_of_another_optimizer_or_model_is_not_loaded(
    make: Callable[[], Any], options: dict[str, Any]
) -> None:
    if options.get("dtype") == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless it is enabled at its start")
    replica = replica_of(make(), **options)
    problem = present(replica.load_optimizer(adam_state(), batches(1)[0]))
    assert problem.startswith("it must be of ")
    assert int(replica.model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "kind", [pytest.param("torn", marks=pytest.mark.slow), "changed", pytest.param("infinite", marks=pytest.mark.slow)]
)
def test_a_damaged_state_is_not_loaded(kind: str) -> None:
    state = adam_state()
    content = state.content.copy()
    if kind == "torn":
        content = content[:-4]
    elif kind == "changed":
        content[-1] ^= 1
    else:
        content[-4:] = np.array([np.inf], np.float32).view(np.uint8)
        state = dataclasses.replace(state, checksum=zlib.crc32(content.data))
    replica = replica_of(keras.optimizers.Adam(0.01))
    problem = present(replica.load_optimizer(dataclasses.replace(state, content=content), batches(1)[0]))
    assert {"torn": "bytes. Received", "changed": "another checksum", "infinite": "is not finite"}[kind] in problem
    assert int(replica.model.optimizer.iterations) == 0


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_read() -> None:
    replica = replica_of(keras.optimizers.Adam(0.01))
    replica.train(batches(2))
    variable = replica.model.optimizer.variables[-1]
    variable.assign(np.full(variable.shape, np.inf))
    assert replica.read_optimizer() is None


def packed(model: keras.Model) -> tuple[Recipe, bytes]:
    file = archive.to_bytes(model)
    return recipe_of(model, file), file


@pytest.mark.parametrize(
    "features",
    [pytest.param(6, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)],
    ids=["the traced loop", "data of another kind"],
)
def test_a_reused_replica_loads_the_state(features: int | None) -> None:
    """With data of another kind, a new model replaces the kept one, and loads the state as well."""
    data, cache = batches(7), ReplicaCache()
    if features is None:
        data = [dataclasses.replace(batch, y=tuple(y.astype(np.int16) for y in batch.y)) for batch in data]
    recipe, file = packed(network(keras.optimizers.Adam(0.01)))
    with cache.lent(recipe, file) as replica:
        replica.train(batches(5))
    reference = replica_of(keras.optimizers.Adam(0.01))
    reference.train(data[:3])
    state, start = present(reference.read_optimizer()), weights(reference)
    with cache.lent(recipe, file) as replica:
        assert loaded(replica, start).load_optimizer(state, data[3]) == ""
        rows = replica.train(data[3:])
        np.testing.assert_array_equal(rows, reference.train(data[3:]))
        np.testing.assert_array_equal(weights(replica), weights(reference))
