"""The part of prediction that runs on executors, without Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from support.cases import rest_slow

from distkeras.data.column_kinds import lists_of
from distkeras.data.columns import Column, to_numpy
from distkeras.data.rows import Padding
from distkeras.keras_model import archive
from distkeras.ml.model import one_row
from distkeras.ps.errors import BadValueError, ShapeError
from distkeras.transformers import serving
from distkeras.transformers.outputs import OutputColumn, nested_lists
from distkeras.transformers.predictor import PackedModel


def batch(ids: range) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(list(ids), pa.int32())], names=["id"])


@pytest.mark.parametrize("sizes", [[10], [3, 3, 3, 1], [0, 5, 0, 5, 0], [1] * 10, [4, 4, 2], [9, 1], []])
@pytest.mark.parametrize("size", [1, 3, 4, 10, 100])
def test_rebatching_keeps_every_row_in_order(sizes: list[int], size: int) -> None:
    starts = np.cumsum([0, *sizes])
    out = list(serving.rebatched([batch(range(a, a + n)) for a, n in zip(starts, sizes, strict=False)], size))
    assert [row for part in out for row in part.column(0).to_pylist()] == list(range(sum(sizes)))
    assert all(part.num_rows % size == 0 for part in out[:-1])
    assert all(part.num_rows for part in out)


def test_large_batches_are_not_copied() -> None:
    whole = batch(range(10))
    first = next(serving.rebatched([whole], 4))
    assert first.num_rows == 8
    assert first.column(0).buffers()[1].address == whole.column(0).buffers()[1].address


@pytest.mark.parametrize(("n", "full", "expected"), [(1, 8, 1), (3, 8, 4), (5, 6, 6), (8, 8, 8), (5, 1000, 8)])
def test_padding_repeats_the_last_row(n: int, full: int, expected: int) -> None:
    array = np.arange(2 * n).reshape(n, 2)
    padded = serving.pad(array, full)
    assert len(padded) == expected
    np.testing.assert_array_equal(padded[:n], array)
    assert (padded[n:] == array[-1]).all()


KIND = pa.struct(
    {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
)


def vectors(*rows: tuple[Any, ...] | None) -> pa.StructArray:
    names = ("type", "size", "indices", "values")
    return pa.array([None if row is None else dict(zip(names, row, strict=True)) for row in rows], KIND)


DENSE = (1, None, None, [1.0, 2.0, 3.0])
SPARSE = (0, 3, [2, 0], [5.0, 4.0])
ZERO: tuple[int, int, list[int], list[float]] = (0, 3, [], [])


@pytest.mark.parametrize("rows", [(DENSE, DENSE), (SPARSE, DENSE, ZERO), (ZERO,), (ZERO, SPARSE)])
@pytest.mark.parametrize("skip", [0, 1])
def test_vectors_become_lists(rows: tuple[Any, ...], skip: int) -> None:
    values = {id(DENSE): [1.0, 2.0, 3.0], id(SPARSE): [4.0, 0.0, 5.0], id(ZERO): [0.0] * 3}
    array = vectors(*[DENSE] * skip, *rows).slice(skip)
    assert lists_of(array).to_pylist() == [values[id(row)] for row in rows]
    assert to_numpy(array, Column("v", (3,))).tolist() == [values[id(row)] for row in rows]


@pytest.mark.parametrize("first", [DENSE, SPARSE])
def test_invalid_vectors_are_refused(first: tuple[Any, ...]) -> None:
    with pytest.raises(BadValueError, match=r"null in row 11.*column 'v'"):
        to_numpy(vectors(first, None, DENSE), Column("v", (3,)), first_row=10)
    with pytest.raises(ShapeError, match=r"4 values in row 1 "):
        to_numpy(vectors(first, (0, 4, [0], [1.0])), Column("v", (3,)))


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3), (4, 0), (0, 3), (4, 1, 1, 2)])
def test_outputs_become_nested_lists(shape: tuple[int, ...]) -> None:
    output = np.random.default_rng(0).normal(size=shape).astype("float16")
    array = nested_lists(output, "float32")
    assert array.to_pylist() == output.astype("float32").tolist()
    array.validate(full=True)


@pytest.mark.parametrize(("form", "dtype"), [("number", "int64"), ("vector", "int64"), ("values", "uint64")])
def test_integers_that_doubles_round_are_refused(form: str, dtype: str) -> None:
    column = OutputColumn("best", 0, form, 1, dtype)
    assert len(serving.exact_column(column, np.array([[2**53 - 1], [0]], dtype), 1)) == 2
    with pytest.raises(BadValueError, match=rf"int64\. Received: {2**53 + 1} \[worker/partition 1, column 'best'\]"):
        serving.exact_column(column, np.array([[0], [2**53 + 1]], dtype), 1)


def plan(model: keras.Model, batch_size: int) -> serving.PredictionPlan:
    data = archive.to_bytes(model)
    return serving.PredictionPlan(
        read_archive=lambda: data,
        key=repr(hash(data)),
        objects=archive.CustomObjects(),
        inputs=(serving.ModelInput("x", (2,), "float32"),),
        columns=(OutputColumn("y", 0),),
        row_bytes=12,
        options=serving.PredictionOptions(batch_size, 1 << 20),
    )


def test_rows_are_counted_over_the_whole_partition() -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    good, bad = ({"x": [[1.0, 1.0]] * 4}, {"x": [[1.0, 1.0], None]})
    batches = [pa.RecordBatch.from_pydict(rows) for rows in (good, good, bad)]
    out = serving.predict(plan(model, 2), batches, 3)
    assert next(out).schema.names == ["x", "y"]
    assert next(out).num_rows == 4
    with pytest.raises(BadValueError, match=r"row 9 \[worker/partition 3, column 'x'\]"):
        next(out)


INPUT_DTYPES = ["bfloat16", "float16", "float32", "bool", "int8", "uint8"]
if keras.backend.backend() != "jax":  # which has no 64 bits unless they are enabled at its start
    INPUT_DTYPES += ["float64", "int64"]


@pytest.mark.parametrize("dtype", rest_slow(INPUT_DTYPES, "float32", "bfloat16", INPUT_DTYPES[-1]))
def test_inputs_of_every_dtype_are_those_of_keras(dtype: str) -> None:
    inputs = keras.Input((2,), dtype=dtype)
    model = keras.Model(inputs, keras.ops.cast(inputs, "float32") * 3)
    packed = PackedModel(archive.to_bytes(model))
    ((shape, kept),) = packed.inputs
    values = np.array([[1.0, 0.0], [0.1, 3.1]] if "float" in dtype else [[1.0, 0.0], [0.0, 1.0]])
    given = replace(plan(model, 4), inputs=(serving.ModelInput("x", shape, kept),))
    (out,) = serving.predict(given, [pa.RecordBatch.from_pydict({"x": values.tolist()})], 0)
    np.testing.assert_array_equal(out["y"].to_pylist(), model.predict(values, verbose=0))
    assert one_row(values[0], shape, kept, "x").dtype == kept


@pytest.mark.parametrize("handle_invalid", ["error", "skip", "keep"])
def test_a_second_extent_must_be_the_same_for_all_rows(handle_invalid: str) -> None:
    x = keras.Input((1, None), dtype="int32")
    given = plan(keras.Model(x, keras.ops.sum(x, axis=(1, 2))), 4)
    inputs = (serving.ModelInput("x", (1, None), "int32"),)
    given = replace(given, inputs=inputs, options=replace(given.options, handle_invalid=handle_invalid))
    rows = [[1, 2], [3, 4], None, [5], [6]] if handle_invalid != "error" else [[1, 2], [3, 4], [0, 0], [5], [6]]
    batches = [pa.RecordBatch.from_pydict({"x": rows[:1]}), pa.RecordBatch.from_pydict({"x": rows[1:]})]
    text = r"\(1, None\) is open.*hold 2 values.*Received: 1 values in row 3 \[worker/partition 7, column 'x'\]"
    with pytest.raises(ShapeError, match=text):
        list(serving.predict(given, batches, 7))


@pytest.mark.parametrize("handle_invalid", ["error", "skip", "keep"])
def test_rows_of_any_length_are_predicted_each_at_its_own(handle_invalid: str) -> None:
    x, fixed = keras.Input((None,), dtype="int32"), keras.Input((1,))
    given = plan(keras.Model([x, fixed], keras.ops.mean(x, axis=1) + fixed[:, 0]), 4)
    inputs = (serving.ModelInput("x", (None,), "int32"), serving.ModelInput("z", (1,), "float32"))
    given = replace(given, inputs=inputs, options=replace(given.options, handle_invalid=handle_invalid))
    rows = [[1, 3], [5], None, [2, 4, 6], [], [6, 8], [9]]
    if handle_invalid == "error":
        rows[2] = [1]
    batches = [pa.RecordBatch.from_pydict({"x": rows[a:b], "z": [0.5] * (b - a)}) for a, b in ((0, 1), (1, 7))]
    found = [value for batch in serving.predict(given, batches, 7) for value in batch["y"].to_pylist()]
    expected = [None if row is None else (np.mean(row) if row else 0) + 0.5 for row in rows]
    assert found == expected


def test_outputs_of_steps_have_the_length_of_their_row() -> None:
    x = keras.Input((None,), dtype="int32")
    given = plan(keras.Model(x, keras.ops.stack([x, -x], axis=2)), 4)
    column = replace(given.columns[0], depth=2, output_dtype="int32")
    given = replace(given, inputs=(serving.ModelInput("x", (None,), "int32"),), columns=(column,))
    (out,) = serving.predict(given, [pa.RecordBatch.from_pydict({"x": [[1, 2], [3], [4, 5]]})], 7)
    assert out["y"].to_pylist() == [[[1, -1], [2, -2]], [[3, -3]], [[4, -4], [5, -5]]]
    with pytest.raises(BadValueError, match="null in row 1"):
        list(serving.predict(given, [pa.RecordBatch.from_pydict({"x": [[1], [2, None]]})], 7))


def test_outputs_of_long_rows_are_few_in_a_call_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = keras.Input((None,), dtype="int32")
    given = plan(keras.Model(x, x[:, :, None] * x[:, None, :]), 100)
    column = replace(given.columns[0], depth=2, output_dtype="int32")
    options = replace(given.options, batch_bytes=4 * (3 * 8 * 8 + 2 * 2))  # three maps of long rows, and a short one's
    inputs = (serving.ModelInput("x", (None,), "int32", padding=Padding(longest=8)),)
    given = replace(given, inputs=inputs, columns=(column,), row_bytes=8, options=options)
    rows = [[number] * (9 if number % 5 else 2) for number in range(23)]
    shapes: list[tuple[int, ...]] = []

    def noted(model: Any, arrays: Any) -> list[np.ndarray]:
        outputs = outputs_of_call(model, arrays)
        shapes.append(outputs[0].shape)
        return outputs

    outputs_of_call = serving.outputs_of_call
    monkeypatch.setattr(serving, "outputs_of_call", noted)
    for step_outputs, most in (((), 23), (((None, None),), 3 + 1)):
        shapes.clear()
        whole = replace(given, step_outputs=step_outputs)
        found = list(serving.predict(whole, [pa.RecordBatch.from_pydict({"x": rows})], 7))
        assert [row for batch in found for row in batch["y"].to_pylist()] == [
            [[number * number] * min(len(row), 8)] * min(len(row), 8) for number, row in enumerate(rows)
        ]
        assert max(batch.num_rows for batch in found) == most
        assert (max(4 * np.prod(shape) for shape in shapes) <= options.batch_bytes) == bool(step_outputs)
    with pytest.raises(BadValueError, match="null in row 22"):
        list(serving.predict(whole, [pa.RecordBatch.from_pydict({"x": [*rows[:22], None]})], 7))


def test_decoded_rows_decide_an_open_extent() -> None:
    x = keras.Input((None, 2))
    given = plan(keras.Model(x, keras.ops.sum(x, axis=(1, 2), keepdims=False)[:, None]), 4)
    given = replace(given, inputs=(serving.ModelInput("x", (None, 2), "float32", lambda n: np.ones((n, 2))),))
    (out,) = serving.predict(given, [pa.RecordBatch.from_pydict({"x": [3, 3]})], 7)
    assert out["y"].to_pylist() == [[6.0], [6.0]]
    (out,) = serving.predict(given, [pa.RecordBatch.from_pydict({"x": [3, 1]})], 7)
    assert out["y"].to_pylist() == [[6.0], [2.0]]
    with pytest.raises(BadValueError, match="null in row 0"):
        list(serving.predict(given, [pa.RecordBatch.from_pydict({"x": pa.array([None, 1], pa.int64())})], 7))


def test_a_model_that_loses_rows_is_refused() -> None:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.ops.sum(inputs, axis=0))
    batches = [pa.RecordBatch.from_pydict({"x": [[1.0, 1.0]] * 4})]
    with pytest.raises(ShapeError, match="one value a row"):
        list(serving.predict(plan(model, 8), batches, 0))


def test_only_the_last_few_models_are_kept() -> None:
    rows = [pa.RecordBatch.from_pydict({"x": [[1.0, 1.0]]})]
    made = [keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]) for _ in range(6)]
    plans = [plan(model, 1) for model in made]
    for one in plans:
        list(serving.predict(one, rows, 0))
    assert list(serving.MODELS) == [one.key for one in plans[-serving.MODELS_KEPT :]]


@pytest.mark.parametrize(("sizes", "most"), [([10], 4), ([3, 9, 1], 4), ([25], 8), ([8, 8], 8)])
def test_the_size_of_returned_batches_is_bounded(sizes: list[int], most: int) -> None:
    starts = np.cumsum([0, *sizes])
    batches = [batch(range(a, a + n)) for a, n in zip(starts, sizes, strict=False)]
    out = list(serving.rebatched(batches, 4, most))
    assert [row for part in out for row in part.column(0).to_pylist()] == list(range(sum(sizes)))
    assert max(part.num_rows for part in out) <= most


@keras.saving.register_keras_serializable("serving")
class Counted(keras.layers.Layer):
    """A layer that adds the number of rows of its call."""

    def call(self, x: Any) -> Any:
        return x + keras.ops.cast(keras.ops.shape(x)[0], x.dtype)


@pytest.mark.parametrize(("batch_bytes", "rows"), [(16, 1), (64, 4), (1, 1), (1 << 20, 8)])
@pytest.mark.parametrize("shape", [(2,), (None,)])
def test_calls_are_bounded_by_rows_and_by_bytes(batch_bytes: int, rows: int, shape: tuple[int | None]) -> None:
    model = keras.Sequential([keras.layers.Input(shape), Counted()])
    data = archive.to_bytes(model)
    given = serving.PredictionPlan(
        read_archive=lambda: data,
        key=f"{batch_bytes}{shape}",
        objects=archive.CustomObjects({"serving>Counted": Counted}),
        inputs=(serving.ModelInput("x", shape, "float32"),),
        columns=(OutputColumn("y", 0),),
        row_bytes=16 if shape[0] else 1,
        options=serving.PredictionOptions(8, batch_bytes),
    )
    table = pa.RecordBatch.from_pydict({"x": pa.array([[0.0] * (2 if shape[0] else 4)] * 16, pa.list_(pa.float32()))})
    out = pa.Table.from_batches(serving.predict(given, [table], 0))
    assert {row[0] for row in out["y"].to_pylist()} == {float(rows)}


def test_layers_read_the_drivers_settings_of_keras() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Normalization(mean=0.0, variance=0.0)])
    rows, keys, before = pa.RecordBatch.from_pydict({"x": [[1.0, 2.0]]}), set(), keras.config.epsilon()
    try:
        for epsilon in (0.5, 0.25):
            keras.config.set_epsilon(epsilon)
            packed = PackedModel(archive.to_bytes(model))
            keys.add(packed.key)
            keras.config.set_epsilon(1e-7)  # the setting of a Python worker
            there = replace(plan(model, 1), key=packed.key, settings=packed.settings)
            (out,) = serving.predict(there, [rows], 0)
            assert out["y"].to_pylist() == [[1.0 / epsilon, 2.0 / epsilon]]
    finally:
        keras.config.set_epsilon(before)
    assert len(keys) == 2
