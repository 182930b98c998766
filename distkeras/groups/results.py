"""The results of a job that trains a model for each group: a table, and the models by key."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError

from distkeras.data.schema import field_of, quoted
from distkeras.groups.keys import key_as_text, key_row, plain_keys, require_plain, same_key
from distkeras.groups.replica import load_weights
from distkeras.groups.store import CRC, ID, LARGE, SHOWN, WEIGHTS, StoredGroups
from distkeras.keras_model.recipe import Recipe
from distkeras.ps.errors import ConfigurationError, DistkerasError
from distkeras.ps.world.files import open_files
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

#: The most bytes of weights that a process caches, and the most files that it keeps open.
_KEPT_BYTES, _OPEN_MAX = 256 << 20, 8
#: Columns of rows to predict, next to the user's: the name of the group's row, and why it has no model.
GROUP, REASON = "__distkeras_group", "__distkeras_no_model"


class WeightsById:
    """Looks up weights by the names of the groups' rows, and caches the most recently used ones."""

    def __init__(self, stored: StoredGroups) -> None:
        self._stored = stored
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        #: For each row: the file, and its place there.
        self._places: dict[str, tuple[str, int]] = {}
        for name in stored.files:
            names, are_large = self._read(partial(self._columns, name, [ID, LARGE]))
            for row, (group, large) in enumerate(zip(names, are_large, strict=True)):
                if not large:
                    self._places[group] = name, row
        if len(self._places) != stored.count:
            raise stored.lost(f"{len(self._places)} groups instead of {stored.count}")

    def weights(self, group: str) -> bytes:
        """Return the weights of a group that has a model."""
        data = self._kept.get(group)
        if data is None:
            if group not in self._places:
                raise self._stored.lost(f"no row {group!r}")
            data = self._read(partial(self._weights_at, *self._places[group], group))
            self._kept[group] = data
            self._kept_bytes += len(data)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(group)
        return data

    def by_key(self) -> Iterator[tuple[tuple[Any, ...], str, str | None]]:
        """Yield the key of each group, of the types that `require_plain` accepts, its row's name, and its error."""
        for name in self._stored.files:
            yield from self._read(partial(self._keys, name))

    def _file(self, name: str) -> pq.ParquetFile:
        if name not in self._files:
            data = b"".join(open_files(self._stored.uri, create=False).read(name))
            self._files[name] = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
            if len(self._files) > _OPEN_MAX:
                self._files.popitem(last=False)
        return self._files[name]

    def _columns(self, name: str, columns: list[str]) -> list[list[Any]]:
        table = self._file(name).read(columns=columns)
        return [table[column].to_pylist() for column in columns]

    def _keys(self, name: str) -> Iterator[tuple[tuple[Any, ...], str, str | None]]:
        table = self._file(name).read(columns=[*self._stored.key_names, ID, "error", LARGE])
        table = table.filter(pc.invert(table[LARGE]))
        keys = plain_keys([table[key] for key in self._stored.key_names])
        return zip(keys, table[ID].to_pylist(), table["error"].to_pylist(), strict=True)

    def _weights_at(self, name: str, row: int, group: str) -> bytes:
        file = self._file(name)
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if row < rows:
                found = file.read_row_group(number, columns=[ID, CRC, WEIGHTS]).slice(row, 1).to_pylist()[0]
                if found[ID] == group and found[WEIGHTS] is not None and zlib.crc32(found[WEIGHTS]) == found[CRC]:
                    weights: bytes = found[WEIGHTS]
                    return weights
                break
            row -= rows
        raise self._stored.lost(f"other weights in the row {group!r}")

    def _read(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, which reads files; a damaged one may have other columns, texts and sizes."""
        try:
            return call()
        except DistkerasError:
            raise
        except Exception as error:
            raise self._stored.lost(f"{type(error).__name__}: {error}") from error


#: The lookups that this process used last.
_lookup = lru_cache(maxsize=1)(WeightsById)


@lru_cache(maxsize=1)
def _by_key(stored: StoredGroups) -> dict[tuple[Any, ...], tuple[str, str | None]]:
    return {key: (group, error) for key, group, error in _lookup(stored).by_key()}


@dataclass(frozen=True)
class JoinedGroups:
    """The models of groups, for record batches with the columns `GROUP` and `REASON`. Travels to executors."""

    stored: StoredGroups
    columns: tuple[str, ...] = (GROUP, REASON)

    @property
    def key_names(self) -> tuple[str, ...]:
        return (GROUP, REASON)

    @property
    def shown_names(self) -> tuple[str, ...]:
        return self.stored.key_names

    def reason_without_model(self, batch: pa.RecordBatch) -> list[str | None]:
        reasons: list[str | None] = batch.column(self.columns[1]).to_pylist()
        return reasons

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
        yield from _parts(self.stored, batch.column(self.columns[0]).to_pylist())


def joined(df: DataFrame, stored: StoredGroups) -> DataFrame:
    """Return rows with the name of the group's row (`GROUP`), and why it has no model, or null (`REASON`)."""
    from pyspark.sql import functions as F

    names = {field_of(df.schema.fields, name).name: f"__distkeras_key_{n}" for n, name in enumerate(stored.key_names)}
    groups = stored.read(df.sparkSession).select(*map(quoted, names), ID, "error").withColumnsRenamed(names)
    keyed = df.withColumns({alias: F.col(quoted(name)) for name, alias in names.items()})
    rows = keyed.join(F.broadcast(groups), same_key(keyed, groups, list(names.values())), "left")
    text = key_as_text(stored.key_names, [keyed[alias] for alias in names.values()])
    missing = F.when(groups[ID].isNull(), F.concat(F.lit("there is no model for "), text))
    failed = F.concat(F.lit("the model for "), text, F.lit(" was not trained: "), groups["error"])
    own = [keyed[quoted(name)] for name in df.columns]
    return rows.select(*own, groups[ID].alias(GROUP), missing.otherwise(failed).alias(REASON))


@dataclass(frozen=True)
class GroupModels:
    """The models of groups, for the arguments of a function of SQL, where Spark cannot look up the groups."""

    stored: StoredGroups
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        require_plain(self.stored.key_fields)

    @property
    def key_names(self) -> tuple[str, ...]:
        return self.stored.key_names

    @property
    def shown_names(self) -> tuple[str, ...]:
        return self.key_names

    def reason_without_model(self, batch: pa.RecordBatch) -> list[str | None]:
        by_key, reasons = _by_key(self.stored), list[str | None]()
        shown = zip(*(_texts(batch.column(name)) for name in self.columns), strict=True)
        for key, values in zip(self._keys(batch), shown, strict=True):
            text = ", ".join(f"{name}={value}" for name, value in zip(self.key_names, values, strict=True))
            group, error = by_key.get(key, (None, None))
            reason = None if error is None else f"the model for {text} was not trained: {error}"
            reasons.append(f"there is no model for {text}" if group is None else reason)
        return reasons

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
        by_key = _by_key(self.stored)
        yield from _parts(self.stored, [by_key[key][0] for key in self._keys(batch)])

    def _keys(self, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        return plain_keys([batch.column(name) for name in self.columns])


def _texts(column: pa.Array) -> list[Any]:
    """Return values for messages; not all of Spark's strings are UTF-8."""
    if pa.types.is_string(column.type):
        values = column.cast(pa.binary()).to_pylist()
        return [None if value is None else value.decode(errors="replace") for value in values]
    texts: list[Any] = column.to_pylist()
    return texts


def _parts(stored: StoredGroups, groups: Sequence[str]) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
    lookup = _lookup(stored)
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    for group, of_group in places.items():
        yield np.array(of_group), partial(load_weights, data=lookup.weights(group))


class GroupResults:
    """The models of all groups, and a table with the outcome of each training.

    Attributes:
        path: the folder with the models; a job without ``path`` keeps it until the process ends.
    """

    def __init__(self, session: SparkSession, stored: StoredGroups, recipe: Recipe, model_file: bytes) -> None:
        self.session, self.stored = session, stored
        self.recipe, self.model_file = recipe, model_file
        self.path = stored.uri

    @property
    def table(self) -> DataFrame:
        """One row per group: the columns of its key, rows, seconds, loss, metrics, and error, or null.

        Loss and metrics are means over the rows of the last epoch. They are null if there is an error. A job that reads
        a damaged row fails with the text of a SnapshotError.
        """
        return self._rows(*(name for name, _ in SHOWN))

    @property
    def weights(self) -> DataFrame:
        """One row per group: the columns of its key, and ``weights``, or null.

        The weights are the arrays of `keras.Model.get_weights`, each in C order, one after the other as bytes.
        """
        return self._rows(WEIGHTS).withColumnRenamed(WEIGHTS, "weights")

    def _rows(self, *names: str) -> DataFrame:
        return self.stored.read(self.session).select(*map(quoted, self.stored.key_names), *names)

    def model(self, key: Any) -> keras.Model:
        """Return the model of one group, compiled like the trainer's.

        Args:
            key: the value of the column; or a mapping, or a row of `table`, with the value of each column.

        Raises:
            ConfigurationError: there is no such group, or its training failed; the text says why.
            SnapshotError: the files of the groups are missing or damaged.
        """
        from pyspark.errors import PySparkException

        row = key_row(self.session, self.stored.key_fields, key)
        names = self.stored.key_names
        try:
            table = self.stored.read(self.session)
            found = table.join(row, same_key(table, row, names), "left_semi").select("error", WEIGHTS).first()
            if found is None and (count := table.count()) != self.stored.count:
                raise self.stored.lost(f"{count} groups instead of {self.stored.count}")
        except (PySparkException, Py4JError) as error:
            raise typed_error(error, self.session) from None
        if found is None or found["error"] is not None:
            text = row.select(key_as_text(names).alias("key")).collect()[0]["key"]
            reason = f"there is no model for {text}"
            if found is not None:
                reason = f"the model for {text} was not trained: {found['error']}"
            raise ConfigurationError(f"`key` must be that of a trained group: {reason}. Received: key={key!r}")
        model = self.recipe.build(self.model_file)
        load_weights(model, bytes(found[WEIGHTS]))
        return model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(by={list(self.stored.key_names)}, path={self.path!r})"
