"""Groups that are trained side by side have the numbers of groups that are trained one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import hypothesis
import keras
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from support.cases import examples

from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import ROW_HASH
from distkeras.groups.replica import GroupsSideBySide, ReplicaOfGroups, common_steps, weights_of
from distkeras.groups.store import WEIGHTS, table_schema
from distkeras.groups.task import FIRST, GroupPartition, GroupTask
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import Recipe, recipe_of
from distkeras.ps.errors import ConfigurationError, NonFiniteError

SPEC = DataSpec(features=(Column("x", (3,)),), labels=(Column("y", ()),), batch_size=4, epochs=2, seed=3)
STACK = 5

Built = tuple[Recipe, bytes]

on_tensorflow = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only its graphs refuse these")
not_on_torch = pytest.mark.skipif(keras.backend.backend() == "torch", reason="it has no stacks of models")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01, global_clipnorm=0.5),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.05),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "schedule": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
    "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "average that overwrites": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
}
LAYERS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: keras.layers.Dropout(0.4, seed=1),
    "noise": lambda: keras.layers.GaussianNoise(0.3, seed=2),
    "averages": lambda: keras.layers.BatchNormalization(),
    "penalty": lambda: keras.layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l1"),
}
#: Further optimizers and layers; tracing each takes seconds.
RARER = [
    ("adam", ()),
    ("nadam", ()),  # changes an extra variable in each step
    *((name, ()) for name in ("sgd", "adamw", "adagrad", "lamb", "schedule", "loss scale", "average", "muon")),
    *(("sgd", (name,)) for name in LAYERS),
]


@cache
def built(optimizer: str, layers: tuple[str, ...] = ()) -> Built:
    keras.utils.set_random_seed(1)
    inner = [LAYERS[name]() for name in layers]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), *inner, keras.layers.Dense(1)])
    return described(model, optimizer)


def described(model: keras.Model, optimizer: str, **options: Any) -> Built:
    model_file = archive.to_bytes(model)
    recipe = recipe_of(model, model_file, optimizer=OPTIMIZERS[optimizer](), loss="mse", metrics=["mae"], **options)
    return recipe, model_file


@cache
def both_ways(optimizer: str, layers: tuple[str, ...] = ()) -> tuple[ReplicaOfGroups, GroupsSideBySide]:
    recipe, model_file = built(optimizer, layers)
    return ReplicaOfGroups(recipe, model_file), GroupsSideBySide(recipe, model_file, SPEC, STACK)


def rows(seed: int, count: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 3)).astype(np.float32), rng.normal(size=count).astype(np.float32)


def assert_same_but_for_rounding(
    ways: tuple[ReplicaOfGroups, GroupsSideBySide],
    groups: Sequence[tuple[np.ndarray, ...]],
    spec: DataSpec = SPEC,
    bad: int = -1,
) -> None:
    alone, stack = ways
    outcomes = stack.train(groups)
    assert len(outcomes) == len(groups)
    for place, (columns, outcome) in enumerate(zip(groups, outcomes, strict=True)):
        if place == bad:
            with pytest.raises(NonFiniteError) as error:
                alone.train(columns, spec)
            assert isinstance(outcome, NonFiniteError)
            assert (str(outcome), outcome.step) == (str(error.value), error.value.step)
            continue
        replica, means = alone.train(columns, spec)
        assert not isinstance(outcome, NonFiniteError)
        ours, theirs = (np.frombuffer(data, np.float32) for data in (outcome[0], weights_of(replica.model)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outcome[1], means, rtol=1e-4, atol=1e-6)


COUNTS = st.lists(st.integers(1, 11), min_size=1, max_size=STACK)


@not_on_torch
@pytest.mark.parametrize(
    ("optimizer", "layers"),
    [
        ("momentum", ("dropout", "averages")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in RARER),
    ],
)
@examples(5)
@hypothesis.given(COUNTS)
def test_groups_of_any_sizes_have_the_numbers_of_single_groups(
    optimizer: str, layers: tuple[str, ...], counts: list[int]
) -> None:
    assert_same_but_for_rounding(both_ways(optimizer, layers), [rows(seed, count) for seed, count in enumerate(counts)])


@pytest.mark.slow
@not_on_torch
def test_a_group_that_diverges_does_not_affect_the_others() -> None:
    groups = [rows(seed, count) for seed, count in enumerate((9, 11, 6))]
    groups[1] = tuple(column * np.float32(1e30) for column in groups[1])
    assert_same_but_for_rounding(both_ways("adam"), groups, bad=1)
    assert_same_but_for_rounding(both_ways("adam"), [groups[2], groups[0], rows(3, 11)])


@not_on_torch
@pytest.mark.slow
def test_named_inputs_and_sample_weights_train_without_shuffling() -> None:
    spec = DataSpec(
        features=(Column("a", (3,)), Column("b", (1,))),
        labels=(Column("y", ()),),
        sample_weight=Column("weight"),
        batch_size=4,
        epochs=2,
        shuffle=False,
    )
    keras.utils.set_random_seed(1)
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((1,), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    recipe, model_file = described(keras.Model(inputs, keras.layers.Dense(1)(joined)), "adam")
    ways = ReplicaOfGroups(recipe, model_file), GroupsSideBySide(recipe, model_file, spec, 3)
    groups = []
    for seed, count in enumerate((9, 5, 2)):
        (a, y), (b, weight) = rows(seed, count), rows(seed + 9, count)
        groups.append((a, b[:, :1], y, np.abs(weight)))
    assert_same_but_for_rounding(ways, groups, spec)


@hypothesis.given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9))
def test_each_group_trains_on_its_mini_batches_in_order(counts: list[int], batch_size: int) -> None:
    taken: list[list[int]] = [[] for _ in counts]
    for common in common_steps(counts, batch_size):
        assert all(one < other for one, other in pairwise(common.places.tolist()))
        for place, first in zip(common.places.tolist(), common.first.tolist(), strict=True):
            assert len(taken[place]) == first
            taken[place] += [common.size] * common.steps
    for count, sizes in zip(counts, taken, strict=True):
        whole, rest = divmod(count, batch_size)
        assert sizes == [batch_size] * whole + [rest] * (rest > 0)


@keras.saving.register_keras_serializable("distkeras_tests")
class Scaled(keras.layers.Dense):  # type: ignore[misc]  # Keras' classes have no types
    """A custom layer."""


def refused(model: keras.Model, optimizer: str = "sgd", count: int = 2) -> None:
    GroupsSideBySide(*described(model, optimizer), SPEC, count)


def linear(*inner: Any) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *inner, keras.layers.Dense(1)])


@pytest.mark.slow
@on_tensorflow
def test_steps_that_tensorflow_cannot_vectorize_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot vectorize its step: .*true_fn"):
        refused(linear(), "accumulation")
    with pytest.raises(ConfigurationError, match="state outside of its layers' and its optimizer's variables"):
        refused(linear(), "average that overwrites")


@not_on_torch
def test_models_that_cannot_be_stacked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="Keras' own classes and functions"):
        refused(linear(Scaled(2)))
    eager = linear()
    eager.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ConfigurationError, match="run_eagerly=True"):
        refused(eager)
    recipe, model_file = built("sgd")
    with pytest.raises(ConfigurationError, match=r"one of \['jax', 'tensorflow'\]\. Received: 'torch'"):
        GroupsSideBySide(replace(recipe, backend="torch"), model_file, SPEC, 2)
    monkeypatch.setattr("distkeras.groups.replica._STACK_BYTES_MAX", 1 << 12)
    with pytest.raises(ConfigurationError, match=r"`side_by_side` must be at most \d+ for this model"):
        refused(linear(), count=1000)


def trained_partition(
    optimizer: str, ids: Sequence[Sequence[int | None]], count: int
) -> dict[str, tuple[str | None, bytes | None]]:
    """Train a model with an embedding of ten ids on groups of these ids; return error and weights by key."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((1,), dtype="int32"), keras.layers.Embedding(10, 2), keras.layers.Flatten()]
    recipe, model_file = described(keras.Sequential([*layers, keras.layers.Dense(1)]), optimizer)
    task = GroupTask(
        run=f"{optimizer} {count}",
        epoch=1,
        key_names=("key",),
        schema=to_arrow_schema(table_schema([])),
        spec=replace(SPEC, features=(Column("id", (1,), "int32"),)),
        recipe=recipe,
        read_model=lambda: model_file,
        metrics=("loss", "mae"),
        rows_max=30,
        side_by_side=count,
        threads=None,
    )
    keys = [f"g{number}" for number, group in enumerate(ids) for _ in group]
    firsts = [place == 0 for group in ids for place in range(len(group))]
    values = pa.array([value for group in ids for value in group], pa.int32())
    others = [pa.array([1.0] * len(keys), pa.float32()), pa.array(range(len(keys)), pa.int64()), pa.array(firsts)]
    record = pa.RecordBatch.from_arrays([pa.array(keys), values, *others], ["key", "id", "y", ROW_HASH, FIRST])
    # Record batches end anywhere, also within a group.
    rows = pa.Table.from_batches(GroupPartition(task, 0).train(iter([record[:7], record[7:8], record[8:]]))).to_pylist()
    assert [row["rows"] for row in rows] == [len(group) for group in ids]
    return {row["key"]: (row["error"], row[WEIGHTS]) for row in rows}


# Adam squares each row of a table's gradient separately, even if an id occurs twice.
@pytest.mark.slow
@not_on_torch
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad", "schedule"])
def test_groups_that_cannot_be_trained_are_rows_with_their_errors(
    caplog: pytest.LogCaptureFixture, optimizer: str
) -> None:
    ids: list[list[int | None]] = [[1, 2, 3, 4, 5], [1, None], [7, 8, 9], [0, 10], [2] * 6, [3]]
    alone = trained_partition(optimizer, ids, 1)
    assert "have failed and are trained one after another" not in caplog.text
    stacks = trained_partition(optimizer, ids, 4)
    # On JAX, an id that is not a row gives NaN, and so an error of its group alone.
    together = "3 groups side by side have failed and are trained one after another" in caplog.text
    assert together == (keras.backend.backend() == "tensorflow")
    assert {key: error for key, (error, _) in stacks.items()} == {key: error for key, (error, _) in alone.items()}
    assert [key for key, (error, _) in stacks.items() if error] == ["g1", "g3"]
    for key in ("g0", "g2", "g4", "g5"):
        ours, theirs = (np.frombuffer(each[key][1] or b"", np.float32) for each in (stacks, alone))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
