"""Mini-batches of a stack: training does not depend on which of them make a window."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from support.training.small_classifier import ROWS, batches, classifier, weights

from distkeras.data.batches import Batch, Stack
from distkeras.keras_model.compiled_steps import lent
from distkeras.keras_model.replica import KerasReplica


def stacked_batches(count: int, rows: int, weighted: bool) -> list[Batch]:
    """Return mini-batches as the data plane makes them, with ``rows`` complete mini-batches per stack."""
    data = batches(count, weighted=weighted)
    for first in range(0, count, rows):
        part = data[first : first + rows]
        weight = np.stack([batch.weight for batch in part if batch.weight is not None]) if weighted else None
        x, y = np.stack([batch.x[0] for batch in part]), np.stack([batch.y[0] for batch in part])
        stack = Stack((x,), (y,), weight)
        for place, batch in enumerate(part):
            batch.placed_in(stack, place)
    return data


@pytest.mark.parametrize(
    ("picked", "weighted"),
    [
        pytest.param(slice(0, 4), True, marks=pytest.mark.slow),
        pytest.param(slice(1, 3), False, marks=pytest.mark.slow),
        (slice(2, 7), True),  # from two stacks
        pytest.param([3, 2, 1], False, marks=pytest.mark.slow),
        pytest.param([0, 2, 2, 3], True, marks=pytest.mark.slow),
        pytest.param([0, 0, 1], False, marks=pytest.mark.slow),
    ],
)
def test_batches_of_stacks_train_like_single_batches(picked: slice | list[int], weighted: bool) -> None:
    data = stacked_batches(8, 4, weighted)
    chosen = data[picked] if isinstance(picked, slice) else [data[index] for index in picked]
    together, apart = KerasReplica(classifier("adam")), KerasReplica(classifier("adam"))
    expected = np.concatenate([apart.train([dataclasses.replace(batch)]) for batch in chosen])
    np.testing.assert_allclose(together.train(chosen), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(weights(together), weights(apart), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="compiled steps are TensorFlow's")
def test_a_stack_is_passed_to_tensorflow_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def counted(array: np.ndarray) -> Any:
        taken.append(array.shape)
        return lent(array)

    monkeypatch.setattr("distkeras.keras_model.compiled_steps.lent", counted)
    data = stacked_batches(12, 12, weighted=False)
    replica = KerasReplica(classifier())
    for first in range(0, 12, 3):
        replica.train(data[first : first + 3])
    assert taken == [(12, ROWS, 6), (12, ROWS)]
