"""The columns that a compiled model reads: its inputs, its labels and their weights.

Several columns of numbers may be one input; a label's column has the shape, the dtype and the values that the loss of
its output accepts. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch, DataSpec, absent, as_weight
from distkeras.data.binding import Entry, GivenColumns, GivenEntries, inputs_of, listed, names_of, outputs_of
from distkeras.data.column_kinds import common_type, dtype_of_input, float_dtype, is_scalar, label_dtype
from distkeras.data.columns import Column, Part, user_names
from distkeras.data.losses import LossKind, has_own_step, kind_of, loss_name, losses_of
from distkeras.data.schema import (
    PARTS,
    field_of,
    known_length,
    numeric_column,
    parts_of,
    quoted,
    require_columns,
    require_parts,
)
from distkeras.private_keras import calls_of
from distkeras.ps.errors import ConfigurationError, ShapeError
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType


log = logging.getLogger(__name__)

_Decoder = Callable[[Any], Any]
_First = Callable[[], tuple[int, ...] | None]


def fixed_shape(tensor: Any, what: str, column: str) -> tuple[int, ...]:
    """Return the shape of one row of an input or output; ConfigurationError if it is not fixed."""
    shape = tuple(tensor.shape[1:])
    if any(extent is None for extent in shape):
        raise ConfigurationError(f"the model's {what} must have a fixed shape. Received: shape={shape}", column=column)
    return tuple(int(extent) for extent in shape)


class TargetColumns:
    """Makes the columns of labels and weights of a compiled model.

    The first of ``rows`` shows shapes that the model leaves open; without them, and of a stream, they stay unknown.
    """

    def __init__(
        self, model: keras.Model, schema: StructType, decode: Mapping[str, _Decoder], rows: DataFrame | None
    ) -> None:
        self._outputs, self._names, self._losses = list(model.outputs), outputs_of(model).names, losses_of(model)
        self._own_step = has_own_step(model)
        self._schema, self._decode = schema, decode
        self._rows = None if rows is None or rows.isStreaming else rows

    def labels(self, entries: Sequence[Entry]) -> tuple[Column | None, ...]:
        """Return the labels of each output; none if there are no ``entries``."""
        given = entries or [None] * len(self._outputs)
        columns = tuple(map(self._label, given, self._outputs, self._losses, self._names))
        return columns if entries else ()

    def weights(self, entries: Sequence[Entry]) -> Column | tuple[Column | None, ...] | None:
        """Return the weights: of all outputs together if there is one entry, else of each."""
        columns = tuple(
            None if entry is None else self._weight(entry, output)
            for entry, output in zip(entries, self._outputs, strict=False)
        )
        return (columns or (None,))[0] if len(columns) < 2 else columns

    def _label(self, entry: Entry, output: Any, loss: Any, name: str) -> Column | None:
        if entry is None:
            if loss is None or self._own_step:
                return None
            raise ConfigurationError(
                f"`label_col` must name a column for output {name!r}, whose loss is {loss_name(loss)!r}: an output "
                "needs no labels if it has no loss, or if the model has its own `train_step`. Received: None"
            )
        field, first, decode = self._source(entry)
        shape = fixed_shape(output, "output", field.name)
        scalar = is_scalar(field.dataType) and decode is None
        sparse = scalar or decode is not None or numeric_column([field], field.name).depth < len(shape)
        kind = kind_of(loss, shape, sparse=sparse)
        if self._own_step or loss is None:
            kind = replace(kind, by_keras=False)
        column = _target_column(field, shape, kind, decode)
        if not scalar and kind.scores == "ctc":
            column = self._sequence_column(field, shape, kind, decode, first)
        elif not (scalar or kind.by_keras):
            column = _with_shape(column, first())
        if not column.whole:  # class numbers are integers already
            column = replace(column, dtype=float_dtype() if decode else label_dtype(field.dataType))
        return self._together(entry, column)

    def _sequence_column(
        self, field: StructField, shape: tuple[int, ...], kind: LossKind, decode: _Decoder | None, first: _First
    ) -> Column:
        """Return the column of class numbers of which a row has as many as the data show."""
        shown = first()
        if shown is None:
            raise ConfigurationError(
                f"labels of the loss {kind.name!r} must have a known length: a stream's must be ML vectors with their "
                f"size in the metadata, and a DataFrame must have rows. Received: {field.dataType.simpleString()}",
                column=field.name,
            )
        classes = shape[-1] if kind.by_keras else None
        return Column(field.name, shown, "int32", decode, classes=classes, loss=kind.name)

    def _weight(self, entry: Entry, output: Any) -> Column:
        field, first, _ = self._source(entry)
        if is_scalar(field.dataType):
            return Column(field.name, dtype=float_dtype())
        of_steps = Column(field.name, fixed_shape(output, "output", field.name)[:-1])
        return self._together(entry, replace(_with_shape(of_steps, first()), dtype=float_dtype()))

    def _source(self, entry: Entry) -> tuple[StructField, _First, _Decoder | None]:
        """Return the field that holds values, a function that reads the first one's shape, and the decoder."""
        from pyspark.sql import types as T

        assert entry is not None
        if isinstance(entry, str):
            field, decode = self._schema[entry], self._decode.get(entry)
            return field, partial(self._first_shape, field, decode), decode
        for name in entry:
            kind = self._schema[name].dataType
            if not is_scalar(kind) or name in self._decode:
                raise ConfigurationError(
                    "several columns for one output must hold one number each, and not be decoded. "
                    f"Received: {kind.simpleString()}",
                    column=name,
                )
        return T.StructField(", ".join(entry), T.ArrayType(T.DoubleType())), lambda: (len(entry),), None

    def _together(self, entry: Entry, column: Column) -> Column:
        """Return ``column`` with the columns that it consists of, if they are several."""
        if not isinstance(entry, tuple):
            return column
        if column.size != len(entry):
            raise _label_shape_error(column, f"{len(entry)} columns")
        parts = tuple(Part(name, self._schema[name].dataType.typeName()) for name in entry)
        return replace(column, parts=parts, together=entry)

    def _first_shape(self, field: StructField, decode: _Decoder | None) -> tuple[int, ...] | None:
        """Return the shape that most of the first rows' values have; None if there are none, or they are unknown."""
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F

        length = known_length(field)
        if length is not None and decode is None:
            return (length,)
        if self._rows is None:
            return None
        source = F.col(quoted(field.name)) if decode else numeric_column([field], field.name).column
        try:
            rows = self._rows.select(source.alias("value")).take(_SHOWN_ROWS)
        except PySparkException as error:
            raise typed_error(error, self._rows.sparkSession) from None
        shapes = Counter(_shape_of(row["value"], decode) for row in rows)
        shapes.pop(None, None)  # workers refuse such a row, with its number
        return shapes.most_common(1)[0][0] if shapes else None


#: The rows whose values show a shape: an invalid one among them does not count.
_SHOWN_ROWS = 16


def _shape_of(value: Any, decode: _Decoder | None) -> tuple[int, ...] | None:
    """Return the shape of a row's value; None for a null, unequal nested arrays, or a value that is not decoded."""
    try:
        return None if value is None else tuple(np.shape(value if decode is None else decode(value)))
    except Exception:  # workers report what the user's function raises
        log.debug("a value has no shape", exc_info=True)
        return None


def _with_shape(column: Column, shown: tuple[int, ...] | None) -> Column:
    """Return ``column`` with the shape of the data, unless such values fill its own as `to_numpy` reads them."""
    flat = shown is not None and len(shown) == 1 and shown[0] == column.size
    if shown is None or flat or [n for n in shown if n != 1] == [n for n in column.shape if n != 1]:
        return column
    return Column(column.name, shown, decode=column.decode, loss=column.loss)


def _target_column(field: StructField, shape: tuple[int, ...], kind: LossKind, decode: _Decoder | None) -> Column:
    """Return the column of the labels of an output of ``shape``."""
    name, scalar = field.name, is_scalar(field.dataType) and decode is None
    if kind.scores in ("sparse", "one-hot") and shape:
        return _classes_column(field, shape, kind, decode)
    if scalar and math.prod(shape) != 1:
        if kind.by_keras:
            raise _not_scalar_error(field, shape, kind)
        column = Column(name, loss=kind.name)  # a user's loss may accept any shape
    else:
        probabilities = kind.scores == "binary" and kind.by_keras
        column = Column(name, shape, decode=decode, probabilities=probabilities, loss=kind.name)
    return _of_known_length(field, column, kind)


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
    return _of_known_length(field, column, kind)


def _not_scalar_error(field: StructField, shape: tuple[int, ...], kind: LossKind) -> ShapeError:
    return ShapeError(
        f"labels must be arrays of shape {shape}, like the model's output (integer classes need the loss "
        f"'sparse_categorical_crossentropy'). Received: {field.dataType.simpleString()}, loss={kind.name!r}",
        column=field.name,
    )


def _of_known_length(field: StructField, column: Column, kind: LossKind) -> Column:
    """Return ``column``; raise ShapeError if vectors have another length than Keras needs, as far as Spark knows it."""
    length = known_length(field)
    if kind.by_keras and kind.scores != "ctc" and column.decode is None and length not in (None, column.size):
        raise _label_shape_error(column, f"vectors of {length} values")
    return column


def require_class_numbers(df: DataFrame, spec: DataSpec) -> None:
    """Raise ShapeError if the first row has one-hot labels, but the loss needs class numbers."""
    from pyspark.errors import PySparkException

    for column in spec.targets:
        if column.classes is None or column.size != 1 or column.together or column.decode is not None:
            continue
        field = df.schema[column.name]
        if is_scalar(field.dataType):
            continue
        try:
            row = df.select(numeric_column([field], field.name).flat.alias("values")).first()
        except PySparkException as error:
            raise typed_error(error, df.sparkSession) from None
        if row is not None and row["values"] is not None and len(row["values"]) != column.size:
            raise _label_shape_error(column, f"{len(row['values'])} values in the first row")


def _label_shape_error(column: Column, received: str) -> ShapeError:
    number = "one value" if column.size == 1 else f"{column.size} values"
    expected = f"labels must hold {number}, like the model's output"
    if column.classes is not None:
        advice = "one-hot ones need the loss 'categorical_crossentropy'"
        expected = f"labels must be class numbers, {number} a row; {advice}"
    return ShapeError(f"{expected}. Received: {received}, loss={column.loss!r}", column=column.name)


def data_spec(
    model: keras.Model,
    schema: StructType,
    *,
    features: GivenColumns,
    labels: GivenEntries,
    weight: GivenEntries = None,
    decode: Mapping[str, _Decoder] | None = None,
    rows: DataFrame | None = None,
    **options: Any,
) -> DataSpec:
    """Return the `DataSpec` of a job for a compiled ``model`` and the data's ``schema``.

    ``features``, ``labels`` and ``weight`` are columns as the trainer takes them; see `binding`. A label
    column fills the shape of its output; for the sparse cross-entropy it holds class numbers in [0, classes).
    ``options`` are further fields of `DataSpec`.

    Args:
        rows: the DataFrame. Its first row has the shape of weights, and of labels that the user's own code reads; None,
            or a stream: the shape follows from the output.
    """
    inputs, outputs = list(model.inputs or ()), list(model.outputs or ())
    if not inputs or not outputs:
        raise ConfigurationError(
            f"`model` must have inputs and outputs: give it an Input. Received: model={model.name!r}"
        )
    features = inputs_of(model).bound(features, "features_col")
    parts = outputs_of(model)
    entries = parts.entries(labels, "label_col")
    weights = (weight,) if isinstance(weight, str) else parts.entries(weight, "sample_weight_col")
    decode, names = decode or {}, listed(entries)
    unread = [name for name in decode if name not in (*features, *names)]
    if unread:
        known = [user_names(name, parts_of(schema[name])) if name in schema.names else name for name in features]
        raise ConfigurationError(f"`decode` must be of the columns {[*known, *names]}. Received: decode of {unread}")
    require_columns(schema.fields, (*features, *names, *listed(weights)), decode)
    targets = TargetColumns(model, schema, decode, rows)
    return DataSpec(
        features=tuple(
            replace(_feature_column(schema[name], tensor, decode.get(name)), table=table_of(model, tensor))
            for name, tensor in zip(features, inputs, strict=True)
        ),
        labels=targets.labels(entries),
        sample_weight=targets.weights(weights),
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
        y=tuple(absent((1,)) if label is None else zeros(label) for label in spec.labels),
        weight=as_weight([absent((1,)) if weight is None else zeros(weight) + 1 for weight in spec.weights]),
    )


def _feature_column(field: StructField, tensor: Any, decode: _Decoder | None) -> Column:
    name, kind, shape = field.name, field.dataType, fixed_shape(tensor, "input", field.name)
    size = math.prod(shape)
    dtype = dtype_of_input(tensor)
    if dtype == "string":
        raise ConfigurationError(
            "the model's input must be numbers: apply TextVectorization or StringLookup to the rows first, and train "
            "on the numbers that it gives. Received: an input of text",
            column=name,
        )
    length = known_length(field)
    if decode is None:
        require_parts(field, shape)
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


def table_of(model: keras.Model, tensor: Any) -> tuple[str, int] | None:
    """Return the name and the rows of the smallest table of an Embedding that looks up an input itself, or None."""
    import keras

    tables = [
        (layer.input_dim, layer.name)
        for layer in model.layers
        if type(layer) is keras.layers.Embedding
        for node in calls_of(layer)
        if node.input_tensors[0] is tensor
    ]
    return next(((name, rows) for rows, name in sorted(tables)), None)


#: The column that scalar columns become.
ASSEMBLED = "distkeras_features"


def assembled(df: DataFrame, features: GivenColumns, dtypes: Sequence[str]) -> tuple[DataFrame, GivenColumns]:
    """Return ``df`` and its columns that feed a model, one for each input.

    Several columns for one input must hold one number each; they fill it together, in their order. Their type is one
    that holds every number of theirs as well as a single column would: integers stay integers.
    """
    names = names_of(features, "features_col")
    if len(dtypes) != 1 or len(names) == 1 or isinstance(names, Mapping):
        return df, names
    from pyspark.sql import functions as F

    parts = [(name, field_of(df.schema.fields, name).dataType) for name in names]
    for name, kind in parts:
        if not is_scalar(kind):
            raise ConfigurationError(
                "several columns for one input of the model must hold one number each. "
                f"Received: {kind.simpleString()}",
                column=name,
            )
    together_kind = common_type(dict(parts), whole="float" not in dtypes[0])
    numbers = [numeric_column(df.schema.fields, name).column.cast(together_kind) for name in names]
    metadata = {PARTS: [Part(name, kind.typeName())._asdict() for name, kind in parts]}
    together = F.array(*numbers).alias(ASSEMBLED, metadata=metadata)
    return df.select("*", together), (ASSEMBLED,)
