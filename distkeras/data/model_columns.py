"""The columns that a compiled model reads: its inputs, its labels and their weights.

Several columns of numbers may be one input.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch, DataSpec, absent, as_weight
from distkeras.data.binding import GivenColumns, GivenEntries, inputs_of, listed, names_of, outputs_of
from distkeras.data.column_kinds import common_type, dtype_of_input, is_scalar
from distkeras.data.columns import Column, Part, user_names
from distkeras.data.label_columns import TargetColumns, fixed_shape
from distkeras.data.schema import (
    PARTS,
    field_of,
    known_length,
    numeric_column,
    parts_of,
    require_columns,
    require_parts,
)
from distkeras.ps.errors import ConfigurationError, ShapeError

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField, StructType


_Decoder = Callable[[Any], Any]


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

    Raises:
        MissingColumnError: a column is not in ``schema``.
        ColumnTypeError: a column does not hold numbers.
        ConfigurationError: the columns do not match the model's inputs or outputs; a shape is not fixed; an input is
            text; an output has a loss and no labels; or the loss is a cross-entropy over classes on an output of one
            number.
        ShapeError: a column of numbers, or of vectors whose size Spark knows, does not fill its input or output.
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
            replace(_feature_column(schema[name], tensor, decode.get(name)), table=_table_of(model, tensor))
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


def _table_of(model: keras.Model, tensor: Any) -> tuple[str, int] | None:
    """Return the name and the rows of the smallest table of an Embedding that looks up an input itself, or None."""
    import keras

    tables = [
        (layer.input_dim, layer.name)
        for layer in model.layers
        if type(layer) is keras.layers.Embedding
        for node in layer._inbound_nodes  # noqa: SLF001 - Keras has no public list
        if node.input_tensors[0] is tensor
    ]
    return next(((name, rows) for rows, name in sorted(tables)), None)


#: The column that scalar columns become.
ASSEMBLED = "distkeras_features"


def assembled(df: DataFrame, features: GivenColumns, dtypes: Sequence[str]) -> tuple[DataFrame, GivenColumns]:
    """Return ``df`` and its columns that feed a model, one for each input.

    Several columns for one input must hold one number each; they fill it together, in their order. Their type is one
    that holds every number of theirs as well as a single column would: integers stay integers.

    Args:
        dtypes: the numpy names of the inputs' dtypes.

    Raises:
        MissingColumnError: there is no such column.
        ConfigurationError: one of several columns for one input is no number, or no type holds the decimals of all.
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
