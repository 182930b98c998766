"""The memory of mini-batches: adjacent, and aligned so that a backend can use it without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from distkeras.data.batches import Batch, DataSpec
from distkeras.data.columns import Column, ColumnArrays
from distkeras.data.ordering import EpochOrder
from distkeras.data.rows import aligned, is_aligned

SPEC = DataSpec((Column("x", (2,)),), (Column("y", (), "int64"),), Column("w"), batch_size=4)


def columns(rows: int) -> ColumnArrays:
    numbers = np.arange(rows)
    return np.stack([numbers, numbers + 0.5], axis=1).astype("float32"), numbers, numbers.astype("float32")


def cut(data: ColumnArrays, spec: DataSpec = SPEC, window: int = 1) -> list[Batch]:
    order = EpochOrder(spec, worker=0, window=window)
    return [rows.batch(1, index, False) for index, rows in enumerate(order.cut(data, 0, epoch=1))]


def require_stacks_hold(got: list[Batch]) -> None:
    """Assert that each batch's stack is aligned and contains the batch at its place."""
    for batch in got:
        if batch.stack is None:
            continue
        assert isinstance(batch.weight, np.ndarray)
        assert isinstance(batch.stack.weight, np.ndarray)
        own = (*batch.x, *batch.y, batch.weight)
        for array, stacked in zip(own, (*batch.stack.x, *batch.stack.y, batch.stack.weight), strict=True):
            assert is_aligned(stacked)
            assert not stacked.flags.writeable
            assert np.shares_memory(array, stacked[batch.place])
            np.testing.assert_array_equal(array, stacked[batch.place])


@pytest.mark.parametrize(("window", "together"), [(1, 40), (8, 40), (7, 35), (41, 40)])
def test_shuffled_batches_of_a_window_are_adjacent(monkeypatch: pytest.MonkeyPatch, window: int, together: int) -> None:
    batch_bytes = SPEC.batch_size * (8 + 8 + 4)
    monkeypatch.setattr("distkeras.data.ordering.GATHER_BYTES", 40 * batch_bytes)
    got = cut(columns(100 * SPEC.batch_size), window=window)
    assert [batch.place for batch in got] == [index % together for index in range(100)]
    for first in range(0, 100, together):
        assert len({id(batch.stack) for batch in got[first : first + together]}) == 1
    assert len({id(batch.stack) for batch in got}) == -(-100 // together)
    require_stacks_hold(got)


@pytest.mark.parametrize("rows", [3, 4, 5, 30])
def test_a_short_batch_has_no_stack(rows: int) -> None:
    got = cut(columns(rows))
    assert [batch.stack is None for batch in got] == [*[False] * (rows // 4), *[True] * (rows % 4 > 0)]
    require_stacks_hold(got)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    whole = aligned(array.shape, array.dtype)
    whole[...] = array
    return whole


def misaligned_copy(array: np.ndarray) -> np.ndarray:
    longer = aligned((len(array) + 1, *array.shape[1:]), array.dtype)
    longer[1:] = array
    return longer[1:]


@pytest.mark.parametrize(
    ("place", "rows", "stacked"), [(aligned_copy, 30, 7), (aligned_copy, 4, 0), (misaligned_copy, 30, 0)]
)
def test_unshuffled_batches_are_in_one_stack_if_their_rows_are_aligned(
    place: Callable[[np.ndarray], np.ndarray], rows: int, stacked: int
) -> None:
    got = cut(tuple(map(place, columns(rows))), replace(SPEC, shuffle=False))
    assert [batch.place for batch in got if batch.stack is not None] == list(range(stacked))
    assert len({id(batch.stack) for batch in got if batch.stack is not None}) == min(1, stacked)
    require_stacks_hold(got)


def test_a_changed_batch_has_no_stack() -> None:
    batch = cut(columns(8))[0]
    assert batch.stack is not None
    assert replace(batch, weight=None).stack is None
