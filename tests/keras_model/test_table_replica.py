"""The optimizer's state of rows at a worker: it is kept by row id, and sent with the rest of the state."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training.table_models import (
    CutCase,
    batches_in,
    batches_of,
    ids_and_target,
    one_table,
    trained_by_rows,
    two_id_inputs,
    two_tables,
)

from distkeras.data.batches import Batch
from distkeras.keras_model.optimizers import optimizer_of
from distkeras.keras_model.table_replica import RowValues, TableReplica
from distkeras.ps.protocol.loop import OptimizerState
from distkeras.ps.protocol.tables import initial_rows
from distkeras.ps.worker.tables import Window

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the gradients of other backends do not name rows"
)
WIDTH, ROWS = 3, 5000
windows = st.lists(st.lists(st.integers(0, ROWS - 1) | st.integers(1020, 1030), max_size=30), max_size=12)


@given(windows)
def test_rows_are_kept_by_their_ids(touched: list[list[int]]) -> None:
    values, expected = RowValues(WIDTH, 0.5), dict[int, np.ndarray]()
    for number, ids in enumerate(touched):
        rows = np.unique(np.array(ids, np.int64))
        out = np.full((len(rows), WIDTH), np.nan, np.float32)
        values.get(rows, out)
        for row, found in zip(rows, out, strict=True):
            np.testing.assert_array_equal(found, expected.get(int(row), np.full(WIDTH, 0.5, np.float32)))
        new = np.arange(len(rows) * WIDTH, dtype=np.float32).reshape(-1, WIDTH) + 1000 * number
        values.set(rows, new)
        expected.update(zip(rows.tolist(), new, strict=True))
    assert len(values) == len(expected)


@given(windows, st.integers(1, 20))
def test_of_too_many_rows_those_that_were_set_last_are_kept(touched: list[list[int]], most: int) -> None:
    values, expected = RowValues(WIDTH, 0.5), dict[int, float]()
    for number, ids in enumerate(touched):
        rows = list(dict.fromkeys(ids))  # in any order
        values.set(np.array(rows, np.int64), np.full((len(rows), WIDTH), number, np.float32))
        for row in rows:
            expected.pop(row, None)
            expected[row] = number
        if number % 3 == 2:
            values.keep(most)
            expected = dict(list(expected.items())[-most:])
    found, kept = values.latest(most)
    assert list(zip(found.tolist(), kept[:, 0].tolist(), strict=True)) == list(expected.items())[-most:]


def test_memory_grows_with_the_rows_that_were_set() -> None:
    values = RowValues(64, 0.0)
    for number in range(20):
        values.set(np.arange(number * 100, number * 100 + 100) * 5000, np.ones((100, 64), np.float32))
    assert len(values) == 2000
    assert values.nbytes < 3 * 2000 * 64 * 4


def adagrad() -> CutCase:
    return CutCase.of(two_tables(keras.optimizers.Adagrad(0.5)))


def trained(case: CutCase, data: Sequence[Batch], replica: TableReplica) -> tuple[np.ndarray, OptimizerState]:
    weights = trained_by_rows(case, data, replica=replica).weights
    state = replica.read_optimizer()
    assert state is not None
    return weights, state


@pytest.mark.parametrize(
    ("optimizer", "vectors"),
    [
        pytest.param(keras.optimizers.Adagrad(0.5), 1, marks=pytest.mark.slow),
        pytest.param("lazyadam", 2, marks=on_tensorflow),
        pytest.param("lazymomentum", 1, marks=[on_tensorflow, pytest.mark.slow]),
    ],
)
def test_the_next_attempt_continues_with_the_state_of_rows(optimizer: Any, vectors: int) -> None:
    case, data = CutCase.of(two_tables(optimizer_of(optimizer))), batches_of(two_id_inputs, 12)
    one = case.small()
    _, state = trained(case, data[:6], one)
    dense = one.size - sum(table.most * table.width for table in case.cut.tables)
    touched = [np.unique(np.concatenate([w.rows[t] for w in case.windows(data[:6])])).size for t in (0, 1)]
    rows = sum(8 + n * (8 + 4 * vectors * t.width) for n, t in zip(touched, case.cut.tables, strict=True))
    assert 0 < state.content.nbytes - rows - 4 * vectors * dense < 64
    successor = case.small()
    assert successor.load_optimizer(state, batches_in(next(case.windows(data)))[0]) == ""
    again = successor.read_optimizer()
    assert again is not None
    assert (again.layout, again.checksum) == (state.layout, state.checksum)
    expected, last = trained(case, data[6:], one)
    weights, state = trained(case, data[6:], successor)
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(state.content, last.content)
    forgetful, _ = trained(case, data[6:], case.small())
    assert not np.array_equal(forgetful, expected)


@pytest.mark.slow
@on_tensorflow
def test_a_state_that_does_not_fit_is_not_loaded() -> None:
    case, data = adagrad(), batches_of(two_id_inputs, 6)
    _, state = trained(case, data, case.small())
    example = batches_in(next(case.windows(data)))[0]

    def problem(content: np.ndarray, layout: str = state.layout) -> str | None:
        changed = OptimizerState(layout, content, zlib.crc32(np.ascontiguousarray(content).data))
        fresh = case.small()
        found = fresh.load_optimizer(changed, example)
        kept = fresh.read_optimizer()
        assert kept is not None
        assert kept.content.nbytes < state.content.nbytes  # no row was loaded
        return found

    assert "rows" in str(problem(state.content[:-4]))
    assert "rows" in str(problem(np.append(state.content, np.zeros(8, np.uint8))))
    assert "rows" in str(problem(state.content[: state.content.nbytes // 2]))
    nan = state.content.copy()
    nan[-4:] = np.array([np.nan], np.float32).view(np.uint8)
    assert "not finite" in str(problem(nan))
    assert "must be of" in str(problem(state.content, "another"))
    other = CutCase.of(one_table(keras.optimizers.Adagrad(0.5)))
    first = batches_in(next(other.windows(batches_of(ids_and_target, 3))))[0]
    assert "must be of" in str(other.small().load_optimizer(state, first))
    damaged = OptimizerState(state.layout, nan, state.checksum)
    assert "checksum" in str(case.small().load_optimizer(damaged, example))


@pytest.mark.slow
@on_tensorflow
def test_plain_sgd_has_no_state() -> None:
    case = CutCase.of(one_table())
    replica = case.small()
    trained_by_rows(case, batches_of(ids_and_target, 3), replica=replica)
    assert replica.read_optimizer() is None


def living_case(**lives: Any) -> CutCase:
    """Return a case whose only table is partial."""
    case = CutCase.of(one_table(keras.optimizers.Adagrad(0.5)), window=1)
    assert case.cut.worker is not None
    tables = tuple(replace(table, seed=3, scale=0.05, **lives) for table in case.cut.tables)
    return case._replace(cut=replace(case.cut, worker=replace(case.cut.worker, tables=tables)))


def moves(
    case: CutCase, replica: TableReplica, data: Batch, shift: float = 0.0, window: Window | None = None
) -> np.ndarray:
    """Return how far a window moves its rows, each of which begins at ``shift`` from its initial value."""
    assert case.cut.worker is not None
    (table,), window = case.cut.worker.tables, window or next(case.windows([data], 1))
    (batch,) = batches_in(window)
    begin = np.zeros(replica.size, np.float32)
    begin[: -table.most * table.width] = 0.1
    rows = begin[-table.most * table.width :].reshape(table.most, table.width)[: len(batch.rows[0])]
    rows[...] = initial_rows(table, batch.rows[0]) + np.float32(shift)
    replica.load(begin)
    replica.train([batch])
    end = np.empty(replica.size, np.float32)
    replica.read(end)
    return (end - begin)[-table.most * table.width :].reshape(table.most, -1)[: len(rows)]


@on_tensorflow
def test_a_row_with_its_initial_value_begins_with_new_slots_if_rows_come_and_go() -> None:
    (data,) = batches_of(ids_and_target, 1)
    lasting, living = living_case(), living_case(tracked=True)
    one, other = lasting.small(), living.small()
    first = moves(lasting, one, data)
    np.testing.assert_array_equal(moves(living, other, data), first)
    again = moves(lasting, one, data)
    assert (np.abs(again) < np.abs(first)).any()  # accumulators have grown
    np.testing.assert_array_equal(moves(living, other, data), first)  # such a row was not admitted, or has expired
    expected = lasting.small()
    moves(lasting, expected, data)
    np.testing.assert_array_equal(
        moves(living, other, data, shift=0.5), moves(lasting, expected, data, shift=0.5)
    )  # it has moved, so it is live, and its slots are those after the latest window


@pytest.mark.slow
@on_tensorflow
def test_the_slots_of_the_latest_rows_are_kept_if_rows_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 300
    memory: list[RowValues] = []

    class Remembered(RowValues):
        def __init__(self, width: int, initial: float) -> None:
            super().__init__(width, initial)
            memory.append(self)

    monkeypatch.setattr("distkeras.keras_model.table_replica.RowValues", Remembered)
    data = batches_of(ids_and_target, 40)
    touched = [batches_in(window)[0].rows[0] for window in living_case().windows(data, 1)]
    latest = list(dict.fromkeys(row for rows in reversed(touched) for row in reversed(rows.tolist())))
    assert len(latest) > 2 * most
    sent = 8 + 4 * 8
    for lives, fewest, bytes_of_row in (
        ({}, len(latest), sent),
        ({"tracked": True}, most - most // 4, 2 * (sent + 8) + 128),
    ):
        monkeypatch.setattr("distkeras.keras_model.table_replica.STATE_BYTES_OF_ROWS", 8 + most * bytes_of_row)
        case = living_case(**lives)
        replica = case.small()
        for batch in data:
            moves(case, replica, batch, shift=0.5)
        state = replica.read_optimizer()
        assert state is not None
        assert (kept := set(memory[-1].ids.tolist())).issuperset(latest[:fewest])
        assert len(kept) <= max(fewest, most + len(touched[-1]))
        if lives:
            assert memory[-1].nbytes <= len(kept) * bytes_of_row
        successor = case.small()
        assert successor.load_optimizer(state, batches_in(next(case.windows(data, 1)))[0]) == ""
        assert set(memory[-1].ids.tolist()) == set(latest[: min(most, len(kept))])


@pytest.mark.slow
@on_tensorflow
def test_a_window_that_is_computed_again_begins_with_the_rows_that_it_then_receives() -> None:
    case, (data,) = living_case(tracked=True), batches_of(ids_and_target, 1)
    window, replica, fresh = next(case.windows([data], 1)), case.small(), case.small()
    first = moves(case, replica, data, window=window)
    np.testing.assert_array_equal(moves(case, replica, data, window=window), first)  # all rows have expired meanwhile
    moves(case, fresh, data)
    expected = moves(case, fresh, data, shift=0.5)
    np.testing.assert_array_equal(moves(case, replica, data, shift=0.5, window=window), expected)
