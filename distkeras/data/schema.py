"""Which DataFrame column feeds which input and target of a model, settled on the driver before any job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch
from distkeras.data.binding import GivenColumns, inputs_of, outputs_of
from distkeras.data.columns import Column
from distkeras.data.dataframe import field_of, is_scalar, known_length, require_numbers
from distkeras.data.labels import require_length
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ConfigurationError, ShapeError

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField

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
            replace(_feature_column(df.schema[name], tensor, name in decode), decode=decode.get(name))
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
    """Whether every column that is to be decoded is one that is read.

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
