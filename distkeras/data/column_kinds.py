"""The kinds of columns that hold numbers: one table, `KINDS`, which the data plane, the stages and the models read.

A further kind is an entry of the table. The dtypes in which values reach a model are those that Keras' ``fit`` gives
arrays of the same kind. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType


Bad = Callable[[int, str, object], NoReturn]
"""Raises a BadValueError: the number's place among all of them, what was expected, and what was received."""


def _doubles_of_decimals(column: SparkColumn, depth: int, dtype: str) -> SparkColumn:
    # Arrow's own conversion to doubles does not round to the nearest one.
    return column.cast("array<" * depth + "double" + ">" * depth) if np.dtype(dtype).kind == "f" else column


def _numbers_of_decimals(values: pa.Array, dtype: str, bad: Bad) -> pa.Array:
    """Return decimals as doubles, or as integers if the model expects these: a double rounds from 2**53 on."""
    kind = np.dtype(dtype).kind
    if kind == "f":
        return values.cast(pa.float64())
    whole = pa.uint64() if kind == "u" else pa.int64()
    try:
        return values.cast(whole)
    except pa.ArrowInvalid:
        limits = np.iinfo(whole.to_pandas_dtype())
        for place, value in enumerate(values.to_pylist()):
            if value != int(value) or not limits.min <= value <= limits.max:
                bad(place, f"values must be exact as {dtype}", value)
        raise


def _is_vector_in_arrow(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and [field.name for field in kind] == ["type", "size", "indices", "values"]


def _arrays_of_vectors(column: SparkColumn, depth: int, dtype: str) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    # `vector_to_array` fails on a null, without naming the column: a null stays null here.
    values = vector_to_array(column, "float32" if dtype == "float32" else "float64")
    return F.when(column.isNotNull(), values)


def vector_of(values: SparkColumn) -> SparkColumn:
    """Return dense ML vectors of arrays of numbers; null stays null."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    return F.when(values.isNotNull(), array_to_vector(values.cast("array<double>")))


def _lists_of_vectors(vectors: pa.StructArray) -> pa.ListArray:
    """Return ML vectors, as Spark sends them, as lists of doubles; dense ones are a view, and null stays null."""
    kinds, sizes, indices, values = vectors.flatten()
    sparse = kinds.fill_null(1).to_numpy() == 0
    if not sparse.any():
        return values
    counts = pc.list_value_length(values).fill_null(0).to_numpy().astype(np.int64)
    lengths = np.where(sparse, sizes.fill_null(0).to_numpy(), counts)  # the size of dense vectors is null
    ends = np.cumsum(lengths)
    # A dense vector has no indices: its numbers stay in their places.
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places[np.repeat(sparse, counts)] = indices.flatten().to_numpy()
    full = np.zeros(ends[-1])
    full[np.repeat(ends - lengths, counts) + places] = values.flatten().to_numpy()
    mask = vectors.is_null() if vectors.null_count else None
    return pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), full, mask=mask)


@dataclass(frozen=True)
class ColumnKind:
    """One kind of numbers, of which a column holds one a row, or nested arrays.

    Args:
        dtype: numpy name of an array of the numbers, as Keras' ``fit`` gets it; None: numpy has no such type.
        held_by: the types of `_TOGETHER` that hold the numbers as well as their own does.
        is_in_arrow: whether a type of Arrow's is of this kind.
        on_jvm: from a column, its depth and the dtype that a model expects, makes numbers or arrays of numbers; the
            dtype "object" keeps them exactly.
        written: makes a column of this kind of an array of numbers.
        lists: makes lists of numbers of Arrow's values, for a kind with ``axes``.
        from_arrow: from flat numbers without nulls and the dtype, makes numbers of a type of numpy's.
        axes: of the value itself, which cannot be nested in arrays; 0 for a number. Null stays null everywhere.
    """

    dtype: str | None
    held_by: tuple[str, ...]
    is_in_arrow: Callable[[pa.DataType], bool]
    on_jvm: Callable[[SparkColumn, int, str], SparkColumn] = lambda column, depth, dtype: column
    written: Callable[[SparkColumn], SparkColumn] = lambda values: values
    lists: Callable[[pa.Array], pa.Array] = lambda values: values
    from_arrow: Callable[[pa.Array, str, Bad], pa.Array] = lambda values, dtype, bad: values
    axes: int = 0


#: The types that several columns of one number each can share, the smallest first.
_TOGETHER = ("short", "int", "bigint", "float", "double")

VECTOR = ColumnKind("float64", (), _is_vector_in_arrow, _arrays_of_vectors, vector_of, _lists_of_vectors, axes=1)
#: By Spark's name of the type.
KINDS = {
    "boolean": ColumnKind("bool", _TOGETHER, pa.types.is_boolean),
    "byte": ColumnKind("int8", _TOGETHER, pa.types.is_integer),
    "short": ColumnKind("int16", _TOGETHER, pa.types.is_integer),
    "integer": ColumnKind("int32", ("int", "bigint", "double"), pa.types.is_integer),
    "long": ColumnKind("int64", ("bigint", "double"), pa.types.is_integer),
    "float": ColumnKind("float32", ("float", "double"), pa.types.is_floating),
    "double": ColumnKind("float64", ("double",), lambda kind: pa.types.is_floating(kind) or pa.types.is_null(kind)),
    "decimal": ColumnKind(
        None, ("double",), pa.types.is_decimal, _doubles_of_decimals, from_arrow=_numbers_of_decimals
    ),
    "vectorudt": VECTOR,  # the class of `pyspark.ml` and that of the older `pyspark.mllib`
}


def kind_in(spark_type: DataType) -> tuple[DataType, ColumnKind | None, int]:
    """Return the type within a column's arrays, its kind, None if it is not of numbers, and the axes of one value."""
    depth = 0
    while hasattr(spark_type, "elementType"):
        spark_type, depth = spark_type.elementType, depth + 1
    kind = KINDS.get(spark_type.typeName())
    if kind is None or (kind.axes and depth):
        return spark_type, None, depth
    return spark_type, kind, depth + kind.axes


def is_scalar(spark_type: DataType) -> bool:
    _, kind, depth = kind_in(spark_type)
    return kind is not None and not depth


def common_type(columns: Mapping[str, DataType], *, whole: bool) -> str:
    """Return the smallest type that holds the numbers of all these columns; of integers next to fractions, double.

    ``whole``: the model wants integers, of which a double does not hold all that decimals do.
    """
    kinds = [KINDS[spark_type.typeName()] for spark_type in columns.values()]
    common = next(one for one in _TOGETHER if all(one in kind.held_by for kind in kinds))
    if not whole or common != "double" or any(kind.dtype and np.dtype(kind.dtype).kind == "f" for kind in kinds):
        return common
    # Decimals, next to integers of at most 19 digits.
    digits = [(getattr(kind, "precision", 19), getattr(kind, "scale", 0)) for kind in columns.values()]
    left, right = max(precision - scale for precision, scale in digits), max(scale for _, scale in digits)
    if left + right > _DECIMAL_DIGITS:
        raise ConfigurationError(
            f"several columns for one input of integers must fit a decimal of {_DECIMAL_DIGITS} digits: cast them to "
            f"bigint. Received: {', '.join(f'{name} {kind.simpleString()}' for name, kind in columns.items())}"
        )
    return f"decimal({left + right},{right})"


#: Digits of the largest decimals.
_DECIMAL_DIGITS = 38


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def kind_in_arrow(arrow_type: pa.DataType) -> ColumnKind | None:
    """Return the kind of the numbers in a type of Arrow's, which may be lists of them; None: it holds none."""
    nested = is_list(arrow_type)
    while is_list(arrow_type):
        arrow_type = arrow_type.value_type
    kind = next((kind for kind in KINDS.values() if kind.is_in_arrow(arrow_type)), None)
    return None if kind is not None and kind.axes and nested else kind


def lists_of(values: pa.Array) -> pa.Array:
    """Return Arrow's values as numbers or (nested) lists of numbers; null stays null."""
    kind = kind_in_arrow(values.type)
    return values if kind is None else kind.lists(values)


def innermost(values: pa.Array) -> pa.Array:
    """Return the numbers in ML vectors or (nested) lists as one flat array, without nulls."""
    values = lists_of(values)
    while is_list(values.type):
        values = values.flatten()
    return values


#: The dtype of an input of text, such as one of TextVectorization or StringLookup, which numpy does not have.
TEXT = "string"


def float_dtype() -> str:
    """Return the numpy name of the dtype of floats: ``fit`` casts those of any array to ``keras.config.floatx()``.

    It is float32 where that is a lower precision, to which layers and losses cast by themselves.
    """
    import keras

    return "float64" if keras.config.floatx() == "float64" else "float32"


def label_dtype(spark_type: DataType) -> str:
    """Return the numpy name of the dtype of labels from a column of type ``spark_type``, which may be an array."""
    dtype = getattr(kind_in(spark_type)[1], "dtype", None)  # None: no type of numpy's
    return float_dtype() if dtype is None or dtype.startswith("float") else _held(dtype)


def dtype_of_input(tensor: Any) -> str:
    """Return the numpy name of the dtype of a symbolic input's values; float32 for one that numpy does not have."""
    dtype = str(tensor.dtype)
    return "float32" if dtype.startswith(("bfloat", "float8")) else _held(dtype)


def held_dtype(dtype: str, backend: str, *, x64: bool) -> str:
    """Return the dtype in which a backend holds values of ``dtype``: JAX truncates integers without ``x64``."""
    return dtype if backend != "jax" or x64 else {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)


def _held(dtype: str) -> str:
    import keras

    backend = keras.backend.backend()
    x64 = backend != "jax" or bool(sys.modules["jax"].config.jax_enable_x64)
    return held_dtype(dtype, backend, x64=x64)
