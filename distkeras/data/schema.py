"""DataFrames on the driver: their columns, checked by type before any work, and bound to a model's inputs and outputs.

Only JVM expressions are built here: Spark sends only numbers and arrays of numbers to Python. Importing this module
loads neither pyspark nor Keras.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from distkeras.chatter import quiet_session
from distkeras.data.batches import DataSpec
from distkeras.data.column_kinds import ColumnKind, kind_in
from distkeras.data.columns import Part
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, EmptyDataError, MissingColumnError, ShapeError
from distkeras.ps.validate import invalid, require_integer, require_number
from distkeras.spark.cluster import drivers_python, is_stopped

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType

_Decoder = Callable[[Any], Any]

#: How to make numbers of a type that does not hold them; by the beginning of its name.
_CONVERSION_ADVICE = {
    **dict.fromkeys(
        ("string", "varchar", "char"),
        "index classes with Spark ML's StringIndexer, cast digits, turn text into arrays of token ids",
    ),
    "binary": "decode it to an array of numbers, with `decode`",
    "struct": "select its fields, each a column, or make one array of them",
    "map": "make an array of its values",
    "timestamp": "make a number of it, for example with unix_timestamp",
    "date": "make a number of it, for example with datediff",
    "variant": "extract its numbers with variant_get",
    "vector": "concatenate the vectors of a row with Spark ML's VectorAssembler",
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
    """Check that the argument ``name`` is a Spark DataFrame, classic or of Spark Connect, whose session runs."""
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
    _require_imported_types(name, value)
    if value.isStreaming and not stream:
        raise ConfigurationError(
            f"`{name}` must not be a stream: `Trainer.train_stream` and `KerasEstimator.fitStream` train on streams. "
            f"Received: a streaming DataFrame with columns={value.columns}"
        )
    quiet_session(value.sparkSession)  # what follows in its log is about our queries


def _require_imported_types(name: str, df: DataFrame) -> None:
    """Raise ConfigurationError if reading the schema would import a module: a Parquet file can name any."""
    jdf: Any = vars(df).get("_jdf")
    if jdf is not None:
        classes = list(_python_classes(json.loads(jdf.schema().json())))
    else:  # of Spark Connect: the message, which PySpark has not made types of yet
        client = df.sparkSession.client
        plan = vars(df)["_plan"].to_proto(client)
        answer = client._analyze(method="schema", plan=plan)  # noqa: SLF001 - PySpark has no public way without types
        classes = re.findall(r'python_class: "([^"]*)"', str(answer.schema))
    known = {*sys.modules, "pyspark.ml.linalg", "pyspark.mllib.linalg"}
    unknown = sorted({kind for kind in classes if kind.rpartition(".")[0] not in known})
    if unknown:
        raise ConfigurationError(
            f"`{name}` must have columns of types that this program knows: import the module of each type before, if "
            f"you trust the data. Received: {', '.join(unknown)}"
        )


def _python_classes(value: Any) -> Iterator[str]:
    """Yield the Python classes of user-defined types in the JSON of a schema."""
    if isinstance(value, dict):
        if value.get("type") == "udt" and value.get("pyClass"):
            yield str(value["pyClass"])
        for part in value.values():
            yield from _python_classes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _python_classes(part)


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


def known_length(field: StructField) -> int | None:
    """Return the length of a column's vectors from the metadata of Spark ML's stages; None if it is unknown."""
    _, kind, _ = kind_in(field.dataType)
    length = field.metadata.get("ml_attr", {}).get("num_attrs") if kind is not None and kind.axes else None
    return None if length is None else int(length)


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


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, as expressions of the JVM, in which null stays null; ``depth`` 0: a number, 1: a vector."""

    name: str
    kind: ColumnKind
    depth: int

    def for_model(self, dtype: str) -> SparkColumn:
        """Return numbers, or arrays of numbers, for a model that expects ``dtype``; "object": exactly the column's."""
        from pyspark.sql import functions as F

        return self.kind.on_jvm(F.col(quoted(self.name)), self.depth, dtype)

    @property
    def column(self) -> SparkColumn:
        """Return the column's numbers, or arrays of numbers; a vector as ``array<double>``."""
        return self.for_model("object")

    @property
    def flat(self) -> SparkColumn:
        """Return the same as one array a row."""
        from pyspark.sql import functions as F

        column = self.column if self.depth else F.array(self.column)
        for _ in range(self.depth - 1):
            column = F.flatten(column)
        return column

    @property
    def element(self) -> str:
        """Return the type of results: ``"double"`` for doubles and vectors, else ``"float"``."""
        return "double" if self.kind.dtype == "float64" else "float"

    def each(self, function: Callable[[SparkColumn], SparkColumn]) -> SparkColumn:
        """Apply ``function`` to every number (depth 0 or 1), with results of type `element`; a vector stays one."""
        from pyspark.sql import functions as F

        if self.depth > 1:
            raise ConfigurationError(
                "a column to scale must hold numbers, flat arrays or vectors. Received: nested arrays",
                column=self.name,
            )
        if self.depth == 0:
            return function(self.column).cast(self.element)
        return self.kind.written(F.transform(self.column, lambda value: function(value).cast(self.element)))


def numeric_column(fields: Sequence[StructField], name: str) -> NumericColumn:
    """Return the column ``name``, which must hold numbers."""
    field = field_of(fields, name)
    element, kind, depth = kind_in(field.dataType)
    if kind is not None:
        return NumericColumn(field.name, kind, depth)
    starts = filter(element.simpleString().startswith, _CONVERSION_ADVICE)
    hint = next((f"; {_CONVERSION_ADVICE[start]}" for start in starts), "")
    raise ColumnTypeError(
        f"a column must hold numbers, arrays of numbers or ML vectors{hint}. "
        f"Received: type={field.dataType.simpleString()}",
        column=field.name,
    )


def require_columns(fields: Sequence[StructField], names: Iterable[str], decoded: Container[str]) -> None:
    """Check that the named columns exist, and hold numbers unless executors decode them; see `numeric_column`."""
    for name in names:
        (field_of if name in decoded else numeric_column)(fields, name)


def ready_columns(fields: Sequence[StructField], spec: DataSpec) -> list[SparkColumn]:
    """Return the columns of ``spec`` as numbers or (nested) arrays of numbers, except for those that executors decode.

    Vectors (`VectorUDT`, dense or sparse) become arrays of float32, or of float64 if the model expects float64, or
    integers, which float32 may round; decimals become doubles, unless the model expects integers; nulls stay null. A
    column used twice, as by an autoencoder, is selected once. The JVM evaluates all expressions, so they work under
    Spark Connect as well.
    """
    from pyspark.sql import functions as F

    ready = []
    require_columns(fields, (name for column in spec.columns for name in column.sources), spec.encoded)
    for name, sources in {column.name: column.together for column in spec.columns}.items():
        if sources:
            column = F.array(*(numeric_column(fields, source).column.cast("double") for source in sources))
        elif name in spec.encoded:
            column = F.col(quoted(name))
        else:
            dtype = "object" if name in spec.whole else "float64" if name in spec.doubles else "float32"
            column = numeric_column(fields, name).for_model(dtype)
        ready.append(column.alias(name))
    return ready


#: Key of a field's metadata: the names of the columns that it was assembled from.
PARTS = "distkeras_parts"


def parts_of(field: StructField) -> tuple[Part, ...]:
    """Return the columns that a column was assembled from; empty for a single column."""
    return tuple(Part(**part) for part in field.metadata.get(PARTS, ()))


def require_parts(field: StructField, shape: Sequence[int | None]) -> None:
    """Raise ShapeError unless the columns that ``field`` was assembled from are as many as an input has values."""
    parts = parts_of(field)
    if parts and None not in shape and len(parts) != math.prod(extent or 1 for extent in shape):
        raise ShapeError(
            f"several columns for one input must be one for each value of its shape {tuple(shape)}. "
            f"Received: {len(parts)} columns, {[part.name for part in parts]}"
        )


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


#: Weights of classes that are counted, with which each class has the same weight in the loss.
BALANCED = "balanced"
#: The most classes that are counted: numbers of a regression are no classes.
_CLASSES_MAX = 10_000


def require_class_weight(value: Any) -> dict[int, float] | str:
    """Return the checked weights by class number, or "balanced"; ConfigurationError for anything else."""
    if value == BALANCED:
        return BALANCED
    if not isinstance(value, Mapping) or not value:
        raise invalid("class_weight", value, f'"{BALANCED}", or a dictionary: class number to weight')
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
    if label.is_open or (classes is not None and label.size != 1) or sum(extent != 1 for extent in label.shape) > 1:
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

    A ``label`` is a class number, or a one-hot array or vector; a column ``weight`` multiplies the weights.
    """
    from pyspark.sql import functions as F

    if CLASS_WEIGHT.casefold() in (name.casefold() for name in df.columns):
        raise ConfigurationError(f"no column may have the name {CLASS_WEIGHT!r}. Received: columns={df.columns}")
    number = _class_number(df, label)
    row_weight = F.lit(1.0) if weight is None else numeric_column(df.schema.fields, weight).column.cast("double")
    factor = F.lit(1.0)
    for class_number, class_factor in class_weight.items():
        factor = F.when(number == F.lit(class_number), F.lit(float(class_factor))).otherwise(factor)
    return df.withColumn(CLASS_WEIGHT, row_weight * factor)


def _class_number(df: DataFrame, label: str) -> SparkColumn:
    from pyspark.sql import functions as F

    column = numeric_column(df.schema.fields, label).flat
    largest = F.array_position(column, F.array_max(column)) - 1
    return F.when(F.size(column) == 1, F.get(column, F.lit(0)).cast("double")).otherwise(largest)


def balanced(df: DataFrame, label: str) -> dict[int, float]:
    """Return the weights with which each class of the rows has the same weight: rows / (classes * rows of the class).

    Rows whose label is null are not counted; training refuses them.
    """
    from pyspark.sql import functions as F

    counted = df.select(_class_number(df, label).alias("number")).groupBy("number").agg(F.count("*").alias("rows"))
    counts: dict[float, int] = dict(counted.where(F.col("number").isNotNull()).limit(_CLASSES_MAX + 1).collect())
    unfit = [number for number in counts if not (number >= 0 and float(number).is_integer())]
    if unfit or len(counts) > _CLASSES_MAX:
        what = unfit[0] if unfit else f"of more than {_CLASSES_MAX} values"
        raise ConfigurationError(
            "`class_weight` must be a dictionary unless labels are class numbers, from 0 on, of at most "
            f"{_CLASSES_MAX} classes. Received: class_weight={BALANCED!r} with a label {what}",
            column=label,
        )
    if not counts:
        raise EmptyDataError("the DataFrame must have rows with labels. Received: none", column=label)
    total = sum(counts.values())
    return {int(number): total / (len(counts) * rows) for number, rows in sorted(counts.items())}
