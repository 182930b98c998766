"""DataFrames on the driver: their columns, checked by type before any work, and bound to a model's inputs and outputs.

Only JVM expressions are built here: Spark sends only numbers and arrays of numbers to Python. Importing this module
loads neither pyspark nor Keras.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from distkeras.data.columns import Part
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError
from distkeras.ps.validate import invalid, require_integer, require_number
from distkeras.spark.cluster import drivers_python, is_stopped

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

_Decoder = Callable[[Any], Any]

#: How to make numbers of a type that does not hold them; by the beginning of its name.
_CONVERSION_ADVICE = {
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

#: How to make a Spark DataFrame of other objects; by the beginning of the class's full name.
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


def require_dataframe(name: str, value: Any, *, stream: bool = True) -> None:
    """Check that the argument ``name`` is a Spark DataFrame, classic or of Spark Connect, whose session runs.

    Raises:
        ConfigurationError: it is not a DataFrame (the text says how to make one of it), its session has ended, or it is
            a stream and ``stream`` is false.
    """
    from pyspark.sql import DataFrame

    if not isinstance(value, DataFrame):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        advice = next((advice for start, advice in _CONVERSIONS if kind.startswith(start)), None)
        hint = "" if advice is None or value is None else f"; {advice.format(name=name)}"
        raise ConfigurationError(f"`{name}` must be a Spark DataFrame{hint}. Received: {name} of type {kind}")
    if is_stopped(value.sparkSession):
        raise ConfigurationError(
            f"`{name}` must be of a running Spark session: create it again. Received: {name} of a stopped session"
        )
    if value.isStreaming and not stream:
        raise ConfigurationError(
            f"`{name}` must not be a stream: `Trainer.train_stream` and `KerasEstimator.fitStream` train on streams. "
            f"Received: a streaming DataFrame with columns={value.columns}"
        )


def field_of(fields: Sequence[StructField], name: str) -> StructField:
    """Return the field with exactly this name; MissingColumnError for none, ConfigurationError for several."""
    matches = [field for field in fields if field.name == name]
    if len(matches) > 1:
        raise ConfigurationError(
            f"column names must be unambiguous. Received: {len(matches)} columns named {name!r}", column=name
        )
    if not matches:
        names = [field.name for field in fields]
        near = [known for known in names if known.casefold() == name.casefold()]
        near = near or difflib.get_close_matches(name, names, 1)
        hint = f" (or is it {near[0]!r}?)" if near else ""
        raise MissingColumnError(
            f"the DataFrame must have the column {name!r}{hint}. Received: columns={names}", column=name
        )
    return matches[0]


def is_vector(kind: DataType) -> bool:
    """Return whether a column holds ML vectors."""
    # Compared by name: the class of `pyspark.ml` and that of the older `pyspark.mllib` both convert.
    return type(kind).__name__ == "VectorUDT"


def known_length(field: StructField) -> int | None:
    """Return the length of a column's vectors from the metadata of Spark ML's stages; None if it is unknown."""
    length = field.metadata.get("ml_attr", {}).get("num_attrs") if is_vector(field.dataType) else None
    return None if length is None else int(length)


def is_scalar(kind: DataType) -> bool:
    """Return whether a column holds one number a row."""
    from pyspark.sql.types import BooleanType, NumericType

    return isinstance(kind, NumericType | BooleanType)


def require_numbers(name: str, kind: DataType) -> None:
    """Raise ColumnTypeError unless a column holds numbers, arrays of them or ML vectors; it says how to convert it."""
    from pyspark.sql.types import ArrayType

    element = kind
    while isinstance(element, ArrayType):
        element = element.elementType
    if is_scalar(element) or (is_vector(kind) and element is kind):
        return
    text = element.simpleString()
    advice = next((advice for start, advice in _CONVERSION_ADVICE.items() if text.startswith(start)), None)
    if is_vector(element):
        advice = "concatenate the vectors of a row with Spark ML's VectorAssembler"
    hint = "" if advice is None else f"; {advice}"
    raise ColumnTypeError(
        f"a column must hold numbers, arrays of numbers or ML vectors{hint}. Received: type={kind.simpleString()}",
        column=name,
    )


def quoted(name: str) -> str:
    """Return ``name`` in backticks, so that Spark takes dots, spaces and backticks as parts of the name."""
    return "`" + name.replace("`", "``") + "`"


def map_in_arrow(
    df: DataFrame,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    profile: ResourceProfile | None = None,
) -> DataFrame:
    """Return ``df.mapInArrow(function, schema)`` for columns of any name, on the driver's Python if that exists."""
    names = df.columns

    def with_names(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(pa.RecordBatch.from_arrays(record.columns, names=names) for record in records)

    run = function
    if any("." in name or "`" in name for name in names):  # PySpark passes column names unquoted to the JVM
        df, run = df.toDF(*(f"column_{number}" for number in range(len(names)))), with_names
    with drivers_python(df):
        return df.mapInArrow(run, schema, profile=profile)


def column_types(fields: Sequence[StructField], names: Iterable[str], decoded: Container[str]) -> dict[str, DataType]:
    """Return the type of each named column, which must hold numbers unless executors decode it.

    Raises:
        MissingColumnError: there is no such column.
        ColumnTypeError: its type does not hold numbers.
        ConfigurationError: there are several columns of that name.
    """
    types = {name: field_of(fields, name).dataType for name in names}
    for name, kind in types.items():
        if name not in decoded:
            require_numbers(name, kind)
    return types


def ready_columns(fields: Sequence[StructField], spec: DataSpec) -> list[SparkColumn]:
    """Return the columns of ``spec`` as numbers or (nested) arrays of numbers, except for those that executors decode.

    Vectors (`VectorUDT`, dense or sparse) become arrays of float32, or of float64 if the model expects float64, or
    integers, which float32 may round; decimals become doubles, unless the model expects integers, and booleans bytes;
    nulls stay null. A column used twice, as by an autoencoder, is selected once. The JVM evaluates all expressions, so
    they work under Spark Connect as well.

    Args:
        fields: the fields of any DataFrame.
        spec: the columns, in the order of the result.

    Raises:
        MissingColumnError, ColumnTypeError, ConfigurationError: see `column_types`.
    """
    from pyspark.sql import functions as F

    ready = []
    types = column_types(fields, (name for column in spec.columns for name in column.sources), spec.encoded)
    for name, sources in {column.name: column.together for column in spec.columns}.items():
        if sources:
            column = F.array(*(F.col(quoted(source)).cast("double") for source in sources))
        elif name in spec.encoded:
            column = F.col(quoted(name))
        else:
            kind = types[name]
            column = numbers_of(name, kind, "float64" if name in spec.doubles else "float32")
            target = _number_type(kind, whole=name in spec.whole)
            column = column if target == kind else column.cast(target)
        ready.append(column.alias(name))
    return ready


#: Key of a field's metadata: the names of the columns that it was assembled from.
PARTS = "distkeras_parts"


def parts_of(field: StructField) -> tuple[Part, ...]:
    """Return the columns that a column was assembled from; empty for a single column."""
    return tuple(Part(**part) for part in field.metadata.get(PARTS, ()))


def numbers_of(name: str, kind: DataType, element: str = "float64") -> SparkColumn:
    """Return a column with ML vectors converted to arrays of ``element``; values of other types do not change."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    column = F.col(quoted(name))
    # `vector_to_array` fails on a null, without naming the column: a null stays null here.
    return F.when(column.isNotNull(), vector_to_array(column, element)) if is_vector(kind) else column


def flattened(column: SparkColumn, kind: DataType) -> SparkColumn:
    """Return an array column of type ``kind`` as one flat array a row."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType

    while isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        column, kind = F.flatten(column), kind.elementType
    return column


def _number_type(kind: DataType, *, whole: bool) -> DataType:
    """Return the type to cast numbers to, which is ``kind`` itself if no cast is needed.

    Args:
        whole: the model expects integers: decimals are not cast to doubles, which would round them.
    """
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        element = _number_type(kind.elementType, whole=whole)
        return kind if element == kind.elementType else T.ArrayType(element, kind.containsNull)
    if isinstance(kind, T.BooleanType):
        return T.ByteType()
    return T.DoubleType() if isinstance(kind, T.DecimalType) and not whole else kind


def decoders(value: Any, features: Sequence[str]) -> dict[str, _Decoder]:
    """Return the functions of the argument ``decode`` by column; ConfigurationError for an invalid argument."""
    if value is None:
        return {}
    if callable(value) and len(features) == 1:
        return {features[0]: value}
    functions = value if isinstance(value, Mapping) else {}
    if not functions or not all(isinstance(k, str) and callable(v) for k, v in functions.items()):
        expected = "a function, where there is one column of features, or a dictionary: column to function"
        raise invalid("decode", value, expected)
    return dict(functions)


#: The column that `weighted` adds.
CLASS_WEIGHT = "distkeras_class_weight"


def require_class_weight(value: Any) -> dict[int, float]:
    """Return the checked weights by class number; ConfigurationError for anything else than weights of at least 0."""
    if not isinstance(value, Mapping) or not value:
        raise invalid("class_weight", value, "a dictionary: class number to weight")
    try:
        return {
            require_integer("class_weight", number, 0): require_number("class_weight", weight, inclusive=True)
            for number, weight in value.items()
        }
    except ConfigurationError:
        expected = "a dictionary: class number, from 0 on, to a finite weight of at least 0"
        raise invalid("class_weight", value, expected) from None


def require_classes(class_weight: Mapping[int, float], spec: DataSpec) -> None:
    """Raise ConfigurationError unless labels are one class a row, and each weight is for an existing class."""
    labels = spec.targets
    if len(labels) != 1 or labels[0].together:
        names = [name for label in labels for name in label.sources]
        raise ConfigurationError(f"`class_weight` needs one label column. Received: label_col={names}")
    (label,) = labels
    for weight in spec.weights:
        if isinstance(spec.sample_weight, tuple) or (weight is not None and weight.shape != ()):
            raise ConfigurationError(
                "`class_weight` needs weights of one number a row in `sample_weight_col`, for all outputs. "
                f"Received: sample_weight_col={[one and one.sources for one in spec.weights]}"
            )
    classes = label.classes
    if label.decode is not None:
        raise ConfigurationError(
            "`class_weight` needs labels that are not decoded. Received: `decode`", column=label.name
        )
    if (classes is not None and label.size != 1) or sum(extent != 1 for extent in label.shape) > 1:
        raise ConfigurationError(
            "`class_weight` needs one class a row: a class number, or a one-hot array. "
            f"Received: labels of shape {label.shape}",
            column=label.name,
        )
    if classes is None and label.size > 1:
        classes = label.size
    above = [] if classes is None else [number for number in class_weight if number >= classes]
    if above:
        raise ConfigurationError(
            f"`class_weight` must be of classes in [0, {classes}), which the model's output has. Received: {above}",
            column=label.name,
        )


def weighted(df: DataFrame, label: str, class_weight: Mapping[int, float], weight: str | None) -> DataFrame:
    """Return ``df`` with the column `CLASS_WEIGHT`: the weight of each row's class (1 if the class has none).

    Args:
        label: class numbers of any type, or one-hot arrays or ML vectors, whose largest element is the class.
        weight: column of sample weights, by which the class weights are multiplied, or None.

    Raises:
        ConfigurationError: ``df`` has a column `CLASS_WEIGHT`.
    """
    from pyspark.sql import functions as F

    if CLASS_WEIGHT.casefold() in (name.casefold() for name in df.columns):
        raise ConfigurationError(f"no column may have the name {CLASS_WEIGHT!r}. Received: columns={df.columns}")
    kind = df.schema[label].dataType
    column = flattened(numbers_of(label, kind), kind)
    if is_scalar(kind):
        number = column.cast("double")
    else:
        largest = F.array_position(column, F.array_max(column)) - 1
        number = F.when(F.size(column) == 1, F.get(column, F.lit(0))).otherwise(largest).cast("double")
    row_weight = F.lit(1.0) if weight is None else F.col(quoted(weight)).cast("double")
    factor = F.lit(1.0)
    for class_number, class_factor in class_weight.items():
        factor = F.when(number == F.lit(class_number), F.lit(float(class_factor))).otherwise(factor)
    return df.withColumn(CLASS_WEIGHT, row_weight * factor)
