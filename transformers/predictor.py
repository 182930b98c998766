"""A Keras model as a Spark ML stage that predicts."""

from __future__ import annotations

import hashlib
import math
import tempfile
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame, SparkSession

from distkeras.cluster.failures import short_errors
from distkeras.data.binding import inputs_of, listed, names_of, outputs_of
from distkeras.data.decoding import decoders
from distkeras.keras_model import archive
from distkeras.keras_model.registered import config_of, object_of
from distkeras.ps.errors import ConfigurationError
from distkeras.transformers import serving
from distkeras.transformers.archive_files import load_archive, save_archive
from distkeras.transformers.outputs import OutputColumn
from distkeras.transformers.params import (
    HasDecode,
    HasOutputType,
    StageTransformer,
    integer_from,
    names_or_mapping,
    param,
)
from distkeras.transformers.prediction import column_type, predicted
from distkeras.transformers.writing import StageWriter

if TYPE_CHECKING:
    import keras

#: Archives up to here travel in the closure: far below what a Spark Connect message holds.
_INLINE_BYTES = 4 << 20

#: What a parameter of columns takes.
COLUMNS = "a name, distinct names, or a mapping: name of an input or output of the model to a distinct name"
#: Of the inputs and outputs of a call of the model, unless told otherwise.
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
        custom_objects: classes and functions of the model, by registered name, beside what `keras.saving` knows. They
            travel to the workers, and are not saved: whoever loads the predictor registers them.
        decode: function from the value of the column of features to an array of the input's shape, or a dictionary with
            one for some columns, as in `Trainer`. To be saved, a function is registered with `keras.saving`.

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

    @short_errors
    def __init__(
        self,
        keras_model: keras.Model | PackedModel | None = None,
        features_col: str | Sequence[str] | Mapping[str, str] | None = None,
        output_col: str | Sequence[str] | Mapping[str, str] | None = None,
        batch_size: int | None = None,
        output_type: str | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        batch_bytes: int | None = None,
        decode: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(features_col=["features"], output_col=["prediction"], batch_size=1024, output_type="array")
        self._setDefault(batch_bytes=BATCH_BYTES, decode=None)
        self._set_given(
            features_col=features_col, output_col=output_col, batch_size=batch_size, batch_bytes=batch_bytes
        )
        self._set_given(output_type=output_type, decode=decode)
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
        found = decoders(self.getOrDefault("decode"), features)
        if unknown := sorted(found.keys() - set(features)):
            raise ConfigurationError(f"`decode` must be of the columns {list(features)}. Received: decode of {unknown}")
        return found

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
        return predicted(dataset, packed, features, columns, limits, self.feature_decoders())

    def write(self) -> MLWriter:
        """Writes Spark ML's metadata, and the model beside it."""
        return _Writer(self)

    @classmethod
    def read(cls) -> _Reader:
        """Reads what `write` has written."""
        return _Reader(cls)


class PackedModel:
    """A model as bytes, with what the driver must know about it.

    Args:
        data: a ``.keras`` archive.
        custom_objects: classes and functions of the model, by registered name, beside what `keras.saving` knows.

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
        # Two notebook classes of one name may differ, and bytes do not tell.
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
    """Spark ML's metadata, and the archive as rows of Parquet beside it."""

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
            predictor._set(decode={column: object_of(config, "decode") for column, config in functions.items()})  # noqa: SLF001 - likewise
        return predictor
