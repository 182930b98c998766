"""The prediction of a stream in a task, on executors, with versions that another stream publishes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distkeras.keras_model.variables import VariableVector, moving_statistics, trainable_variables
from distkeras.ps.checkpoint.versions import Version, VersionFolder, version_named
from distkeras.ps.errors import ConfigurationError
from distkeras.spark.failures import message_first

if TYPE_CHECKING:
    import keras

#: Temporary columns: the version's name, and its number.
NAME, NUMBER = "__distkeras_version_name", "__distkeras_version"
#: The local properties in which Spark stores a streaming query's id, and the number of its micro-batch.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass(frozen=True)
class PublishedModels:
    """The versions in a directory, for rows with a column that names their version. Travels to executors.

    Args:
        model: the key of the model of these versions.
        columns: the name of the column with the version's name.
    """

    uri: str
    model: str
    columns: tuple[str, ...] = (NAME,)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The same as `columns`."""
        return (NAME,)

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The same as `columns`."""
        return (NAME,)

    def reason_without_model(self, batch: pa.RecordBatch) -> list[str | None]:
        """Return None for each row: every version has a model."""
        return [None] * batch.num_rows

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
        """Yield for each version in a batch the places of its rows, and a function that loads it into a model."""
        names = batch.column(self.columns[0])
        for name in pc.unique(names).to_pylist():
            yield np.flatnonzero(pc.equal(names, name)), partial(self._load, name=name)

    def _load(self, model: keras.Model, name: str) -> None:
        loaded = _LOADED.get(model)
        if loaded is None:
            loaded = _LOADED[model] = _Loaded(model)
        loaded.load(self, name)


class _Loaded:
    """A model of this process, and the version of its weights."""

    def __init__(self, model: keras.Model) -> None:
        self._weights = VariableVector(trainable_variables(model))
        self._moving_statistics = VariableVector(moving_statistics(model))
        self._version: tuple[str, str] | None = None

    def load(self, models: PublishedModels, name: str) -> None:
        """Load the weights of a version into the model, unless it has them."""
        if self._version == (models.uri, name):
            return
        version = version_named(name)
        assert version is not None, name
        with message_first():
            center, statistics = VersionFolder(models.uri).load(version, models.model)
        self._version = None  # until both are loaded
        self._weights.load(center)
        self._moving_statistics.load(statistics)
        self._version = models.uri, name


_LOADED: weakref.WeakKeyDictionary[keras.Model, _Loaded] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class HeldVersion:
    """Yields one row with the version that predicts a micro-batch. Travels to one task of each micro-batch."""

    uri: str

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the version's name and number for the batch that has a row; the other batches are empty."""
        for batch in batches:
            if batch.num_rows:
                with message_first():
                    version = self._version()
                columns = [pa.array([str(version)]), pa.array([version.number], pa.int64())]
                yield pa.RecordBatch.from_arrays(columns, names=[NAME, NUMBER])

    def _version(self) -> Version:
        from pyspark import TaskContext

        context = TaskContext.get()
        query, batch = (None if context is None else context.getLocalProperty(name) for name in (_QUERY, _BATCH))
        if query is None or batch is None:
            raise ConfigurationError(
                "rows of a stream must be read in a streaming query. Received: a task without a query"
            )
        return VersionFolder(self.uri).hold(query, int(batch))
