"""Mini-batches of one partition, made by a thread of their own while the model trains.

The order is the heart of it. A task that Spark runs again is told how far its predecessor came, and goes on from there,
so the batch at (epoch, index) must be the same for every attempt. It is a pure function of the rows in their order
of arrival, the seed, the worker and the epoch; where Arrow's record batches begin and end plays no part.

* Epoch 0 trains while the rows arrive. They are shuffled within blocks of a fixed number of rows.
* Later epochs are a permutation of the whole partition, from the spool.
* Without shuffling, every epoch is the order of arrival.

Whether the rows *are* the same shows in a rolling checksum over the hashes that they came with: a batch carries that of
all rows up to the end of its block, and a successor that skips the batch compares.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from distkeras.data.columns import Column, to_numpy
from distkeras.data.memory import aligned
from distkeras.data.prefetch import Prefetcher
from distkeras.data.spec import ROW_HASH, DataSpec
from distkeras.data.spool import Arrays, Spool, local_directory, regroup
from distkeras.ps.errors import BadValueError, ConfigurationError, LedgerError, MissingColumnError

# A block of the first epoch: large enough to part equal neighbors, small enough to start training soon.
_BLOCK_BYTES = 8 << 20
_BLOCK_ROWS = 1 << 16

# How long `close` waits for the thread, which may be in the midst of reading from Spark.
_CLOSE_SECONDS = 60.0

# Shuffled batches are picked several at a time, so that a worker's window lies in one piece of memory.
_PICK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One mini-batch. Its arrays may be views: not to be written to.

    Attributes:
        epoch: pass over the partition, from 0.
        index: place within the epoch, from 0.
        last: whether it ends its epoch; only then may it be shorter than the batch size.
        x: for each input, an array `(n, *column.shape)`.
        y: for each target, an array `(n, *column.shape)`.
        weight: sample weights `(n,)`, or None.
        checksum: CRC-32 over the hashes of the partition's first rows, this batch's among them; 0 where rows have none.
    """

    epoch: int
    index: int
    last: bool
    x: Arrays
    y: Arrays
    weight: np.ndarray | None
    checksum: int = 0

    @property
    def size(self) -> int:
        """Rows in this batch, n."""
        return len(self.x[0])


class Source:
    """The mini-batches of one partition, over all epochs: an iterator and a context manager.

    A thread reads and prepares up to `depth` batches ahead; it starts at once. Leaving the context ends it, wherever
    it is, and drops the spool. What goes wrong in the thread is raised by the iteration.

    Memory: the spool's budget, `depth` batches and 8 MB of batches beside them, two blocks of the first epoch and what
    Spark sends at a time, and for shuffled later epochs eight bytes per row.

    Args:
        arrow: record batches with the columns of `spec`, under their names; consumed by the thread.
        spec: which columns, how many rows, which order.
        worker: id of the worker, which is that of its partition.
        start: (epoch, index) of the first batch to yield. The whole partition is read even when `start` lies in a
            later epoch, to fill the spool; at (spec.epochs, 0) there is nothing to do and nothing is read.
        checksum: of the batch before `start`, as a predecessor saw it; None: not to be compared.
        depth: batches to prepare ahead, at least 1.
        window: batches that the worker is going to train on at a time.
        directory: where a spool over its budget is put; one of Spark's local directories by default.
        patience: seconds to wait for Spark's next rows.

    Raises:
        ConfigurationError: an argument cannot work.

    The iteration raises:
        BadValueError: a null, NaN or infinity; a number that its dtype cannot hold; a label that is no class.
        ShapeError: a ragged array, or values that do not fill the column's shape.
        MissingColumnError: a column did not come, or holds no numbers.
        LedgerError: `start` lies beyond the end of its epoch, or the rows before it have another checksum: these are
            not the rows that were counted.
        JobStoppedError: the source was closed.
        DeadlineError: no rows came within `patience`.
    """

    def __init__(
        self,
        arrow: Iterator[pa.RecordBatch],
        spec: DataSpec,
        *,
        worker: int,
        start: tuple[int, int] = (0, 0),
        checksum: int | None = None,
        depth: int = 16,
        window: int = 1,
        directory: str | None = None,
        patience: float = 3600.0,
    ) -> None:
        if worker < 0:
            raise ConfigurationError(f"`worker` must not be negative. Received: worker={worker!r}")
        if window < 1:
            raise ConfigurationError(f"`window` must be at least 1. Received: window={window!r}", worker=worker)
        self.rows = 0
        """Rows read so far; those of the partition once the first epoch is over."""
        self._arrow = arrow
        self._spec = spec
        self._worker = worker
        self._columns = spec.columns
        self._closed = False
        self._depth = depth
        self._patience = patience
        self._block_rows = self._rows_of_a_block()
        self._pick_rows = self._rows_of_a_pick(window)
        self._hashes = _Hashes(self._block_rows)
        self._spool: Spool | None = None
        if spec.epochs > 1 or spec.rewindable:
            self._spool = Spool(self._columns, spec.spool_bytes, directory or local_directory(worker))
        self._ahead = self._from(start, checksum)

    def _from(self, start: tuple[int, int], checksum: int | None) -> Prefetcher[Batch]:
        if min(start) < 0 or start > (self._spec.epochs, 0):
            raise ConfigurationError(
                f"`start` must lie between (0, 0) and ({self._spec.epochs}, 0), the end. Received: start={start!r}",
                worker=self._worker,
            )
        batches = self._batches(*start, checksum)
        return Prefetcher(
            batches,
            self._depth,
            name=f"distkeras-batches-{self._worker}",
            patience=self._patience,
            what="the next rows from Spark",
            worker=self._worker,
        )

    def rewind(self, start: tuple[int, int], checksum: int | None = None) -> None:
        """Goes on from the batch at ``start``, before or after the present one, as if the source were new.

        Raises:
            ConfigurationError: the rows of a single epoch were not kept (`DataSpec.rewindable`).
            DeadlineError: the thread is still waiting for rows from Spark after a minute.
        """
        if self._spool is None:
            raise ConfigurationError("`rewind` needs the rows kept. Received: one epoch, rewindable=False")
        self._halt()
        self._ahead = self._from(start, checksum)

    def read_on(self) -> None:
        """Reads the partition to its end, so that `rows` is right although batches were left out; yields no more.

        Raises:
            DeadlineError: the thread is still waiting for rows from Spark after a minute.
        """
        self._halt()
        deque(self._read(), maxlen=0)

    def _halt(self) -> None:
        self._closed = True
        self._ahead.close(_CLOSE_SECONDS)
        self._closed = False

    @property
    def batches_per_epoch(self) -> int:
        """Batches, full or short, in the rows read so far; those of an epoch once the first one is over."""
        return -(-self.rows // self._spec.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._ahead)

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and drops the spool; may be called from any thread, and again.

        Raises:
            DeadlineError: the thread is still waiting for rows from Spark after a minute.
        """
        self._closed = True
        self._ahead.close(_CLOSE_SECONDS)
        if self._spool is not None:
            self._spool.close()

    # What follows runs in the thread.

    def _batches(self, start: int, index: int, checksum: int | None) -> Iterator[Batch]:
        for epoch in range(start, self._spec.epochs):
            if epoch == start and epoch > 0:
                deque(self._read(), maxlen=0)
                if index == 0:  # otherwise the batch before it is compared on the way
                    self._compare(epoch, 0, self._hashes.upto(self.rows), checksum)
            cuts = self._later_epoch(epoch) if epoch else self._first_epoch()
            yield from self._numbered(epoch, cuts, index if epoch == start else 0, checksum)

    def _arriving(self) -> Iterator[Arrays]:
        """All rows in the order of arrival: those that a stretch before a `rewind` has read, then the others."""
        if self._spool is not None and self._spool.rows:
            yield self._spool.arrays()
        yield from self._read()

    def _read(self) -> Iterator[Arrays]:
        """The columns of each record batch, checked and spooled."""
        limits = dict(zip(self._spec.labels, self._spec.class_limits, strict=True))
        # Before a record is taken, for `rewind` reads on. Long stretches yield no batch, where the thread would end.
        while not self._closed and (record := next(self._arrow, None)) is not None:
            step = self.rows // self._spec.batch_size
            arrays = []
            for column in self._columns:
                if record.schema.get_field_index(column.name) < 0:
                    raise MissingColumnError(
                        f"the rows must have the column {column.name!r}. Received: columns={record.schema.names}",
                        worker=self._worker,
                        column=column.name,
                    )
                values = to_numpy(
                    record.column(column.name), column, worker=self._worker, step=step, first_row=self.rows
                )
                limit = limits.get(column)
                if limit is not None:
                    _check_classes(values, column, limit, worker=self._worker, step=step, first_row=self.rows)
                arrays.append(values)
            rows = tuple(arrays)
            self._hashes.append(record)
            if self._spool is not None:
                rows = self._spool.append(rows)
            self.rows += record.num_rows
            yield rows

    def _rows_of_a_block(self) -> int:
        spec = self._spec
        if not spec.shuffle:
            return spec.batch_size
        bound = min(_BLOCK_ROWS, _BLOCK_BYTES // self._row_bytes)
        return spec.batch_size * max(1, bound // spec.batch_size)

    def _rows_of_a_pick(self, window: int) -> int:
        """Of whole windows, if one fits."""
        most = max(1, _PICK_BYTES // (self._spec.batch_size * self._row_bytes))
        return self._spec.batch_size * (most - most % window or most)

    @property
    def _row_bytes(self) -> int:
        return sum(column.row_bytes for column in self._columns)

    def _first_epoch(self) -> Iterator[_Cut]:
        end = 0
        for number, block in enumerate(regroup(self._arriving(), self._block_rows)):
            end += len(block[0])
            yield from self._cuts(block, len(block[0]), self._hashes.upto(end), 0, number)

    def _later_epoch(self, epoch: int) -> Iterator[_Cut]:
        assert self._spool is not None
        return self._cuts(self._spool.arrays(), self._spool.rows, self._hashes.upto(self._spool.rows), epoch)

    def _cuts(self, arrays: Arrays, rows: int, checksum: int, *key: int) -> Iterator[_Cut]:
        """Cuts `rows` rows into batches, in an order that depends on the seed, the worker and `key`."""
        size = self._spec.batch_size
        if not self._spec.shuffle:
            for first in range(0, rows, size):
                yield _Cut(_Pick(arrays), slice(first, min(first + size, rows)), checksum)
            return
        order = np.random.default_rng((self._spec.seed, self._worker, *key)).permutation(rows)
        for start in range(0, rows, self._pick_rows):
            pick = _Pick(arrays, order[start : start + self._pick_rows])
            end = min(self._pick_rows, rows - start)
            for first in range(0, end, size):
                yield _Cut(pick, slice(first, min(first + size, end)), checksum)

    def _numbered(self, epoch: int, cuts: Iterator[_Cut], start: int, checksum: int | None) -> Iterator[Batch]:
        """Batches from number `start` on. Each is held back until it is known whether another one follows."""
        count = 0
        held: _Cut | None = None
        for cut in cuts:
            if held is not None and count > start:
                yield self._batch(epoch, count - 1, False, held)
            held = cut
            count += 1
            if count == start:
                self._compare(epoch, start, cut.checksum, checksum)
        if held is not None and count > start:
            yield self._batch(epoch, count - 1, True, held)
        if start > count:
            raise LedgerError(
                f"`start` must lie within the data. Received: start={(epoch, start)}, and {count} batches in "
                f"epoch {epoch}: the input did not yield the same rows again",
                worker=self._worker,
                step=start,
            )

    def _compare(self, epoch: int, index: int, found: int, expected: int | None) -> None:
        if expected is not None and found != expected:
            raise LedgerError(
                f"the input must yield the same rows again: checksum {expected:#010x} before mini-batch {index} of "
                f"epoch {epoch}. Received: checksum {found:#010x}",
                worker=self._worker,
                step=index,
            )

    def _batch(self, epoch: int, index: int, last: bool, cut: _Cut) -> Batch:
        spec = self._spec
        taken = dict(zip(self._columns, cut.arrays(), strict=True))
        return Batch(
            epoch,
            index,
            last,
            x=tuple(taken[column] for column in spec.features),
            y=tuple(taken[column] for column in spec.labels),
            weight=None if spec.sample_weight is None else taken[spec.sample_weight],
            checksum=cut.checksum,
        )


class _Pick:
    """Rows of ``arrays``, in the order of ``rows`` (None: as they are), picked when a batch of them is first wanted."""

    def __init__(self, arrays: Arrays, rows: np.ndarray | None = None) -> None:
        self._arrays, self._rows = arrays, rows

    def arrays(self) -> Arrays:
        if self._rows is not None:
            self._arrays, self._rows = tuple(_take(array, self._rows) for array in self._arrays), None
        return self._arrays


class _Cut(NamedTuple):
    """One batch: its rows of a pick, and the checksum of all rows up to the end of what was picked from."""

    pick: _Pick
    rows: slice
    checksum: int

    def arrays(self) -> Arrays:
        views = tuple(array[self.rows] for array in self.pick.arrays())
        for view in views:
            view.flags.writeable = False  # it may be the spool itself
        return views


class _Hashes:
    """The rolling checksum of the rows read so far, and as it was at the end of each block of ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._marks = array("L", [0])
        self._now = self._read = 0

    def append(self, record: pa.RecordBatch) -> None:
        place = record.schema.get_field_index(ROW_HASH)
        if place < 0:
            return
        hashes = np.ascontiguousarray(record.column(place).to_numpy())
        first = 0
        while first < len(hashes):
            end = min(len(hashes), first + self._rows - self._read % self._rows)
            self._now = zlib.crc32(hashes[first:end].data, self._now)
            self._read += end - first
            if self._read % self._rows == 0:
                self._marks.append(self._now)
            first = end

    def upto(self, row: int) -> int:
        """The checksum of the rows before ``row``: the end of a block, or of what is read. 0 where they have none."""
        if not self._read:
            return 0
        return self._marks[row // self._rows] if row % self._rows == 0 else self._now


def _take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = aligned((len(rows), *array.shape[1:]), array.dtype)
    return array.take(rows, axis=0, out=out, mode="clip")  # `out` would be written by way of a copy if this could raise


def _check_classes(values: np.ndarray, column: Column, classes: int, *, worker: int, step: int, first_row: int) -> None:
    bad = (values < 0) | (values >= classes)
    if values.dtype.kind == "f":
        bad |= values != np.floor(values)
    if bad.any():
        position = int(np.argmax(bad))
        raise BadValueError(
            f"labels must be integers in [0, {classes}). Received: {values.flat[position].item()} in row "
            f"{first_row + position // column.size}",
            worker=worker,
            column=column.name,
            step=step,
        )
