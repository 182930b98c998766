"""A Keras model as a Spark ML stage that predicts."""

from __future__ import annotations

import atexit
import hashlib
import math
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

import distkeras.transformers.expressions as expressions
import distkeras.transformers.serving as serving
from distkeras.data.binding import inputs_of, listed, names_of, outputs_of
from distkeras.data.column_kinds import TEXT, dtype_of_input, innermost, lists_of, vector_of
from distkeras.data.columns import Column, Part, user_names
from distkeras.data.model_columns import table_of
from distkeras.data.padding import require_paddings
from distkeras.data.rows import Padding
from distkeras.data.schema import (
    decoders,
    field_of,
    map_in_arrow,
    parts_of,
    quoted,
    require_columns,
    require_parts,
)
from distkeras.keras_model import archive, keras_config, mapped_tables
from distkeras.keras_model.attributes import attributes_of_model, set_attributes_of_model
from distkeras.keras_model.mapped_tables import MappedModel, ModelParts
from distkeras.keras_model.same_step import require_same_outputs
from distkeras.keras_model.unsaved_values import named_layers
from distkeras.keras_model.variables import has_rows_at_server
from distkeras.ps.errors import ColumnTypeError, ConfigurationError
from distkeras.spark.cluster import context_of, drivers_python
from distkeras.spark.failures import short_errors
from distkeras.transformers.files import Saveable
from distkeras.transformers.outputs import OutputColumn
from distkeras.transformers.params import (
    COLUMN_OR_NONE,
    INVALID,
    POSITIVE_INTEGER,
    HasDecode,
    HasOutputType,
    HasPadding,
    StageTransformer,
    names_or_mapping,
    param,
)

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import DataSpec
    from distkeras.keras_model.recipe import Recipe


#: Spark's functions over Arrow arrays, which PySpark has from 4.1 on; None before.
arrow_udf: Any
try:
    from pyspark.sql.pandas.functions import arrow_udf
except ImportError:
    arrow_udf = None

#: Temporary columns: the model's outputs, the partition's number, and the reasons.
_OUTPUTS, _PARTITION, _REASON = "__distkeras_outputs", "__distkeras_partition", "__distkeras_reason"


@dataclass(frozen=True)
class ModelFunction:
    """The function over Arrow arrays that predicts on executors.

    Args:
        names: names of the struct's fields, one for each of the plan's columns; None: there is one column, without a
            struct. Spark does not accept ML vectors within the struct of such a function: there they are arrays.
        inputs_of: returns, from the function's arguments, a column for each input of the model, and with models by key
            also for each column of a key.
    """

    plan: serving.PredictionPlan
    names: Sequence[str] | None
    inputs_of: Callable[[Sequence[pa.Array]], list[pa.Array]]

    def results(self, arguments: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """Yield the function's values for its arguments, which are tuples if the function has several."""
        models = self.plan.options.models
        inputs = [column.name for column in self.plan.inputs] + list(models.columns if models is not None else ())
        columns = (self.inputs_of(each if isinstance(each, tuple) else (each,)) for each in arguments)
        batches = (pa.RecordBatch.from_arrays(arrays, names=inputs) for arrays in columns)
        for batch in serving.predict(self.plan, batches, _partition()):
            outputs = batch.columns[len(inputs) :][: len(self.names or ("",))]  # the reasons are left out if not named
            if self.names is None:
                yield outputs[0]
            else:
                yield pa.StructArray.from_arrays([lists_of(output) for output in outputs], names=self.names)


def struct_of(fields: Mapping[str, T.DataType]) -> T.StructType:
    """Return the type of a `ModelFunction`'s values for several columns, given their names and types."""
    array = T.ArrayType(T.DoubleType())
    kinds = (array if isinstance(kind, VectorUDT) else kind for kind in fields.values())
    return T.StructType(list(map(T.StructField, fields, kinds)))


def predicted(
    dataset: DataFrame,
    packed: PackedModel,
    features: Sequence[str],
    columns: Sequence[OutputColumn],
    options: serving.PredictionOptions,
) -> DataFrame:
    """Return ``dataset`` with the new ``columns``; lazy, like any transformation.

    Args:
        features: a column for each input of the model.

    Raises:
        ConfigurationError: a new column already exists, or the backend has no text and an input is text.
        MissingColumnError, ColumnTypeError: a feature column does not exist, or does not hold numbers.
    """
    fields = dataset.schema.fields
    packed.require_backend(features)
    texts = {name for name, (_, dtype) in zip(features, packed.inputs, strict=True) if dtype == TEXT}
    for name in texts.difference(options.decode):
        kind = field_of(fields, name).dataType
        if not isinstance(kind, T.StringType):
            raise ColumnTypeError(
                f"a column for an input of text must hold strings. Received: type={kind.simpleString()}", column=name
            )
    require_columns(fields, features, texts.union(options.decode))
    reason_cols = [options.invalid_col] if options.invalid_col else []
    expressions.check_new_columns(dataset, *(column.name for column in columns), *reason_cols)
    for name, (shape, _) in zip(features, packed.inputs, strict=True):
        if name not in options.decode and name not in texts:
            require_parts(field_of(fields, name), shape)
    parts = {name: parts_of(field_of(fields, name)) for name in features}
    through, computed = _through_python, list(columns)
    if arrow_udf is not None:  # derived columns are computed from the outputs' values, if they are read
        sources = dict.fromkeys(column.output for column in columns if column.derived)
        computed = [column for column in columns if not column.derived]
        computed += [packed.column("", output) for output in sources]
        through = _through_function
    out = through(dataset, packed.plan(dataset.sparkSession, features, computed, options, parts), columns)
    if not options.tolerant:
        return out
    if options.handle_invalid == "skip":
        out = out.where(F.col(_REASON).isNull())
    return out.withColumnRenamed(_REASON, options.invalid_col) if reason_cols else out.drop(_REASON)


def _through_function(dataset: DataFrame, plan: serving.PredictionPlan, columns: Sequence[OutputColumn]) -> DataFrame:
    """Send only the features to Python, and only the outputs back: the rows stay in the JVM."""
    # From Spark 4.3 on, batches of a columnar source such as Parquet go to a function without conversion, which fails
    # if the table has ML vectors in any column. The partition's number, which only rows have, makes Spark convert.
    names, plan = with_key_columns(plan)
    types = {f"output_{number}": column.spark_type for number, column in enumerate(plan.columns)}
    if plan.options.tolerant:
        types[_REASON] = T.StringType()
    several = len(types) > 1
    function = ModelFunction(plan, list(types) if several else None, lambda arguments: list(arguments)[:-1])
    call = arrow_udf(function.results, struct_of(types) if several else types["output_0"])
    with drivers_python(dataset):
        # Spark would call a deterministic one for each use of the column: in a filter, and again after it.
        outputs = call.asNondeterministic()(*(F.col(quoted(name)) for name in names), F.col(_PARTITION))
    rows = dataset.select("*", F.spark_partition_id().alias(_PARTITION))
    if not several:
        return rows.select("*", outputs.alias(columns[0].name)).drop(_PARTITION)
    keys = {(column.name, column.output): key for key, column in zip(types, plan.columns, strict=False)}
    new = []
    for column in columns:
        output = F.col(_OUTPUTS)[keys["" if column.derived else column.name, column.output]]
        if column.derived:
            with drivers_python(dataset):
                output = arrow_udf(_derivation(column), column.spark_type)(output)
        elif isinstance(column.spark_type, VectorUDT):
            output = vector_of(output)
        new.append(output.alias(column.name))
    if plan.options.tolerant:
        new.append(F.col(_OUTPUTS)[_REASON].alias(_REASON))
    return rows.select("*", outputs.alias(_OUTPUTS)).select("*", *new).drop(_OUTPUTS, _PARTITION)


def with_key_columns(plan: serving.PredictionPlan) -> tuple[list[str], serving.PredictionPlan]:
    """Return the columns of a function's arguments, and the plan for them: a key may have the name of an input."""
    inputs, models = [column.name for column in plan.inputs], plan.options.models
    if models is None:
        return inputs, plan
    columns = tuple(f"__distkeras_key_{number}" for number in range(len(models.key_names)))
    options = replace(plan.options, models=replace(models, columns=columns))  # type: ignore[type-var]  # a dataclass
    return [*inputs, *models.key_names], replace(plan, options=options)


def _derivation(column: OutputColumn) -> Callable[[pa.Array], pa.Array]:
    """Return the function that computes ``column`` from its output's numbers or arrays on executors."""

    def derive(output: pa.Array) -> pa.Array:
        valid = output.drop_null()
        if len(valid):
            values = innermost(valid).to_numpy(zero_copy_only=False).reshape(len(valid), -1)
        else:
            values = np.zeros((min(1, len(output)), 2))  # of the right type, for `spread`
        derived = column.to_arrow(values)
        if not output.null_count:
            return derived
        return serving.spread(derived, ["null" if null else None for null in output.is_null().to_pylist()])

    return derive


def _through_python(dataset: DataFrame, plan: serving.PredictionPlan, columns: Sequence[OutputColumn]) -> DataFrame:
    """Send all columns to Python and back."""
    fields = [T.StructField(column.name, column.spark_type) for column in columns]
    if plan.options.tolerant:
        fields.append(T.StructField(_REASON, T.StringType()))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return serving.predict(plan, batches, _partition())

    return map_in_arrow(dataset, run, T.StructType([*dataset.schema.fields, *fields]))


def _partition() -> int | None:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context else None


#: Archives up to this size travel in the closure: it is far below the limit of a Spark Connect message.
_INLINE_BYTES = 4 << 20

#: The description of valid values of a parameter of columns.
COLUMNS = "a name, distinct names, or a mapping: name of an input or output of the model to a distinct name"
#: Bytes of the inputs and outputs of one call of the model, by default.
BATCH_BYTES = 64 << 20


class ModelPredictor(Saveable, StageTransformer, HasOutputType, HasDecode, HasPadding):  # type: ignore[misc]  # the first one reads
    """Add a Keras model's predictions to each row, and keep all other columns, the rows and their order.

    ::

        predictor = ModelPredictor(keras_model=trained, features_col="features", output_col="prediction")
        predictor.transform(df).select("prediction")

    The predictor has a copy of the model: further training does not change it. Each Python worker loads the model once
    and keeps it for later jobs. Prediction is lazy, like any transformation. An invalid row ends the job that reads it:
    Spark's error contains a BadValueError or ShapeError that names column, partition and row; the evaluators of this
    package raise that error itself. From PySpark 4.1 on, a job that reads none of the new columns predicts nothing.

    An output of shape ``(n,)`` becomes a column of numbers, ``(n, k)`` arrays (or ML vectors), ``(n, h, k)`` arrays of
    arrays.
    The prediction for a row must not depend on other rows of the batch.

    Args:
        keras_model: a built Functional or Sequential model of any backend.
        features_col: one column for each input of the model, in its order: numbers, arrays (nested like the
            input or flat) or vectors. A mapping where the inputs are a dictionary: {"user": "user_column", ...}.
            Default ``"features"``.
        output_col: one new column for each output, in the model's order; a mapping where the outputs are a dictionary.
            Default ``"prediction"``.
        batch_size: largest number of rows of a call of the model; default 1024.
        batch_bytes: largest size of the inputs and outputs of a call, so that large rows are in smaller batches;
            default 64 MiB.
        output_type: type of flat outputs: "array" (the default), or "vector", which Spark ML's own evaluators read.
        custom_objects: classes and functions of the model, by registered name, which `keras.saving` does not know.
            They travel to the workers, and are not saved: register them before you load the predictor.
        decode: function from the value of the features column to an array of the input's shape, or a dictionary from
            columns to such functions, as in `Trainer`. To be saved, a function must be registered with `keras.saving`.
        handle_invalid: treatment of a row with a null, NaN or infinity, an array of another size, or a value that
            ``decode`` fails on. "error" (the default): the job that reads it fails. "skip": it is left out. "keep": it
            stays, with null predictions.
            Rows of any length are predicted each at its own length, with others of the same one. Where another extent
            of the input than the first is open, rows must have one length, and others fail the job in any case.
        invalid_col: with handle_invalid="keep", a new column of text: why a row has no prediction, or null. "" for none
            (the default).
        padding: `distkeras.Padding` of rows of any length, or a dictionary from columns to theirs. Each row is cut to
            ``longest`` steps, and padded by itself to a length that ``multiple`` permits. Default: neither.

    Raises:
        ConfigurationError: The model is not built, cannot be saved, or has no fixed inputs; the number of columns is
            wrong; a new column already exists; or an input is text, and the backend is not TensorFlow.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
    """

    features_col = param("features_col", "columns to predict from", names_or_mapping, COLUMNS)
    output_col = param("output_col", "new columns", names_or_mapping, COLUMNS)
    batch_size = param("batch_size", "rows a call of the model, at most", *POSITIVE_INTEGER)
    batch_bytes = param("batch_bytes", "of the inputs and outputs of a call, at most", *POSITIVE_INTEGER)
    handle_invalid = param("handle_invalid", "treatment of a row with a null, NaN or another invalid value", *INVALID)
    invalid_col = param("invalid_col", "new column with the reason why a kept row has no prediction", *COLUMN_OR_NONE)

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
        padding: Padding | Mapping[str, Padding] | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(features_col=["features"], output_col=["prediction"], batch_size=1024, batch_bytes=BATCH_BYTES)
        self._setDefault(output_type="array", decode=None, handle_invalid="error", invalid_col="", padding=None)
        self._set_given(
            features_col=features_col, output_col=output_col, batch_size=batch_size, batch_bytes=batch_bytes
        )
        self._set_given(output_type=output_type, decode=decode, handle_invalid=handle_invalid, invalid_col=invalid_col)
        self._set_given(padding=padding)
        self.feature_decoders()  # raises for invalid ones
        if keras_model is not None and not isinstance(keras_model, PackedModel):
            keras_model = PackedModel(archive.to_bytes(keras_model, "keras_model"), custom_objects, keras_model)
        self._model = keras_model

    @property
    def keras_model(self) -> keras.Model:
        """Return a new copy of the model, not compiled."""
        packed = self.packed_model
        return archive.from_bytes(packed.data, packed.objects, trusted=packed.trusted)

    @property
    def packed_model(self) -> PackedModel:
        """Return the model as bytes; raise ConfigurationError if the predictor has none."""
        if self._model is None:
            raise ConfigurationError("`keras_model` must be set. Received: ModelPredictor without keras_model")
        return self._model

    def feature_decoders(self) -> dict[str, Callable[[Any], Any]]:
        """Return the decoders of features by column; raise ConfigurationError if ``decode`` has other columns."""
        features = listed(names_of(self._required("features_col"), "features_col"))
        by_column = decoders(self.getOrDefault("decode"), features)
        if unknown := sorted(by_column.keys() - set(features)):
            raise ConfigurationError(f"`decode` must be of the columns {list(features)}. Received: decode of {unknown}")
        return by_column

    def _transform(self, dataset: DataFrame) -> DataFrame:
        packed = self.packed_model
        features = packed.input_parts.bound(self._required("features_col"), "features_col")
        names = packed.output_parts.bound(self._required("output_col"), "output_col")
        vectors = self._required("output_type") == "vector"
        columns = [
            packed.column(name, output, "vector" if vectors and len(shape) == 1 else "values")
            for output, (name, (shape, _)) in enumerate(zip(names, packed.outputs, strict=True))
        ]
        options = serving.PredictionOptions(
            self._required("batch_size"),
            self._required("batch_bytes"),
            self.feature_decoders(),
            self._required("handle_invalid"),
            self._required("invalid_col"),
            padding=self.getOrDefault("padding"),
        )
        return predicted(dataset, packed, features, columns, options)

    def predict(self, dataframe: DataFrame) -> DataFrame:
        """Call `transform`; this is dist-keras' name for it."""
        return self.transform(dataframe)

    def archive_to_save(self) -> bytes:
        """Return the model as a ``.keras`` archive; raise ConfigurationError if the predictor has none."""
        return self.packed_model.data

    def restore(self, data: bytes | None, saved: Mapping[str, Any]) -> None:
        """Restore the model."""
        assert data is not None, "a predictor without a model is not saved"
        self._model = PackedModel(data)


#: For each session, the functions that build models with tables in files in its tasks, by the models' keys.
_MAPPED: weakref.WeakKeyDictionary[SparkSession, dict[str, Callable[..., MappedModel]]] = weakref.WeakKeyDictionary()


class PackedModel:
    """A model as bytes, with its properties that the driver needs.

    Args:
        data: a ``.keras`` archive.
        custom_objects: classes and functions of the model, by registered name, which `keras.saving` does not know.
        given: the user's own model, whose outputs on drawn rows are compared with those of the loaded one.

    Raises:
        ConfigurationError: the model cannot be loaded, has no fixed inputs, or predicts something else than ``given``.
    """

    def __init__(
        self, data: bytes, custom_objects: Mapping[str, Any] | None = None, given: keras.Model | None = None
    ) -> None:
        self.objects = archive.custom_objects(data)
        self.objects.update(archive.require_objects(custom_objects))
        # Loading it on the driver finds errors before executors do, and discards the optimizer's state.
        with keras_config.applied(archive.settings_of(data)):
            model = archive.from_bytes(data, self.objects, trusted=archive.trusted_code(data))
            attributes = archive.attributes_in(data)
            if given is not None:
                attributes = attributes_of_model(given, model)
                set_attributes_of_model(model, attributes)
                require_same_outputs(given, model)
            #: Attributes of the model that its configuration lacks.
            self.attributes = attributes
            self.data = archive.with_attributes(archive.to_bytes(model), attributes)
        self.inputs = [(tuple(tensor.shape[1:]), dtype_of_input(tensor)) for tensor in _tensors(model, "inputs")]
        self.outputs = [(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in _tensors(model, "outputs")]
        #: For each input whose values an Embedding looks up: its name and its rows.
        self.tables = [table_of(model, tensor) for tensor in _tensors(model, "inputs")]
        self.input_parts, self.output_parts = inputs_of(model), outputs_of(model)
        for shape, _ in self.inputs:
            if shape.count(None) > 1:
                raise ConfigurationError(
                    f"`keras_model` must leave at most one extent of an input open. Received: shape={shape}"
                )
        self.settings = archive.settings_of(self.data)
        self.trusted = archive.trusted_code(self.data)
        digest = hashlib.sha256(self.data + repr(self.settings).encode())
        # Two notebook classes of one name may differ, although the archives are equal.
        self.key = digest.hexdigest() + (f"-{uuid.uuid4().hex}" if self.objects else "")
        self._maps = mapped_tables.has_wide_tables(model) and not _has_lambda_only(model)
        self._maps_losses = self._maps and not mapped_tables.has_activity_losses(model)
        self._sent: weakref.WeakKeyDictionary[SparkSession, Callable[[], bytes]] = weakref.WeakKeyDictionary()

    @property
    def input_dtypes(self) -> list[str]:
        """Return the numpy names of the inputs' dtypes."""
        return [dtype for _, dtype in self.inputs]

    def require_backend(self, features: Sequence[str]) -> None:
        """Raise ConfigurationError if an input is text, which of Keras' backends only TensorFlow has.

        Args:
            features: a column for each input.
        """
        import keras

        backend = keras.backend.backend()
        for name, column, dtype in zip(self.input_parts.names, features, self.input_dtypes, strict=True):
            if dtype == TEXT and backend != "tensorflow":
                raise ConfigurationError(
                    "a model of text can predict on TensorFlow only: set KERAS_BACKEND=tensorflow, or apply its "
                    "TextVectorization or StringLookup to the rows first, and predict with a model of the numbers. "
                    f"Received: the input {name!r} of text, on the backend {backend!r}",
                    column=column,
                )

    def archive_reader(self, spark: SparkSession) -> Callable[[], bytes]:
        """Return a function that reads the archive in tasks of ``spark``; the archive is sent once per session."""
        if spark not in self._sent:
            self._sent[spark] = _sent(spark, f"{self.key}.keras", self.data)
        return self._sent[spark]

    def loader(self, spark: SparkSession, recipe: Recipe, spec: DataSpec) -> Callable[[], keras.Model | MappedModel]:
        """Return what makes tasks of ``spark`` the compiled model: with its wide tables in files where that can be."""
        if self._maps_losses:
            columns = [user_names(column.name, column.parts) for column in spec.features]
            return partial(self._table_mapper(spark), columns, self.objects, recipe.build)
        read = self.archive_reader(spark)
        return lambda: recipe.build(read())

    def _table_mapper(self, spark: SparkSession) -> Callable[..., MappedModel]:
        """Return a function that builds the model with wide tables in files in tasks of ``spark``."""
        sent = _MAPPED.setdefault(spark, {})
        if self.key not in sent:
            parts, tables = mapped_tables.split_tables(archive.from_bytes(self.data, self.objects), self.objects)
            # Executors may fetch a file until the session ends.
            folder = Path(tempfile.mkdtemp(prefix="distkeras-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            files = mapped_tables.save_tables(tables, folder)
            for file in files:
                _add_file(spark, file)
            names = [file.name for file in files]
            rest = _sent(spark, f"distkeras-{self.key}-rest.keras", parts.rest)
            sent[self.key] = partial(_mapped_model, replace(parts, rest=b""), rest, names)
        return sent[self.key]

    def column(self, name: str, output: int, form: str = "values", **options: Any) -> OutputColumn:
        """Return a new column of output number ``output``; ``options`` are those of `OutputColumn`."""
        shape, dtype = self.outputs[output]
        return OutputColumn(name, output, form, len(shape), dtype, **options)

    def plan(
        self,
        spark: SparkSession,
        features: Sequence[str],
        columns: Sequence[OutputColumn],
        options: serving.PredictionOptions,
        parts: Mapping[str, tuple[Part, ...]],
    ) -> serving.PredictionPlan:
        """Return the plan of prediction for tasks of ``spark``; ``parts`` are the parts of assembled columns."""
        maps = self._maps and options.models is None
        if options.padding is not None:
            given = zip(features, self.inputs, self.tables, strict=True)
            of_steps = [
                Column(n, shape, dtype, table=table) for n, (shape, dtype), table in given if shape[:1] == (None,)
            ]
            require_paddings(options.padding, of_steps)
        return serving.PredictionPlan(
            read_archive=bytes if maps else self.archive_reader(spark),
            key=self.key,
            objects=self.objects,
            settings=self.settings,
            trusted=self.trusted,
            inputs=tuple(
                serving.ModelInput(
                    name, shape, dtype, options.decode.get(name), parts.get(name, ()), table, options.padding_of(name)
                )
                for name, (shape, dtype), table in zip(features, self.inputs, self.tables, strict=True)
            ),
            columns=tuple(columns),
            row_bytes=_row_bytes(self.inputs) + _row_bytes(self.outputs),
            step_outputs=tuple(shape for shape, _ in self.outputs if None in shape),
            options=options,
            map_tables=self._table_mapper(spark) if maps else None,
        )


def _has_lambda_only(model: keras.Model) -> bool:
    """Return whether a model has a `Lambda`, whose code is permitted in the whole model only, and can be sent whole."""
    import keras

    lambdas = any(isinstance(layer, keras.layers.Lambda) for layer in named_layers(model).values())
    return lambdas and not has_rows_at_server(model)


def _sent(spark: SparkSession, name: str, data: bytes) -> Callable[[], bytes]:
    """Send bytes to executors, and return a function that reads them in tasks."""
    if len(data) <= _INLINE_BYTES:
        return partial(bytes, data)
    if (context := context_of(spark)) is not None:  # each executor fetches a broadcast once, when it is first read
        variable = context.broadcast(data)
        return lambda: variable.value
    with tempfile.TemporaryDirectory(prefix="distkeras-") as directory:
        path = Path(directory, name)
        path.write_bytes(data)
        _add_file(spark, path)
    return partial(_artifact_bytes, path.name)


def _add_file(spark: SparkSession, path: Path) -> None:
    """Send a file to every executor, where tasks find it by its name."""
    if (context := context_of(spark)) is None:
        spark.addArtifacts(str(path), file=True)
    else:
        context.addFile(str(path))


def _mapped_model(
    parts: ModelParts,
    read_rest: Callable[[], bytes],
    names: Sequence[str],
    columns: Sequence[str],
    objects: archive.CustomObjects,
    build: Callable[[bytes], keras.Model] | None = None,
) -> MappedModel:
    from pyspark.core.files import SparkFiles

    files = [Path(SparkFiles.get(name)) for name in names]
    return MappedModel(replace(parts, rest=read_rest()), files, columns, objects, build)


def _artifact_bytes(name: str) -> bytes:
    from pyspark.core.files import SparkFiles

    return Path(SparkFiles.get(name)).read_bytes()


def _row_bytes(tensors: Sequence[tuple[tuple[int | None, ...], str]]) -> int:
    # An open extent counts as 1, and every dtype as four bytes, which nearly all have.
    return sum(math.prod(extent or 1 for extent in shape) * 4 for shape, _ in tensors)


def _tensors(model: keras.Model, name: str) -> list[Any]:
    tensors = getattr(model, name, None)
    if not tensors:
        raise ConfigurationError(
            "`keras_model` must be a Functional or Sequential model, whose inputs and outputs have a shape: "
            "wrap another one as `keras.Model(inputs, model(inputs))`. "
            f"Received: keras_model={model.name!r} of {type(model)} without {name}"
        )
    return list(tensors)
