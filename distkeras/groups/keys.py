"""The key of a group: the values of the columns that rows are grouped by.

Spark alone sorts, groups, joins and compares keys, so equality is Spark's: of zones, collations, NaN and -0.0. Python
passes them on as Arrow's values without looking at them. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distkeras.data.schema import field_of, quoted
from distkeras.ps.errors import ColumnTypeError, ConfigurationError
from distkeras.ps.validate import invalid

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType


def key_names(by: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns to group by; raise ConfigurationError unless ``by`` is a column or a list of unique ones."""
    names = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else ()
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise invalid("by", by, "the name of a column, or a list of distinct names")
    return names


def key_fields(schema: StructType, names: Sequence[str], reserved: Sequence[str]) -> list[StructField]:
    """Return the columns of a key, each of which may be null; ``reserved`` names the result's other columns."""
    from pyspark.sql.types import StructField

    fields = [field_of(schema.fields, name) for name in names]
    taken = {name.casefold() for name in reserved}
    for field in fields:
        if (unfit := _unfit(field.dataType)) is not None:
            raise ColumnTypeError(
                f"`by` must name columns that Spark compares and sends to Python, not of {unfit}. "
                f"Received: type={field.dataType.simpleString()}",
                column=field.name,
            )
        if field.name.casefold() in taken:
            raise ConfigurationError(
                f"`by` must not name a column that the result has: {', '.join(reserved)}. Received: {field.name!r}",
                column=field.name,
            )
        taken.add(field.name.casefold())
    return [StructField(field.name, field.dataType) for field in fields]


def _unfit(kind: DataType) -> str | None:
    """Return the part of a type that cannot be a key's; None if there is none."""
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        return _unfit(kind.elementType)
    if isinstance(kind, T.StructType):
        return next(filter(None, (_unfit(field.dataType) for field in kind.fields)), None)
    names = ("map", "variant", "interval year", "interval month", "void", "object", "geo")
    text = kind.simpleString()
    unfit = isinstance(kind, T.UserDefinedType | T.CalendarIntervalType) or text.startswith(names)
    return text if unfit else None


def same_key(left: DataFrame, right: DataFrame, names: Sequence[str]) -> Column:
    """Return the condition that rows of two DataFrames have the same key; a null is equal to a null."""
    from pyspark.sql import functions as F

    condition = F.lit(True)
    for name in names:
        condition = condition & left[quoted(name)].eqNullSafe(right[quoted(name)])
    return condition


def key_as_text(names: Sequence[str], columns: Sequence[Column] | None = None) -> Column:
    """Return a key as messages show it: ``shop=a, year=2020``; ``columns`` are those of its values, if not by name."""
    from pyspark.sql import functions as F

    values = [F.col(quoted(name)) for name in names] if columns is None else columns
    texts = [F.coalesce(value.cast("string"), F.lit("null")) for value in values]
    return F.concat_ws(", ", *(F.concat(F.lit(f"{name}="), text) for name, text in zip(names, texts, strict=True)))


def key_row(session: SparkSession, fields: Sequence[StructField], key: Any) -> DataFrame:
    """Return one row with the columns of a key: a value, or a mapping or `Row` that has one for each column."""
    from pyspark.errors import PySparkException
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    names = [field.name for field in fields]
    values = key
    if isinstance(key, Row) and hasattr(key, "__fields__"):
        given = key.asDict()
        values = {name: given[name] for name in names} if set(names) <= set(given) else given
    if not isinstance(values, Mapping):
        if len(names) > 1:
            raise invalid("key", key, f"a mapping with a value for each of {', '.join(names)}")
        values = {names[0]: values}
    if set(values) != set(names):
        raise invalid("key", key, f"a mapping with a value for each of {', '.join(names)}")
    try:
        row = tuple(_for_spark(values[field.name], field.dataType) for field in fields)
        return session.createDataFrame([row], StructType(list(fields)))
    except (PySparkException, TypeError, ValueError, OverflowError) as error:
        types = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)
        raise invalid("key", key, f"of the key's types: {types} ({error})") from error


def _for_spark(value: Any, kind: DataType) -> Any:
    """Return a value of Python as Spark takes it: it ignores the `fold` of a local time, and NumPy's numbers."""
    from pyspark.sql import types as T

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(kind, T.TimestampType) and isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC)
    if isinstance(kind, T.ArrayType) and isinstance(value, list | tuple | np.ndarray):
        return [_for_spark(part, kind.elementType) for part in value]
    if isinstance(kind, T.StructType) and isinstance(value, tuple) and len(value) == len(kind.fields):
        return tuple(_for_spark(part, field.dataType) for part, field in zip(value, kind.fields, strict=True))
    return value


#: Types of which equal values are equal in Arrow; by the beginning of Spark's names.
_PLAIN = ("tinyint", "smallint", "int", "bigint", "string", "binary", "boolean", "date", "timestamp", "decimal")


def require_plain(fields: Sequence[StructField]) -> None:
    """Raise ColumnTypeError for a key that a function of SQL cannot look up: Spark does not compare it there."""
    for field in fields:
        kind = field.dataType.simpleString()
        if not kind.startswith(_PLAIN) or kind.startswith("interval") or " collate " in kind:
            raise ColumnTypeError(
                "a function of SQL looks up keys of integers, strings without a collation, binaries, booleans, dates, "
                f"timestamps or decimals; `transform` takes keys of every type. Received: type={kind}",
                column=field.name,
            )


def plain_keys(columns: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
    """Return the keys in some columns of the types that `require_plain` accepts, equal if Spark's are equal."""
    return list(zip(*map(_plain_values, columns), strict=True))


def _plain_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.binary())  # not all of Spark's strings are UTF-8
    values: list[Any] = column.to_pylist()
    return values
