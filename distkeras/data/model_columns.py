"""The columns that a compiled model reads: its inputs, its labels and their weights.

Several columns of numbers may be one input; a label's column has the shape, the dtype and the values that the loss of
its output accepts. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch, DataSpec, absent, as_weight
from distkeras.data.binding import Entry, GivenColumns, GivenEntries, inputs_of, listed, names_of, outputs_of
from distkeras.data.column_kinds import common_type, dtype_of_input, float_dtype, is_scalar, label_dtype
from distkeras.data.columns import Column, Part, user_names
from distkeras.data.losses import LossKind, has_own_step, kind_of, loss_name, losses_of
from distkeras.data.padding import compiles_each_length, with_padding
from distkeras.data.rows import Padding
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
from distkeras.private_keras import calls_of, structures
from distkeras.ps.errors import ConfigurationError, ShapeError
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType


log = logging.getLogger(__name__)

_Decoder = Callable[[Any], Any]
_First = Callable[[], tuple[int, ...] | None]


Shape = tuple[int | None, ...]
"""The shape of one row's value; the first extent is None if rows have any length."""


def row_shape(tensor: Any, what: str, column: str) -> Shape:
    """Return the shape of one row of an input or output, of which only the first extent may be open.

    Raises:
        ConfigurationError: another extent is open.
    """
    shape = tuple(tensor.shape[1:])
    if None in shape[1:]:
        raise ConfigurationError(
            f"the model's {what} must have a fixed shape, or rows of any length: only the first extent may be open. "
            f"Received: shape={shape}",
            column=column,
        )
    return tuple(None if extent is None else int(extent) for extent in shape)


def _is_single(shape: Shape) -> bool:
    """Return whether a row's value is one number."""
    return None not in shape and math.prod(extent or 0 for extent in shape) == 1


class TargetColumns:
    """Makes the columns of labels and weights of a compiled model.

    The first of ``rows`` shows shapes that the model leaves open; without them, and of a stream, they stay unknown.
    """

    def __init__(
        self, model: keras.Model, schema: StructType, decode: Mapping[str, _Decoder], rows: DataFrame | None
    ) -> None:
        self._outputs, self._names, self._losses = list(model.outputs), outputs_of(model).names, losses_of(model)
        self._own_step = has_own_step(model)
        #: The numbers of the outputs whose loss needs a label for each step; set by `labels`.
        self.per_step: set[int] = set()
        self._schema, self._decode = schema, decode
        self._rows = rows

    def labels(self, entries: Sequence[Entry]) -> tuple[Column | None, ...]:
        """Return the labels of each output; none if there are no ``entries``."""
        given = entries or [None] * len(self._outputs)
        columns = tuple(map(self._label, given, self._outputs, self._losses, range(len(given))))
        return columns if entries else ()

    def weights(self, entries: Sequence[Entry]) -> Column | tuple[Column | None, ...] | None:
        """Return the weights: of all outputs together if there is one entry, else of each."""
        columns = tuple(
            None if entry is None else self._weight(entry, output)
            for entry, output in zip(entries, self._outputs, strict=False)
        )
        return (columns or (None,))[0] if len(columns) < 2 else columns

    def _label(self, entry: Entry, output: Any, loss: Any, number: int) -> Column | None:
        if entry is None:
            if loss is None or self._own_step:
                return None
            raise ConfigurationError(
                f"`label_col` must name a column for output {self._names[number]!r}, whose loss is "
                f"{loss_name(loss)!r}: an output needs no labels if it has no loss, or if the model has its own "
                "`train_step`. Received: None"
            )
        field, first, decode = self._source(entry)
        shape = row_shape(output, "output", field.name)
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
        elif column.is_open:
            self.per_step.add(number)
        if not column.whole:  # class numbers are integers already
            column = replace(column, dtype=float_dtype() if decode else label_dtype(field.dataType))
        return self._together(entry, column)

    def _sequence_column(
        self, field: StructField, shape: Shape, kind: LossKind, decode: _Decoder | None, first: _First
    ) -> Column:
        """Return the column of class numbers of which a row has as many as the data show, or any number."""
        shown = (None,) if None in shape else first()
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
        of_steps = Column(field.name, row_shape(output, "output", field.name)[:-1])
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
        if column.is_open or column.size != len(entry):
            raise _label_shape_error(column, f"{len(entry)} columns")
        parts = tuple(Part(name, self._schema[name].dataType.typeName()) for name in entry)
        return replace(column, parts=parts, together=entry)

    def _first_shape(self, field: StructField, decode: _Decoder | None) -> tuple[int, ...] | None:
        """Return the shape that most of the first rows' values have; None if there are none, or they are unknown."""
        length = known_length(field)
        if length is not None and decode is None:
            return (length,)
        (shapes,) = _first_shapes(self._rows, [field], {} if decode is None else {field.name: decode})
        return shapes.most_common(1)[0][0] if shapes else None


#: The rows whose values show a shape: an invalid one among them does not count.
_SHOWN_ROWS = 16


def _first_shapes(
    df: DataFrame | None, fields: Sequence[StructField], decode: Mapping[str, _Decoder]
) -> list[Counter[tuple[int, ...]]]:
    """Return for each field the shapes of the first rows' values; none of a stream."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    if df is None or df.isStreaming:
        return [Counter() for _ in fields]
    sources = [F.col(quoted(f.name)) if f.name in decode else numeric_column([f], f.name).column for f in fields]
    try:
        rows = df.select(*sources).take(_SHOWN_ROWS)
    except PySparkException as error:
        raise typed_error(error, df.sparkSession) from None
    shown = [[_shape_of(row[number], decode.get(field.name)) for row in rows] for number, field in enumerate(fields)]
    # Workers refuse a row without a shape, with its number.
    return [Counter(shape for shape in shapes if shape is not None) for shapes in shown]


def _with_shown_steps(
    spec: DataSpec,
    model: keras.Model,
    schema: StructType,
    decode: Mapping[str, _Decoder],
    rows: DataFrame | None,
    per_step: Container[int],
) -> DataSpec:
    """Return ``spec``, whose columns with rows of any length know on how many steps the model is to be tried.

    Inputs have those of the longest of the first rows; labels and weights those of their outputs, if they are known.
    """
    columns = [column for column in spec.columns if column.is_open]
    if not columns:
        return spec
    shapes = _first_shapes(rows, [schema[column.name] for column in columns], decode)
    steps: dict[str, int] = {}
    for column, shown in zip(columns, shapes, strict=True):
        found = [shape[0] // (column.size if len(shape) == 1 else 1) for shape in shown if shape]
        steps[column.name] = int(column.padding.lengths(np.array([max(found, default=column.shown_steps)]))[0])

    def shown_for(column: Any, of_output: int = 0) -> Any:
        if column is None or not column.is_open:
            return column
        return replace(column, shown_steps=of_output or steps[column.name])

    features = tuple(map(shown_for, spec.features))
    given = {number: column.shown_steps for number, column in enumerate(features) if column.is_open}
    outputs = _output_steps(model, given) or [0] * len(model.outputs)
    return spec.with_columns(
        features,
        [shown_for(label, outputs[output] if output in per_step else 0) for output, label in enumerate(spec.labels)],
        [shown_for(weight, outputs[output]) for output, weight in enumerate(spec.weights)],
    )


def _with_step_counts(spec: DataSpec, model: keras.Model, per_step: Container[int]) -> DataSpec:
    """Return ``spec``, in which labels and weights of steps name the input that has as many steps as their output.

    Inputs that need as many steps as another one name that one.

    Args:
        per_step: numbers of the outputs whose loss needs a label for each step.
    """
    inputs = [number for number, column in enumerate(spec.features) if column.is_open]
    if not inputs:
        return spec
    lengths = dict(zip(inputs, _PROBES * len(inputs), strict=False))
    steps = _output_steps(model, lengths)
    if steps is None and len(inputs) > 1:  # inputs that must agree
        lengths = dict.fromkeys(inputs, _PROBES[0])
        steps = _output_steps(model, lengths)
    names = {length: spec.features[number].name for number, length in reversed(lengths.items())}

    def named(column: Any, length: int) -> Any:
        name = names.get(length, "") if column is not None and column.is_open else ""
        return replace(column, steps_of=name) if column is not None and name != column.name else column

    found = steps or [0] * len(model.outputs)
    return spec.with_columns(
        [
            named(column, lengths[number]) if steps and number in lengths else column
            for number, column in enumerate(spec.features)
        ],
        [named(label, found[output]) if output in per_step else label for output, label in enumerate(spec.labels)],
        [named(weight, found[output]) for output, weight in enumerate(spec.weights)],
    )


#: Lengths for which the steps of outputs are asked: what layers do to one hardly makes another one of it.
_PROBES = [101, 211, 331, 443, 563]


def _output_steps(model: keras.Model, lengths: Mapping[int, int]) -> list[int] | None:
    """Return the steps of each output for inputs of such ``lengths``, 0 for unknown ones; None if they do not fit."""
    import keras

    tensors = [
        keras.KerasTensor((1, *(lengths.get(number) if n is None else n for n in tensor.shape[1:])), tensor.dtype)
        for number, tensor in enumerate(model.inputs)
    ]
    structure = structures(model)[0]
    try:
        outputs = model.compute_output_spec(
            tensors[0] if structure is None else keras.tree.pack_sequence_as(structure, tensors)
        )
    except Exception:  # a layer that allows no such lengths; workers report those that come
        log.debug("the steps of the outputs are unknown", exc_info=True)
        return None
    shapes = [tuple(output.shape) for output in keras.tree.flatten(outputs)]
    return [(shape[1] or 0) if len(shape) > 1 else 0 for shape in shapes]


def _shape_of(value: Any, decode: _Decoder | None) -> tuple[int, ...] | None:
    """Return the shape of a row's value; None for a null, unequal nested arrays, or a value that is not decoded."""
    try:
        return None if value is None else tuple(np.shape(value if decode is None else decode(value)))
    except Exception:  # workers report what the user's function raises
        log.debug("a value has no shape", exc_info=True)
        return None


def _with_shape(column: Column, shown: tuple[int, ...] | None) -> Column:
    """Return ``column`` with the shape of the data, unless such values fill its own as `to_numpy` reads them."""
    if column.is_open:  # labels may have fewer axes than the output
        fewer = shown is not None and 0 < len(shown) < len(column.shape)
        return replace(column, shape=(None, *(shown or ())[1:])) if fewer else column
    flat = shown is not None and len(shown) == 1 and shown[0] == column.size
    if shown is None or flat or [n for n in shown if n != 1] == [n for n in column.shape if n != 1]:
        return column
    return Column(column.name, shown, decode=column.decode, loss=column.loss)


def _target_column(field: StructField, shape: Shape, kind: LossKind, decode: _Decoder | None) -> Column:
    """Return the column of the labels of an output of ``shape``."""
    name, scalar = field.name, is_scalar(field.dataType) and decode is None
    if kind.scores in ("sparse", "one-hot") and shape:
        return _classes_column(field, shape, kind, decode)
    if scalar and not _is_single(shape):
        if kind.by_keras:
            raise _not_scalar_error(field, shape, kind)
        column = Column(name, loss=kind.name)  # a user's loss may accept any shape
    else:
        probabilities = kind.scores == "binary" and kind.by_keras
        column = Column(name, shape, decode=decode, probabilities=probabilities, loss=kind.name)
    return _of_known_length(field, column, kind)


def _classes_column(field: StructField, shape: Shape, kind: LossKind, decode: _Decoder | None) -> Column:
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
    if kind.scores == "sparse" and not (scalar and not _is_single(rest)):
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


def _not_scalar_error(field: StructField, shape: Shape, kind: LossKind) -> ShapeError:
    return ShapeError(
        f"labels must be arrays of shape {shape}, like the model's output (integer classes need the loss "
        f"'sparse_categorical_crossentropy'). Received: {field.dataType.simpleString()}, loss={kind.name!r}",
        column=field.name,
    )


def _of_known_length(field: StructField, column: Column, kind: LossKind) -> Column:
    """Return ``column``; raise ShapeError if vectors have another length than Keras needs, as far as Spark knows it."""
    length = known_length(field)
    if column.is_open or kind.scores == "ctc":
        return column
    if kind.by_keras and column.decode is None and length not in (None, column.size):
        raise _label_shape_error(column, f"vectors of {length} values")
    return column


def require_class_numbers(df: DataFrame, spec: DataSpec) -> None:
    """Raise ShapeError if the first row has one-hot labels, but the loss needs class numbers."""
    from pyspark.errors import PySparkException

    for column in spec.targets:
        single = column.size == 1 and not column.is_open
        if column.classes is None or not single or column.together or column.decode is not None:
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
    padding: Padding | Mapping[str, Padding] | None = None,
    rows: DataFrame | None = None,
    **options: Any,
) -> DataSpec:
    """Return the `DataSpec` of a job for a compiled ``model`` and the data's ``schema``.

    ``features``, ``labels`` and ``weight`` are columns as the trainer takes them; see `binding`. A label
    column fills the shape of its output; for the sparse cross-entropy it holds class numbers in [0, classes).
    ``options`` are further fields of `DataSpec`.

    Args:
        padding: of rows of any length, of all columns or by column; see `distkeras.data.padding`.
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
    spec = DataSpec(
        features=tuple(
            replace(_feature_column(schema[name], tensor, decode.get(name)), table=table_of(model, tensor))
            for name, tensor in zip(features, inputs, strict=True)
        ),
        labels=targets.labels(entries),
        sample_weight=targets.weights(weights),
    )
    spec = _with_step_counts(spec, model, targets.per_step)
    spec = with_padding(spec, padding, few=compiles_each_length(model))
    return replace(_with_shown_steps(spec, model, schema, decode, rows, targets.per_step), **options)


def example(spec: DataSpec) -> Batch:
    """Return a mini-batch of one row of zeros, which suffices to check whether the loss and the metrics fit."""

    def zeros(column: Column) -> np.ndarray:
        shape = (column.shown_steps if extent is None else extent for extent in column.shape)
        return np.zeros((1, *shape), column.dtype)

    return Batch(
        0,
        0,
        True,
        x=tuple(map(zeros, spec.features)),
        y=tuple(absent((1,)) if label is None else zeros(label) for label in spec.labels),
        weight=as_weight([absent((1,)) if weight is None else zeros(weight) + 1 for weight in spec.weights]),
        is_open=spec.is_open,
    )


def _feature_column(field: StructField, tensor: Any, decode: _Decoder | None) -> Column:
    name, kind, shape = field.name, field.dataType, row_shape(tensor, "input", field.name)
    is_open = None in shape
    size = math.prod(extent or 0 for extent in shape)
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
    if decode is None and length is not None and length != size and not is_open:
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
