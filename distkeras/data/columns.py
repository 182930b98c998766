"""Columns on executors: `to_numpy` turns Arrow's arrays into numpy arrays.

It refuses values that cannot be trained on, and processes whole buffers, never a row at a time. Importing the module
loads neither pyspark nor Keras. `distkeras.data.schema` prepares the columns on the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from distkeras.data.column_kinds import Bad, is_list, kind_in_arrow
from distkeras.ps.errors import BadValueError, ColumnTypeError, ShapeError
from distkeras.ps.validate import invalid


class Part(NamedTuple):
    """One of the columns of one number each that a column was assembled from, with Spark's name of its type."""

    name: str
    kind: str


@dataclass(frozen=True)
class Column:
    """One input, target or weight of a model, and the DataFrame column that holds it.

    Args:
        name: name of the DataFrame column, exactly as `DataFrame.columns` spells it.
        shape: shape of one row's value; `()` for a scalar.
        dtype: numpy name of an integer, floating or boolean type.
        decode: makes an array of that shape from a row's value of any kind; None if the values are numbers.
        parts: the columns of one number each that it was assembled from; empty for a single column.
        together: the names of these columns if the DataFrame has no column of this name; empty if it has.
        classes: for a label that is a class number: it must be an integer in [0, classes).
        ignored: a class number outside of them that is allowed, since the loss leaves it out; None for none.
        probabilities: a label must be in [0, 1].
        loss: name of a label's loss, for error texts; "" if it is unknown.
        table: for ids that an Embedding looks up: its name and the rows of its table. Negative ids count from the end.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    decode: Callable[[Any], Any] | None = None
    parts: tuple[Part, ...] = ()
    together: tuple[str, ...] = ()
    classes: int | None = field(default=None, compare=False)
    ignored: int | None = field(default=None, compare=False)
    probabilities: bool = field(default=False, compare=False)
    loss: str = field(default="", compare=False)
    table: tuple[str, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise invalid("name", self.name, "the name of a column")
        if not isinstance(self.shape, tuple) or not all(isinstance(n, int) and n > 0 for n in self.shape):
            raise invalid("shape", self.shape, "a tuple of positive integers", column=self.name)
        try:
            numeric = isinstance(self.dtype, str) and np.dtype(self.dtype).kind in "biuf"
        except TypeError:
            numeric = False
        if not numeric:
            raise invalid("dtype", self.dtype, "the name of a numpy number type", column=self.name)
        if self.classes is not None and self.classes < 1:
            raise invalid("classes", self.classes, "a positive integer, or None", column=self.name)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of the DataFrame's columns that hold the values."""
        return self.together or (self.name,)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def checks(self) -> tuple[object, ...]:
        """Return what decides which values are accepted. The equality of columns leaves it out."""
        return self.classes, self.ignored, self.probabilities, self.loss, self.table

    @property
    def whole(self) -> bool:
        return np.dtype(self.dtype).kind != "f"

    @property
    def row_bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    def name_of(self, place: int) -> str:
        """Return the name of the user's column from which the element at ``place`` of a row's value comes."""
        return self.parts[place % self.size].name if len(self.parts) == self.size else self.name


def user_names(name: str, parts: Sequence[Part]) -> str:
    """Return the names of the user's columns that column ``name`` was assembled from, or its own name."""
    return ", ".join(part.name for part in parts) or name


def described(columns: Iterable[Column]) -> str:
    """Return the names of the user's columns, with the shape of a row's value of each."""
    return ", ".join(f"{user_names(column.name, column.parts)} of shape {column.shape}" for column in columns)


ColumnArrays = tuple[np.ndarray, ...]
"""One array per column, all of the same length."""


def to_numpy(
    values: pa.Array,
    column: Column,
    *,
    worker: int | None = None,
    step: int | None = None,
    first_row: int = 0,
    record: pa.RecordBatch | None = None,
) -> np.ndarray:
    """Return one Arrow column as an array.

    No copy is made when the type needs no conversion; the result is then a read-only view that keeps
    the Arrow buffer alive. Nested arrays must be nested like `column.shape` (axes of length 1 aside),
    unless that shape has one axis.

    Args:
        values: numbers, ML vectors or (nested) lists of numbers; n rows.
        worker: id of the worker, for error texts.
        step: mini-batch within the epoch, for error texts.
        first_row: number of the first row within its partition, for error texts.
        record: the rows with all their columns, for error texts.

    Returns:
        Array of shape `(n, *column.shape)` and dtype `column.dtype`, C-contiguous.

    Raises:
        BadValueError: a null, NaN or infinity, a number that overflows a floating `column.dtype`, one that an integer
            `column.dtype` cannot hold exactly, one for it that `values` or the part of ``column`` may have rounded (a
            double from 2**53 on, a float from 2**24 on), or a label that is not a class.
        ShapeError: rows of unequal length, or a count other than `column.size`.
        ColumnTypeError: the type does not hold numbers.
    """

    def fail(
        kind: type[BadValueError | ShapeError], row: int, expected: str, received: object, place: int | None = None
    ) -> NoReturn:
        name = column.name if place is None else column.name_of(place)
        others = "" if record is None else _row_text(record, row)
        text = f"{expected}. Received: {received} in row {first_row + row}{others}"
        if column.classes is not None and kind is ShapeError:
            advice = "one-hot ones need the loss 'categorical_crossentropy'"
            text = f"labels must be class numbers; {advice}: {text}"
        text += f", loss={column.loss!r}" if column.loss else ""
        raise kind(text, worker=worker, column=name, step=step)

    def bad(place: int, expected: str, received: object) -> NoReturn:
        fail(BadValueError, place // column.size, expected, received, place)

    def converted(raw: np.ndarray) -> np.ndarray:
        array = _convert(raw, column, bad).reshape(len(values), *column.shape)
        _check_range(array, column, bad)
        return array

    if column.decode is not None:
        return converted(_decoded(values, column, fail))
    kind = kind_in_arrow(values.type)
    if kind is None:
        raise ColumnTypeError(
            f"a column must hold numbers, arrays of numbers or ML vectors. Received: type={values.type}",
            worker=worker,
            column=column.name,
            step=step,
        )
    if not len(values):
        return np.empty((0, *column.shape), column.dtype)
    flat = kind.from_arrow(_flatten(kind.lists(values), column, fail), column.dtype, bad)
    # Only booleans need a copy: they are bits in Arrow, and bytes in numpy.
    return converted(flat.to_numpy(zero_copy_only=not pa.types.is_boolean(flat.type)))


_Fail = Callable[..., NoReturn]
#: The most characters of a row's other values in an error text, and of one of these values.
_ROW_MAX, _VALUE_MAX = 300, 40


def _row_text(record: pa.RecordBatch, row: int) -> str:
    """Return the row's single numbers and texts, by which its owner finds it; "" if it has none."""
    texts = []
    for name, values in zip(record.schema.names, record.columns, strict=True):
        kind = values.type
        if not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or name.startswith(("__", "distkeras_"))):
            texts.append(f"{name}={str(values[row].as_py())[:_VALUE_MAX]}")
    text = ", ".join(texts)
    return f" ({text[:_ROW_MAX]})" if text else ""


def _flatten(values: pa.Array, column: Column, fail: _Fail) -> pa.Array:
    """Return the numbers of all rows as one flat array; each row must hold `column.size` of them and no null."""
    nesting: list[int] = []  # length of the lists at each level, the outermost first
    while True:
        if values.null_count:
            position = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
            place = position if nesting else None
            fail(BadValueError, position // math.prod(nesting), "values must not be null", "null", place)
        if not is_list(values.type):
            break
        if pa.types.is_fixed_size_list(values.type):
            lengths = np.full(len(values), values.type.list_size)
        else:
            lengths = np.diff(values.offsets.to_numpy())
        # A flat array must have the model's length; at each level of a nested one, all lists must be equally long.
        flat = not nesting and not is_list(values.type.value_type)
        expected = column.size if flat else max(1, int(lengths[0]))
        unequal = np.flatnonzero(lengths != expected)
        if unequal.size:
            text = f"arrays must hold {expected} values each, for shape {column.shape}"
            fail(ShapeError, int(unequal[0]) // math.prod(nesting), text, f"{lengths[unequal[0]]} values")
        nesting.append(expected)
        values = values.flatten()
    received = [n for n in nesting if n != 1]
    expected_shape = [n for n in column.shape if n != 1]
    like = received == expected_shape or (len(expected_shape) <= 1 and math.prod(received) == column.size)
    if not like and len(nesting) != 1:  # a single level was compared above
        text = f"values must fill the shape {column.shape}"
        fail(ShapeError, 0, text, f"arrays nested as {tuple(nesting)}" if nesting else "a single number")
    return values


def _decoded(values: pa.Array, column: Column, fail: _Fail) -> np.ndarray:
    """Return the results of `column.decode` for all values as one flat array."""
    assert column.decode is not None
    arrays = []
    for row, raw in enumerate(values.to_pylist()):
        if raw is None:
            fail(BadValueError, row, "values must not be null", "null")
        try:
            array = np.asarray(column.decode(raw))
        except Exception as error:  # noqa: BLE001 - every error of the caller's function gets its row
            fail(BadValueError, row, "`decode` must make an array of every value", f"{type(error).__name__}: {error}")
        if array.dtype.kind not in "biuf":
            fail(BadValueError, row, "`decode` must make an array of numbers", f"dtype {array.dtype}")
        if array.shape != column.shape and [n for n in array.shape if n != 1] != [n for n in column.shape if n != 1]:
            text = f"`decode` must make arrays of shape {column.shape}"
            fail(ShapeError, row, text, f"shape {array.shape}")
        arrays.append(array.reshape(-1))
    return np.concatenate(arrays) if arrays else np.empty(0, column.dtype)


def _check_range(values: np.ndarray, column: Column, bad: Bad) -> None:
    if column.table is not None:
        _check_ids(values, *column.table, bad)
    if column.classes is not None:
        _check_classes(values, column.ignored, column.classes, bad)
    elif column.probabilities:
        _check_probabilities(values, bad)


def _check_ids(values: np.ndarray, layer: str, rows: int, bad: Bad) -> None:
    if not values.size or (values.min() >= -rows and values.max() < rows):
        return
    # The layer truncates ids that are not whole.
    low = values <= -rows - 1 if values.dtype.kind == "f" else values < -rows
    _require_none(low | (values >= rows), f"ids of {layer!r} must be in [0, {rows}), its rows", values, bad)


def _check_classes(values: np.ndarray, ignored: int | None, classes: int, bad: Bad) -> None:
    wrong = (values < 0) | (values >= classes)
    if values.dtype.kind == "f":
        wrong |= values != np.floor(values)
    if ignored is not None:
        wrong &= values != ignored
    also = "" if ignored is None else f", or {ignored}, which the loss ignores"
    _require_none(wrong, f"labels must be integers in [0, {classes}){also}", values, bad)


def _require_none(wrong: np.ndarray, expected: str, values: np.ndarray, bad: Bad) -> None:
    """Raise the error for the first number that is ``wrong``, if any is."""
    if wrong.any():
        place = int(np.argmax(wrong))
        bad(place, expected, values.flat[place].item())


#: How far a label may be outside of [0, 1]: pictures that were scaled in float32 are, by rounding.
_OUTSIDE = 1e-5


def _check_probabilities(values: np.ndarray, bad: Bad) -> None:
    if not values.size or (values.min() >= -_OUTSIDE and values.max() <= 1 + _OUTSIDE):
        return
    text = "labels of a binary cross-entropy must be in [0, 1]; the classes -1 and 1 must be 0 and 1"
    _require_none((values < -_OUTSIDE) | (values > 1 + _OUTSIDE), text, values, bad)


def _convert(raw: np.ndarray, column: Column, bad: Bad) -> np.ndarray:
    dtype = np.dtype(column.dtype)
    # Overflow and NaN are found in the result below; numpy's warnings would only repeat them.
    with np.errstate(over="ignore", invalid="ignore"):
        values = raw.astype(dtype, copy=False)
    if dtype.kind == "f":
        if raw.dtype.kind == "f" or dtype.itemsize == 2:
            _require_none(~np.isfinite(values), f"values must be finite as {dtype.name}", raw, bad)
    elif not np.can_cast(raw.dtype, dtype):
        _require_none(values != raw, f"values must be exact as {dtype.name}", raw, bad)
    if dtype.kind != "f" and raw.dtype.kind == "f":
        _require_unrounded(raw, column, bad)
    return values


def _require_unrounded(raw: np.ndarray, column: Column, bad: Bad) -> None:
    """Refuse integers so large that other ones, such as neighboring ids, have the same floating number."""
    kinds = [raw.dtype.name] * column.size
    if len(column.parts) == column.size:  # doubles hold the values that floats next to integers have already rounded
        kinds = ["float32" if part.kind == "float" else raw.dtype.name for part in column.parts]
    limits = [2 ** (np.finfo(kind).nmant + 1) for kind in kinds]
    rounded = (np.abs(raw).reshape(-1, column.size) >= np.array(limits)).reshape(-1)
    if rounded.any():
        position = int(np.argmax(rounded))
        kind, limit = kinds[position % column.size], limits[position % column.size]
        text = f"values must be integers or decimals in Spark from {limit} on, where {kind} rounds them"
        bad(position, text, raw[position].item())
