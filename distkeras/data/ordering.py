"""An order of rows that is the same for every attempt of a task, and the checksum that verifies it.

`partitioned` runs on the driver, `RowChecksum` on the executors. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from distkeras.data.batches import Batch, DataSpec, Stack
from distkeras.data.columns import Column, ColumnArrays, ColumnRows
from distkeras.data.rows import RaggedRows, aligned, is_aligned
from distkeras.data.schema import quoted, ready_columns
from distkeras.ps.checkpoint.state import SUM_BITS, SUM_SHIFT, checksum_of
from distkeras.ps.errors import ConfigurationError, LedgerError
from distkeras.ps.validate import require_integer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: The column that `partitioned` adds: a hash of the row's values, by which a worker verifies the rows.
ROW_HASH = "distkeras_row_hash"
_LEAST_HASH = -(2**63)


def partitioned(df: DataFrame, spec: DataSpec, workers: int, *, partitioned_already: bool = False) -> DataFrame:
    """Return the columns of `spec` and `ROW_HASH` in `workers` partitions, whose rows always come in the same order.

    A task that Spark runs again skips the mini-batches that an earlier attempt committed, so both must see
    the same rows in the same order. Spark guarantees this neither after a shuffle nor for files. Here the
    partition of a row and its place are functions of its values: rows go to a partition by their hash,
    and are sorted there by the hash and, if two hashes are equal, by all values. Rows that still
    compare equal are interchangeable. The order is effectively random with respect to the values.

    Equal rows share a partition. Data with few distinct rows therefore fill the partitions unevenly, and
    may leave some empty.

    Args:
        df: any DataFrame whose multiset of rows is the same whenever it is computed.
        spec: columns to keep; its seed enters the hash.
        workers: number of partitions, at least 1.
        partitioned_already: do not move the rows. This assumes that `df` has `workers`
            partitions, and that each yields the same rows in the same order whenever it is computed; it
            saves the shuffle and the sort.
    """
    workers = require_integer("workers", workers)
    ready = df.select(*ready_columns(df.schema.fields, spec))
    if ROW_HASH.casefold() in (name.casefold() for name in ready.columns):
        raise ConfigurationError(f"no column may have the name {ROW_HASH!r}. Received: columns={ready.columns}")

    from pyspark.sql import functions as F

    values = [F.col(quoted(name)) for name in ready.columns]
    hashed = ready.withColumn(ROW_HASH, F.xxhash64(F.lit(spec.seed), *values))
    if partitioned_already:
        return hashed
    return hashed.repartition(workers, ROW_HASH).sortWithinPartitions(ROW_HASH, *values)


#: The advice if Spark computes other rows each time.
SAVE_ROWS = "Save the rows before training if they come from rand(), from limit without an order, or from changing data"


def require_rows(df: DataFrame, expected: int) -> None:
    """Raise LedgerError unless the rows of ``df`` have the sum ``expected`` of an earlier job; one pass in Spark."""
    from pyspark.sql import functions as F

    # The sum of more than four billion rows overflows, and is null.
    (row,) = df.select(F.try_sum(F.shiftrightunsigned(ROW_HASH, SUM_SHIFT)).alias("sum")).collect()
    if row["sum"] is not None and (checksum := row["sum"] % (1 << SUM_BITS)) != expected:
        raise LedgerError(
            f"the input has not returned the same rows as before: checksum {checksum:#010x} of all rows, "
            f"and {expected:#010x} when the job began. {SAVE_ROWS}"
        )


class RowChecksum:
    """A checksum over the row hashes of a partition in the order of arrival, stored for the end of each block.

    Its lower 32 bits are a CRC, which depends on the order. The upper bits are the sum of the leading bits of the
    hashes, which depends neither on the order nor on the partitions: see `distkeras.ps.checkpoint.snapshots`.
    """

    def __init__(self, block_rows: int) -> None:
        self._block_rows = block_rows
        #: The estimated share of the partition that was read: hashes are uniform, and rows come in their order. 0 if
        #: they do not, or if rows have no hashes.
        self.share = 0.0
        self._in_order, self._last = True, _LEAST_HASH
        self._at_block_ends = array("q", [0])
        self._crc = self._sum = self._rows = 0

    def update(self, record: pa.RecordBatch) -> None:
        """Add the hashes of the next rows, which are the column `ROW_HASH`; rows without it are not counted."""
        place = record.schema.get_field_index(ROW_HASH)
        if place < 0:
            return
        hashes = np.ascontiguousarray(record.column(place).to_numpy())
        self._update_share(hashes)
        first = 0
        while first < len(hashes):
            end = min(len(hashes), first + self._block_rows - self._rows % self._block_rows)
            self._crc = zlib.crc32(hashes[first:end].data, self._crc)
            self._sum += int((hashes[first:end].view(np.uint64) >> np.uint64(SUM_SHIFT)).sum())
            self._rows += end - first
            if self._rows % self._block_rows == 0:
                self._at_block_ends.append(self._latest)
            first = end

    def _update_share(self, hashes: np.ndarray) -> None:
        if not len(hashes) or not self._in_order:
            return
        self._in_order = bool(hashes[0] >= self._last and (hashes[1:] >= hashes[:-1]).all())
        self._last = int(hashes[-1])
        self.share = (self._last - _LEAST_HASH) / -(2 * _LEAST_HASH) if self._in_order else 0.0

    @property
    def _latest(self) -> int:
        return checksum_of(self._sum, self._crc)

    def before(self, row: int) -> int:
        """Return the checksum of the rows before ``row``, which ends a block or all rows so far; 0 without hashes."""
        if not self._rows:
            return 0
        return self._at_block_ends[row // self._block_rows] if row % self._block_rows == 0 else self._latest


# A block of the first epoch: large enough to separate equal rows, which are adjacent; small enough to start soon.
BLOCK_BYTES = 8 << 20
BLOCK_ROWS = 1 << 16

#: Mini-batches among which `Padding.bucket` puts rows of like length side by side.
_BUCKET = 64

#: Shuffled batches are gathered several at a time, so that a worker's windows are contiguous in memory.
GATHER_BYTES = 4 << 20


class BatchRows(NamedTuple):
    """The rows of one mini-batch, gathered on first use: their place in ``gather``, and their checksum."""

    gather: Gather
    rows: slice
    checksum: int

    def batch(self, epoch: int, index: int, last: bool) -> Batch:
        """Return the mini-batch. Its arrays are read-only: they may be views of the spool itself."""
        views = self.gather.views(self.rows)
        spec = self.gather.spec
        batch = Batch(epoch, index, last, *spec.sides(views), self.checksum, spec.is_open)
        stack, place = self.gather.stack, self.rows.start // spec.batch_size
        return batch if stack is None or place >= len(stack) else batch.placed_in(stack, place)


class Gather:
    """Rows of several columns in this order, gathered once, on first use; None: all rows, without a copy.

    Rows of any length need an order: each mini-batch is padded by itself.
    """

    def __init__(self, spec: DataSpec, columns: ColumnRows, order: np.ndarray | None = None) -> None:
        self.spec = spec
        self._rows, self._order = columns, order
        self._columns: ColumnArrays = columns if order is None else ()  # none is ragged
        #: For each column of rows of any length, the lengths of its mini-batches; None for other columns.
        self._lengths: list[np.ndarray | None] = [None] * len(spec.columns)
        #: For each mini-batch, the steps of rows of any length, and with padding; 0 until rows are gathered.
        self._steps = np.zeros((-(-len(columns[0] if order is None else order) // spec.batch_size), 2), np.int64)
        #: The full mini-batches, if they are aligned for a backend; None until rows are gathered.
        self.stack: Stack | None = None
        if order is None and len(columns[0]) >= 2 * spec.batch_size and all(map(is_aligned, self._columns)):
            self.stack = self._stacked(self._columns)

    def views(self, rows: slice) -> ColumnArrays:
        """Return read-only views of the rows of one mini-batch, an array per column, as long as the mini-batch."""
        views = []
        for values, lengths in zip(self._gathered(), self._lengths, strict=True):
            view = values[rows] if lengths is None else values[rows, : lengths[rows.start // self.spec.batch_size]]
            view.flags.writeable = False
            views.append(view)
        return tuple(views)

    def steps(self, rows: slice) -> tuple[int, int]:
        """Return of one mini-batch, once it is gathered: the steps of its rows of any length, and with padding."""
        own, padded = self._steps[rows.start // self.spec.batch_size].tolist()
        return own, padded

    def _gathered(self) -> ColumnArrays:
        """Return one array per column; gathered arrays are aligned for TensorFlow."""
        if self._order is not None:
            columns = zip(self._rows, self.spec.columns, strict=True)
            self._columns = tuple(self._take(number, *column) for number, column in enumerate(columns))
            self._rows, self._order = (), None
            self.stack = self._stacked(self._columns)
        return self._columns

    def _take(self, number: int, rows: np.ndarray | RaggedRows, column: Column) -> np.ndarray:
        assert self._order is not None, "rows without an order are not copied"
        if not isinstance(rows, RaggedRows):
            out = aligned((len(self._order), *rows.shape[1:]), rows.dtype)
            return rows.take(self._order, axis=0, out=out, mode="clip")  # with a mode that can raise, `out` is buffered
        size, count = self.spec.batch_size, len(self._order)
        array, lengths = rows.padded_batches(self._order, size, column.padding)
        self._lengths[number] = lengths
        firsts = np.arange(0, count, size)
        self._steps[:, 0] += np.add.reduceat(rows.kept(self._order, column.padding), firsts)
        self._steps[:, 1] += lengths * np.minimum(size, count - firsts)
        return array

    def _stacked(self, columns: ColumnArrays) -> Stack:
        size = self.spec.batch_size
        whole = len(columns[0]) // size
        stacked = tuple(array[: whole * size].reshape(whole, size, *array.shape[1:]) for array in columns)
        for values in stacked:
            values.flags.writeable = False
        return Stack(*self.spec.sides(stacked), self._lengths_of(whole) if self.spec.is_open else None)

    def _lengths_of(self, batches: int) -> np.ndarray:
        """Return `Stack.lengths` of so many mini-batches."""
        none = np.zeros(batches, np.int32)
        columns = [none if lengths is None else lengths[:batches] for lengths in self._lengths]
        return np.stack(self.spec.by_array(columns, none), axis=1).astype(np.int32)


class EpochOrder:
    """Cuts rows into mini-batches, in the order of an epoch; without `DataSpec.shuffle`, the order of arrival.

    As many mini-batches as a ``window`` are contiguous in memory, unless they take more than `GATHER_BYTES`.
    """

    def __init__(self, spec: DataSpec, worker: int, window: int) -> None:
        self._spec = spec
        self._worker, self._window = worker, window
        self._buckets = spec.shuffle and any(column.padding.bucket for column in spec.columns if column.is_open)
        size = spec.batch_size
        #: Mini-batches that are contiguous in memory.
        self.gathered = self._batches_of(spec.row_bytes)
        #: Rows of a block of the first epoch, within which rows are shuffled: a multiple of the batch size.
        self.block_rows = (
            size * max(1, min(BLOCK_ROWS, BLOCK_BYTES // spec.row_bytes) // size) if spec.shuffle else size
        )
        if self._buckets:
            self.block_rows = max(self.block_rows, size * _BUCKET)

    def cut(self, columns: ColumnRows, checksum: int, epoch: int, block: int | None = None) -> Iterator[BatchRows]:
        """Cut all rows of ``columns`` into mini-batches, of which the last may be shorter."""
        size, rows = self._spec.batch_size, len(columns[0])
        if not self._spec.shuffle and not self._spec.is_open:
            gather = Gather(self._spec, columns)
            for first in range(0, rows, size):
                yield BatchRows(gather, slice(first, min(first + size, rows)), checksum)
            return
        order = row_order(self._spec, self._worker, epoch, rows, block)
        if self._buckets:
            order = bucketed(order, columns, size)
        for start, end in self._runs(order, columns):
            gather = Gather(self._spec, columns, order[start:end])
            for first in range(0, end - start, size):
                yield BatchRows(gather, slice(first, min(first + size, end - start)), checksum)

    def _runs(self, order: np.ndarray, columns: ColumnRows) -> Iterator[tuple[int, int]]:
        """Yield the first row and the end of the mini-batches that are gathered at once.

        Those of rows of any length have the length of the longest one in memory, which may at most double it.
        """
        size, rows = self._spec.batch_size, len(order)
        if not self._spec.is_open:
            for start in range(0, rows, size * self.gathered):
                yield start, min(start + size * self.gathered, rows)
            return
        row_bytes = self._padded_row_bytes(order, columns)
        first = 0
        while first < len(row_bytes):
            ahead = row_bytes[first : first + self._batches_of(int(row_bytes[first]))]
            most = self._batches_of(int(ahead.max()))
            if first % self._window:  # windows are in one piece where possible
                most = min(most, self._window - first % self._window)
            longest, own = np.maximum.accumulate(ahead[:most]), np.cumsum(ahead[:most])
            wasteful = np.flatnonzero(longest * np.arange(1, len(own) + 1) > 2 * own)
            end = first + (int(wasteful[0]) if len(wasteful) else len(own))
            yield first * size, min(end * size, rows)
            first = end

    def _padded_row_bytes(self, order: np.ndarray, columns: ColumnRows) -> np.ndarray:
        """Return for each mini-batch the bytes of a row with its padding."""
        firsts = np.arange(0, len(order), self._spec.batch_size)
        row_bytes = np.zeros(len(firsts), np.int64)
        for rows, column in zip(columns, self._spec.columns, strict=True):
            if isinstance(rows, RaggedRows):
                longest = np.maximum.reduceat(rows.kept(order, column.padding), firsts)
                step_bytes = math.prod(rows.steps.shape[1:]) * rows.steps.itemsize
                row_bytes += column.padding.lengths(longest) * step_bytes
            else:
                row_bytes += column.row_bytes
        return row_bytes

    def _batches_of(self, row_bytes: int) -> int:
        most = max(1, GATHER_BYTES // (self._spec.batch_size * max(1, row_bytes)))
        return most - most % self._window or most


def bucketed(order: np.ndarray, columns: ColumnRows, size: int) -> np.ndarray:
    """Return ``order`` with rows of like length in each mini-batch of ``size`` rows; a shorter one stays as it is.

    Each bucket of mini-batches keeps its rows: they are sorted by length, and the mini-batches are put in the order of
    the first of their rows in ``order``, which is random.
    """
    lengths = np.max([rows.lengths for rows in columns if isinstance(rows, RaggedRows)], axis=0)[order]
    sorted_order, whole = order.copy(), len(order) // size * size
    for start in range(0, whole, size * _BUCKET):
        end = min(start + size * _BUCKET, whole)
        batches = start + np.argsort(lengths[start:end], kind="stable").reshape(-1, size)
        sorted_order[start:end] = order[batches[np.argsort(batches.min(axis=1))]].reshape(-1)
    return sorted_order


def row_order(spec: DataSpec, worker: int, epoch: int, rows: int, block: int | None = None) -> np.ndarray:
    """Return the numbers of the rows in the order of an epoch, int64 ``(rows,)``."""
    if not spec.shuffle:
        return np.arange(rows)
    key = (spec.seed, worker, epoch) if block is None else (spec.seed, worker, epoch, block)
    return np.random.default_rng(key).permutation(rows)
