"""Columns on executors: `to_numpy` turns Arrow's arrays into numpy arrays.

It refuses values that cannot be trained on, and processes whole buffers, never a row at a time. Importing the module
loads neither pyspark nor Keras. `distkeras.data.schema` prepares the columns on the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from distkeras.data.column_kinds import Bad, innermost, is_list, kind_in_arrow
from distkeras.data.rows import Padding, RaggedRows
from distkeras.ps.errors import BadValueError, ColumnTypeError, ShapeError
from distkeras.ps.validate import invalid


class Part(NamedTuple):
    """One of the columns of one number each that a column was assembled from, with Spark's name of its type."""

    name: str
    kind: str


#: Steps of a row of any length, by which memory is divided before rows come.
_ESTIMATED_STEPS = 512


@dataclass(frozen=True)
class Column:
    """One input, target or weight of a model, and the DataFrame column that holds it.

    Args:
        name: name of the DataFrame column, exactly as `DataFrame.columns` spells it.
        shape: shape of one row's value; `()` for a scalar. The first extent is None if rows have any length.
        dtype: numpy name of an integer, floating or boolean type.
        decode: makes an array of that shape from a row's value of any kind; None if the values are numbers.
        parts: the columns of one number each that it was assembled from; empty for a single column.
        together: the names of these columns if the DataFrame has no column of this name; empty if it has.
        padding: for rows of any length: how they are padded.
        classes: for a label that is a class number: it must be an integer in [0, classes).
        ignored: a class number outside of them that is allowed, since the loss leaves it out; None for none.
        probabilities: a label must be in [0, 1].
        loss: name of a label's loss, for error texts; "" if it is unknown.
        shown_steps: for rows of any length: the steps of a mini-batch on which the model is tried before rows come.
        steps_of: for labels and weights of steps: the input of which a row has as many steps; "" if it is unknown.
        table: for ids that an Embedding looks up: its name and the rows of its table. Negative ids count from the end.
    """

    name: str
    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    decode: Callable[[Any], Any] | None = None
    parts: tuple[Part, ...] = ()
    together: tuple[str, ...] = ()
    padding: Padding = field(default_factory=Padding)
    classes: int | None = field(default=None, compare=False)
    ignored: int | None = field(default=None, compare=False)
    probabilities: bool = field(default=False, compare=False)
    loss: str = field(default="", compare=False)
    shown_steps: int = field(default=32, compare=False)
    steps_of: str = field(default="", compare=False)
    table: tuple[str, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise invalid("name", self.name, "the name of a column")
        fixed = self.shape[self.is_open :] if isinstance(self.shape, tuple) else (None,)
        if not all(isinstance(n, int) and n > 0 for n in fixed):
            raise invalid(
                "shape", self.shape, "a tuple of positive integers, of which the first may be None", column=self.name
            )
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
    def is_open(self) -> bool:
        """Return whether rows may have any length."""
        return self.shape[:1] == (None,)

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Return the shape of one step of rows of any length; of other rows, that of a row's value."""
        return tuple(extent for extent in self.shape if extent is not None)

    @property
    def longest_shape(self) -> tuple[int | None, ...]:
        """Return the shape of the longest row's value; the first extent is None if rows of any length are not cut."""
        longest = self.padding.longest
        return (self.padding.length(longest), *self.step_shape) if self.is_open and longest is not None else self.shape

    @property
    def size(self) -> int:
        """Return how many numbers a row's value has; of rows of any length, each step."""
        return math.prod(self.step_shape)

    @property
    def whole(self) -> bool:
        return np.dtype(self.dtype).kind != "f"

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row; of rows of any length, an estimate that depends on no row."""
        return self.size * np.dtype(self.dtype).itemsize * (_ESTIMATED_STEPS if self.is_open else 1)

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

Rows = np.ndarray | Any
"""The rows of a column: an array; or `RaggedRows`, if the column `is_open`. Any: most columns are not."""

ColumnRows = tuple[Rows, ...]
"""The rows of each column, all of the same number."""


def to_numpy(
    values: pa.Array,
    column: Column,
    *,
    worker: int | None = None,
    step: int | None = None,
    first_row: int = 0,
    record: pa.RecordBatch | None = None,
) -> Rows:
    """Return one Arrow column as an array, or as rows of any length.

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
        Array of shape `(n, *column.shape)` and dtype `column.dtype`, C-contiguous; if `column.is_open`, n `RaggedRows`.

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

    offsets: np.ndarray | None = None

    def bad(place: int, expected: str, received: object) -> NoReturn:
        step = place // column.size
        row = step if offsets is None else int(np.searchsorted(offsets, step, "right")) - 1
        fail(BadValueError, row, expected, received, place)

    def converted(raw: np.ndarray) -> Rows:
        array = _convert(raw, column, bad).reshape(-1 if column.is_open else len(values), *column.step_shape)
        check_range(array, column, bad)
        return array if offsets is None else RaggedRows(array, offsets)

    if column.decode is not None:
        decoded, decoded_lengths = _decoded(values, column, fail)
        offsets = _offsets(decoded_lengths) if column.is_open else None
        return converted(decoded)
    kind = kind_in_arrow(values.type)
    if kind is None:
        raise ColumnTypeError(
            f"a column must hold numbers, arrays of numbers or ML vectors. Received: type={values.type}",
            worker=worker,
            column=column.name,
            step=step,
        )
    if not len(values):
        nothing = np.empty((0, *column.step_shape), column.dtype)
        return RaggedRows(nothing, _offsets([])) if column.is_open else nothing
    lists = kind.lists(values)
    if column.is_open:
        steps, lengths = _steps(lists, column, fail)
        offsets = _offsets(lengths)
    else:
        steps = _flatten(lists, column, fail)
    flat = kind.from_arrow(steps, column.dtype, bad)
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


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _steps(rows: pa.Array, column: Column, fail: _Fail) -> tuple[pa.Array, np.ndarray]:
    """Return the numbers of all rows of any length as one flat array without nulls, and the steps of each row."""
    if rows.null_count:
        fail(BadValueError, _first_null(rows), "values must not be null", "null")
    if not is_list(rows.type):
        if column.size != 1:
            fail(ShapeError, 0, f"values must fill the shape {column.shape}", "a single number")
        return rows, np.ones(len(rows), np.int64)
    lengths = _lengths(rows)
    offsets = _offsets(lengths)

    def row_of(place: int) -> int:
        return int(np.searchsorted(offsets, place, "right")) - 1

    def fail_in_step(kind: Any, step: int, expected: str, received: object, place: int | None = None) -> NoReturn:
        fail(kind, row_of(step), expected, received, place)

    steps = rows.flatten()
    if not len(steps):
        return innermost(steps), lengths
    if is_list(steps.type):
        return _flatten(steps, replace(column, shape=column.step_shape), fail_in_step), lengths
    if steps.null_count:
        fail(BadValueError, row_of(_first_null(steps)), "values must not be null", "null")
    unequal = np.flatnonzero(lengths % column.size)
    if unequal.size:
        text = f"arrays must hold a multiple of {column.size} values each, for shape {column.shape}"
        fail(ShapeError, int(unequal[0]), text, f"{lengths[unequal[0]]} values")
    return steps, lengths // column.size


def _first_null(values: pa.Array) -> int:
    return int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))


def _lengths(lists: pa.Array) -> np.ndarray:
    """Return the length of each of some lists, of which none is null."""
    if pa.types.is_fixed_size_list(lists.type):
        return np.full(len(lists), lists.type.list_size)
    lengths: np.ndarray = np.diff(lists.offsets.to_numpy())
    return lengths


def _flatten(values: pa.Array, column: Column, fail: _Fail) -> pa.Array:
    """Return the numbers of all rows as one flat array; each row must hold `column.size` of them and no null."""
    nesting: list[int] = []  # length of the lists at each level, the outermost first
    while True:
        if values.null_count:
            position = _first_null(values)
            place = position if nesting else None
            fail(BadValueError, position // math.prod(nesting), "values must not be null", "null", place)
        if not is_list(values.type):
            break
        lengths = _lengths(values)
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


def _decoded(values: pa.Array, column: Column, fail: _Fail) -> tuple[np.ndarray, list[int]]:
    """Return the results of `column.decode` for all values as one flat array, and the first extent of each."""
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
        if not _fills(array.shape, column):
            text = f"`decode` must make arrays of shape {column.shape}"
            fail(ShapeError, row, text, f"shape {array.shape}")
        arrays.append(array)
    flat = [array.reshape(-1) for array in arrays]
    return np.concatenate(flat) if flat else np.empty(0, column.dtype), [len(a) if a.ndim else 1 for a in arrays]


def _fills(shape: tuple[int, ...], column: Column) -> bool:
    """Return whether an array has a column's shape, axes of length 1 aside; the axis of steps counts always."""
    if column.is_open and not shape:
        return False
    own, expected = shape[column.is_open :], column.step_shape
    return own == expected or [n for n in own if n != 1] == [n for n in expected if n != 1]


def check_range(values: np.ndarray, column: Column, bad: Bad) -> None:
    """Call ``bad`` for the first number that is no id of the column's table, no class, or no probability."""
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
