"""Stages on disk, as Spark ML has them: also written over under Spark Connect; functions as JSON, and no code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.ml.util import DefaultParamsWritable, DefaultParamsWriter, MLWriter

from distkeras.ps.errors import ConfigurationError
from distkeras.spark.cluster import context_of
from distkeras.spark.failures import short_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Bytes of a row: well below what Parquet and a Connect message take.
_CHUNK_BYTES = 8 << 20


def save_archive(spark: SparkSession, data: bytes, path: str) -> None:
    """Write an archive below the folder of a saved stage."""
    rows = [
        (start // _CHUNK_BYTES, bytearray(data[start : start + _CHUNK_BYTES]))
        for start in range(0, len(data), _CHUNK_BYTES)
    ]
    spark.createDataFrame(rows, "part int, data binary").coalesce(1).write.parquet(f"{path}/model")


def load_archive(spark: SparkSession, path: str) -> bytes:
    """Return what `save_archive` has written there."""
    rows = spark.read.parquet(f"{path}/model").orderBy("part").collect()
    return b"".join(bytes(row["data"]) for row in rows)


def config_of(value: Any, name: str) -> Any:
    """Return how Keras describes ``value``, JSON-ready; ConfigurationError if it is not Keras' or registered."""
    import keras

    own = getattr(value, "__module__", type(value).__module__).split(".")[0] == "keras"
    kinds = [kind for kind in (value, type(value)) if callable(kind)]
    if own or any(keras.saving.get_registered_name(kind) in keras.saving.get_custom_objects() for kind in kinds):
        config = keras.saving.serialize_keras_object(value)
        if json.loads(json.dumps(config)) == config:
            return config
    raise ConfigurationError(
        f"`{name}` must be what Keras can describe, to be saved: decorate your own classes and functions with "
        f"`keras.saving.register_keras_serializable()`. Received: {name}={value!r}"
    )


def object_of(config: Any, name: str) -> Any:
    """Return what `config_of` was given; raise ConfigurationError if Keras does not know it in this process."""
    import keras

    try:
        return keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        registered = config.get("registered_name") if isinstance(config, dict) else config
        raise ConfigurationError(
            f"`{name}` must be known to Keras in this process: import the module that registers it before loading. "
            f"Received: {name} of the registered name {registered!r}; Keras said: {error}"
        ) from error


class StageWriter(MLWriter):
    """Spark ML's writer, which cannot overwrite where there is no JVM to ask."""

    @short_errors
    def save(self, path: str) -> None:
        """Save below ``path``; in place of what is there, after `overwrite`."""
        if self.shouldOverwrite and context_of(self.sparkSession) is None:
            # Spark's overwrite leaves nothing of the old folder, on every filesystem.
            self.sparkSession.createDataFrame([], "value string").write.mode("overwrite").text(path)
            self.saveImpl(path)
        else:
            super().save(path)


class ParamsWriter(StageWriter, DefaultParamsWriter):
    """Writes a stage that is parameters only."""


class ParamsWritable(DefaultParamsWritable):
    """A stage that is parameters only."""

    def write(self) -> MLWriter:
        """Return a writer of Spark ML's metadata."""
        return ParamsWriter(self)  # type: ignore[arg-type]  # mixed into classes of parameters only
