"""DataFrames on the driver: their columns, checked by type before any work, and bound to a model's inputs and outputs.

Only JVM expressions are built here: what leaves Spark is numbers, or arrays of numbers. Importing this module loads
neither pyspark nor Keras.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distkeras.data.batches import Batch
from distkeras.data.binding import GivenColumns, inputs_of, outputs_of
from distkeras.data.columns import Column
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ColumnTypeError, ConfigurationError, MissingColumnError, ShapeError
from distkeras.ps.validate import invalid, require_integer, require_number
from distkeras.spark.cluster import drivers_python, is_stopped, tasks_python
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    import keras
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

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


def quoted(name: str) -> str:
    """The column name ``name`` as Spark parses it: dots, spaces and backticks belong to the name."""
    return "`" + name.replace("`", "``") + "`"


def map_in_arrow(
    df: DataFrame,
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    profile: ResourceProfile | None = None,
) -> DataFrame:
    """``df.mapInArrow(function, schema)`` for columns of any name, on the driver's Python where that is there.

    PySpark itself names columns to the JVM unquoted.
    """
    names = df.columns
    if not any("." in name or "`" in name for name in names):
        with drivers_python(df):
            return df.mapInArrow(function, schema, profile=profile)

    def with_names(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(pa.RecordBatch.from_arrays(record.columns, names=names) for record in records)

    with drivers_python(df):
        return df.toDF(*(f"column_{number}" for number in range(len(names)))).mapInArrow(
            with_names, schema, profile=profile
        )


def arrow_ready(
    df: DataFrame, names: Iterable[str], encoded: Container[str] = (), exact: Container[str] = ()
) -> DataFrame:
    """Return the named columns of `df`, as numbers or (nested) arrays of numbers; `encoded` ones as they are.

    Vectors (`VectorUDT`, dense or sparse) become arrays of float32, decimals become doubles, booleans
    bytes; nulls stay null. A name given twice, as by an autoencoder, is selected once. Only expressions
    that the JVM evaluates are added, so this works under Spark Connect as well.

    Args:
        df: any DataFrame.
        names: columns to keep, in this order.
        encoded: those among them that executors decode.
        exact: those whose vectors become arrays of float64, since float32 does not hold every integer.

    Raises:
        MissingColumnError: `df` has no such column.
        ColumnTypeError: its type holds no numbers.
        ConfigurationError: `df` has several columns of that name.
    """
    return df.select(*ready_columns(df, names, encoded, exact))


def ready_columns(
    df: DataFrame, names: Iterable[str], encoded: Container[str] = (), exact: Container[str] = ()
) -> list[SparkColumn]:
    """Return the expressions that `arrow_ready` selects."""
    fields = df.schema.fields
    kinds = {name: field_of(fields, name).dataType for name in names}
    return [_ready(name, kind, name in encoded, name in exact).alias(name) for name, kind in kinds.items()]


#: Key of a field's metadata: the names of the columns that were put together in it.
PARTS = "distkeras_parts"


def parts_of(field: StructField) -> tuple[str, ...]:
    """Return the names of the columns that were put together in one; empty for a single column."""
    return tuple(field.metadata.get(PARTS, ()))


def _ready(name: str, kind: DataType, encoded: bool, exact: bool) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    column = F.col(quoted(name))
    if encoded:
        return column
    require_numbers(name, kind)
    if is_vector(kind):
        # The conversion throws inside the JVM on a null; kept null, it gets a typed error from `to_numpy`.
        return F.when(column.isNotNull(), vector_to_array(column, "float64" if exact else "float32"))
    target = _number_type(kind)
    return column if target == kind else column.cast(target)


def _number_type(kind: DataType) -> DataType:
    """The type to cast numbers to: `kind` itself if Arrow brings it as such."""
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        element = _number_type(kind.elementType)
        return kind if element == kind.elementType else T.ArrayType(element, kind.containsNull)
    if isinstance(kind, T.BooleanType):
        return T.ByteType()
    return T.DoubleType() if isinstance(kind, T.DecimalType) else kind


def decoders(value: Any, features: Sequence[str]) -> dict[str, Callable[[Any], Any]]:
    """The argument ``decode``, by column; none for None.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is None:
        return {}
    if callable(value) and len(features) == 1:
        return {features[0]: value}
    functions = value if isinstance(value, Mapping) else {}
    if not functions or not all(isinstance(k, str) and callable(v) for k, v in functions.items()):
        expected = "a function, where there is one column of features, or a dictionary: column to function"
        raise invalid("decode", value, expected)
    return dict(functions)


def require_length(field: StructField, column: Column, loss: str, classes: int | None) -> None:
    """Check that vectors whose length Spark knows, such as those of its encoders, have the length that the loss needs.

    Raises:
        ShapeError: they do not.
    """
    length = known_length(field)
    if length is not None and length != column.size:
        raise _unfit(column, loss, classes, f"vectors of {length} values")


def require_class_numbers(df: DataFrame, spec: DataSpec) -> None:
    """Looks at one row where the loss wants a class number and the column's type lets it hold one-hot labels.

    Raises:
        ShapeError: it does.
    """
    for column, classes, loss in zip(spec.labels, spec.class_limits, spec.label_losses, strict=True):
        kind = df.schema[column.name].dataType
        if classes is None or column.size != 1 or is_scalar(kind) or column.decode is not None:
            continue
        length = _length_of_a_row(df, column.name, kind)
        if length is not None and length != column.size:
            raise _unfit(column, loss, classes, f"{length} values in the first row")


def _unfit(column: Column, loss: str, classes: int | None, received: str) -> ShapeError:
    number = "one value" if column.size == 1 else f"{column.size} values"
    if classes is None:
        expected = f"labels must hold {number}, like the model's output"
    else:
        expected = (
            f"labels must be class numbers, {number} a row; one-hot ones need the loss 'categorical_crossentropy'"
        )
    return ShapeError(f"{expected}. Received: {received}, loss={loss!r}", column=column.name)


def _length_of_a_row(df: DataFrame, name: str, kind: DataType) -> int | None:
    """How many numbers the column holds in some row; None where there is no row, or a null."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    try:
        row = df.select(_flat(F.col(quoted(name)), kind).alias("values")).first()
    except PySparkException as error:
        raise typed_error(error, tasks_python(df.sparkSession)) from None
    return None if row is None or row["values"] is None else len(row["values"])


def _flat(column: SparkColumn, kind: DataType) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType

    if is_vector(kind):
        return F.when(column.isNotNull(), vector_to_array(column))
    while isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        column, kind = F.flatten(column), kind.elementType
    return column


#: The column that `weighted` adds.
CLASS_WEIGHT = "distkeras_class_weight"


def require_class_weight(value: Any) -> dict[int, float]:
    """Return a weight of at least 0 for each of some classes.

    Raises:
        ConfigurationError: it is something else.
    """
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
    """Check that the labels of ``spec`` are one class a row, and that every weight belongs to a class.

    Raises:
        ConfigurationError: it is not so.
    """
    labels = spec.labels
    if len(labels) != 1:
        raise ConfigurationError(
            f"`class_weight` needs one label column. Received: label_col={[label.name for label in labels]}"
        )
    (label,), (classes,) = labels, spec.class_limits
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
    """``df`` with the column `CLASS_WEIGHT`: the weight of each row's class (1 where it has none), computed in the JVM.

    Args:
        df: any DataFrame.
        label: class numbers of any type, or one-hot arrays or ML vectors, whose largest element tells the class.
        class_weight: of the classes.
        weight: column of sample weights, by which the others are multiplied; None: there is none.

    Raises:
        ConfigurationError: ``df`` has a column `CLASS_WEIGHT`.
    """
    from pyspark.sql import functions as F

    if CLASS_WEIGHT.casefold() in (name.casefold() for name in df.columns):
        raise ConfigurationError(f"no column may have the name {CLASS_WEIGHT!r}. Received: columns={df.columns}")
    number = _class_number(df, label)
    row_weight = F.lit(1.0) if weight is None else F.col(quoted(weight)).cast("double")
    factor = F.lit(1.0)
    for one, value in class_weight.items():
        factor = F.when(number == F.lit(one), F.lit(float(value))).otherwise(factor)
    return df.withColumn(CLASS_WEIGHT, row_weight * factor)


def _class_number(df: DataFrame, label: str) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    column, kind = F.col(quoted(label)), df.schema[label].dataType
    if is_vector(kind):
        column = F.when(column.isNotNull(), vector_to_array(column))
    elif not isinstance(kind, T.ArrayType):
        return column.cast("double")
    else:
        while isinstance(kind.elementType, T.ArrayType):  # axes of length 1
            column, kind = F.flatten(column), kind.elementType
    largest = F.array_position(column, F.array_max(column)) - 1
    return F.when(F.size(column) == 1, F.get(column, F.lit(0))).otherwise(largest).cast("double")


_ONE_HOT = ("CategoricalCrossentropy", "categorical_crossentropy")
_SPARSE = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy")


def data_spec(  # noqa: PLR0913 - the trainer's arguments about data, each by its keyword
    model: keras.Model,
    df: DataFrame,
    *,
    features: GivenColumns,
    labels: GivenColumns,
    weight: str | None,
    batch_size: int,
    epochs: int,
    seed: int,
    shuffle: bool,
    spool_bytes: int,
    decode: Mapping[str, Callable[[Any], Any]] | None = None,
) -> DataSpec:
    """Return the data plane's part of the job for a compiled ``model`` and ``df``.

    ``features`` and ``labels`` are columns as the trainer takes them; see `binding`. A label
    column fills the shape of its output; for the sparse cross-entropy it holds class numbers in [0, classes).

    Raises:
        MissingColumnError: a column is not in ``df``.
        ColumnTypeError: a column holds no numbers.
        ConfigurationError: columns that do not name the model's inputs or outputs, an open shape, an input of text, or
            a cross-entropy over classes on an output of one number.
        ShapeError: a column of numbers, or of vectors whose size Spark knows, that does not fill its input or output.
    """
    inputs, outputs = list(model.inputs or ()), list(model.outputs or ())
    if not inputs or not outputs:
        raise ConfigurationError(
            f"`model` must know its inputs and outputs: give it an Input. Received: model={model.name!r}"
        )
    features = inputs_of(model).bound(features, "features_col")
    labels = outputs_of(model).bound(labels, "label_col")
    decode, types = dict(decode or {}), {}
    require_decoded_columns(decode, (*features, *labels))
    for name in (*features, *labels, *(() if weight is None else (weight,))):
        types[name] = field_of(df.schema.fields, name).dataType
        if name not in decode:
            require_numbers(name, types[name])
    losses = losses_of(model)
    targets = [
        _target_column(name, types[name], output, loss, name in decode)
        for name, output, loss in zip(labels, outputs, losses, strict=True)
    ]
    names = tuple("" if loss is None else loss_name(loss) for loss in losses)
    for (column, classes), loss in zip(targets, names, strict=True):
        if column.name not in decode:
            require_length(df.schema[column.name], column, loss, classes)
    return DataSpec(
        features=tuple(
            replace(
                _feature_column(df.schema[name], tensor, name in decode),
                decode=decode.get(name),
                parts=parts_of(df.schema[name]),
            )
            for name, tensor in zip(features, inputs, strict=True)
        ),
        labels=tuple(replace(column, decode=decode.get(column.name)) for column, _ in targets),
        sample_weight=None if weight is None else Column(weight),
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle,
        classes=tuple(classes for _, classes in targets),
        losses=names,
        spool_bytes=spool_bytes,
    )


def require_decoded_columns(decode: Iterable[str], columns: Sequence[str]) -> None:
    """Check that every column with a decoder is read.

    Raises:
        ConfigurationError: one is not.
    """
    strange = [name for name in decode if name not in columns]
    if strange:
        raise ConfigurationError(f"`decode` must be of the columns {list(columns)}. Received: decode of {strange}")


def example(spec: DataSpec) -> Batch:
    """A mini-batch of one row of zeros: enough to find out whether the loss and the metrics fit."""

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


def _feature_column(field: StructField, tensor: Any, decoded: bool) -> Column:
    """The column of one input, as far as its type tells whether it fills it."""
    name, kind, shape = field.name, field.dataType, _fixed_shape(tensor, "input", field.name)
    size = math.prod(shape)
    dtype = str(tensor.dtype)
    if dtype == "string":
        raise ConfigurationError(
            "the model's input must be numbers: apply TextVectorization or StringLookup to the rows first, and train "
            "on the numbers that it gives. Received: an input of text",
            column=name,
        )
    if is_scalar(kind) and size != 1 and not decoded:
        raise ShapeError(
            f"values must fill the input's shape {shape}; Spark ML's VectorAssembler makes one column of several "
            f"numbers. Received: {kind.simpleString()}",
            column=name,
        )
    known = None if decoded else known_length(field)
    if known is not None and known != size:
        raise ShapeError(f"vectors must hold {size} values each, for shape {shape}. Received: {known}", column=name)
    # The model casts floats to its own precision; integers and booleans stay.
    return Column(name, shape, "float32" if "float" in dtype else dtype)


def losses_of(model: keras.Model) -> list[Any]:
    """The loss of each output, as compiled: a name, a function, an object, or None."""
    loss, outputs = model.loss, list(model.outputs)
    if isinstance(loss, dict):
        return [loss.get(name) for name in outputs_of(model).names]
    if isinstance(loss, (list, tuple)):
        return [*loss, *[None] * (len(outputs) - len(loss))]
    return [loss] * len(outputs)


def loss_name(loss: Any) -> str:
    """The name of a loss, as it was given: of the class of an object, or of the function."""
    if isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)


def _is_keras_own(loss: Any) -> bool:
    import keras

    if isinstance(loss, str):
        return loss not in keras.saving.get_custom_objects()
    return getattr(loss, "__module__", type(loss).__module__).split(".")[0] == "keras"


def _target_column(name: str, kind: DataType, output: Any, loss: Any, decoded: bool) -> tuple[Column, int | None]:
    shape, scalar = _fixed_shape(output, "output", name), is_scalar(kind) and not decoded
    if loss_name(loss) in (*_SPARSE, *_ONE_HOT) and shape[-1:] == (1,):
        raise ConfigurationError(
            "the model's output must have a number for each class; the loss of a single one is 'binary_crossentropy'. "
            f"Received: shape={shape}, loss={loss_name(loss)!r}",
            column=name,
        )
    if loss_name(loss) in _SPARSE and not (scalar and math.prod(shape[:-1]) != 1):
        return Column(name, shape[:-1], "int32"), shape[-1]
    if scalar and math.prod(shape) != 1:
        if loss is None or _is_keras_own(loss):
            raise ShapeError(
                f"labels must be arrays of shape {shape}, like the model's output (integer classes need the loss "
                f"'sparse_categorical_crossentropy'). Received: {kind.simpleString()}, loss={loss_name(loss)!r}",
                column=name,
            )
        shape = ()  # a loss of the user's own may take anything
    return Column(name, shape), None
