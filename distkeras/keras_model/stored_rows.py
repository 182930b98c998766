"""The touched rows of a trained table: in Parquet files, and sorted in memory-mapped files.

No function here holds a table: rows are processed in blocks. Only the ids of all rows are in memory, while they are
sorted.

The rows of a version that a stream publishes are a list of files, some of which earlier versions have written: whole
ones, and then *changes*, of which later ones replace earlier rows. A file of changes has rows, or ids that are *gone*.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distkeras.ps.errors import BadValueError, ConfigurationError, DistkerasError
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape, initial_rows
from distkeras.ps.world.files import Files, apart, below, open_files, remove_folder, scratch

#: Bytes of rows in one Parquet file.
FILE_BYTES = 32 << 20

#: Row numbers, and these rows, float32 ``(count, width)``.
Block = tuple[Ids, np.ndarray]

#: The list of a folder's files, which Spark's readers leave out because of the first character.
_LIST = "_rows.json"
#: The list while rows are written; it stays so if the driver is killed then.
_UNFINISHED = b"null"


class SavedRows(NamedTuple):
    """The trained rows of a table.

    Args:
        folder: path or URI of the folder with their files; or of a version's list of files, which ends with ".json".
        checksum: of the list of these files, with the number of rows and the checksum of each; None: not known, as of
            rows that an earlier version of this package wrote.
    """

    folder: str
    checksum: str | None = None


def save_rows(folder: str, blocks: Iterable[Block]) -> SavedRows:
    """Write rows to a new folder within ``folder``, a local path or a URI; of an error, nothing remains.

    Its Parquet files have the columns ``id`` (bigint) and ``vector`` (array of floats).

    Raises:
        ConfigurationError: the folder cannot be written to.
    """
    place = below(folder, uuid.uuid4().hex)
    try:
        files = open_files(place)
        files.write(_LIST, [_UNFINISHED])
        return SavedRows(place, write_list(files, _LIST, list(write_files(files, "rows", blocks))))
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove_folder(place)
        if isinstance(error, DistkerasError) or not isinstance(error, OSError):  # a lost server is both
            raise
        raise ConfigurationError(
            f"the `folder` of a WideEmbedding must be one that the driver can write to. Received: {folder!r}: {error}"
        ) from error


def write_list(files: Files, name: str, listed: Sequence[Mapping[str, Any]]) -> str:
    """Write a list of files of rows, and return its checksum."""
    data = json.dumps(listed).encode()
    files.write(name, [data])
    return _checksum(data)


def write_files(files: Files, prefix: str, blocks: Iterable[Block], **marks: bool) -> Iterator[dict[str, Any]]:
    """Write rows to Parquet files; yield the entry of each in a list, with ``marks``. Rows of width 0 are ids alone."""
    for number, (ids, rows) in enumerate(_gathered(blocks)):
        columns: dict[str, pa.Array] = {"id": pa.array(ids)}
        if rows.shape[1]:
            flat = pa.array(np.ascontiguousarray(rows, np.float32).reshape(-1))
            offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * rows.shape[1])
            columns["vector"] = pa.ListArray.from_arrays(offsets, flat)
        buffer = BytesIO()
        pq.write_table(pa.table(columns), buffer)
        name = f"{prefix}-{number:05}.parquet"
        files.write(name, [buffer.getbuffer()])
        yield {"name": name, "rows": len(ids), "checksum": _checksum(buffer.getbuffer()), **marks}


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def require_folder(name: str, folder: str) -> None:
    """Raise a ConfigurationError unless a folder can be written to, for the rows of table ``name``."""
    probe = f"probe-{uuid.uuid4().hex}"
    try:
        files = open_files(folder)
        files.write(probe, [b""])
        files.delete(probe)
    except OSError as error:
        raise ConfigurationError(
            f"the `folder` of {name!r} must be one that the driver can write to. Received: {folder!r}: {error}"
        ) from error


def _gathered(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield the rows in blocks of about `FILE_BYTES`."""
    pending, size = list[Block](), 0
    for block in blocks:
        pending.append(block)
        size += block[1].nbytes or block[0].nbytes
        if size >= FILE_BYTES:
            yield _joined(pending)
            pending, size = [], 0
    if pending:
        yield _joined(pending)


def _joined(blocks: list[Block]) -> Block:
    return np.concatenate([ids for ids, _ in blocks]), np.concatenate([rows for _, rows in blocks])


def load_rows(saved: SavedRows, shape: TableShape, *, vectors: bool = True) -> Iterator[Block]:
    """Yield the rows of `save_rows`, or of a version, file by file; without vectors, of width 0.

    Raises:
        ConfigurationError: a file is missing, cannot be read, or is not the one that was written; or the rows were not
            written to their end.
    """
    with _errors(saved, shape):
        files, listed = _listed(saved)
        latest = _latest(files, listed, shape)
        for entry, is_latest in zip(listed, latest, strict=True):
            if not entry.get("gone"):
                ids, rows = _read(files, entry, shape, vectors=vectors)
                yield (ids, rows) if is_latest is None else (ids[is_latest], rows[is_latest])


def _latest(files: Files, listed: Sequence[Mapping[str, Any]], shape: TableShape) -> Sequence[np.ndarray | None]:
    """Return for each file which of its rows no later file replaces; None: all of them."""
    if not any(entry.get("change") for entry in listed):
        return [None] * len(listed)
    parts = [_read(files, entry, shape, vectors=False)[0] for entry in listed]
    ids = np.concatenate(parts)
    found = np.zeros(len(ids), np.bool_)
    _, last = np.unique(ids[::-1], return_index=True)
    found[len(ids) - 1 - last] = True
    return np.split(found, np.cumsum([len(part) for part in parts])[:-1])


def _read(files: Files, entry: Mapping[str, Any], shape: TableShape, *, vectors: bool = True) -> Block:
    data = b"".join(files.read(entry["name"]))
    if _checksum(data) != entry.get("checksum", _checksum(data)):
        raise ValueError(f"{entry['name']} with other bytes")
    vectors = vectors and not entry.get("gone")
    table = pq.read_table(BytesIO(data), columns=["id", "vector"] if vectors else ["id"])
    ids = table["id"].to_numpy()
    if len(ids) != entry.get("rows", len(ids)):
        raise ValueError(f"{len(ids)} rows in {entry['name']}")
    if not vectors:
        return ids, np.empty((len(ids), 0), np.float32)
    flat = table["vector"].combine_chunks().flatten().to_numpy().astype(np.float32, copy=False)
    if flat.size != len(ids) * shape.width:
        raise ValueError(f"{flat.size} numbers for {len(ids)} rows of {shape.width}")
    return ids, flat.reshape(len(ids), shape.width)


@contextlib.contextmanager
def _errors(saved: SavedRows, shape: TableShape) -> Iterator[None]:
    """Raise a ConfigurationError for what is wrong with the files of rows."""
    try:
        yield
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"the rows of table {shape.name!r} must be in {saved.folder!r}, as training has written them. After "
            f"the folder was moved, set `rows` of the layer to its new place. Received: {error}"
        ) from error


def _listed(saved: SavedRows) -> tuple[Files, list[dict[str, Any]]]:
    """Return the folder, and the files of rows in the order in which they were written.

    Raises:
        ValueError: there are others.
    """
    (folder, checksum), name = saved, apart(saved.folder)[1]
    of_version = name.endswith(".json")
    folder, name = apart(folder) if of_version else (folder, _LIST)
    files = open_files(folder, create=False)
    names = [name] if of_version else files.names()
    if name not in names:
        found = sorted(name for name in names if name.endswith(".parquet"))
        if checksum is not None or not found:
            raise ValueError(f"no {_LIST}" if checksum is not None else "no file of rows")
        return files, [{"name": name} for name in found]
    data = b"".join(files.read(name))
    if data == _UNFINISHED:
        raise ValueError("rows that were not written to their end, as of a driver that was killed")
    if checksum is not None and _checksum(data) != checksum:
        raise ValueError("the rows of another model, or a damaged list of them")
    listed: list[dict[str, Any]] = json.loads(data)
    return files, listed


#: ``make(name, shape, dtype)`` returns an array to write to.
MakeArray = Callable[[str, tuple[int, ...], type[np.generic]], np.ndarray]


def sorted_rows(saved: SavedRows | None, shape: TableShape, make: MakeArray) -> tuple[np.ndarray, np.ndarray]:
    """Return saved rows, sorted by id: the ids, int64, and the rows, float32, in arrays that ``make`` returns.

    Args:
        saved: what `save_rows` returned; None: no row is trained.
    """
    parts = [] if saved is None else [ids for ids, _ in load_rows(saved, shape, vectors=False)]
    unsorted = np.concatenate(parts) if parts else np.empty(0, np.int64)
    order = np.argsort(unsorted, kind="stable")
    ids, rows = make("ids", unsorted.shape, np.int64), make("rows", (len(unsorted), shape.width), np.float32)
    ids[...] = unsorted[order]
    ranks = np.empty(len(unsorted), np.int64)
    ranks[order] = np.arange(len(unsorted))
    start = 0
    for block_ids, block in load_rows(saved, shape) if saved is not None and len(unsorted) else ():
        rows[ranks[start : start + len(block_ids)]] = block
        start += len(block_ids)
    return ids, rows


def sorted_files(saved: SavedRows | None, shape: TableShape, folder: Path) -> tuple[Path, Path]:
    """Write what `sorted_rows` returns to two files in ``folder``, as `numpy.save` does, and return their paths."""
    name = f"distkeras-{uuid.uuid4().hex}"
    paths = {part: folder / f"{name}-{part}.npy" for part in ("ids", "rows")}

    def make(part: str, extents: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        if extents[0]:
            return np.lib.format.open_memmap(paths[part], "w+", dtype, extents)
        np.save(paths[part], empty := np.empty(extents, dtype))  # which cannot be mapped
        return empty

    for array in sorted_rows(saved, shape, make):
        if isinstance(array, np.memmap):
            array.flush()
    return paths["ids"], paths["rows"]


def in_unnamed_file(name: str, extents: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return an array in a temporary file without a name, which even a killed process does not leave behind."""
    size = math.prod(extents) * np.dtype(dtype).itemsize
    return np.frombuffer(scratch(size), dtype).reshape(extents) if size else np.empty(extents, dtype)


class StoredRows:
    """The rows of a table: trained rows from memory-mapped files, all others with their initial values.

    Args:
        shape: of the table.
        ids, rows: the arrays of `sorted_rows`.
        changes: ids, ascending, and the rows that they have instead; those that are gone have their initial values.
    """

    def __init__(self, shape: TableShape, ids: np.ndarray, rows: np.ndarray, changes: Block | None = None) -> None:
        self._shape, self._ids, self._rows = shape, ids, rows
        self._changes: Block = changes or (NO_IDS, np.empty((0, shape.width), np.float32))

    def changed(self, ids: Ids, rows: np.ndarray) -> StoredRows:
        """Return these rows with changes: ``ids`` are unique."""
        before, before_rows = self._changes
        kept = ~np.isin(before, ids)
        every = np.concatenate([before[kept], ids])
        order = np.argsort(every)
        changes = every[order], np.concatenate([before_rows[kept], rows])[order]
        return StoredRows(self._shape, self._ids, self._rows, changes)

    def take(self, ids: np.ndarray, column: str | None = None) -> np.ndarray:
        """Return the rows of ``ids``, of any shape, float32 ``(*ids.shape, width)``.

        Args:
            ids: of any dtype; they are truncated to integers.
            column: the column of the ids, for the error.

        Raises:
            BadValueError: an id is not a row of the table.
        """
        flat = np.asarray(ids).astype(np.int64, copy=False).reshape(-1)
        require_ids(self._shape.name, flat, 0, self._shape.rows, column)
        needed, back = np.unique(flat, return_inverse=True)
        rows = initial_rows(self._shape, needed)
        if len(self._ids):
            places = np.minimum(np.searchsorted(self._ids, needed), len(self._ids) - 1)
            trained = self._ids[places] == needed
            rows[trained] = self._rows[places[trained]]
        changed_ids, changed_rows = self._changes
        if len(changed_ids):
            places = np.minimum(np.searchsorted(changed_ids, needed), len(changed_ids) - 1)
            changed = changed_ids[places] == needed
            rows[changed] = changed_rows[places[changed]]
        taken: np.ndarray = rows[back].reshape(*np.shape(ids), self._shape.width)
        return taken


def listed_files(saved: SavedRows | None, shape: TableShape) -> list[dict[str, Any]]:
    """Return the entries of the files of rows; ConfigurationError if these are not the ones that were written."""
    if saved is None:
        return []
    with _errors(saved, shape):
        return _listed(saved)[1]


def following(
    stored: StoredRows, earlier: Sequence[Mapping[str, Any]], saved: SavedRows, shape: TableShape
) -> StoredRows | None:
    """Return the rows of version ``saved`` from ``stored``, the rows of the ``earlier`` files.

    It reads the changes since then. None: the version has other files.
    """
    with _errors(saved, shape):
        files, listed = _listed(saved)
        new = listed[len(earlier) :]
        unlike = not earlier or listed[: len(earlier)] != earlier or not all(entry.get("change") for entry in new)
        if unlike or not all("checksum" in entry for entry in earlier):
            return None
        for entry in new:
            ids, rows = _read(files, entry, shape)
            stored = stored.changed(ids, initial_rows(shape, ids) if entry.get("gone") else rows)
        return stored


def require_ids(name: str, ids: np.ndarray, least: int, rows: int, column: str | None) -> None:
    """Raise BadValueError, which names ``column``, unless all ids of a table are in ``[least, rows)``."""
    bad = (ids < least) | (ids >= rows)
    if bad.any():
        raise BadValueError(f"ids of {name!r} must be in [0, {rows}), its rows. Received: {ids[bad][0]}", column=column)
