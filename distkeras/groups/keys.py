"""The key of a group: the values of the columns that rows are grouped by.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distkeras.data.schema import field_of
from distkeras.ps.errors import ColumnTypeError, ConfigurationError
from distkeras.ps.validate import invalid

if TYPE_CHECKING:
    from pyspark.sql.types import StructField, StructType

Key = tuple[Any, ...]

#: Types for which Spark, Arrow, Parquet and Python agree on equality; by the beginning of their names.
_KINDS = ("tinyint", "smallint", "int", "bigint", "string", "boolean", "date", "timestamp", "decimal")


def key_names(by: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns to group by; raise ConfigurationError unless ``by`` is a column or a list of unique ones."""
    names = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else ()
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise invalid("by", by, "the name of a column, or a list of distinct names")
    return names


def key_fields(schema: StructType, names: Sequence[str], reserved: Sequence[str]) -> list[StructField]:
    """Return the columns of a key.

    Args:
        reserved: names of the result's other columns.

    Raises:
        MissingColumnError: there is no such column.
        ColumnTypeError: Spark, Arrow and Python disagree on the equality of values of its type.
        ConfigurationError: its name is reserved.
    """
    fields = [field_of(schema.fields, name) for name in names]
    for field in fields:
        kind = field.dataType.simpleString()
        if not kind.startswith(_KINDS) or kind.startswith("interval") or " collate " in kind:
            raise ColumnTypeError(
                "`by` must name columns of integers, strings without a collation, booleans, dates, timestamps or "
                f"decimals. Received: type={kind}",
                column=field.name,
            )
        if field.name in reserved:
            raise ConfigurationError(
                f"`by` must not name a column that the result has: {', '.join(reserved)}. Received: {field.name!r}",
                column=field.name,
            )
    return fields


def keyed_runs(records: Iterator[pa.RecordBatch], count: int) -> Iterator[tuple[Key, pa.RecordBatch]]:
    """Yield the rows in runs of one key each; a key may have several consecutive runs.

    Args:
        records: rows in the order of their keys, whose first columns are the key's.
        count: the number of columns of a key.
    """
    for record in records:
        if not record.num_rows:
            continue
        keys = record.columns[:count]
        changes = np.zeros(record.num_rows - 1, bool)
        for column in keys:
            changes |= _differs(column)
        starts = [0, *(np.flatnonzero(changes) + 1).tolist(), record.num_rows]
        for start, stop in pairwise(starts):
            yield tuple(column[start].as_py() for column in keys), record.slice(start, stop - start)


def _differs(column: pa.Array) -> np.ndarray:
    """Return for each value after the first whether it differs from the previous one; nulls are equal."""
    before, after = column.slice(0, len(column) - 1), column.slice(1)
    values = pc.fill_null(pc.not_equal(before, after), False)
    nulls = pc.xor(before.is_null(), after.is_null())
    differs: np.ndarray = pc.or_(values, nulls).to_numpy(zero_copy_only=False)
    return differs


def distinct_keys(columns: Sequence[pa.Array]) -> tuple[list[Key], np.ndarray]:
    """Return the unique keys of rows with these columns, and for each row the place of its key among them."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        codes = np.unique(codes, return_inverse=True)[1]  # keeps codes small: products over many columns overflow
    _, firsts, places = np.unique(codes, return_index=True, return_inverse=True)
    return [tuple(column[int(row)].as_py() for column in columns) for row in firsts], places


def key_text(key: Key, names: Sequence[str]) -> str:
    """Return a key as messages show it: ``shop='a', year=2020``."""
    return ", ".join(f"{name}={value!r}" for name, value in zip(names, key, strict=True))


def key_of(values: Mapping[str, Any] | Any, names: Sequence[str]) -> Key:
    """Return the key for a single value, or for a mapping by column; raise ConfigurationError for other columns."""
    if not isinstance(values, Mapping):
        if len(names) > 1:
            raise invalid("key", values, f"a mapping with a value for each of {', '.join(names)}")
        return (values,)
    if set(values) != set(names):
        raise invalid("key", dict(values), f"a mapping with a value for each of {', '.join(names)}")
    return tuple(values[name] for name in names)
