"""The touched rows of a trained table: in Parquet files, and sorted in memory-mapped files.

No function here holds a table: rows are processed in blocks. Only the ids of all rows are in memory, while they are
sorted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distkeras.ps.errors import BadValueError, ConfigurationError, DistkerasError
from distkeras.ps.protocol.tables import Ids, TableShape, initial_rows
from distkeras.ps.world.files import Files, below, open_files, remove_folder

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
        folder: path or URI of the folder with their files.
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
        return SavedRows(place, _write(place, blocks))
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove_folder(place)
        if isinstance(error, DistkerasError) or not isinstance(error, OSError):  # a lost server is both
            raise
        raise ConfigurationError(
            f"the `folder` of a WideEmbedding must be one that the driver can write to. Received: {folder!r}: {error}"
        ) from error


def _write(place: str, blocks: Iterable[Block]) -> str:
    """Write files of rows and their list, and return the list's checksum."""
    files, listed = open_files(place), list[dict[str, Any]]()
    files.write(_LIST, [_UNFINISHED])
    for number, (ids, rows) in enumerate(_gathered(blocks)):
        flat = pa.array(np.ascontiguousarray(rows, np.float32).reshape(-1))
        offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * rows.shape[1])
        table = pa.table({"id": pa.array(ids), "vector": pa.ListArray.from_arrays(offsets, flat)})
        buffer = BytesIO()
        pq.write_table(table, buffer)
        name = f"rows-{number:05}.parquet"
        files.write(name, [buffer.getbuffer()])
        listed.append({"name": name, "rows": len(ids), "checksum": _checksum(buffer.getbuffer())})
    data = json.dumps(listed).encode()
    files.write(_LIST, [data])
    return _checksum(data)


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
        size += block[1].nbytes
        if size >= FILE_BYTES:
            yield _joined(pending)
            pending, size = [], 0
    if pending:
        yield _joined(pending)


def _joined(blocks: list[Block]) -> Block:
    return np.concatenate([ids for ids, _ in blocks]), np.concatenate([rows for _, rows in blocks])


def load_rows(saved: SavedRows, shape: TableShape, *, vectors: bool = True) -> Iterator[Block]:
    """Yield the rows of `save_rows`, file by file; without vectors, of width 0.

    Raises:
        ConfigurationError: a file is missing, cannot be read, or is not the one that was written; or the rows were not
            written to their end.
    """
    columns = ["id", "vector"] if vectors else ["id"]
    try:
        files = open_files(saved.folder, create=False)
        for entry in _listed(files, saved.checksum):
            data = b"".join(files.read(entry["name"]))
            if _checksum(data) != entry.get("checksum", _checksum(data)):
                raise ValueError(f"{entry['name']} with other bytes")
            table = pq.read_table(BytesIO(data), columns=columns)
            ids = table["id"].to_numpy()
            if len(ids) != entry.get("rows", len(ids)):
                raise ValueError(f"{len(ids)} rows in {entry['name']}")
            rows = np.empty((len(ids), 0), np.float32)
            if vectors:
                flat = table["vector"].combine_chunks().flatten().to_numpy().astype(np.float32, copy=False)
                if flat.size != len(ids) * shape.width:
                    raise ValueError(f"{flat.size} numbers for {len(ids)} rows of {shape.width}")
                rows = flat.reshape(len(ids), shape.width)
            yield ids, rows
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"the rows of table {shape.name!r} must be in {saved.folder!r}, as training has written them. After "
            f"the folder was moved, set `rows` of the layer to its new place. Received: {error}"
        ) from error


def _listed(files: Files, checksum: str | None) -> list[dict[str, Any]]:
    """Return the files of rows, in the order in which they were written; ValueError if there are others."""
    names = files.names()
    if _LIST in names:
        data = b"".join(files.read(_LIST))
        if data == _UNFINISHED:
            raise ValueError("rows that were not written to their end, as of a driver that was killed")
        if checksum is not None and _checksum(data) != checksum:
            raise ValueError("the rows of another model, or a damaged list of them")
        listed: list[dict[str, Any]] = json.loads(data)
        return listed
    found = sorted(name for name in names if name.endswith(".parquet"))
    if checksum is not None or not found:
        raise ValueError(f"no {_LIST}" if checksum is not None else "no file of rows")
    return [{"name": name} for name in found]


def sorted_files(saved: SavedRows | None, shape: TableShape, folder: Path) -> tuple[Path, Path]:
    """Write saved rows to two files in ``folder``, sorted by id, and return their paths.

    Args:
        saved: what `save_rows` returned; None: no row is trained.

    Returns:
        The ids, int64, and the rows, float32, each as `numpy.save` writes them.
    """
    name = f"distkeras-{uuid.uuid4().hex}"
    paths = folder / f"{name}-ids.npy", folder / f"{name}-rows.npy"
    parts = [] if saved is None else [ids for ids, _ in load_rows(saved, shape, vectors=False)]
    ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
    order = np.argsort(ids, kind="stable")
    np.save(paths[0], ids[order])
    if not len(ids):
        np.save(paths[1], np.empty((0, shape.width), np.float32))
        return paths
    ranks = np.empty(len(ids), np.int64)
    ranks[order] = np.arange(len(ids))
    out = np.lib.format.open_memmap(paths[1], "w+", np.float32, (len(ids), shape.width))
    start = 0
    assert saved is not None, "rows were read from there"
    for block_ids, rows in load_rows(saved, shape):
        out[ranks[start : start + len(block_ids)]] = rows
        start += len(block_ids)
    out.flush()
    return paths


class StoredRows:
    """The rows of a table: trained rows from memory-mapped files, all others with their initial values.

    Args:
        shape: of the table.
        ids, rows: the files of `sorted_files`.
    """

    def __init__(self, shape: TableShape, ids: Path, rows: Path) -> None:
        self._shape = shape
        self._ids, self._rows = np.load(ids, mmap_mode="r"), np.load(rows, mmap_mode="r")

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
        taken: np.ndarray = rows[back].reshape(*np.shape(ids), self._shape.width)
        return taken


def require_ids(name: str, ids: np.ndarray, least: int, rows: int, column: str | None) -> None:
    """Raise BadValueError, which names ``column``, unless all ids of a table are in ``[least, rows)``."""
    bad = (ids < least) | (ids >= rows)
    if bad.any():
        raise BadValueError(f"ids of {name!r} must be in [0, {rows}), its rows. Received: {ids[bad][0]}", column=column)
