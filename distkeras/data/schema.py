"""Which DataFrame column feeds which input and target of a model, settled on the driver before any job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch
from distkeras.data.columns import Column, quoted
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ConfigurationError, MissingColumnError, ShapeError

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_CLASS_WEIGHT = "distkeras_class_weight"
_SPARSE = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy")


def names_of(columns: str | Sequence[str], argument: str) -> tuple[str, ...]:
    """One column name or several, as a tuple."""
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(f"`{argument}` must be a column name or several. Received: {argument}={columns!r}")
    return names


def data_spec(  # noqa: PLR0913 - the trainer's arguments about data, each by its keyword
    model: keras.Model,
    df: DataFrame,
    *,
    features: tuple[str, ...],
    labels: tuple[str, ...],
    weight: str | None,
    batch_size: int,
    epochs: int,
    seed: int,
    shuffle: bool,
    spool_bytes: int,
) -> DataSpec:
    """The data plane's part of the job for a compiled ``model`` and ``df``.

    A label column fills the shape of its output, but for the sparse cross-entropy, where it holds class numbers in
    [0, classes).

    Raises:
        MissingColumnError: a column is not in ``df`` or holds no numbers.
        ConfigurationError: another number of columns than of inputs or outputs, or an open shape.
        ShapeError: a scalar label column for an output of several numbers.
    """
    inputs, outputs = list(model.inputs or ()), list(model.outputs or ())
    if not inputs or not outputs:
        raise ConfigurationError(
            f"`model` must know its inputs and outputs: give it an Input. Received: model={model.name!r}"
        )
    _check_count("features_col", features, inputs, "inputs", model)
    _check_count("label_col", labels, outputs, "outputs", model)
    types = {field.name: field.dataType for field in df.schema.fields}
    for name in (*features, *labels, *(() if weight is None else (weight,))):
        if name not in types:
            raise MissingColumnError(
                f"the DataFrame must have the column {name!r}. Received: columns={list(types)}", column=name
            )
    targets = [
        _target_column(name, types[name], output, loss)
        for name, output, loss in zip(labels, outputs, _losses(model), strict=True)
    ]
    return DataSpec(
        features=tuple(
            Column(name, _fixed_shape(tensor, "input", name), _column_dtype(tensor))
            for name, tensor in zip(features, inputs, strict=True)
        ),
        labels=tuple(column for column, _ in targets),
        sample_weight=None if weight is None else Column(weight),
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle,
        classes=tuple(classes for _, classes in targets),
        spool_bytes=spool_bytes,
    )


def weighted(
    df: DataFrame, labels: tuple[str, ...], class_weight: Mapping[int, float] | None, weight: str | None
) -> tuple[DataFrame, str | None]:
    """Class weights become sample weights, in the JVM; returns the DataFrame and the name of the column of weights.

    Raises:
        ShapeError: not one label column of integer classes.
    """
    if class_weight is None:
        return df, weight
    from pyspark.sql import functions as F
    from pyspark.sql.types import IntegralType

    kinds = {field.name: field.dataType for field in df.schema.fields}
    if len(labels) != 1 or not isinstance(kinds.get(labels[0]), IntegralType):
        raise ShapeError(
            "`class_weight` needs one label column of integer classes. "
            f"Received: label_col={list(labels)} of {[str(kinds.get(name)) for name in labels]}"
        )
    label = F.col(quoted(labels[0]))
    row_weight = F.lit(1.0) if weight is None else F.col(quoted(weight)).cast("double")
    factor = F.lit(1.0)
    for number, value in class_weight.items():
        factor = F.when(label == F.lit(int(number)), F.lit(float(value))).otherwise(factor)
    return df.withColumn(_CLASS_WEIGHT, row_weight * factor), _CLASS_WEIGHT


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


def _check_count(argument: str, names: tuple[str, ...], tensors: list[Any], what: str, model: keras.Model) -> None:
    if len(names) != len(tensors):
        raise ConfigurationError(
            f"`{argument}` must name a column for each of the {len(tensors)} {what} of the model. "
            f"Received: {argument}={list(names)} for model={model.name!r}"
        )


def _fixed_shape(tensor: Any, what: str, column: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape[1:])
    if any(extent is None for extent in shape):
        raise ConfigurationError(f"the model's {what} must have a fixed shape. Received: shape={shape}", column=column)
    return tuple(int(extent) for extent in shape)


def _column_dtype(tensor: Any) -> str:
    """float32 for any float: the model casts to its own precision; integers and booleans stay."""
    name = str(tensor.dtype)
    return "float32" if "float" in name else name


def _losses(model: keras.Model) -> list[Any]:
    """The loss of each output, as compiled: a name, a function, an object, or None."""
    loss, outputs = model.loss, list(model.outputs)
    if isinstance(loss, dict):
        names = list(model.output_names)
        return [loss.get(name) for name in names]
    if isinstance(loss, (list, tuple)):
        return [*loss, *[None] * (len(outputs) - len(loss))]
    return [loss] * len(outputs)


def _loss_name(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)


def _is_keras_own(loss: Any) -> bool:
    import keras

    if isinstance(loss, str):
        return loss not in keras.saving.get_custom_objects()
    return getattr(loss, "__module__", type(loss).__module__).split(".")[0] == "keras"


def _target_column(name: str, kind: DataType, output: Any, loss: Any) -> tuple[Column, int | None]:
    from pyspark.sql.types import NumericType

    shape = _fixed_shape(output, "output", name)
    scalar = isinstance(kind, NumericType) or kind.typeName() == "boolean"
    if _loss_name(loss) in _SPARSE:
        return Column(name, shape[:-1], "int32"), shape[-1]
    if scalar and math.prod(shape) != 1:
        if loss is None or _is_keras_own(loss):
            raise ShapeError(
                f"labels must be arrays of shape {shape}, like the model's output (integer classes need the loss "
                f"'sparse_categorical_crossentropy'). Received: {kind.simpleString()}, loss={_loss_name(loss)!r}",
                column=name,
            )
        shape = ()  # a loss of the user's own may take anything
    return Column(name, shape), None
