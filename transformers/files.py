"""Stages saved in Spark ML's format, also overwritten under Spark Connect; values are JSON, never code."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml import Transformer
from pyspark.ml.param import Param, Params
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWritable,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from distkeras.data.rows import Padding
from distkeras.keras_model import archive
from distkeras.keras_model.attributes import attributes_of, set_attributes
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.private_keras import undecayed
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.schedules import Schedule, schedule_of
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.validate import invalid
from distkeras.settings import GROUPS
from distkeras.spark.cluster import context_of, stage_path
from distkeras.spark.failures import short_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: Bytes of a row: well below the limits of Parquet and of a Connect message.
_CHUNK_BYTES = 8 << 20


def save_archive(spark: SparkSession, data: bytes, path: str) -> None:
    """Write an archive below the folder of a saved stage."""
    rows = [
        (start // _CHUNK_BYTES, bytearray(data[start : start + _CHUNK_BYTES]))
        for start in range(0, len(data), _CHUNK_BYTES)
    ]
    spark.createDataFrame(rows, "part int, data binary").coalesce(1).write.parquet(f"{path}/model")


def load_archive(spark: SparkSession, path: str) -> bytes:
    """Return the archive that `save_archive` has written below ``path``."""
    rows = spark.read.parquet(f"{path}/model").orderBy("part").collect()
    return b"".join(bytes(row["data"]) for row in rows)


def config_of(value: Any, name: str) -> Any:
    """Return Keras' configuration of ``value``, JSON-ready; ConfigurationError unless it is Keras' or registered."""
    import keras

    own = getattr(value, "__module__", type(value).__module__).split(".")[0] == "keras"
    kinds = [kind for kind in (value, type(value)) if callable(kind)]
    if own or any(keras.saving.get_registered_name(kind) in keras.saving.get_custom_objects() for kind in kinds):
        config = keras.saving.serialize_keras_object(value)
        if json.loads(json.dumps(config)) == config:
            return config
    expected = "what Keras can describe, to be saved: decorate your own classes and functions with "
    raise invalid(name, value, f"{expected}`keras.saving.register_keras_serializable()`")


def object_of(config: Any, name: str) -> Any:
    """Reverse `config_of`; raise ConfigurationError if Keras does not know the object in this process."""
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
    """Spark ML's writer, extended: it can also overwrite under Spark Connect."""

    @short_errors
    def save(self, path: str) -> None:
        """Save below ``path``; after `overwrite`, replace what is there."""
        path = stage_path(self.sparkSession, path)
        if self.shouldOverwrite and context_of(self.sparkSession) is None:
            # Writing in Spark's mode "overwrite" removes the old folder, on every filesystem.
            self.sparkSession.createDataFrame([], "value string").write.mode("overwrite").text(path)
            self.saveImpl(path)
        else:
            super().save(path)


class ParamsWriter(StageWriter, DefaultParamsWriter):
    """Writes a stage that consists of parameters only."""


class ParamsWritable(DefaultParamsWritable):
    """A stage that consists of parameters only."""

    def write(self) -> MLWriter:
        """Return a writer of Spark ML's metadata."""
        return ParamsWriter(self)  # type: ignore[arg-type]  # mixed into classes of parameters only


#: The key that marks a JSON object as the description of another value; it holds the kind of that value.
_KIND = "distkeras"
#: Settings of plain fields, by kind.
_SETTINGS: dict[str, type[Any]] = {"deadlines": Deadlines, "checkpoint": Checkpoint, "padding": Padding, **GROUPS}
#: Fields that are valid only in this Spark session, and are not saved.
_OF_THIS_SESSION = {"resources"}


def to_json(value: Any, name: str) -> Any:
    """Return a parameter's value as JSON; ConfigurationError if it could not be read back, such as a callback."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Rule):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {_KIND: "rule", "name": value.name, "fields": to_json(fields, name)}
    if isinstance(value, Schedule):
        return {_KIND: "schedule", "config": value.config()}
    if isinstance(value, PathLike):
        return fspath(value)
    if type(value) in _SETTINGS.values():
        names = [field.name for field in dataclasses.fields(value) if field.name not in _OF_THIS_SESSION]
        return {_KIND: type(value).__name__.lower(), "fields": {name: getattr(value, name) for name in names}}
    if isinstance(value, Mapping):
        return {_KIND: "mapping", "items": [[to_json(key, name), to_json(part, name)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return [to_json(part, name) for part in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return value.item()
    config = config_of(value, name)
    if undecayed(inner_optimizer(value)):
        raise invalid(
            name, value, "an optimizer that excludes weights from decay by `var_names`, to be saved: not `var_list`"
        )
    lacking = attributes_of(value, object_of(copy.deepcopy(config), name)) if hasattr(value, "get_config") else []
    return {_KIND: "keras", "config": config, **({"attributes": lacking} if lacking else {})}


def from_json(value: Any, name: str) -> Any:
    """Reverse `to_json`, except that a tuple is a list; ConfigurationError for a class unknown to Keras."""
    if isinstance(value, list):
        return [from_json(part, name) for part in value]
    if not isinstance(value, dict):
        return value
    if value[_KIND] == "rule":
        fields = from_json(value["fields"], name)
        return make(value["name"], **{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})
    if value[_KIND] == "schedule":
        return schedule_of(value["config"])
    if value[_KIND] in _SETTINGS:
        return _SETTINGS[value[_KIND]](**value["fields"])
    if value[_KIND] == "mapping":
        return {from_json(key, name): from_json(part, name) for key, part in value["items"]}
    rebuilt = object_of(value["config"], name)
    set_attributes(rebuilt, value.get("attributes", []))
    return rebuilt


class Saveable(Params, MLReadable[Any], MLWritable, ABC):
    """A stage of parameters, optionally a Keras model, and few other data; ``left_out`` are not written."""

    left_out: tuple[str, ...] = ()

    def write(self) -> KerasMLWriter:
        """Return a writer of parameters and model."""
        return KerasMLWriter(self)

    @classmethod
    def read(cls) -> KerasMLReader[Any]:
        """Return a reader of saved stages."""
        return KerasMLReader(cls)

    @abstractmethod
    def archive_to_save(self) -> bytes | None:
        """Return the model as a ``.keras`` archive, with its optimizer; None if there is no model."""

    def extra_to_save(self) -> dict[str, Any]:
        """Return further values to save, in addition to parameters and model, JSON-ready."""
        return {}

    def save_files(self, path: str) -> None:
        """Write further files below ``path``, where the stage is saved."""
        return

    def load_files(self, spark: SparkSession, path: str) -> None:
        """Read the files that `save_files` wrote below ``path``."""
        return

    @abstractmethod
    def restore(self, data: bytes | None, saved: Mapping[str, Any]) -> None:
        """Restore the stage from the archive, and from the values that `extra_to_save` returned."""


_S = TypeVar("_S", bound=Saveable)


class SavedValue(Transformer, Saveable):
    """A stage that wraps a parameter's value that JSON cannot represent, such as an optimizer or a model.

    Spark's searches write each value of a grid as JSON, or as a stage in a folder of its own. So parameters store such
    values as stages. `KerasEstimator.getOrDefault` and the getters return the value itself; a search's
    ``getEstimatorParamMaps`` returns this stage, with the value as ``value``.
    """

    def __init__(self, value: Any = None, name: str = "") -> None:
        super().__init__()
        self.value, self.name = value, name

    def __repr__(self) -> str:
        return repr(self.value)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        raise ConfigurationError(f"a stage must transform rows. Received: the value of the parameter {self.name!r}")

    def archive_to_save(self) -> bytes | None:
        """Return the archive of a model; None for other values."""
        return archive.to_save(self.value) if self._is_model() else None

    def extra_to_save(self) -> dict[str, Any]:
        """Return the description of a value that is not a model."""
        return {"name": self.name, "value": None if self._is_model() else to_json(self.value, self.name)}

    def restore(self, data: bytes | None, saved: Mapping[str, Any]) -> None:
        """Restore the value from an archive, or from its description."""
        self.name = str(saved["name"])
        if data is None:
            self.value = from_json(saved["value"], self.name)
        else:
            self.value = archive.from_bytes(data, compiled=True)

    def _is_model(self) -> bool:
        import keras

        return isinstance(self.value, keras.Model)


def saveable(param: Param[Any]) -> Param[Any]:
    """Return a parameter like ``param``, whose values Spark's searches can save; see `SavedValue`."""
    convert: Callable[[Any], Any] = param.typeConverter

    @functools.wraps(convert)
    def converted(value: Any) -> Any:
        value = convert(unwrapped(value))
        return value if _is_json(value) else SavedValue(value, param.name)

    return Param(Params._dummy(), param.name, param.doc, converted)  # noqa: SLF001 - as Spark ML's own mixins


def unwrapped(value: Any) -> Any:
    """Return the value inside a `SavedValue`, and any other value unchanged."""
    return value.value if isinstance(value, SavedValue) else value


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_json(part) for part in value)
    return value is None or isinstance(value, (str, bool, int, float))


class KerasMLWriter(StageWriter):
    """Writes metadata, parameters as JSON, and the archive as rows of Parquet next to them."""

    def __init__(self, instance: Saveable) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        """Write below ``path``."""
        spark = self.sparkSession
        params = {
            param.name: to_json(unwrapped(value), param.name)
            for param, value in self.instance._paramMap.items()  # noqa: SLF001 - as Spark ML's own writers do
            if param.name not in self.instance.left_out
        }
        bare = self.instance.copy()
        bare._paramMap, bare._defaultParamMap = {}, {}  # noqa: SLF001 - Spark ML's writer would encode the values
        data = self.instance.archive_to_save()
        extra = {"distkeras": {"params": params, "archive": data is not None, **self.instance.extra_to_save()}}
        DefaultParamsWriter.saveMetadata(bare, path, spark, extraMetadata=extra)
        if data is not None:
            save_archive(spark, data, path)
        self.instance.save_files(path)


class KerasMLReader(MLReader[_S]):
    """Reads stages that `KerasMLWriter` has written: sets the parameters of ``kind()``, and restores the rest."""

    def __init__(self, kind: type[_S]) -> None:
        super().__init__()
        self.kind = kind

    @short_errors
    def load(self, path: str) -> _S:
        """Return the stage that was saved below ``path``."""
        spark = self.sparkSession
        path = stage_path(spark, path)
        metadata = DefaultParamsReader.loadMetadata(path, spark)
        if metadata["class"].rpartition(".")[2] != self.kind.__name__:
            raise ConfigurationError(f"{path} must hold a {self.kind.__name__}. Received: {metadata['class']}")
        saved = metadata["distkeras"]
        instance = self.kind()
        instance._resetUid(metadata["uid"])  # noqa: SLF001 - as Spark ML's own readers do
        for name, value in saved["params"].items():
            instance._set(**{name: from_json(value, name)})  # noqa: SLF001 - as Spark ML's own readers do
        instance.restore(load_archive(spark, path) if saved["archive"] else None, saved)
        instance.load_files(spark, path)
        return instance
