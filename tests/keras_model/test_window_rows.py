"""Windows of mini-batches with local ids: the rows are the right ones, other arrays are shared, and errors name ids."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.training.table_models import (
    CASES,
    OTHER_ROWS,
    ROWS,
    SIZE,
    WINDOW,
    CutCase,
    batches_in,
    batches_of,
    columns_of,
    extra_input,
    ids_and_target,
    ids_extra_and_target,
    numbers,
    one_table,
    slices,
    two_calls,
    two_id_inputs,
    two_tables,
)

from distkeras.data.batches import Batch, DataSpec
from distkeras.data.columns import Column, Part
from distkeras.keras_model.table_replica import numbered
from distkeras.ps.errors import BadValueError

if keras.backend.backend() == "torch":
    pytest.skip("tables stay dense on PyTorch", allow_module_level=True)

ONE, MASKED, SHARED, TWO = (
    CutCase.of(model, choose=names)
    for model, names in (
        (one_table(), "table"),
        (one_table(mask_zero=True), "table"),
        (two_calls(), "table"),
        (two_tables(), ("narrow", "wide")),
    )
)


def epoch(ids: list[list[np.ndarray]], epoch: int = 0) -> list[Batch]:
    draw = np.random.default_rng(0)
    return [Batch(epoch, n, n == len(ids) - 1, tuple(x), (numbers(draw, len(x[0])),), None) for n, x in enumerate(ids)]


def test_windows_have_the_rules_length_and_end_with_their_epochs() -> None:
    draw = np.random.default_rng(1)
    data = [batch for n, count in enumerate((7, 3, 1)) for batch in epoch([[draw.integers(0, 9, (2, 4))]] * count, n)]
    windows = list(ONE.windows(data))
    assert [[(b.epoch, b.index) for b in batches_in(w)] for w in windows] == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, 3), (0, 4), (0, 5)],
        [(0, 6)],
        [(1, 0), (1, 1), (1, 2)],
        [(2, 0)],
    ]
    assert [batches_in(w)[-1].last for w in windows] == [False, False, True, True, True]


ids = st.integers(0, OTHER_ROWS - 1) | st.sampled_from([0, 1, OTHER_ROWS - 1])


@examples(30)
@given(st.data())
@pytest.mark.parametrize("case", [ONE, MASKED, SHARED, TWO], ids=["one", "masked", "shared", "two"])
def test_local_ids_identify_the_original_rows(case: CutCase, data: st.DataObject) -> None:
    assert case.cut.worker is not None
    inputs = 1 if case in (ONE, MASKED) else 2
    width = 4 if inputs == 1 else 2
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    drawn = [
        [np.array(data.draw(st.lists(ids, min_size=n * width, max_size=n * width)), np.int32).reshape(n, width)
         for _ in range(inputs)]
        for n in sizes
    ]  # fmt: skip
    batches = epoch(drawn)
    windows = list(case.windows(batches))
    assert [batch.size for window in windows for batch in batches_in(window)] == sizes
    for number, window in enumerate(windows):
        own = drawn[number * WINDOW : (number + 1) * WINDOW]
        for lookup in case.cut.worker.lookups:
            sources = [case.cut.worker.sources[source].inputs[0] for source in lookup.sources]
            expected = {int(v) for x in own for source in sources for v in x[source].flat} | {0} & {
                int(case is MASKED) - 1
            }
            for table in lookup.tables:
                rows = window.rows[table]
                assert rows.dtype == np.int64
                assert rows.tolist() == sorted(expected)
                assert len(rows) <= case.cut.tables[table].most
                np.testing.assert_array_equal(batches_in(window)[0].rows[table][window.places[table]], rows)
        at = 0
        for lookup in case.cut.worker.lookups:
            for source in lookup.sources:
                for batch, x in zip(batches_in(window), own, strict=True):
                    assert batch.rows is batches_in(window)[0].rows
                    local = batch.x[len(case.cut.worker.inputs) + at]
                    original = x[case.cut.worker.sources[source].inputs[0]]
                    assert local.dtype == np.int32
                    np.testing.assert_array_equal(batch.rows[lookup.tables[0]][local], original)
                    if case is MASKED:
                        np.testing.assert_array_equal(local == 0, original == 0)
                at += 1


def test_other_inputs_and_stacks_are_shared() -> None:
    case, data = CutCase.of(extra_input()), batches_of(ids_extra_and_target, 12, stacked=6)
    for window in case.windows(data[:6]):
        assert len({id(batch.stack) for batch in batches_in(window)}) == 1
        for place, batch in enumerate(batches_in(window)):
            original = data[batch.index]
            assert (batch.place, batch.checksum, batch.last) == (place, original.checksum, original.last)
            assert np.shares_memory(batch.x[0], original.x[1])
            assert np.shares_memory(batch.y[0], original.y[0])
            assert batch.stack is not None
            assert np.shares_memory(batch.stack.x[0], original.x[1])
            assert np.shares_memory(batch.stack.x[1], batch.x[1])


def test_a_window_may_have_several_stacks() -> None:
    data = batches_of(ids_and_target, 9, stacked=2)
    for window in ONE.windows(data):
        for batch in batches_in(window):
            np.testing.assert_array_equal(batch.rows[0][batch.x[0]], data[batch.index].x[0])


def test_sample_weights_are_kept() -> None:
    data = batches_of(ids_and_target, 6, weighted=True)
    for window in ONE.windows(data):
        for batch in batches_in(window):
            assert batch.weight is not None
            np.testing.assert_array_equal(batch.weight, data[batch.index].weight)


@pytest.mark.parametrize("value", [-ROWS - 1, ROWS, 2**31 - 1])
def test_the_error_for_an_id_outside_the_table_comes_before_its_window(value: int) -> None:
    data = batches_of(ids_and_target, 9)
    bad = data[4].x[0].copy()
    bad[3, 2] = value
    data[4] = Batch(0, 4, False, (bad,), data[4].y, None)
    windows = ONE.windows(data)
    assert len(batches_in(next(windows))) == WINDOW
    message = (
        rf"ids of 'table' must be in \[0, {ROWS}\), its rows\. Received: {value} in row 3 of mini-batch 4 of epoch 0"
    )
    with pytest.raises(BadValueError, match=message) as raised:
        next(windows)
    assert (raised.value.worker, raised.value.column, raised.value.step) == (2, "column_0", 4)


def test_negative_ids_count_from_the_end_as_in_keras() -> None:
    given = np.array([[-1, 2, -ROWS, ROWS - 1]])
    window = next(ONE.windows(epoch([[given]])))
    np.testing.assert_array_equal(window.rows[0], [0, 2, ROWS - 1])
    np.testing.assert_array_equal(batches_in(window)[0].x[0], [[0, 1, 2, 0]])  # in order of appearance
    np.testing.assert_array_equal(batches_in(window)[0].rows[0], [ROWS - 1, 2, 0])
    with pytest.raises(BadValueError, match=f"Received: -{ROWS} "):  # Keras does not mask this id, and row 0 is masked
        next(MASKED.windows(epoch([[given]])))


def test_the_error_names_the_row_of_the_id_if_rows_are_not_shuffled() -> None:
    data = epoch([[np.full((SIZE, 4), 5)]] * 2)
    bad = np.full((SIZE, 4), 5)
    bad[3, 2] = ROWS
    data[1] = Batch(0, 1, True, (bad,), data[1].y, None)
    parts = tuple(Part(name, "int") for name in ("first", "second", "third", "fourth"))
    spec = DataSpec((Column("ids", (4,), parts=parts),), batch_size=SIZE, shuffle=False)
    with pytest.raises(BadValueError, match=rf"Received: {ROWS} in row {SIZE + 3} \[.*column 'third'"):
        next(ONE.windows(data, spec=spec))


def test_the_error_for_an_id_of_a_slice_names_the_column() -> None:
    case, data = CutCase.of(slices()), epoch([[np.full((2, 4), ROWS)]])
    with pytest.raises(BadValueError, match=f"ids of 'table' must be .* Received: {ROWS} in row 0 .*column 'column_0'"):
        next(case.windows(data))


def test_the_error_for_tables_of_one_tensor_names_the_table_without_the_row() -> None:
    keras.utils.set_random_seed(1)
    ids, layers = keras.Input((4,), dtype="int32"), keras.layers
    parts = [
        layers.Flatten()(layers.Embedding(rows, 2, name=name)(ids)) for name, rows in (("long", 900), ("short", 800))
    ]
    model = keras.Model(ids, layers.Dense(1)(layers.Concatenate()(parts)))
    model.compile("sgd", "mse")
    case = CutCase.of(model)
    with pytest.raises(BadValueError, match=r"ids of 'short' must be in \[0, 800\).*Received: 850"):
        next(case.windows(epoch([[np.full((2, 4), 850)]])))


def test_fractions_are_truncated_as_in_keras_unless_they_change_the_mask() -> None:
    values = np.array([[1.9, 2.0, 0.0, 3.2]], np.float32)
    window = next(ONE.windows(epoch([[values]])))
    np.testing.assert_array_equal(batches_in(window)[0].rows[0][batches_in(window)[0].x[0]], [[1, 2, 0, 3]])
    assert len(next(MASKED.windows(epoch([[values]]))).rows[0]) == 4
    with pytest.raises(BadValueError, match=r"Received: 0\.5"):
        next(MASKED.windows(epoch([[np.array([[1.0, 2.0, 0.5, 0.0]], np.float32)]])))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hashing", marks=pytest.mark.slow),
        "lookups",
        pytest.param("sequential with hashing", marks=pytest.mark.slow),
        "slices",
    ],
)
def test_ids_are_those_that_the_model_computes(name: str) -> None:
    if name != "slices" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no strings")
    case = CutCase.of(CASES[name].model())
    assert case.cut.worker is not None
    data = batches_of(CASES[name].draw, 5, stacked=2)
    dense = case.recipe.build(case.file)
    tables = [layer for layer in dense.layers if isinstance(layer, keras.layers.Embedding)]
    given = keras.Model(dense.inputs, [table.input for table in tables if table.name != "table" or name != "slices"])
    expected = [
        np.asarray(array) for array in keras.tree.flatten(given([keras.ops.convert_to_tensor(a) for a in data[0].x]))
    ]
    window = next(case.windows(data))
    count = len(case.cut.worker.inputs)
    found = []
    for lookup in case.cut.worker.lookups:
        for _ in lookup.sources:
            found.append(batches_in(window)[0].rows[lookup.tables[0]][batches_in(window)[0].x[count]])
            count += 1
    for ids_of_a_table in expected:
        assert any(np.array_equal(ids_of_a_table, own) for own in found)


def test_the_error_names_the_column_by_its_position() -> None:
    data = batches_of(two_id_inputs, 3)
    bad = data[1].x[1].copy()
    bad[0, 0] = ROWS
    data[1] = Batch(0, 1, False, (data[1].x[0], bad), data[1].y, None)
    with pytest.raises(BadValueError, match=r"ids of 'wide' .*column 'column_1'"):
        next(TWO.windows(data, spec=columns_of(data[0])))


@pytest.mark.parametrize("rows", [1, 7, 100_000, 2**48, 2**62])
def test_rows_are_numbered_as_they_appear(rows: int) -> None:
    ids = np.random.default_rng(rows % 97).integers(0, rows, 20_000)
    touched, places = numbered(ids)
    np.testing.assert_array_equal(touched.touched, np.unique(ids))
    np.testing.assert_array_equal(touched.by_number, list(dict.fromkeys(ids.tolist())))
    np.testing.assert_array_equal(touched.by_number[touched.places], touched.touched)
    np.testing.assert_array_equal(touched.by_number[places], ids)
