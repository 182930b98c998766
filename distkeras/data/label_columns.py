"""The columns of a model's labels: their shape, dtype and the values that the loss of their output accepts.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distkeras.data.columns import Column
from distkeras.data.losses import LossKind, kind_of
from distkeras.data.schema import flattened, is_scalar, is_vector, known_length, numbers_of
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ConfigurationError, ShapeError
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField

_Decoder = Callable[[Any], Any]


def fixed_shape(tensor: Any, what: str, column: str) -> tuple[int, ...]:
    """Return the shape of one row of an input or output; ConfigurationError if it is not fixed."""
    shape = tuple(tensor.shape[1:])
    if any(extent is None for extent in shape):
        raise ConfigurationError(f"the model's {what} must have a fixed shape. Received: shape={shape}", column=column)
    return tuple(int(extent) for extent in shape)


def target_column(field: StructField, output: Any, loss: Any, decode: _Decoder | None) -> Column:
    """Return the column of an output's labels.

    Raises:
        ConfigurationError: the output's shape is not fixed, or it has one number under a cross-entropy over classes.
        ShapeError: a column of numbers, or of vectors whose size Spark knows, does not fill the output.
    """
    name, shape = field.name, fixed_shape(output, "output", field.name)
    scalar = is_scalar(field.dataType) and decode is None
    kind = kind_of(loss, shape, sparse=scalar or decode is not None or _depth(field.dataType) < len(shape))
    if kind.scores in ("sparse", "one-hot") and shape:
        return _classes_column(field, shape, kind, decode)
    if scalar and math.prod(shape) != 1:
        if kind.by_keras:
            raise _not_scalar_error(field, shape, kind)
        column = Column(name, loss=kind.name)  # a user's loss may accept any shape
    else:
        probabilities = kind.scores == "binary" and kind.by_keras
        column = Column(name, shape, decode=decode, probabilities=probabilities, loss=kind.name)
    return _of_known_length(field, column)


def _classes_column(field: StructField, shape: tuple[int, ...], kind: LossKind, decode: _Decoder | None) -> Column:
    """Return the column of labels for a cross-entropy over classes: class numbers, or a number for each class."""
    name, scalar = field.name, is_scalar(field.dataType) and decode is None
    place = kind.axis if kind.axis < 0 else kind.axis - 1  # a row has no axis of the batch
    rest = tuple(extent for number, extent in enumerate(shape) if number != place % len(shape))
    if shape[place] == 1:
        raise ConfigurationError(
            "the model's output must have a number for each class; the loss of a single one is 'binary_crossentropy'. "
            f"Received: shape={shape}, loss={kind.name!r}",
            column=name,
        )
    if kind.scores == "sparse" and not (scalar and math.prod(rest) != 1):
        if kind.by_keras:
            checks: dict[str, Any] = {"classes": shape[place], "ignored": kind.ignore_class}
        else:
            checks = {}  # the user's own code may accept other numbers
        column = Column(name, rest, "int32", decode, **checks, loss=kind.name)
    elif scalar and kind.by_keras:
        raise _not_scalar_error(field, shape, kind)
    else:
        column = Column(name, () if scalar else shape, decode=decode, loss=kind.name)
    return _of_known_length(field, column)


def _not_scalar_error(field: StructField, shape: tuple[int, ...], kind: LossKind) -> ShapeError:
    return ShapeError(
        f"labels must be arrays of shape {shape}, like the model's output (integer classes need the loss "
        f"'sparse_categorical_crossentropy'). Received: {field.dataType.simpleString()}, loss={kind.name!r}",
        column=field.name,
    )


def _depth(kind: DataType) -> int:
    """Return how deep a column's arrays are nested."""
    return 1 + _depth(kind.elementType) if hasattr(kind, "elementType") else int(is_vector(kind))


def _of_known_length(field: StructField, column: Column) -> Column:
    """Return ``column``; raise ShapeError if vectors have another length, as far as Spark knows it."""
    length = known_length(field)
    if column.decode is None and length is not None and length != column.size:
        raise _label_shape_error(column, f"vectors of {length} values")
    return column


def require_class_numbers(df: DataFrame, spec: DataSpec) -> None:
    """Raise ShapeError if the first row has one-hot labels, but the loss needs class numbers."""
    from pyspark.errors import PySparkException

    for column in spec.labels:
        kind = df.schema[column.name].dataType
        if column.classes is None or column.size != 1 or is_scalar(kind) or column.decode is not None:
            continue
        try:
            row = df.select(flattened(numbers_of(column.name, kind), kind).alias("values")).first()
        except PySparkException as error:
            raise typed_error(error, df.sparkSession) from None
        if row is not None and row["values"] is not None and len(row["values"]) != column.size:
            raise _label_shape_error(column, f"{len(row['values'])} values in the first row")


def _label_shape_error(column: Column, received: str) -> ShapeError:
    number = "one value" if column.size == 1 else f"{column.size} values"
    expected = f"labels must hold {number}, like the model's output"
    if column.classes is not None:
        expected = (
            f"labels must be class numbers, {number} a row; one-hot ones need the loss 'categorical_crossentropy'"
        )
    return ShapeError(f"{expected}. Received: {received}, loss={column.loss!r}", column=column.name)
