"""The results of a job that trains a model for each group: a table, and the models by key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distkeras.data.schema import map_in_arrow
from distkeras.groups.keys import Key, distinct_keys, key_of, key_text
from distkeras.groups.pieces import SHOWN, WEIGHTS, Manifest, Pieces, folder, key_columns, opened, unpacked_weights
from distkeras.keras_model.recipe import Recipe
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras
    import pyarrow.parquet as pq
    from pyspark.sql import DataFrame, SparkSession

#: The most bytes of weights that a process caches.
_KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class GroupTable:
    """The location of the trained groups; it is sent to executors.

    Args:
        names: of the valid pieces.
    """

    uri: str
    schema: pa.Schema
    names: tuple[str, ...]

    @classmethod
    def open(cls, uri: str, manifest: Manifest) -> GroupTable:
        """Return the table of a finished job.

        Raises:
            ConfigurationError: the job in the folder is not finished.
            SnapshotError: the folder cannot be read.
        """
        if not manifest.pieces:
            raise ConfigurationError(
                f"{uri!r} must hold the models of a finished job. Received: one that is not finished"
            )
        return cls(uri, opened(folder(uri), manifest.pieces[0]).schema_arrow, manifest.pieces)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the columns of a key."""
        return key_columns(self.schema)

    def read(self, columns: Sequence[str], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the pieces ``names``: their keys, and the named columns."""
        pieces = Pieces(self.uri, self.schema)
        for name in names:
            yield from pieces.table(name, columns).to_batches()

    def dataframe(self, session: SparkSession, columns: Sequence[str]) -> DataFrame:
        """Return all rows as a DataFrame: their keys, and the named columns."""
        from pyspark.sql.pandas.types import from_arrow_schema

        fields = [self.schema.field(name) for name in (*self.key_names, *columns)]
        schema = from_arrow_schema(pa.schema(fields))
        table = self

        def read(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for record in records:
                yield from table.read(columns, record.column(0).to_pylist())

        rows = [(name,) for name in self.names]
        return map_in_arrow(session.createDataFrame(rows, "piece string"), read, schema)


class WeightsByKey:
    """Looks up weights in the pieces, and caches the most recently used ones."""

    def __init__(self, table: GroupTable) -> None:
        self._table = table
        self._pieces = Pieces(table.uri, table.schema)
        self._places: dict[Key, tuple[str, int, str | None]] = {}
        for name in table.names:
            rows = self._pieces.table(name, ["error"])
            keys = zip(self._pieces.keys(rows), rows["error"].to_pylist(), strict=True)
            self._places.update((key, (name, row, error)) for row, (key, error) in enumerate(keys))
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._kept: OrderedDict[Key, bytes] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def reason_without_model(self, key: Key) -> str | None:
        """Return why there is no model for a key; None if there is one."""
        place = self._places.get(key)
        text = key_text(key, self._table.key_names)
        if place is None:
            return f"there is no model for {text}"
        return None if place[2] is None else f"the model for {text} was not trained: {place[2]}"

    def weights(self, key: Key) -> bytes:
        """Return the weights for a key that has a model."""
        data = self._kept.get(key)
        if data is None:
            name, row, _ = self._places[key]
            data = self._read(name, row)
            self._kept[key] = data
            self._kept_bytes += len(data)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(key)
        return data

    def _read(self, name: str, row: int) -> bytes:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = self._pieces.open(name)
            if len(self._files) > 8:
                self._files.popitem(last=False)
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if row < rows:
                data: bytes = file.read_row_group(number, columns=[WEIGHTS]).column(0)[row].as_py()
                return data
            row -= rows
        raise IndexError(row)


def load_weights(model: keras.Model, data: bytes) -> None:
    """Set the weights of a model from those of a group."""
    kinds = [(tuple(weight.shape), np.dtype(weight.dtype)) for weight in model.weights]
    for weight, value in zip(model.weights, unpacked_weights(data, kinds), strict=True):
        weight.assign(value.copy())  # a backend may keep a reference to the array


#: The lookup that this process used last.
_lookup = lru_cache(maxsize=1)(WeightsByKey)


@dataclass(frozen=True)
class GroupModels:
    """The models of groups, for the rows of record batches. Travels to executors.

    Args:
        columns: names of the columns of a key in the batches.
    """

    table: GroupTable
    columns: tuple[str, ...]

    @property
    def key_names(self) -> tuple[str, ...]:
        """The columns of a key as the user names them."""
        return self.table.key_names

    def reason_without_model(self, batch: pa.RecordBatch) -> list[str | None]:
        """Return for each row why there is no model for its key; None if there is one."""
        keys, places = self._keys(batch)
        lookup = _lookup(self.table)
        reasons = [lookup.reason_without_model(key) for key in keys]
        return [reasons[place] for place in places]

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
        """Yield for each key in a batch the places of its rows, and a function that loads its weights into a model."""
        keys, places = self._keys(batch)
        lookup = _lookup(self.table)
        for number, key in enumerate(keys):
            yield np.flatnonzero(places == number), partial(load_weights, data=lookup.weights(key))

    def _keys(self, batch: pa.RecordBatch) -> tuple[list[Key], np.ndarray]:
        return distinct_keys([batch.column(name) for name in self.columns])


class GroupResults:
    """The models of all groups, and a table with the outcome of each training.

    Attributes:
        path: the folder with the models; a job without ``path`` keeps it until the process ends.
    """

    def __init__(self, session: SparkSession, table: GroupTable, recipe: Recipe, model_file: bytes) -> None:
        self.session, self.stored = session, table
        self.recipe, self.model_file = recipe, model_file
        self.path = table.uri
        self._lookup: WeightsByKey | None = None

    @property
    def table(self) -> DataFrame:
        """One row a group: the columns of its key, rows, seconds, loss, metrics, and error, or null.

        Loss and metrics are means over the rows of the last epoch. They are null if there is an error.
        """
        return self.stored.dataframe(self.session, [name for name, _ in SHOWN])

    @property
    def weights(self) -> DataFrame:
        """One row a group: the columns of its key, and ``weights``, or null.

        The weights are the arrays of `keras.Model.get_weights`, each in C order, one after the other as bytes.
        """
        return self.stored.dataframe(self.session, [WEIGHTS]).withColumnRenamed(WEIGHTS, "weights")

    def model(self, key: Any) -> keras.Model:
        """Return the model of one group, compiled like the trainer's.

        Args:
            key: the value of the column, or a mapping with the value of each column.

        Raises:
            ConfigurationError: there is no such group, or its training failed; the text says why.
        """
        names = self.stored.key_names
        group_key = key_of(key, names)
        if self._lookup is None:
            self._lookup = WeightsByKey(self.stored)
        reason = self._lookup.reason_without_model(group_key)
        if reason is not None:
            raise ConfigurationError(f"`key` must be that of a trained group: {reason}. Received: key={key!r}")
        model = self.recipe.build(self.model_file)
        load_weights(model, self._lookup.weights(group_key))
        return model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(by={list(self.stored.key_names)}, path={self.path!r})"
