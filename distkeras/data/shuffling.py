"""The rows of each mini-batch: a pure function of the seed, the worker and the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from distkeras.data.batches import Batch, Stack, aligned, is_aligned
from distkeras.data.columns import ColumnArrays
from distkeras.data.spec import DataSpec

# A block of the first epoch: large enough to separate equal rows, which are adjacent; small enough to start soon.
BLOCK_BYTES = 8 << 20
BLOCK_ROWS = 1 << 16

#: Shuffled batches are gathered several at a time, so that a worker's windows are contiguous in memory.
GATHER_BYTES = 4 << 20


class BatchRows(NamedTuple):
    """The rows of one mini-batch, gathered on first use.

    Args:
        gather: the rows of several mini-batches, in their order.
        rows: the place of this mini-batch's rows in ``gather``.
        checksum: of all rows up to the end of the block or partition that the mini-batch is cut from.
    """

    gather: Gather
    rows: slice
    checksum: int

    def batch(self, epoch: int, index: int, last: bool) -> Batch:
        """Return the mini-batch. Its arrays are read-only: they may be views of the spool itself."""
        views = tuple(array[self.rows] for array in self.gather.columns())
        for view in views:
            view.flags.writeable = False
        batch = Batch(epoch, index, last, *self.gather.spec.sides(views), self.checksum)
        stack, place = self.gather.stack, self.rows.start // self.gather.spec.batch_size
        return batch if stack is None or place >= len(stack) else batch.placed_in(stack, place)


class Gather:
    """Rows of several columns, gathered once, on first use.

    Args:
        spec: the columns, and how many rows a mini-batch has.
        order: the numbers of the rows to gather, in the order of the result; None: all rows, without a copy.
    """

    def __init__(self, spec: DataSpec, columns: ColumnArrays, order: np.ndarray | None = None) -> None:
        self.spec = spec
        self._columns, self._order = columns, order
        #: The full mini-batches, if they are aligned for a backend; None until rows are gathered.
        self.stack: Stack | None = None
        if order is None and len(columns[0]) >= 2 * spec.batch_size and all(map(is_aligned, columns)):
            self.stack = self._stacked(columns)

    def columns(self) -> ColumnArrays:
        """Return one array per column; gathered arrays are aligned for TensorFlow."""
        if self._order is not None:
            self._columns, self._order = tuple(_take(array, self._order) for array in self._columns), None
            self.stack = self._stacked(self._columns)
        return self._columns

    def _stacked(self, columns: ColumnArrays) -> Stack:
        size = self.spec.batch_size
        whole = len(columns[0]) // size
        stacked = tuple(array[: whole * size].reshape(whole, size, *array.shape[1:]) for array in columns)
        for array in stacked:
            array.flags.writeable = False
        return Stack(*self.spec.sides(stacked))


class EpochOrder:
    """Cuts rows into mini-batches, in the order of an epoch.

    Without `DataSpec.shuffle` that is always the order of arrival.

    Args:
        spec, worker: columns, batch size, seed and the worker's id, of which the order is a function.
        window: mini-batches that the worker trains on at a time: as many are contiguous in memory, unless they take
            more than `GATHER_BYTES`.
    """

    def __init__(self, spec: DataSpec, worker: int, window: int) -> None:
        self._spec = spec
        self._worker = worker
        size = spec.batch_size
        most = max(1, GATHER_BYTES // (size * spec.row_bytes))
        self._gather_rows = size * (most - most % window or most)
        #: Rows of a block of the first epoch, within which rows are shuffled: a multiple of the batch size.
        self.block_rows = (
            size * max(1, min(BLOCK_ROWS, BLOCK_BYTES // spec.row_bytes) // size) if spec.shuffle else size
        )

    def cut(self, columns: ColumnArrays, checksum: int, epoch: int, block: int | None = None) -> Iterator[BatchRows]:
        """Cut all rows of ``columns`` into mini-batches, of which the last may be shorter.

        Args:
            columns: one array per column.
            checksum: the checksum of all mini-batches.
            epoch: pass over the data.
            block: number of the block that ``columns`` is, or None for all rows of the partition.
        """
        size, rows = self._spec.batch_size, len(columns[0])
        if not self._spec.shuffle:
            gather = Gather(self._spec, columns)
            for first in range(0, rows, size):
                yield BatchRows(gather, slice(first, min(first + size, rows)), checksum)
            return
        order = row_order(self._spec, self._worker, epoch, rows, block)
        for start in range(0, rows, self._gather_rows):
            gather = Gather(self._spec, columns, order[start : start + self._gather_rows])
            end = min(self._gather_rows, rows - start)
            for first in range(0, end, size):
                yield BatchRows(gather, slice(first, min(first + size, end)), checksum)


def row_order(spec: DataSpec, worker: int, epoch: int, rows: int, block: int | None = None) -> np.ndarray:
    """Return the numbers of the rows in the order of an epoch, int64 ``(rows,)``.

    Args:
        block: number of the block of these rows, or None for all rows of the partition.
    """
    if not spec.shuffle:
        return np.arange(rows)
    key = (spec.seed, worker, epoch) if block is None else (spec.seed, worker, epoch, block)
    return np.random.default_rng(key).permutation(rows)


def _take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = aligned((len(rows), *array.shape[1:]), array.dtype)
    return array.take(rows, axis=0, out=out, mode="clip")  # with a mode that can raise, `out` is buffered
