"""A Keras model as a Spark ML stage that predicts."""

from __future__ import annotations

import hashlib
import math
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.ml.functions import array_to_vector
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from distkeras.data.binding import inputs_of, listed, names_of, outputs_of
from distkeras.data.schema import arrow_ready, decoders, field_of, is_vector, map_in_arrow, parts_of, quoted
from distkeras.keras_model import archive
from distkeras.keras_model.registered import config_of, object_of
from distkeras.ps.errors import ConfigurationError
from distkeras.spark.cluster import drivers_python
from distkeras.spark.failures import short_errors
from distkeras.transformers import expressions, serving
from distkeras.transformers.files import StageWriter, load_archive, save_archive
from distkeras.transformers.outputs import OutputColumn
from distkeras.transformers.params import (
    HasDecode,
    HasOutputType,
    StageTransformer,
    integer_from,
    names_or_mapping,
    one_of,
    param,
    text_or_empty,
)

if TYPE_CHECKING:
    import keras


#: Spark's functions over Arrow arrays, as PySpark has them from 4.1 on; None before.
arrow_udf: Any
try:
    from pyspark.sql.pandas.functions import arrow_udf
except ImportError:
    arrow_udf = None

#: numpy name of an output to the numpy name and Spark type of its column.
_TYPES: dict[str, tuple[str, T.DataType]] = {
    "float64": ("float64", T.DoubleType()),
    "bool": ("bool", T.BooleanType()),
    "int8": ("int8", T.ByteType()),
    "uint8": ("int16", T.ShortType()),
    "int16": ("int16", T.ShortType()),
    "uint16": ("int32", T.IntegerType()),
    "int32": ("int32", T.IntegerType()),
    "uint32": ("int64", T.LongType()),
    "int64": ("int64", T.LongType()),
}
_FLOAT = ("float32", T.FloatType())

#: Of the outputs on their way, where there are several, and of the partition's number.
_OUTPUTS, _PARTITION, _REASON = "__distkeras_outputs", "__distkeras_partition", "__distkeras_reason"


class ModelFunction:
    """What an executor does for the rows' values of a model's inputs.

    Args:
        plan: how to predict.
        names: a field of a struct for each of the plan's columns; None: the values of its only one. Spark takes no ML
            vectors within the struct of such a function: there they are arrays.
    """

    def __init__(self, plan: serving.PredictionPlan, names: Sequence[str] | None) -> None:
        self.plan = plan
        self._names = names

    def results(self, arguments: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """The function's values for its arguments, which are tuples of arrays where there are several."""
        inputs = [column.name for column in self.plan.inputs]
        batches = (pa.RecordBatch.from_arrays(self.columns(given), names=inputs) for given in arguments)
        for batch in serving.predict(self.plan, batches, _partition()):
            outputs = batch.columns[len(inputs) :][: len(self._names or ("",))]  # a caller may not want the reasons
            if self._names is None:
                yield outputs[0]
            else:
                yield pa.StructArray.from_arrays([_without_vectors(output) for output in outputs], names=self._names)

    def columns(self, given: pa.Array | tuple[pa.Array, ...]) -> list[pa.Array]:
        """One column for each input of the model."""
        return list(given) if isinstance(given, tuple) else [given]


class _RowsFunction(ModelFunction):
    """Takes a last column that is no input."""

    def columns(self, given: pa.Array | tuple[pa.Array, ...]) -> list[pa.Array]:
        """One column for each input of the model."""
        return super().columns(given)[:-1]


class _DerivedColumn:
    """A column that executors make of a model's output, where it is read.

    Args:
        column: what to make.
    """

    def __init__(self, column: OutputColumn) -> None:
        self._column = column

    def result(self, output: pa.Array) -> pa.Array:
        """The column for an output's column of numbers or arrays."""
        valid = numbers = output.drop_null()
        while pa.types.is_list(numbers.type):
            numbers = numbers.flatten()
        if len(valid):
            values = numbers.to_numpy(zero_copy_only=False).reshape(len(valid), -1)
        else:
            values = np.zeros((min(1, len(output)), 2))  # of the right type, for `spread`
        column = self._column.to_arrow(values)
        if not output.null_count:
            return column
        return serving.spread(column, ["null" if null else None for null in output.is_null().to_pylist()])


def struct_of(fields: Mapping[str, T.DataType]) -> T.StructType:
    """The type of what a `ModelFunction` returns for several columns, given their names and types."""
    plain = {name: T.ArrayType(T.DoubleType()) if is_vector(kind) else kind for name, kind in fields.items()}
    return T.StructType([T.StructField(name, kind) for name, kind in plain.items()])


def _without_vectors(output: pa.Array) -> pa.Array:
    return pc.struct_field(output, "values") if pa.types.is_struct(output.type) else output  # null where the vector is


def column_type(dtype: str) -> tuple[str, T.DataType]:
    """The numpy name and the Spark type of the column for an output of numpy name ``dtype``."""
    return _TYPES.get(dtype, _FLOAT)


def field_of_output(packed: PackedModel, column: OutputColumn) -> T.StructField:
    """The new column as Spark describes it."""
    shape, dtype = packed.outputs[column.output]
    return T.StructField(column.name, column.spark_type(column_type(dtype)[1], len(shape)))


def predicted(
    dataset: DataFrame,
    packed: PackedModel,
    features: Sequence[str],
    columns: Sequence[OutputColumn],
    limits: tuple[int, int],
    decode: Mapping[str, Callable[[Any], Any]] | None = None,
    invalid: serving.InvalidRows = serving.InvalidRows(),  # noqa: B008 - frozen
) -> DataFrame:
    """``dataset`` with the new ``columns``; lazy, like any transformation.

    Args:
        dataset: the data, or a stream of it.
        packed: the model.
        features: a column for each of its inputs.
        columns: the new ones.
        limits: rows and bytes of a call.
        decode: what executors make arrays of a feature's values with, by column; none where they are numbers.
        invalid: what becomes of rows that cannot be predicted from.

    Raises:
        ConfigurationError: a new column that is there already.
        MissingColumnError: no such feature column, or it holds no numbers.
    """
    arrow_ready(dataset, features, decode or ())
    shown = [invalid.reason_col] if invalid.reason_col else []
    expressions.check_new_columns(dataset, *(column.name for column in columns), *shown)
    through = _through_function if arrow_udf is not None else _through_python
    made = _with_sources(packed, columns) if arrow_udf is not None else list(columns)
    plan = packed.plan(dataset.sparkSession, features, made, limits, decode or {})
    parts = {name: parts_of(field_of(dataset.schema.fields, name)) for name in features}
    inputs = tuple(replace(one, parts=parts[one.name]) for one in plan.inputs)
    plan = replace(plan, inputs=inputs, tolerant=invalid.handle != "error")
    out = through(dataset, plan, packed, columns)
    if not plan.tolerant:
        return out
    if invalid.handle == "skip":
        out = out.where(F.col(_REASON).isNull())
    return out.withColumnRenamed(_REASON, invalid.reason_col) if shown else out.drop(_REASON)


def _with_sources(packed: PackedModel, columns: Sequence[OutputColumn]) -> list[OutputColumn]:
    """The columns that the model's function makes: all but the derived ones, and the outputs that those are made of."""
    sources = dict.fromkeys(column.output for column in columns if column.derived)
    made = [column for column in columns if not column.derived]
    return made + [OutputColumn("", number, dtype=column_type(packed.outputs[number][1])[0]) for number in sources]


def _through_function(
    dataset: DataFrame, plan: serving.PredictionPlan, packed: PackedModel, columns: Sequence[OutputColumn]
) -> DataFrame:
    """Only the features go to Python, and only the outputs come back: the rows stay in the JVM.

    From Spark 4.3 on, batches of a columnar source such as Parquet go to a function as they are, which fails where the
    table has ML vectors, given to it or not. A value that only rows have makes rows of them.
    """
    fields_by_key = {f"output_{number}": field_of_output(packed, made) for number, made in enumerate(plan.columns)}
    if plan.tolerant:
        fields_by_key[_REASON] = T.StructField(_REASON, T.StringType())
    several = len(fields_by_key) > 1
    function = _RowsFunction(plan, list(fields_by_key) if several else None)
    struct = struct_of({key: field.dataType for key, field in fields_by_key.items()})
    call = arrow_udf(function.results, struct if several else fields_by_key["output_0"].dataType)
    with drivers_python(dataset):
        # Spark would call a deterministic one wherever the column is named: in a filter, and after it once more.
        outputs = call.asNondeterministic()(*(F.col(quoted(column.name)) for column in plan.inputs), F.col(_PARTITION))
    rows = dataset.select("*", F.spark_partition_id().alias(_PARTITION))
    if not several:
        return rows.select("*", outputs.alias(columns[0].name)).drop(_PARTITION)
    keys = {(made.name, made.output): key for key, made in zip(fields_by_key, plan.columns, strict=False)}
    named = []
    for column in columns:
        kind = field_of_output(packed, column).dataType
        if column.derived:
            with drivers_python(dataset):
                made_of = F.col(_OUTPUTS)[keys["", column.output]]
                value = arrow_udf(_DerivedColumn(column).result, kind)(made_of)
        else:
            value = F.col(_OUTPUTS)[keys[column.name, column.output]]
            value = F.when(value.isNotNull(), array_to_vector(value)) if is_vector(kind) else value
        named.append(value.alias(column.name))
    if plan.tolerant:
        named.append(F.col(_OUTPUTS)[_REASON].alias(_REASON))
    return rows.select("*", outputs.alias(_OUTPUTS)).select("*", *named).drop(_OUTPUTS, _PARTITION)


def _through_python(
    dataset: DataFrame, plan: serving.PredictionPlan, packed: PackedModel, columns: Sequence[OutputColumn]
) -> DataFrame:
    """All columns go to Python and back."""
    fields = [field_of_output(packed, column) for column in columns]
    if plan.tolerant:
        fields.append(T.StructField(_REASON, T.StringType()))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return serving.predict(plan, batches, _partition())

    return map_in_arrow(dataset, run, T.StructType([*dataset.schema.fields, *fields]))


def _partition() -> int | None:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context else None


#: Archives up to here travel in the closure: far below what a Spark Connect message holds.
_INLINE_BYTES = 4 << 20

#: What a parameter of columns takes.
COLUMNS = "a name, distinct names, or a mapping: name of an input or output of the model to a distinct name"
#: Bytes of the inputs and outputs of one call of the model, by default.
BATCH_BYTES = 64 << 20
#: Of a number in a model's arrays, as good as always.
_NUMBER_BYTES = 4


class ModelPredictor(StageTransformer, HasOutputType, HasDecode, MLReadable["ModelPredictor"], MLWritable):
    """Adds what a Keras model predicts for each row, and keeps all other columns, rows and their order.

    The model is taken as it is when the predictor is made; training it on does not change the predictor. Each
    Python worker loads it once and keeps it for later jobs. Prediction is lazy, like any transformation: a row
    that cannot be predicted from ends the job that reads it, with a BadValueError or ShapeError in the text of
    Spark's own error that names column, partition and row. The evaluators of this package raise it as such. From
    PySpark 4.1 on a job that reads none of the new columns predicts nothing.

    An output of shape ``(n,)`` becomes a column of numbers, ``(n, k)`` arrays (or ML vectors), ``(n, h, k)`` arrays of
    arrays.
    What a row gets must not depend on its neighbors in the batch.

    Args:
        keras_model: a built Functional or Sequential model of any backend.
        features_col: one column for each input of the model, in its order: numbers, arrays (nested like the
            input or flat) or vectors. A mapping where the inputs are a dictionary: {"user": "user_column", ...}.
            Default ``"features"``.
        output_col: one new column for each output, in the model's order; a mapping where the outputs are a dictionary.
            Default ``"prediction"``.
        batch_size: rows a call of the model, at most; default 1024.
        batch_bytes: of the inputs and outputs of a call, at most, so that large rows come in smaller batches; default
            64 MiB.
        output_type: of flat outputs: "array" (the default), or "vector", which Spark ML's own evaluators read.
        custom_objects: classes and functions of the model, by registered name, which `keras.saving` does not know.
            They travel to the workers, and are not saved: register them before you load the predictor.
        decode: function from the value of the column of features to an array of the input's shape, or a dictionary with
            one for some columns, as in `Trainer`. To be saved, a function is registered with `keras.saving`.
        handle_invalid: what becomes of a row with a null, NaN or infinity, an array of another size, or a value that
            ``decode`` fails on. "error" (the default): the job that reads it fails. "skip": it is left out. "keep": it
            stays, with null predictions.
        invalid_col: with handle_invalid="keep", a new column of text: why a row has no prediction, or null. "" for none
            (the default).

    Raises:
        ConfigurationError: a model that is not built, cannot be saved, or has no fixed inputs; a number of
            columns that is not the model's; a new column that is there already.
        MissingColumnError, ColumnTypeError: no such column, or it holds no numbers.
    """

    features_col = param("features_col", "columns to predict from", names_or_mapping, COLUMNS)
    output_col = param("output_col", "new columns", names_or_mapping, COLUMNS)
    batch_size = param("batch_size", "rows a call of the model, at most", integer_from(1), "a positive integer")
    batch_bytes = param(
        "batch_bytes", "of the inputs and outputs of a call, at most", integer_from(1), "a positive integer"
    )
    handle_invalid = param(
        "handle_invalid",
        "what becomes of a row with a null, NaN or the like",
        one_of(*serving.HANDLE_INVALID),
        "one of 'error', 'skip' and 'keep'",
    )
    invalid_col = param(
        "invalid_col", "new column with the reason why a kept row has no prediction", text_or_empty, "a column name"
    )

    @short_errors
    def __init__(  # noqa: PLR0913 - one keyword a parameter
        self,
        keras_model: keras.Model | PackedModel | None = None,
        features_col: str | Sequence[str] | Mapping[str, str] | None = None,
        output_col: str | Sequence[str] | Mapping[str, str] | None = None,
        batch_size: int | None = None,
        output_type: str | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        batch_bytes: int | None = None,
        decode: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        handle_invalid: str | None = None,
        invalid_col: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(features_col=["features"], output_col=["prediction"], batch_size=1024, output_type="array")
        self._setDefault(batch_bytes=BATCH_BYTES, decode=None)
        self._set_given(
            features_col=features_col, output_col=output_col, batch_size=batch_size, batch_bytes=batch_bytes
        )
        self._setDefault(handle_invalid="error", invalid_col="")
        self._set_given(output_type=output_type, decode=decode, handle_invalid=handle_invalid, invalid_col=invalid_col)
        self.feature_decoders()  # what cannot work is refused here
        if keras_model is not None and not isinstance(keras_model, PackedModel):
            keras_model = PackedModel(archive.to_bytes(keras_model, "keras_model"), custom_objects)
        self._model = keras_model

    @property
    def keras_model(self) -> keras.Model:
        """A new copy of the model, not compiled."""
        return archive.from_bytes(self.packed_model.data, self.packed_model.objects)

    @property
    def packed_model(self) -> PackedModel:
        """The model as bytes.

        Raises:
            ConfigurationError: the predictor has none.
        """
        if self._model is None:
            raise ConfigurationError("`keras_model` must be set. Received: ModelPredictor without keras_model")
        return self._model

    def feature_decoders(self) -> dict[str, Callable[[Any], Any]]:
        """What executors decode columns of features with, by column.

        Raises:
            ConfigurationError: `decode` is neither a function for the only column nor a dictionary of them.
        """
        features = listed(names_of(self._required("features_col"), "features_col"))
        by_column = decoders(self.getOrDefault("decode"), features)
        if unknown := sorted(by_column.keys() - set(features)):
            raise ConfigurationError(f"`decode` must be of the columns {list(features)}. Received: decode of {unknown}")
        return by_column

    def _transform(self, dataset: DataFrame) -> DataFrame:
        packed = self.packed_model
        features = packed.input_parts.bound(self._required("features_col"), "features_col")
        outputs = packed.output_parts.bound(self._required("output_col"), "output_col")
        vectors = self._required("output_type") == "vector"
        forms = ["vector" if len(shape) == 1 and vectors else "values" for shape, _ in packed.outputs]
        columns = [
            OutputColumn(name, number, form, column_type(packed.outputs[number][1])[0])
            for number, (name, form) in enumerate(zip(outputs, forms, strict=True))
        ]
        limits = (self._required("batch_size"), self._required("batch_bytes"))
        invalid = serving.InvalidRows(self._required("handle_invalid"), self._required("invalid_col"))
        return predicted(dataset, packed, features, columns, limits, self.feature_decoders(), invalid)

    def predict(self, dataframe: DataFrame) -> DataFrame:
        """Return `transform` of the rows, under the name that dist-keras has for it."""
        return self.transform(dataframe)

    def write(self) -> MLWriter:
        """Write Spark ML's metadata, and the model next to it."""
        return _Writer(self)

    @classmethod
    def read(cls) -> _Reader:
        """Reads what `write` has written."""
        return _Reader(cls)


class PackedModel:
    """A model as bytes, with what the driver must know about it.

    Args:
        data: a ``.keras`` archive.
        custom_objects: classes and functions of the model, by registered name, which `keras.saving` does not know.

    Raises:
        ConfigurationError: it cannot be loaded, or has no fixed inputs.
    """

    def __init__(self, data: bytes, custom_objects: Mapping[str, Any] | None = None) -> None:
        self.objects = archive.custom_objects(data)
        self.objects.update(archive.require_objects(custom_objects))
        # Loading it here finds on the driver what would fail on every executor, and drops the optimizer's state.
        model = archive.from_bytes(data, self.objects)
        self.data = archive.to_bytes(model)
        self.inputs = [_shape_and_dtype(tensor) for tensor in _tensors(model, "inputs")]
        self.outputs = [_shape_and_dtype(tensor) for tensor in _tensors(model, "outputs")]
        self.input_parts, self.output_parts = inputs_of(model), outputs_of(model)
        for shape, _ in self.inputs:
            if shape.count(None) > 1:
                raise ConfigurationError(
                    f"`keras_model` must leave at most one extent of an input open. Received: shape={shape}"
                )
        # Two notebook classes of one name may differ, which their bytes do not show.
        self.key = hashlib.sha256(self.data).hexdigest() + (f"-{uuid.uuid4().hex}" if self.objects else "")
        self._sent: weakref.WeakKeyDictionary[SparkSession, serving.Archive] = weakref.WeakKeyDictionary()

    def archive(self, spark: SparkSession) -> serving.Archive:
        """How tasks of ``spark`` get the bytes; sends them if they have not been."""
        if len(self.data) <= _INLINE_BYTES:
            return serving.InlineArchive(self.data)
        if spark not in self._sent:
            self._sent[spark] = self._send(spark)
        return self._sent[spark]

    def plan(
        self,
        spark: SparkSession,
        features: Sequence[str],
        columns: Sequence[OutputColumn],
        limits: tuple[int, int],
        decode: Mapping[str, Callable[[Any], Any]],
    ) -> serving.PredictionPlan:
        """What a task of ``spark`` needs to predict; see `predicted`."""
        return serving.PredictionPlan(
            archive=self.archive(spark),
            key=self.key,
            objects=self.objects,
            inputs=tuple(
                serving.ModelInput(name, shape, dtype, decode.get(name))
                for name, (shape, dtype) in zip(features, self.inputs, strict=True)
            ),
            columns=tuple(columns),
            batch_size=limits[0],
            batch_bytes=limits[1],
            row_bytes=_row_bytes(self.inputs) + _row_bytes(self.outputs),
        )

    def _send(self, spark: SparkSession) -> serving.Archive:
        if "connect" not in type(spark).__module__:
            return serving.BroadcastArchive(spark.sparkContext.broadcast(self.data))
        with tempfile.TemporaryDirectory(prefix="distkeras-") as directory:
            path = Path(directory, f"{self.key}.keras")
            path.write_bytes(self.data)
            spark.addArtifacts(str(path), file=True)
        return serving.ArtifactArchive(path.name)


def _row_bytes(tensors: Sequence[tuple[tuple[int | None, ...], str]]) -> int:
    """Of one row's values, each open extent counted as 1."""
    return sum(math.prod(extent or 1 for extent in shape) * _NUMBER_BYTES for shape, _ in tensors)


def _tensors(model: keras.Model, name: str) -> list[Any]:
    tensors = getattr(model, name, None)
    if not tensors:
        raise ConfigurationError(
            "`keras_model` must be a Functional or Sequential model, whose inputs and outputs have a shape: "
            "wrap another one as `keras.Model(inputs, model(inputs))`. "
            f"Received: keras_model={model.name!r} of {type(model)} without {name}"
        )
    return list(tensors)


def _shape_and_dtype(tensor: Any) -> tuple[tuple[int | None, ...], str]:
    """Shape of one row's value, and dtype."""
    import keras

    return tuple(tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)


class _Writer(StageWriter):
    """Spark ML's metadata, and the archive as rows of Parquet next to it."""

    def __init__(self, instance: ModelPredictor) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        data = self.instance.packed_model.data
        functions = {column: config_of(one, "decode") for column, one in self.instance.feature_decoders().items()}
        plain = self.instance.copy()
        plain.clear(plain.getParam("decode"))  # Spark ML's writer would encode it
        DefaultParamsWriter.saveMetadata(plain, path, self.sparkSession, {"decode": functions})
        save_archive(self.sparkSession, data, path)


class _Reader(MLReader[ModelPredictor]):
    def __init__(self, kind: type[ModelPredictor]) -> None:
        super().__init__()
        self.kind = kind

    @short_errors
    def load(self, path: str) -> ModelPredictor:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        predictor = self.kind(PackedModel(load_archive(self.sparkSession, path)))
        predictor._resetUid(metadata["uid"])  # noqa: SLF001 - as Spark ML's own readers do
        DefaultParamsReader.getAndSetParams(predictor, metadata)
        if functions := metadata.get("decode"):
            predictor._set(decode={column: object_of(config, "decode") for column, config in functions.items()})  # noqa: SLF001 - the same
        return predictor
