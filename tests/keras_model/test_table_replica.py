"""What a worker's optimizer keeps of rows: by row, for one job, and not in the state that is sent."""

from __future__ import annotations

import keras
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.training.table_models import (
    CutCase,
    batches_in,
    batches_of,
    ids_and_target,
    one_table,
    trained_by_rows,
)

from distkeras.keras_model.row_optimizers import accumulators_of
from distkeras.keras_model.table_replica import RowValues

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


def test_memory_grows_with_the_rows_that_were_set() -> None:
    values = RowValues(64, 0.0)
    for number in range(20):
        values.set(np.arange(number * 100, number * 100 + 100) * 5000, np.ones((100, 64), np.float32))
    assert len(values) == 2000
    assert values.nbytes < 3 * 2000 * 64 * 4


def test_the_state_that_is_sent_has_no_row_of_a_table() -> None:
    case, data = CutCase.of(one_table(keras.optimizers.Adagrad(0.5))), batches_of(ids_and_target, 6)
    replica = case.small()
    trained_by_rows(case, data, replica=replica)
    state = replica.read_optimizer()
    assert state is not None
    dense = replica.size - case.cut.tables[0].most * case.cut.tables[0].width
    assert state.content.nbytes < 4 * dense + 64
    successor = case.small()
    window = next(case.windows(data))
    successor.load(np.zeros(successor.size, np.float32))
    assert successor.load_optimizer(state, batches_in(window)[0]) == ""
    again = successor.read_optimizer()
    assert again is not None
    np.testing.assert_array_equal(again.content, state.content)
    slot = accumulators_of(successor.model.optimizer, successor.model.get_layer("table").embeddings)
    assert slot is not None
    assert tuple(slot.shape) == (case.cut.tables[0].most, case.cut.tables[0].width)
    assert np.all(np.asarray(keras.ops.convert_to_numpy(slot)) == np.float32(0.1))


def test_plain_sgd_has_no_state() -> None:
    case = CutCase.of(one_table())
    replica = case.small()
    trained_by_rows(case, batches_of(ids_and_target, 3), replica=replica)
    assert replica.read_optimizer() is None
