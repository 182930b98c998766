"""What a caller passes as a DataFrame, and its columns as their types tell: refused before any work, with the way.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError
from distkeras.spark.cluster import is_stopped

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField

#: What to do with a type that holds no numbers; by the beginning of its name.
_WAYS = {
    "string": "index classes with Spark ML's StringIndexer, cast digits, turn text into arrays of token ids",
    "varchar": "index classes with Spark ML's StringIndexer, cast digits, turn text into arrays of token ids",
    "char": "index classes with Spark ML's StringIndexer, cast digits, turn text into arrays of token ids",
    "binary": "decode it to an array of numbers, with `decode`",
    "struct": "select its fields, each a column, or make one array of them",
    "map": "make an array of its values",
    "timestamp": "make a number of it, for example with unix_timestamp",
    "date": "make a number of it, for example with datediff",
    "variant": "extract its numbers with variant_get",
}

#: How what is no Spark DataFrame becomes one; by the beginning of its class's full name.
_CONVERSIONS = (
    ("pyspark.pandas.", "`{name}.to_spark()` makes one"),
    ("pandas.", "`spark.createDataFrame({name})` makes one"),
    ("polars.", "`spark.createDataFrame({name}.to_pandas())` makes one"),
    ("pyarrow.", "`spark.createDataFrame({name}.to_pandas())` makes one"),
    ("numpy.", "`spark.createDataFrame(list(zip(x.tolist(), y.tolist())), ['features', 'label'])` makes one of arrays"),
    ("pyspark.core.rdd.", "`spark.createDataFrame({name}, schema)` makes one of an RDD of rows"),
    ("pyspark.rdd.", "`spark.createDataFrame({name}, schema)` makes one of an RDD of rows"),
    ("tensorflow.", "write it as Parquet and read that with `spark.read.parquet`"),
    ("builtins.str", "`spark.read.parquet({name})` reads one"),
    ("pathlib.", "`spark.read.parquet(str({name}))` reads one"),
    ("builtins.", "`spark.createDataFrame(rows, ['features', 'label'])` makes one of rows"),
)


def require_dataframe(name: str, value: Any) -> None:
    """A Spark DataFrame, of the classic kind or of Spark Connect, whose session runs.

    Args:
        name: of the argument.
        value: what came.

    Raises:
        ConfigurationError: it is something else, whose way to a DataFrame the text names; or its session has ended.
    """
    from pyspark.sql import DataFrame

    if not isinstance(value, DataFrame):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        way = next((way for start, way in _CONVERSIONS if kind.startswith(start)), None)
        hint = "" if way is None or value is None else f"; {way.format(name=name)}"
        raise ConfigurationError(f"`{name}` must be a Spark DataFrame{hint}. Received: {name} of type {kind}")
    if is_stopped(value.sparkSession):
        raise ConfigurationError(
            f"`{name}` must be of a Spark session that runs: create it again there. Received: {name} of a stopped one"
        )


def require_batch(name: str, value: Any) -> None:
    """A Spark DataFrame, as `require_dataframe` wants it, that is read as a whole.

    Raises:
        ConfigurationError: it is something else, or a stream.
    """
    require_dataframe(name, value)
    if value.isStreaming:
        raise ConfigurationError(
            f"`{name}` must be no stream: call `train` on each micro-batch, in `writeStream.foreachBatch`, or on what "
            f"the stream has written. Received: a streaming DataFrame with columns={value.columns}"
        )


def field_of(fields: Sequence[StructField], name: str) -> StructField:
    """The field of the column ``name``, spelled exactly so.

    Raises:
        MissingColumnError: there is none.
        ConfigurationError: there are several.
    """
    matches = [field for field in fields if field.name == name]
    if len(matches) > 1:
        raise ConfigurationError(
            f"column names must be unambiguous. Received: {len(matches)} columns named {name!r}", column=name
        )
    if not matches:
        names = [field.name for field in fields]
        near = [other for other in names if other.casefold() == name.casefold()]
        near = near or difflib.get_close_matches(name, names, 1)
        hint = f" (or is it {near[0]!r}?)" if near else ""
        raise MissingColumnError(
            f"the DataFrame must have the column {name!r}{hint}. Received: columns={names}", column=name
        )
    return matches[0]


def is_vector(kind: DataType) -> bool:
    """Return whether a column holds ML vectors."""
    # By name: the class of `pyspark.ml` and that of the older `pyspark.mllib` both convert.
    return type(kind).__name__ == "VectorUDT"


def known_length(field: StructField) -> int | None:
    """Return the length of a column's vectors, as Spark ML's own stages note it; None where none has."""
    length = field.metadata.get("ml_attr", {}).get("num_attrs") if is_vector(field.dataType) else None
    return None if length is None else int(length)


def is_scalar(kind: DataType) -> bool:
    """Return whether a column holds one number a row."""
    from pyspark.sql.types import BooleanType, NumericType

    return isinstance(kind, NumericType | BooleanType)


def require_numbers(name: str, kind: DataType) -> None:
    """Check that the column ``name`` of type ``kind`` holds numbers, arrays of them or ML vectors.

    Raises:
        ColumnTypeError: it holds something else; the text names the way to numbers.
    """
    from pyspark.sql.types import ArrayType

    element = kind
    while isinstance(element, ArrayType):
        element = element.elementType
    if is_scalar(element) or (is_vector(kind) and element is kind):
        return
    text = element.simpleString()
    way = next((way for start, way in _WAYS.items() if text.startswith(start)), None)
    if is_vector(element):
        way = "concatenate the vectors of a row with Spark ML's VectorAssembler"
    hint = "" if way is None else f"; {way}"
    raise ColumnTypeError(
        f"a column must hold numbers, arrays of numbers or ML vectors{hint}. Received: type={kind.simpleString()}",
        column=name,
    )
