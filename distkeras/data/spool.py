"""Where a worker keeps the rows of its partition for the epochs after the first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from distkeras.data.columns import Column, ColumnArrays

#: Memory to ask for at first, if the budget allows: the system gives it only as it is filled.
_FIRST_BYTES = 256 << 20


class Spool:
    """Rows in the order of arrival: in memory up to a budget, beyond it in memory-mapped files.

    Either way a column is one contiguous array, so that picking rows at random is one `numpy.take` and not a search
    through chunks. The files hold raw values, one file per column, and lose their names as soon as they are open: even
    a killed process leaves nothing on the disk.

    Not for use by several threads at once.

    Args:
        columns: shape and dtype of one row's values.
        budget: bytes of rows to hold in memory. Beyond 256 MB memory grows by doubling, without ever holding more
            than that at once.
        directory: where to put the files.
    """

    def __init__(self, columns: Sequence[Column], budget: int, directory: str) -> None:
        self._columns = tuple(columns)
        self._directory = directory
        row_bytes = sum(column.row_bytes for column in columns)
        self._memory_rows = budget // row_bytes
        self._first_rows = _FIRST_BYTES // row_bytes
        self._arrays: ColumnArrays = self._allocate(0)  # in memory: with room to grow; on disk: the mapped files
        self._files: list[BinaryIO] | None = None
        self.rows = 0

    @property
    def on_disk(self) -> bool:
        """Return whether the budget was exceeded."""
        return self._files is not None

    def append(self, arrays: ColumnArrays) -> ColumnArrays:
        """Copy rows to the end.

        Args:
            arrays: for each column, an array `(n, *column.shape)` of its dtype.

        Returns:
            The same rows where they are kept, if that is in memory, so that `arrays` can be freed; else `arrays`.

        Raises:
            OSError: the disk is full, or the directory cannot be written.
        """
        total = self.rows + len(arrays[0])
        if self._files is None and total > self._memory_rows:
            self._spill()
        if self._files is not None:
            self._write(arrays)
        else:
            if total > len(self._arrays[0]):
                self._grow(total)
            new, arrays = arrays, tuple(array[self.rows : total] for array in self._arrays)
            for kept, values in zip(arrays, new, strict=True):
                kept[...] = values
        self.rows = total
        return arrays

    def arrays(self) -> ColumnArrays:
        """Return all rows appended so far, one array per column; later calls of `append` leave them alone."""
        if self._files is not None and len(self._arrays[0]) != self.rows:
            self._arrays = tuple(map(self._map, self._files, self._columns))
        return tuple(array[: self.rows] for array in self._arrays)

    def close(self) -> None:
        """Free memory and files. Arrays that were returned before stay valid."""
        for file in self._files or ():
            file.close()
        self._arrays = ()

    def _allocate(self, rows: int) -> ColumnArrays:
        return tuple(np.empty((rows, *column.shape), column.dtype) for column in self._columns)

    def _grow(self, rows: int) -> None:
        # Fresh pages are not resident before they are written, so old and new together stay within the budget.
        grown = self._allocate(min(max(rows, 2 * len(self._arrays[0]), self._first_rows), self._memory_rows))
        for new, old in zip(grown, self.arrays(), strict=True):
            new[: self.rows] = old
        self._arrays = grown

    def _spill(self) -> None:
        in_memory, self._arrays = self.arrays(), self._allocate(0)
        self._files = [self._open() for _ in self._columns]
        self._write(in_memory)

    def _open(self) -> BinaryIO:
        file = tempfile.TemporaryFile(prefix="distkeras-", dir=self._directory)  # noqa: SIM115 - closed by `close`
        return cast(BinaryIO, file)

    def _write(self, arrays: ColumnArrays) -> None:
        assert self._files is not None
        for file, array in zip(self._files, arrays, strict=True):
            if array.size:
                file.write(np.ascontiguousarray(array).data)

    def _map(self, file: BinaryIO, column: Column) -> np.ndarray:
        file.flush()
        return np.asarray(np.memmap(file, column.dtype, "r", shape=(self.rows, *column.shape)))


def local_directory(worker: int) -> str:
    """Return a directory for the files of a task: one of Spark's local ones, spread over the workers."""
    spark = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path and Path(path).is_dir()]
    return spark[worker % len(spark)] if spark else tempfile.gettempdir()
