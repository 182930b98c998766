"""The rows of a partition in the order of arrival, kept for later epochs in memory or in files.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from distkeras.data.columns import Column, ColumnRows
from distkeras.data.rows import RaggedRows

#: Bytes to allocate at first, if the budget allows: the system provides pages only as they are filled.
_FIRST_BYTES = 256 << 20


class Spool:
    """Rows in the order of arrival: in memory up to a budget, beyond it in memory-mapped files.

    Either way a column is one contiguous array, so that picking rows at random is one `numpy.take` and not a search
    through chunks; rows of any length are their steps, and where each row begins. The files hold raw values, one file
    per array, and are unlinked as soon as they are open: even a killed process leaves nothing on the disk.

    Not thread-safe.

    Args:
        columns: shape and dtype of one row's values.
        budget: bytes of rows to hold in memory. Beyond 256 MB memory grows by doubling, without ever holding more
            than that at once.
    """

    def __init__(self, columns: Sequence[Column], budget: int, directory: str) -> None:
        self._directory, self._budget = directory, budget
        row_bytes = sum(column.row_bytes for column in columns)
        first = _FIRST_BYTES // row_bytes
        known = not any(column.is_open for column in columns)
        self._columns = [
            _SpooledColumn(column, first, budget, budget // (row_bytes if known else column.row_bytes))
            for column in columns
        ]
        self.rows = 0

    @property
    def on_disk(self) -> bool:
        return any(part.on_disk for column in self._columns for part in column.parts)

    def append(self, rows: ColumnRows) -> ColumnRows:
        """Copy rows to the end; return views of them if they are in memory, so that ``rows`` can be freed.

        An OSError says that the disk is full, or the directory cannot be written.
        """
        added = [column.arrays_of(part) for column, part in zip(self._columns, rows, strict=True)]
        parts = [part for column in self._columns for part in column.parts]
        on_disk = self.on_disk
        total = sum(part.nbytes for part in parts) + sum(array.nbytes for arrays in added for array in arrays)
        if not on_disk and total > self._budget:
            on_disk = True
            for part in parts:
                part.to_file(self._directory)
        for part, array in zip(parts, (array for arrays in added for array in arrays), strict=True):
            part.append(array)
        first, self.rows = self.rows, self.rows + len(rows[0])
        return rows if on_disk else tuple(column.rows()[first : self.rows] for column in self._columns)

    def arrays(self) -> ColumnRows:
        """Return all rows appended so far, column by column; later calls of `append` do not change them."""
        return tuple(column.rows() for column in self._columns)

    def close(self) -> None:
        """Free memory and files. Arrays that were returned before stay valid."""
        for column in self._columns:
            for part in column.parts:
                part.close()


class _SpooledColumn:
    """A column of the spool: one array; or two, of steps and offsets, if rows have any length.

    Args:
        first: rows to allocate memory for at first.
        budget: bytes of all columns.
        most: rows to allocate memory for, if they have a known size.
    """

    def __init__(self, column: Column, first: int, budget: int, most: int) -> None:
        dtype, step_bytes = np.dtype(column.dtype), column.size * np.dtype(column.dtype).itemsize
        self._is_open = column.is_open
        if not column.is_open:
            self.parts = [_GrowingArray(column.step_shape, dtype, first, most)]
            return
        steps = first * (column.row_bytes // step_bytes)
        offsets = np.dtype(np.int64)
        self.parts = [
            _GrowingArray(column.step_shape, dtype, steps, budget // step_bytes),
            _GrowingArray((), offsets, first, budget // offsets.itemsize + 1),
        ]
        self.parts[1].append(np.zeros(1, offsets))

    def arrays_of(self, rows: np.ndarray | RaggedRows) -> list[np.ndarray]:
        """Return what `parts` must append for some rows."""
        if not isinstance(rows, RaggedRows):
            return [rows]
        return [rows.own_steps, rows.offsets[1:] - rows.offsets[0] + self.parts[0].items]

    def rows(self) -> np.ndarray | RaggedRows:
        """Return all rows."""
        arrays = [part.array() for part in self.parts]
        return RaggedRows(*arrays) if self._is_open else arrays[0]


class _GrowingArray:
    """An array to which items are appended: in memory, with room to grow, or in a memory-mapped file.

    Args:
        shape: of one item.
        first: items to allocate memory for at first.
        most: items that memory may be allocated for.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, first: int, most: int) -> None:
        self._shape, self._dtype, self._first, self._most = shape, dtype, first, most
        self._array = np.empty((0, *shape), dtype)
        self._file: BinaryIO | None = None
        self.items = 0

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    @property
    def nbytes(self) -> int:
        return int(self.items * math.prod(self._shape) * self._dtype.itemsize)

    def append(self, items: np.ndarray) -> None:
        total = self.items + len(items)
        if self._file is not None:
            self._write(items)
        else:
            if total > len(self._array):
                # New pages are not resident before they are written: old and new array together stay within the budget.
                grown = np.empty(
                    (min(max(total, 2 * len(self._array), self._first), self._most), *self._shape), self._dtype
                )
                grown[: self.items] = self._array[: self.items]
                self._array = grown
            self._array[self.items : total] = items
        self.items = total

    def array(self) -> np.ndarray:
        if self._file is not None and len(self._array) != self.items:
            self._file.flush()
            mapped = np.memmap(self._file, self._dtype, "r", shape=(self.items, *self._shape))
            self._array = np.asarray(mapped)
        return self._array[: self.items]

    def to_file(self, directory: str) -> None:
        """Write the items to a file without a name, and free the memory."""
        in_memory, self._array = self.array(), np.empty((0, *self._shape), self._dtype)
        file = tempfile.TemporaryFile(prefix="distkeras-", dir=directory)  # noqa: SIM115 - closed by `close`
        self._file = cast("BinaryIO", file)
        self._write(in_memory)

    def _write(self, items: np.ndarray) -> None:
        assert self._file is not None
        if items.size:
            self._file.write(np.ascontiguousarray(items).data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._array = np.empty((0, *self._shape), self._dtype)


def local_directory(worker: int) -> str:
    """Return a directory for the files of a task: one of Spark's local ones, chosen by the worker's id."""
    spark = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path and Path(path).is_dir()]
    return spark[worker % len(spark)] if spark else tempfile.gettempdir()
