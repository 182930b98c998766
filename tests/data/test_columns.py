from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import output_of

from distkeras.data.columns import Column, Part, to_numpy
from distkeras.ps.errors import BadValueError, ColumnTypeError, ConfigurationError, ShapeError

F32 = pa.float32()


def fixed(rows: list[Any], size: int) -> pa.Array:
    return pa.array(rows, pa.list_(F32, size))


@pytest.mark.parametrize(
    ("values", "shape", "dtype", "expected"),
    [
        (pa.array([1, 2], pa.int32()), (), "int32", [1, 2]),
        (pa.array([1, 2], pa.int64()), (1,), "float32", [[1], [2]]),
        (pa.array([True, False]), (), "float32", [1, 0]),
        (pa.array([Decimal("1.5"), Decimal("2")], pa.decimal128(4, 1)), (), "float64", [1.5, 2]),
        (pa.array([Decimal(2**53 + 1)], pa.decimal128(20, 0)), (), "int64", [2**53 + 1]),
        (pa.array([[Decimal("7.00")]], pa.list_(pa.decimal128(4, 2))), (1,), "int32", [[7]]),
        (pa.array([3.0, 4.0], pa.float64()), (), "int64", [3, 4]),
        (pa.array(np.array([1.5], np.float16)), (), "float32", [1.5]),
        (pa.array([[1, 2], [3, 4]], pa.list_(F32)), (2,), "float32", [[1, 2], [3, 4]]),
        (pa.array([[1, 2, 3, 4]], pa.list_(F32)), (2, 2), "float32", [[[1, 2], [3, 4]]]),
        (pa.array([[1, 2]], pa.large_list(pa.float64())), (2, 1), "float32", [[[1], [2]]]),
        (fixed([[1, 2], [3, 4]], 2), (2,), "float32", [[1, 2], [3, 4]]),
        (pa.array([[7], [8]], pa.list_(F32)), (), "float32", [7, 8]),
        (pa.array([[[1, 2, 3], [4, 5, 6]]], pa.list_(pa.list_(F32))), (2, 3), "float32", [[[1, 2, 3], [4, 5, 6]]]),
        (pa.array([[[1, 2]]], pa.list_(pa.list_(F32))), (2, 1), "float32", [[[1], [2]]]),
        (pa.array([[[1, 2], [3, 4]]], pa.list_(pa.list_(F32))), (4,), "float32", [[1, 2, 3, 4]]),
        (pa.array([[[], []]], pa.list_(pa.list_(F32))).slice(0, 0), (4,), "float32", np.empty((0, 4))),
        (pa.array([], F32), (), "int64", []),
        (pa.array([], pa.list_(F32)), (2,), "float32", np.empty((0, 2))),
    ],
)
def test_values_keep_order_and_take_shape_and_dtype(
    values: Any, shape: tuple[int, ...], dtype: str, expected: np.ndarray | list[Any]
) -> None:
    got = to_numpy(values, Column("c", shape, dtype))
    assert got.dtype == dtype
    assert got.shape == (len(values), *shape)
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("values", "shape", "dtype", "error", "row", "text"),
    [
        (pa.array([1.0, None], F32), (), "float32", BadValueError, 1, "null"),
        (pa.array([None, None]), (), "float32", BadValueError, 0, "null"),
        (pa.array([[1.0], None], pa.list_(F32)), (1,), "float32", BadValueError, 1, "null"),
        (pa.array([[1, 2], [3, None]], pa.list_(F32)), (2,), "float32", BadValueError, 1, "null"),
        (pa.array([[[1], [2]], [[3], [None]]], pa.list_(pa.list_(F32))), (2,), "float32", BadValueError, 1, "null"),
        (pa.array([[[1], [2]], [[3], None]], pa.list_(pa.list_(F32))), (2,), "float32", BadValueError, 1, "null"),
        (pa.array([0.0, 1.0, np.nan], F32), (), "float32", BadValueError, 2, "nan"),
        (pa.array([[0, 1], [2, np.inf]], pa.list_(F32)), (2,), "float32", BadValueError, 1, "inf"),
        (pa.array([1.0, 1e300]), (), "float32", BadValueError, 1, "1e+300"),
        (pa.array([1, 70000]), (), "float16", BadValueError, 1, "70000"),
        (pa.array([1.0, np.nan]), (), "int32", BadValueError, 1, "nan"),
        (pa.array([1.0, 2.5]), (), "int32", BadValueError, 1, "2.5"),
        (pa.array([Decimal("1.00"), Decimal("2.50")]), (), "int32", BadValueError, 1, "2.50"),
        (pa.array([Decimal(1), Decimal(2**63)]), (), "int64", BadValueError, 1, str(2**63)),
        # These may have been rounded before: 2**53 + 1 has the same double.
        (pa.array([2.0**53 - 1, 2.0**53]), (), "int64", BadValueError, 1, str(2.0**53)),
        (pa.array([2.0**24 - 1, -(2.0**24)], F32), (), "int64", BadValueError, 1, str(-(2.0**24))),
        (pa.array([1.0, 2.0**63]), (), "int64", BadValueError, 1, str(2.0**63)),
        (pa.array([1, 300]), (), "uint8", BadValueError, 1, "300"),
        (pa.array([1, -1]), (), "uint8", BadValueError, 1, "-1"),
        (pa.array([[1, 2], [3]], pa.list_(F32)), (2,), "float32", ShapeError, 1, "1 values"),
        (pa.array([[1, 2, 3], [1, 2, 3]], pa.list_(F32)), (2,), "float32", ShapeError, 0, "3 values"),
        (pa.array([[1], []], pa.list_(F32)), (1,), "float32", ShapeError, 1, "0 values"),
        (fixed([[1, 2]], 2), (3,), "float32", ShapeError, 0, "2 values"),
        (pa.array([[[1, 2], [3, 4]], [[5, 6]]], pa.list_(pa.list_(F32))), (2, 2), "float32", ShapeError, 1, "1 values"),
        (
            pa.array([[[1, 2], [3, 4]], [[5, 6], [7]]], pa.list_(pa.list_(F32))),
            (2, 2),
            "float32",
            ShapeError,
            1,
            "1 values",
        ),
        # The right count in the wrong nesting is a transposed image.
        (
            pa.array([[[1, 2, 3], [4, 5, 6]]], pa.list_(pa.list_(F32))),
            (3, 2),
            "float32",
            ShapeError,
            0,
            "arrays nested as (2, 3)",
        ),
        (pa.array([[], []], pa.list_(pa.list_(F32))), (2,), "float32", ShapeError, 0, "0 values"),
        (pa.array([1.0, 2.0], F32), (2,), "float32", ShapeError, 0, "a single number"),
    ],
)
def test_bad_values_name_column_worker_step_and_row(
    values: Any, shape: tuple[int, ...], dtype: str, error: type[BadValueError] | type[ShapeError], row: int, text: str
) -> None:
    with pytest.raises(error) as caught:
        to_numpy(values, Column("pixels", shape, dtype), worker=3, step=7, first_row=100)
    assert type(caught.value) is error
    assert (caught.value.column, caught.value.worker, caught.value.step) == ("pixels", 3, 7)
    assert f"Received: {text}" in caught.value.message
    assert caught.value.message.endswith(f"in row {100 + row}")


@pytest.mark.parametrize("values", [pa.array(["a"]), pa.array([["a"]]), pa.array([{"size": 1}]), pa.array([b"1"])])
def test_types_without_numbers_are_refused(values: Any) -> None:
    with pytest.raises(ColumnTypeError, match="Received: type="):
        to_numpy(values, Column("c"))


def test_values_of_the_right_type_are_not_copied() -> None:
    flat = pa.array(np.arange(12, dtype="float32"))
    got = to_numpy(pa.ListArray.from_arrays(pa.array([0, 3, 6, 9, 12], pa.int32()), flat), Column("c", (3,)))
    assert np.shares_memory(got, flat.to_numpy())
    assert not got.flags.writeable


@given(
    rows=st.lists(st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3), max_size=20),
    first=st.integers(0, 20),
    length=st.integers(0, 20),
    kind=st.sampled_from([pa.list_(F32), pa.large_list(F32), pa.list_(F32, 3)]),
)
def test_a_slice_of_an_array_is_converted_alone(
    rows: list[list[float]], first: int, length: int, kind: pa.FixedSizeListType | pa.LargeListType | pa.ListType
) -> None:
    got = to_numpy(pa.array(rows, kind).slice(min(first, len(rows)), length), Column("c", (3,)))
    np.testing.assert_array_equal(got, np.array(rows, "float32").reshape(-1, 3)[first:][:length])


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": ""},
        {"name": "c", "shape": (3, None)},
        {"name": "c", "shape": (0,)},
        {"name": "c", "shape": [3]},
        {"name": "c", "dtype": "string"},
        {"name": "c", "dtype": "object"},
        {"name": "c", "dtype": None},
        {"name": "c", "dtype": "complex64"},
    ],
)
def test_invalid_columns_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Received: "):
        Column(**arguments)


def test_floats_that_were_assembled_next_to_integers_are_bounded_as_floats() -> None:
    column = Column("both", (2,), "int64", parts=(Part("a", "float"), Part("b", "long")))
    rows = [[2.0**24 - 1, 2.0**53 - 1], [2.0**24, 1.0]]  # as doubles, which Spark makes of both
    np.testing.assert_array_equal(to_numpy(pa.array(rows[:1]), column), [[2**24 - 1, 2**53 - 1]])
    with pytest.raises(
        BadValueError, match=r"from 16777216 on, where float32 rounds.*Received: 16777216.0 in row 1.*'a'"
    ):
        to_numpy(pa.array(rows), column)


def test_executor_modules_load_neither_spark_nor_keras() -> None:
    code = (
        "import sys, distkeras.data.columns, distkeras.data.ordering, distkeras.data.source, distkeras.data.batches\n"
        "sys.exit(str(loaded) if (loaded := {'pyspark', 'keras', 'tensorflow'} & set(sys.modules)) else 0)"
    )
    output_of("-c", code)


class TestLabels:
    def test_an_ignored_class_is_a_label(self) -> None:
        column = Column("y", (2,), "int32", classes=3, ignored=-1)
        values = pa.array([[0, -1], [2, -1]], pa.list_(pa.int64()))
        np.testing.assert_array_equal(to_numpy(values, column), [[0, -1], [2, -1]])
        with pytest.raises(BadValueError, match=r"in \[0, 3\), or -1, which the loss ignores. Received: -2 in row 1"):
            to_numpy(pa.array([[0, 1], [2, -2]], pa.list_(pa.int64())), column)

    def test_labels_of_a_binary_cross_entropy_are_in_0_to_1(self) -> None:
        column = Column("y", (1,), probabilities=True, loss="bce")
        got = to_numpy(pa.array([0.0, 0.3, 1.0 + 1e-7]), column)
        np.testing.assert_allclose(got, np.array([[0], [0.3], [1]]), rtol=1e-6)
        with pytest.raises(BadValueError, match=r"-1 and 1 must be 0 and 1.*Received: -1.0 in row 1.*'bce'") as caught:
            to_numpy(pa.array([1, -1]), column)
        assert caught.value.column == "y"


@pytest.mark.parametrize(
    ("dtype", "good", "bad", "shown"),
    [
        ("int64", [-10, 9], 10, "10"),
        ("int32", [0, -10], -11, "-11"),
        ("float32", [9.9, -10.5], 10.0, "10.0"),
        ("float32", [-0.5, 0.0], -11.0, "-11.0"),
    ],
)
def test_ids_are_rows_of_their_table(dtype: str, good: list[float], bad: float, shown: str) -> None:
    """Keras counts negative ids from the end, and truncates floating ones."""
    column = Column("shops", (2,), dtype, table=("shop", 10))
    rows = pa.array([good, [0, 1]], pa.list_(pa.float64()))
    np.testing.assert_array_equal(to_numpy(rows, column), np.array([good, [0, 1]], dtype))
    rows = pa.array([good, [0, bad]], pa.list_(pa.float64()))
    with pytest.raises(BadValueError, match=rf"ids of 'shop' must be in \[0, 10\).*: {shown} in row 6") as caught:
        to_numpy(rows, column, worker=3, first_row=5)
    assert (caught.value.worker, caught.value.column) == (3, "shops")
