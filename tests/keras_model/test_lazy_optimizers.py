"""Lazy optimizers: a row and its state change only in the steps that touch the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.training.table_models import one_table

from distkeras.keras_model import archive
from distkeras.keras_model.optimizers import optimizer_of
from distkeras.keras_model.recipe import recipe_of
from distkeras.optimizers import LazyAdam, LazyMomentum
from distkeras.ps.errors import ConfigurationError

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the gradients of other backends do not name rows"
)

#: The rows that a step touches, possibly repeated, and a gradient for each.
Step = tuple[Sequence[int], np.ndarray]


def gradient_of(step: Step, rows: int) -> Any:
    """Return a gradient in TensorFlow's form for the lookups of a table."""
    import tensorflow as tf

    ids, values = step
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int32), tf.constant([rows, values.shape[1]]))


def trained(optimizer: Any, start: np.ndarray, steps: Sequence[Step], *, dense: bool = False) -> list[np.ndarray]:
    """Return the table after each step."""
    import tensorflow as tf

    table = keras.Variable(start)
    optimizer.build([table])
    found = []
    for step in steps:
        gradient = gradient_of(step, len(start))
        optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], [table])
        found.append(np.array(table))
    return found


def of_one(*steps: tuple[Sequence[int], Sequence[float]]) -> list[Step]:
    return [(ids, np.array(values, np.float32)[:, None]) for ids, values in steps]


#: Row 0 is touched by the first step and, twice, by the third; row 1 by the second; row 2 by none.
GAP = of_one(([0], [2.0]), ([1], [2.0]), ([0, 0], [1.0, 3.0]))


@on_tensorflow
def test_lazy_adam_makes_the_golden_steps_with_a_gap() -> None:
    found = trained(LazyAdam(0.1, 0.5, 0.75, 0.0), np.ones((3, 1), np.float32), GAP)
    # Step 1, row 0: m = 1, v = 1, and alpha = 0.1 * sqrt(0.25) / 0.5 = 0.1.
    # Step 2, row 1: m = 1, v = 1, and alpha = 0.1 * sqrt(1 - 0.5625) / 0.75 = 0.0881917: all steps count.
    # Step 3, row 0: m = 0.5 + 2 = 2.5, v = 0.75 + 4 = 4.75, and alpha = 0.1 * sqrt(1 - 0.421875) / 0.875 = 0.0868966.
    expected = [[0.9, 1.0, 1.0], [0.9, 0.9118083, 1.0], [0.8003224, 0.9118083, 1.0]]
    np.testing.assert_allclose(np.array(found)[:, :, 0], expected, rtol=1e-6)
    assert found[2][2] == 1.0
    assert found[1][0] == found[0][0]
    dense = trained(keras.optimizers.Adam(0.1, 0.5, 0.75, 1e-30), np.ones((3, 1), np.float32), GAP, dense=True)
    assert dense[1][0] < dense[0][0]  # Adam moves the row also in steps that do not touch it


@on_tensorflow
@pytest.mark.parametrize(("nesterov", "last"), [(False, [0.8, 0.3]), (True, [0.7, 0.05])])
def test_lazy_momentum_makes_the_golden_steps_with_a_gap(nesterov: bool, last: list[float]) -> None:
    found = trained(LazyMomentum(0.1, 0.5, nesterov), np.ones((3, 1), np.float32), GAP)
    # Row 0: u = -0.2, then u = 0.5 * -0.2 - 0.1 * 4 = -0.5; with Nesterov, 0.5 u - 0.1 g is added.
    expected = [[last[0], 1.0, 1.0], [last[0], last[0], 1.0], [last[1], last[0], 1.0]]
    np.testing.assert_allclose(np.array(found)[:, :, 0], expected, rtol=1e-6)


def adam_by_rows(table: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """Return the table after steps of lazy Adam in NumPy, row by row, with rate 0.1."""
    table, first, second = table.astype(np.float64), np.zeros(table.shape), np.zeros(table.shape)
    for number, (ids, values) in enumerate(steps, start=1):
        for row in set(ids):
            g = values[np.array(ids) == row].sum(axis=0)
            first[row] = 0.9 * first[row] + 0.1 * g
            second[row] = 0.999 * second[row] + 0.001 * g**2
            rate = 0.1 * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
            table[row] -= rate * first[row] / (np.sqrt(second[row]) + 1e-7)
    return table


def momentum_by_rows(table: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """Return the table after steps of lazy momentum in NumPy, row by row, with rate 0.1."""
    table, velocity = table.astype(np.float64), np.zeros(table.shape)
    for ids, values in steps:
        for row in set(ids):
            velocity[row] = 0.9 * velocity[row] - 0.1 * values[np.array(ids) == row].sum(axis=0)
            table[row] += velocity[row]
    return table


ROWS, WIDTH = 6, 2
touched = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=8), min_size=1, max_size=8)
LAZY: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[..., np.ndarray]]] = {
    "adam": (lambda: LazyAdam(0.1), lambda: keras.optimizers.Adam(0.1), adam_by_rows),
    "momentum": (lambda: LazyMomentum(0.1), lambda: keras.optimizers.SGD(0.1, 0.9), momentum_by_rows),
}


@on_tensorflow
@pytest.mark.parametrize("name", LAZY)
@examples(20)
@given(touched, st.integers(0, 1000))
def test_touched_rows_move_as_defined_and_others_do_not_move(name: str, ids: list[list[int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    start = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    steps = [(own, draw.normal(size=(len(own), WIDTH)).astype(np.float32)) for own in ids]
    lazy, _, reference = LAZY[name]
    found = trained(lazy(), start, steps)
    # 1 - 0.999 ** t has about five digits in float32.
    np.testing.assert_allclose(found[-1], reference(start, steps), rtol=5e-5, atol=5e-5)
    for (own, _), before, after in zip(steps, [start, *found], found, strict=False):
        others = np.setdiff1d(np.arange(ROWS), own)
        np.testing.assert_array_equal(after[others], before[others])


@on_tensorflow
@pytest.mark.parametrize("name", LAZY)
def test_an_optimizer_equals_that_of_keras_if_every_step_touches_every_row(name: str) -> None:
    draw = np.random.default_rng(0)
    start = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    steps = [(draw.permutation(ROWS).tolist(), draw.normal(size=(ROWS, WIDTH)).astype(np.float32)) for _ in range(12)]
    lazy, dense, _ = LAZY[name]
    expected = trained(dense(), start, steps, dense=True)
    np.testing.assert_array_equal(trained(lazy(), start, steps), expected)
    np.testing.assert_array_equal(trained(lazy(), start, steps, dense=True), expected)  # with dense gradients


@on_tensorflow
@pytest.mark.parametrize(
    "give",
    [
        lambda: "LazyAdam",
        pytest.param(lambda: "lazymomentum", marks=pytest.mark.slow),
        pytest.param(lambda: LazyAdam(0.25, clipvalue=1.0), marks=pytest.mark.slow),
    ],
)
def test_a_worker_has_the_optimizer_that_was_passed_or_named(give: Callable[[], Any]) -> None:
    model, given = one_table(), give()
    file = archive.to_bytes(model)
    own = recipe_of(model, file, optimizer=given).build(file).optimizer
    expected = optimizer_of(given)
    assert type(own) is type(expected)
    config, wanted = own.get_config(), expected.get_config()
    assert {**config, "name": ""} == {**wanted, "name": ""}


@on_tensorflow
def test_an_optimizer_may_be_a_name_with_arguments() -> None:
    found = optimizer_of({"class_name": "LazyMomentum", "config": {"momentum": 0.5, "nesterov": True}})
    assert (type(found), found.momentum, found.nesterov) == (LazyMomentum, 0.5, True)
    assert type(optimizer_of({"class_name": "Adam"})) is keras.optimizers.Adam


@pytest.mark.slow
@on_tensorflow
def test_a_model_is_saved_with_a_lazy_optimizer_and_its_state() -> None:
    model = one_table(LazyAdam(0.5))
    model.fit(np.array([[1, 2, 3, 4]]), np.ones((1, 1)), verbose=0)
    again = archive.from_bytes(archive.to_bytes(model), compiled=True)
    assert type(again.optimizer) is LazyAdam
    for found, expected in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(expected))


@on_tensorflow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: LazyAdam(weight_decay=0.1), "`weight_decay` must not be given to LazyAdam"),
        (lambda: LazyMomentum(use_ema=True), "`use_ema` must not be given to LazyMomentum"),
        (lambda: LazyAdam(gradient_accumulation_steps=2), "`gradient_accumulation_steps` must not"),
        (lambda: LazyMomentum(momentum=0.0), "`momentum` must be"),
    ],
)
def test_options_that_change_every_row_are_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make()


def test_a_backend_with_dense_gradients_is_refused() -> None:
    with (
        mock.patch("keras.backend.backend", return_value="jax"),
        pytest.raises(ConfigurationError, match=r"LazyAdam needs Keras on TensorFlow.*Received: backend 'jax'"),
    ):
        LazyAdam()
