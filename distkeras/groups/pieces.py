"""Trained groups as data: Parquet files in one folder, called pieces, to which tasks write the groups they finish.

A piece is written under another name and then moved, so that its name never refers to a partial file. A task that Spark
runs again reads the pieces of its partition and continues with the keys that are in none of them. Importing this module
loads neither pyspark nor Keras.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distkeras.groups.keys import Key
from distkeras.ps.errors import SnapshotError
from distkeras.ps.world.files import Files, open_files

#: The columns of a piece in addition to those of the key: public ones, and those that only this package reads.
SHOWN = (
    ("rows", pa.int64()),
    ("seconds", pa.float64()),
    ("loss", pa.float64()),
    ("metrics", pa.map_(pa.string(), pa.float64())),
    ("error", pa.string()),
)
_OWN = (("distkeras_checksum", pa.uint64()), ("distkeras_weights", pa.binary()))
CHECKSUM, WEIGHTS = (name for name, _ in _OWN)
RESERVED = tuple(name for name, _ in (*SHOWN, *_OWN))

#: Bytes of weights in one row group of a piece, which is read to look up one key.
_ROW_GROUP_BYTES = 1 << 20
#: The file that describes a job, and the file with its model.
MANIFEST, MODEL = "groups.json", "model.keras"
_NAME = re.compile(r"piece-(\d+)-[0-9a-f]+-\d+-\d+\.parquet")


@dataclass(frozen=True)
class TrainedGroup:
    """One group's model, or the error of its training.

    Args:
        seconds: the duration of its training.
        loss: mean over the rows of its last epoch; None if there is an error.
        metrics: the same for each metric, by name; None if there is an error.
        error: why there is no model; None if there is one.
        checksum: of its rows in their order.
        weights: of the model, as `packed_weights` makes them; None if there is an error.
    """

    key: Key
    rows: int
    seconds: float
    loss: float | None = None
    metrics: tuple[tuple[str, float], ...] | None = None
    error: str | None = None
    checksum: int = 0
    weights: bytes | None = None


def piece_schema(keys: pa.Schema) -> pa.Schema:
    """Return the columns of a piece, given those of a key."""
    return pa.schema([*keys, *(pa.field(name, kind) for name, kind in (*SHOWN, *_OWN))])


def key_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the names of the columns of a key, which are the first columns of a piece."""
    return tuple(schema.names[: -len(RESERVED)])


class Pieces:
    """The pieces in one folder.

    Args:
        uri: of the folder, which is created if it does not exist.

    Raises:
        SnapshotError: the folder cannot be opened or created.
    """

    def __init__(self, uri: str, schema: pa.Schema) -> None:
        self.uri = uri
        self._schema = schema
        self.key_count = len(key_columns(schema))
        self._files = folder(uri)

    def write(self, name: str, groups: Sequence[TrainedGroup]) -> None:
        """Write a piece with at least one group."""
        columns = [[group.key[number] for group in groups] for number in range(self.key_count)]
        columns += [[getattr(group, name.removeprefix("distkeras_")) for group in groups] for name in RESERVED]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        buffer = BytesIO()
        bytes_a_group = max(1, sum(len(group.weights or b"") for group in groups) // len(groups))
        pq.write_table(table, buffer, row_group_size=max(1, _ROW_GROUP_BYTES // bytes_a_group))
        write_whole(self._files, name, buffer.getvalue())

    def finished(self, partition: int) -> tuple[list[str], dict[Key, tuple[int, int]]]:
        """Return the valid pieces of a partition, and the number of rows and the checksum of each key in them.

        Two attempts of one task may have trained the same key. So a piece is valid if no earlier valid piece has one of
        its keys.
        """
        names: list[str] = []
        keys: dict[Key, tuple[int, int]] = {}
        for name in self.names(partition):
            table = self.table(name, ["rows", CHECKSUM])
            rows, checksums = table["rows"].to_pylist(), table[CHECKSUM].to_pylist()
            entries = dict(zip(self.keys(table), zip(rows, checksums, strict=True), strict=True))
            if keys.keys().isdisjoint(entries):
                keys.update(entries)
                names.append(name)
        return names, keys

    def names(self, partition: int) -> list[str]:
        """Return the names of all pieces of a partition, in order."""
        parsed = ((name, _NAME.fullmatch(name)) for name in self._files.names())
        return sorted(name for name, match in parsed if match is not None and int(match[1]) == partition)

    def table(self, name: str, columns: Sequence[str] = ()) -> pa.Table:
        """Return the keys of a piece, and those of its other columns that ``columns`` names."""
        wanted = [*key_columns(self._schema), *columns]
        return self.open(name).read(columns=wanted).select(wanted)

    def open(self, name: str) -> pq.ParquetFile:
        """Open a piece to read parts of it; it raises as `opened` does."""
        return opened(self._files, name)

    def keys(self, table: pa.Table) -> Iterator[Key]:
        """Yield the keys of a table that `table` returned."""
        return zip(*(table.column(number).to_pylist() for number in range(self.key_count)), strict=True)


def opened(files: Files, name: str) -> pq.ParquetFile:
    """Open a piece to read parts of it; raise SnapshotError if it is missing or damaged."""
    try:
        return pq.ParquetFile(pa.BufferReader(b"".join(files.read(name))))
    except (OSError, pa.ArrowException) as error:
        raise SnapshotError(f"the trained groups in {name} cannot be read: {error}") from error


def folder(uri: str) -> Files:
    """Return the files of a folder, which is created if it does not exist; raise SnapshotError if that fails."""
    try:
        return open_files(uri)
    except OSError as error:
        raise SnapshotError(f"`path` must be a folder that can be written to. Received: {uri!r}: {error}") from error


def write_whole(files: Files, name: str, data: bytes) -> None:
    """Write a file atomically: it gets its name only when it is complete."""
    draft = f"{name}.draft"
    files.write(draft, [data])
    files.sync(draft)
    files.move(draft, name)
    files.sync()


def read_whole(files: Files, name: str) -> bytes | None:
    """Return the bytes of a file; None if it does not exist."""
    return b"".join(files.read(name)) if name in files.names() else None


def piece_name(partition: int, run: str, attempt: int, number: int) -> str:
    """Return the name of a piece: ``number`` of an attempt at a partition, in one run of the job."""
    return f"piece-{partition:05d}-{run}-{attempt}-{number:06d}.parquet"


@dataclass(frozen=True)
class Manifest:
    """The identity of a job, and the pieces that hold its result.

    Args:
        identity: a job that resumes in the folder must have the same; JSON-ready.
        keys: names of the columns of a key.
        pieces: names of the valid pieces; None while the job is not finished.
    """

    identity: dict[str, Any]
    keys: tuple[str, ...]
    pieces: tuple[str, ...] | None = None

    def save(self, files: Files) -> None:
        """Write the manifest to the folder."""
        write_whole(files, MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, files: Files) -> Manifest | None:
        """Return the manifest of the folder; None if there is none."""
        data = read_whole(files, MANIFEST)
        if data is None:
            return None
        values = json.loads(data)
        pieces = values["pieces"]
        return cls(values["identity"], tuple(values["keys"]), None if pieces is None else tuple(pieces))


def packed_weights(arrays: Sequence[np.ndarray]) -> bytes:
    """Return arrays as one byte string, each in C order and in its own dtype."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpacked_weights(data: bytes, kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray]:
    """Reverse `packed_weights`: return the arrays, read-only, given the shape and the dtype of each."""
    arrays, start = [], 0
    for shape, dtype in kinds:
        count = math.prod(shape)
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return arrays
