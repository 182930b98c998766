"""DataFrames on the driver: their columns, checked by type before any work, and bound to a model's inputs and outputs.

Only JVM expressions are built here: Spark sends only numbers and arrays of numbers to Python. Importing this module
loads neither pyspark nor Keras.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distkeras.data.batches import Batch
from distkeras.data.binding import GivenColumns, inputs_of, outputs_of
from distkeras.data.columns import Column, Part
from distkeras.data.losses import LossKind, kind_of, losses_of
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError, ShapeError
from distkeras.ps.validate import invalid, require_integer, require_number
from distkeras.spark.cluster import drivers_python, is_stopped
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    import keras
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
    for name, kind in column_types(fields, (column.name for column in spec.columns), spec.encoded).items():
        if name in spec.encoded:
            column = F.col(quoted(name))
        else:
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
    labels = spec.labels
    if len(labels) != 1:
        raise ConfigurationError(
            f"`class_weight` needs one label column. Received: label_col={[label.name for label in labels]}"
        )
    (label,) = labels
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


def data_spec(
    model: keras.Model,
    schema: StructType,
    *,
    features: GivenColumns,
    labels: GivenColumns,
    weight: str | None,
    decode: Mapping[str, _Decoder] | None = None,
    **options: Any,
) -> DataSpec:
    """Return the `DataSpec` of a job for a compiled ``model`` and the data's ``schema``.

    ``features`` and ``labels`` are columns as the trainer takes them; see `binding`. A label
    column fills the shape of its output; for the sparse cross-entropy it holds class numbers in [0, classes).
    ``options`` are further fields of `DataSpec`.

    Raises:
        MissingColumnError: a column is not in ``schema``.
        ColumnTypeError: a column does not hold numbers.
        ConfigurationError: the columns do not match the model's inputs or outputs; a shape is not fixed; an input is
            text; or the loss is a cross-entropy over classes on an output of one number.
        ShapeError: a column of numbers, or of vectors whose size Spark knows, does not fill its input or output.
    """
    inputs, outputs = list(model.inputs or ()), list(model.outputs or ())
    if not inputs or not outputs:
        raise ConfigurationError(
            f"`model` must have inputs and outputs: give it an Input. Received: model={model.name!r}"
        )
    features = inputs_of(model).bound(features, "features_col")
    labels = outputs_of(model).bound(labels, "label_col")
    decode = decode or {}
    unread = [name for name in decode if name not in (*features, *labels)]
    if unread:
        raise ConfigurationError(
            f"`decode` must be of the columns {[*features, *labels]}. Received: decode of {unread}"
        )
    column_types(schema.fields, (*features, *labels, *filter(None, [weight])), decode)
    return DataSpec(
        features=tuple(
            _feature_column(schema[name], tensor, decode.get(name))
            for name, tensor in zip(features, inputs, strict=True)
        ),
        labels=tuple(
            _target_column(schema[name], output, loss, decode.get(name))
            for name, output, loss in zip(labels, outputs, losses_of(model), strict=True)
        ),
        sample_weight=None if weight is None else Column(weight),
        **options,
    )


def example(spec: DataSpec) -> Batch:
    """Return a mini-batch of one row of zeros, which suffices to check whether the loss and the metrics fit."""

    def zeros(column: Column) -> np.ndarray:
        return np.zeros((1, *column.shape), column.dtype)

    return Batch(
        0,
        0,
        True,
        x=tuple(map(zeros, spec.features)),
        y=tuple(map(zeros, spec.labels)),
        weight=None if spec.sample_weight is None else np.ones(1, np.float32),
    )


def _fixed_shape(tensor: Any, what: str, column: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape[1:])
    if any(extent is None for extent in shape):
        raise ConfigurationError(f"the model's {what} must have a fixed shape. Received: shape={shape}", column=column)
    return tuple(int(extent) for extent in shape)


def held_dtype(dtype: str, backend: str, *, x64: bool) -> str:
    """Return the dtype in which a backend holds an input of ``dtype``: JAX truncates integers without ``x64``."""
    return dtype if backend != "jax" or x64 else {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)


def dtype_of_input(tensor: Any) -> str:
    """Return the numpy name of the dtype in which the running backend holds a symbolic input."""
    import keras

    backend = keras.backend.backend()
    x64 = backend != "jax" or bool(sys.modules["jax"].config.jax_enable_x64)
    return held_dtype(str(tensor.dtype), backend, x64=x64)


def _feature_column(field: StructField, tensor: Any, decode: _Decoder | None) -> Column:
    name, kind, shape = field.name, field.dataType, _fixed_shape(tensor, "input", field.name)
    size = math.prod(shape)
    dtype = dtype_of_input(tensor)
    if dtype == "string":
        raise ConfigurationError(
            "the model's input must be numbers: apply TextVectorization or StringLookup to the rows first, and train "
            "on the numbers that it gives. Received: an input of text",
            column=name,
        )
    length = known_length(field)
    if decode is None and is_scalar(kind) and size != 1:
        raise ShapeError(
            f"values must fill the input's shape {shape}; Spark ML's VectorAssembler makes one column of several "
            f"numbers. Received: {kind.simpleString()}",
            column=name,
        )
    if decode is None and length is not None and length != size:
        raise ShapeError(f"vectors must hold {size} values each, for shape {shape}. Received: {length}", column=name)
    # The model casts floats to its own precision, but not float64, integers and booleans.
    kept = "float" not in dtype or dtype == "float64"
    return Column(name, shape, dtype if kept else "float32", decode, parts_of(field))


def _target_column(field: StructField, output: Any, loss: Any, decode: _Decoder | None) -> Column:
    name, shape = field.name, _fixed_shape(output, "output", field.name)
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
