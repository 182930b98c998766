"""The latest version of a model that another stream trains, as a Spark ML model that predicts a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from distkeras.callbacks import CenterWeights
from distkeras.data.schema import map_in_arrow
from distkeras.keras_model import archive
from distkeras.keras_model.published_rows import published_rows
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import layers_with_rows_at_server
from distkeras.ml.model import KerasModel, with_predictions
from distkeras.ml.params import with_accessors
from distkeras.ps.checkpoint.versions import Version, VersionFolder
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.world.files import absolute
from distkeras.spark.failures import short_errors
from distkeras.transformers import expressions
from distkeras.transformers.params import COLUMN_OR_NONE, on_dataframe, param
from distkeras.transformers.predictor import PackedModel
from distkeras.transformers.serving import NAME, NUMBER, HeldVersion, PublishedModels

if TYPE_CHECKING:
    import keras
    import numpy as np
    from pyspark.sql import DataFrame


def _directory(value: Any) -> str:
    """Return a URI as it is, and a path as the tasks of a local master find it, which run in another folder."""
    text = fspath(value)
    if not isinstance(text, str) or not text:
        raise ValueError
    return absolute(text)


@with_accessors
class KerasStreamModel(KerasModel):
    """Predict a stream with the latest version that a training stream publishes, and add the version's number.

    ::

        training = trainer.train_stream(clicks, checkpoint="clicks-checkpoint", publish="versions")
        scoring = KerasStreamModel("versions", timeout=60)      # in this process or another one
        scoring.transform(arriving).writeStream                 # "prediction", "version"

    Each micro-batch of the stream is predicted with one version: the latest one at the start of the micro-batch. A
    version has the number of the last micro-batch of the training stream that it covers. A micro-batch that Spark runs
    again after a failure is predicted with the same version, which the publisher keeps until then.

    `transform` of a table, functions of `register_function`, `evaluate`, `predict` and `keras_model` use the latest
    version at the time of the call.

    Its columns are those of `KerasModel`, and ``version_col``.

    Args:
        versions: the directory or URI of ``publish``, which driver and executors can reach. A scoring stream writes
            the versions that it uses there.
        timeout: seconds to wait for the first version.
        version_col: new column with the version's number, a long; "" adds no column. Default: "version".
        keywords: those of `KerasModel`.

    Raises:
        NoVersionError: There is no version yet.
        SnapshotError: The directory cannot be read.
        ConfigurationError: The columns do not fit the model.
    """

    versions = param("versions", "directory that a training stream publishes to", _directory, "a directory or a URI")
    version_col = param("version_col", 'new column with the number of the version; "" for none', *COLUMN_OR_NONE)

    @short_errors
    def __init__(self, versions: str | PathLike[str] | None = None, *, timeout: float = 0.0, **keywords: Any) -> None:
        template, key = None, ""
        if versions is not None:
            folder = VersionFolder(_directory(versions))
            folder.latest(timeout)
            data, key = folder.model()
            template = archive.from_bytes(data, keywords.get("custom_objects"), compiled=True)
        given: dict[str, Any] = {**keywords, "versions": versions}
        super().__init__(template, **given)
        self._setDefault(version_col="version")
        #: Of the model that the versions are of; empty without one.
        self._model_key = key
        #: The version that was loaded last, with the default values of all parameters.
        self._latest: tuple[Version, KerasModel] | None = None

    @property
    def published(self) -> list[int]:
        """Return the numbers of the published versions, oldest first."""
        return [version.number for version in VersionFolder(self._uri).versions()]

    def at(self, number: int | None = None) -> KerasModel:
        """Return the model of one version, with this one's columns.

        Args:
            number: the version's number; None: the latest version.

        Raises:
            NoVersionError: There is no version yet.
            ConfigurationError: There is no version with this number.
            DifferentJobError: The version belongs to another model.
            SnapshotError: The version cannot be read.
        """
        return self._fixed(number)[1]

    def _fixed(self, number: int | None = None) -> tuple[Version, KerasModel]:
        folder = VersionFolder(self._uri)
        if number is None:
            version = folder.latest()
        else:
            by_number = {version.number: version for version in folder.versions()}
            if number not in by_number:
                raise ConfigurationError(f"`number` must be one of {sorted(by_number)}. Received: number={number!r}")
            version = by_number[number]
        if self._latest is None or self._latest[0] != version:
            self._latest = version, self._load(folder, version)
        return version, self._copyValues(self._latest[1].copy())

    def _load(self, folder: VersionFolder, version: Version) -> KerasModel:
        model = archive.from_bytes(self.archive_to_save(), self.value("custom_objects"), compiled=True)
        CenterWeights(0, *folder.load(version, self._model_key)).load(KerasReplica(model))
        if wide := layers_with_rows_at_server(model):
            rows = folder.rows_of(version)
            for layer in wide:
                layer.rows, layer.rows_checksum = published_rows(folder.uri, rows, layer.name)
        return KerasModel(model, custom_objects=self.value("custom_objects"))

    @property
    def _uri(self) -> str:
        uri: str | None = self.value("versions")
        if uri is None:
            raise ConfigurationError("`versions` must be set. Received: KerasStreamModel without versions")
        return uri

    @property
    def keras_model(self) -> keras.Model:
        """Return a new copy of the latest version, compiled as it was trained, without the state of an optimizer."""
        return self.at().keras_model

    @property
    def packed_model(self) -> PackedModel:
        """Return the latest version as bytes, ready to travel."""
        return self.at().packed_model

    def _outputs_of(self, value: Any) -> list[np.ndarray]:
        return self.at()._outputs_of(value)  # noqa: SLF001 - of the same class

    @short_errors
    def evaluate(self, dataset: DataFrame) -> dict[str, Any]:
        """Return loss and metrics of the latest version over a DataFrame; see `KerasModel.evaluate`."""
        return self.at().evaluate(dataset)

    @on_dataframe
    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        column = self.value("version_col")
        if dataset.isStreaming:
            return self._transform_stream(dataset, column)
        version, fixed = self._fixed()
        out = fixed.transform(dataset)
        if column:
            expressions.check_new_columns(out, column)  # new next to the predictions, too
        return out.withColumn(column, F.lit(version.number).cast("long")) if column else out

    def _transform_stream(self, dataset: DataFrame, column: str) -> DataFrame:
        from pyspark.sql import functions as F

        uri, fixed = self._uri, self.at()
        # Spark computes the other side of a join with a stream again in each micro-batch, once: it is broadcast.
        one_row = dataset.sparkSession.range(0, 1, 1, 1)
        version = map_in_arrow(one_row, HeldVersion(uri).rows, f"{NAME} string, {NUMBER} long")
        rows = dataset.crossJoin(F.broadcast(version))
        options = dataclasses.replace(fixed.prediction_options(), models=PublishedModels(uri, self._model_key))
        out = with_predictions(rows, fixed, options)
        if column:
            expressions.check_new_columns(out, column)
        return (out.withColumn(column, F.col(NUMBER)) if column else out).drop(NAME, NUMBER)

    def extra_to_save(self) -> dict[str, Any]:
        """Return what the outputs mean, and the key of the model that the versions are of."""
        return {**super().extra_to_save(), "model_key": self._model_key}

    def restore(self, data: bytes | None, saved: Mapping[str, Any]) -> None:
        """Take back the model, and what `extra_to_save` returned."""
        super().restore(data, saved)
        self._model_key = saved["model_key"]
