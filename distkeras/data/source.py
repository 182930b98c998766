"""Mini-batches of one partition, prepared by a separate thread while the model trains.

A task that Spark runs again continues where the earlier attempt stopped, so the batch at (epoch, index) must be the
same for every attempt. It is a pure function of the rows in their order of arrival, the seed, the worker and the epoch;
it does not depend on the boundaries of Arrow's record batches.

* Epoch 0 trains while the rows arrive. They are shuffled within blocks of a fixed number of rows.
* Later epochs are a permutation of the whole partition, from the spool.
* Without shuffling, every epoch is the order of arrival.

Whether the rows *are* the same is verified by a rolling checksum over their hashes: a batch carries that of all rows up
to the end of its block, and a later attempt that skips the batch compares it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import pyarrow as pa

from distkeras.data.batches import Batch, DataSpec, in_blocks
from distkeras.data.columns import ColumnRows, to_numpy
from distkeras.data.ordering import SAVE_ROWS, BatchRows, EpochOrder, RowChecksum, partitioned
from distkeras.data.rows import RaggedRows
from distkeras.data.spool import Spool, local_directory
from distkeras.ps.errors import (
    ConfigurationError,
    DeadlineError,
    EmptyDataError,
    JobStoppedError,
    LedgerError,
    LocalProtocolError,
    MissingColumnError,
    ShapeError,
)
from distkeras.ps.validate import invalid, require_integer
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Yields the items of `items`, which a thread computes up to `depth` ahead from `start` on.

    The end of the items ends the iteration, and an error of the thread is raised to the consumer with its traceback,
    after the items before it. Either side can end the other: no wait continues after the thread has ended or
    `close` was called. One thread at a time may consume.

    Args:
        items: consumed by the thread.
        depth: items to prepare ahead, at least 1.
        timeout: seconds that the consumer waits for an item.
        what: a name for an item, for error texts.
        worker: the consuming worker, for error texts.
        idle: called by the thread, again and again, while enough items are ready; it returns whether it had work.
    """

    def __init__(
        self,
        items: Iterable[T],
        depth: int,
        *,
        name: str = "distkeras-prefetch",
        timeout: float = 3600.0,
        what: str = "the next item",
        worker: int | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        depth = require_integer("depth", depth)
        # Items are handed over in bulk: a switch of threads costs more than a small batch. The items that the consumer
        # holds and those that are ready are together at most `depth`.
        self._most_ready = (depth + 1) // 2
        self._ready: deque[T] = deque()
        self._taken: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self._timeout, self._what, self._worker = timeout, what, worker
        self._idle = idle
        self._thread = threading.Thread(target=self._run, args=(items,), name=name, daemon=True)

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item; JobStoppedError after `close`, before the end; DeadlineError if none came in time."""
        if not self._taken:
            if self._thread.ident is None:
                raise LocalProtocolError("items must be read after `start`. Received: a thread that does not run")
            with self._changed:
                if not self._changed.wait_for(lambda: self._ready or self._ended or self._closed, self._timeout):
                    raise DeadlineError(f"waited {self._timeout:g} s for {self._what}", worker=self._worker)
                self._taken, self._ready = self._ready, self._taken
                self._changed.notify_all()
        if self._closed:
            raise JobStoppedError("items must be read before `close`. Received: closed=True")
        if self._taken:
            return self._taken.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self, timeout: float) -> None:
        """End the thread after its current item, or raise DeadlineError. Thread-safe and idempotent."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(
                f"waited {timeout:g} s for the thread {self._thread.name!r} to end: it still waits for its input"
            )

    def _run(self, items: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    break
                while self._idle is not None and self._is_full and self._idle():
                    pass
        except BaseException as raised:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
            error = raised
        finally:
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify_all()

    @property
    def _is_full(self) -> bool:
        return len(self._ready) >= self._most_ready and not self._closed

    def _put(self, item: T) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_full)
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._closed


#: How long `close` waits for the thread, which may be reading from Spark.
_CLOSE_SECONDS = 60.0


class BatchSource:
    """The mini-batches of one partition, over all epochs: an iterator and a context manager.

    Within the context, a thread reads and prepares up to `depth` batches ahead. Leaving the context ends it, and
    discards the spool. The iteration raises the errors of the thread.

    Memory: the spool's budget, `depth` batches and 8 MB of further batches, two blocks of the first epoch, one record
    batch of Spark, and for shuffled later epochs eight bytes per row.

    Args:
        arrow: record batches with the columns of `spec`, under their names; consumed by the thread.
        worker: id of the worker and of its partition.
        start: (epoch, index) of the first batch to yield. The whole partition is read even when `start` lies in a
            later epoch, to fill the spool; at (spec.epochs, 0) there is nothing to do and nothing is read.
        checksum: of the batch before `start`, as an earlier attempt saw it; None: it is not compared.
        depth: batches to prepare ahead, at least 1; two windows, if they are more and take at most 8 MB.
        window: batches that the worker trains on at a time.
        directory: the folder for a spool over its budget; one of Spark's local directories by default.
        timeout: seconds to wait for Spark's next rows.
        read_ahead: read all rows into the spool while enough mini-batches are ready, so that other threads may have
            them early (`from_position`). Rows must be kept: several epochs, or `DataSpec.rewindable`.

    The iteration raises:
        BadValueError: a null, NaN or infinity; a number that its dtype cannot hold; a label that is not a class.
        ShapeError: values that do not fill the column's shape.
        MissingColumnError: the rows lack a column.
        ColumnTypeError: a column does not hold numbers.
        LedgerError: `start` lies beyond the end of its epoch, or the rows before it have another checksum: these are
            not the rows that were committed.
        JobStoppedError: the source was closed.
        DeadlineError: no rows came within `timeout`.
        LocalProtocolError: the context was not entered.
    """

    def __init__(  # noqa: PLR0913 - keywords, all but `worker` with a default
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
        timeout: float = 3600.0,
        read_ahead: bool = False,
    ) -> None:
        worker = require_integer("worker", worker, 0)
        window, depth = require_integer("window", window), require_integer("depth", depth)
        #: Rows read so far; after the first epoch, all rows of the partition.
        self.rows = 0
        #: Whether these are all.
        self.complete = False
        if spec.encoded:  # decoded rows are larger than Spark's record batches
            size = spec.batch_size
            arrow = (record.slice(start, size) for record in arrow for start in range(0, record.num_rows, size))
        self._arrow = arrow
        #: The rows that the partition is expected to have, 0 if unknown. The prefetch thread sets it in one assignment,
        #: because another thread reads it: a row count and a share that are read apart do not belong together.
        self._expected_rows = 0.0
        self._spec = spec
        self._worker = worker
        self._timeout = timeout
        self._order = EpochOrder(spec, worker, window)
        # A whole window is ready when the one before it is over, unless it is large.
        self._depth = max(depth, 2 * min(window, self._order.gathered))
        self._checksum = RowChecksum(self._order.block_rows)
        self._steps = self._padded_steps = 0
        self._spool: Spool | None = None
        if spec.epochs > 1 or spec.rewindable:
            self._spool = Spool(spec.columns, spec.spool_bytes, directory or local_directory(worker))
        #: The first row and the end of records in the spool that the first epoch has not come to.
        self._ahead: deque[tuple[int, int]] | None = deque() if read_ahead and self._spool is not None else None
        # A thread that reads ahead may wait for Spark at any time, and not only when the worker does.
        self._close_seconds = _CLOSE_SECONDS if self._ahead is None else max(_CLOSE_SECONDS, timeout)
        self._prefetcher = self._prefetcher_from(start, checksum)

    def _prefetcher_from(self, start: tuple[int, int], checksum: int | None) -> Prefetcher[Batch]:
        if min(start) < 0 or start > (self._spec.epochs, 0):
            raise invalid("start", start, f"from (0, 0) to ({self._spec.epochs}, 0), the end", worker=self._worker)
        return Prefetcher(
            self._batches(*start, checksum),
            self._depth,
            name=f"distkeras-batches-{self._worker}",
            timeout=self._timeout,
            what="the next rows from Spark, which may still compute them; `Deadlines.rows` sets the limit",
            worker=self._worker,
            idle=None if self._ahead is None else self._read_ahead,
        )

    def rewind(self, start: tuple[int, int], checksum: int | None = None) -> None:
        """Continue from the batch at ``start``, before or after the current one, as if the source were new."""
        if self._spool is None:
            raise ConfigurationError("`rewind` needs the rows kept. Received: one epoch, rewindable=False")
        self._prefetcher.close(self._close_seconds)
        if self._ahead is not None:
            self._ahead.clear()  # the first epoch begins again with all rows of the spool
        self._prefetcher = self._prefetcher_from(start, checksum)
        self._prefetcher.start()

    def read_to_end(self) -> None:
        """Read the partition to its end, which sets `rows`, and end the iteration; DeadlineError as in `close`."""
        self._prefetcher.close(self._close_seconds)
        while self._read_record() is not None:
            pass

    @property
    def checksum(self) -> int:
        """Return the checksum of all rows, once they are read."""
        return self._checksum.before(self.rows)

    def from_position(self, epoch: int, index: int) -> Iterator[Batch]:
        """Yield the mini-batches from a position on, once all rows are read and kept; in any thread."""
        assert self.complete
        assert self._spool is not None
        rows = self._spool.arrays()
        for number in range(epoch, self._spec.epochs):
            cut = self._order.cut(rows, self.checksum, number) if number else self._cut_blocks([rows])
            yield from self._numbered_batches(number, cut, index if number == epoch else 0, None, counted=False)

    def passed(self, batch: Batch) -> float:
        """Return the share of its epoch that is complete after ``batch``; 0 if it is unknown.

        In the first epoch it is estimated from the rows that came and their place in the order of hashes.
        """
        rows = self._expected_rows
        done = (batch.index + 1) * self._spec.batch_size
        return 1.0 if batch.last else min(1.0, done / rows) if rows else 0.0

    @property
    def padding(self) -> float | None:
        """Return the share of padding in the steps of the mini-batches so far; None without rows of any length."""
        return 1 - self._steps / self._padded_steps if self._padded_steps else None

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches in the rows read so far; after the first epoch, that of an epoch."""
        return -(-self.rows // self._spec.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._prefetcher)

    def __enter__(self) -> BatchSource:
        self._prefetcher.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and discard the spool. Thread-safe and idempotent."""
        self._prefetcher.close(self._close_seconds)
        if self._spool is not None:
            self._spool.close()

    # The methods below run in the thread; `_read_record` also in `read_to_end`, after the thread has ended.

    def _batches(self, first_epoch: int, index: int, checksum: int | None) -> Iterator[Batch]:
        for epoch in range(first_epoch, self._spec.epochs):
            start = index if epoch == first_epoch else 0
            if epoch == first_epoch and epoch > 0:
                for _ in self._remaining_rows():  # fills the spool
                    pass
                if start == 0:  # otherwise `_numbered_batches` compares
                    self._check_checksum(epoch, 0, self._checksum.before(self.rows), checksum)
            batch_rows = self._cut_blocks(self._all_rows())
            if epoch > 0:
                assert self._spool is not None
                batch_rows = self._order.cut(self._spool.arrays(), self._checksum.before(self._spool.rows), epoch)
            yield from self._numbered_batches(epoch, batch_rows, start, checksum)

    def _cut_blocks(self, pieces: Iterable[ColumnRows]) -> Iterator[BatchRows]:
        end = 0
        for number, block in enumerate(in_blocks(pieces, self._order.block_rows)):
            end += len(block[0])
            yield from self._order.cut(block, self._checksum.before(end), 0, number)

    def _all_rows(self) -> Iterator[ColumnRows]:
        """Yield all rows in the order of arrival: those read before a `rewind`, then the remaining ones."""
        if self._spool is not None and self._spool.rows:
            yield self._spool.arrays()
        yield from self._remaining_rows()

    def _remaining_rows(self) -> Iterator[ColumnRows]:
        """Yield the rows that have not been read yet, until the prefetcher is closed for a `rewind`."""
        while not self._prefetcher.closed:
            if self._ahead:
                first, end = self._ahead.popleft()
                assert self._spool is not None
                yield tuple(column[first:end] for column in self._spool.arrays())
                continue
            rows = self._read_record()
            if rows is None:
                return
            yield rows

    def _read_ahead(self) -> bool:
        """Read the next rows into the spool, before the first epoch comes to them; return whether there were any."""
        first = self.rows
        if self.complete or self._read_record() is None:
            return False
        assert self._ahead is not None
        self._ahead.append((first, self.rows))
        return True

    def _read_record(self) -> ColumnRows | None:
        """Return the columns of the next record batch, checked and spooled; None at the end."""
        record = next(self._arrow, None)
        if record is None:
            self._expected_rows, self.complete = self.rows, True
            return None
        step = self.rows // self._spec.batch_size
        rows = checked_columns(record, self._spec, worker=self._worker, step=step, first_row=self.rows)
        self._checksum.update(record)
        if self._spool is not None:
            rows = self._spool.append(rows)
        self.rows += record.num_rows
        share = self._checksum.share
        self._expected_rows = self.rows / share if share else 0.0
        return rows

    def _numbered_batches(
        self, epoch: int, batch_rows: Iterator[BatchRows], start: int, checksum: int | None, *, counted: bool = True
    ) -> Iterator[Batch]:
        """Yield the batches from number `start` on. Each waits for the next one, since the last is marked as such.

        Those that are ``counted`` count for `padding`.
        """
        count = 0
        previous: BatchRows | None = None
        for rows in batch_rows:
            if previous is not None and count > start:
                yield self._batch(previous, epoch, count - 1, False, counted)
            previous = rows
            count += 1
            if count == start:
                self._check_checksum(epoch, start, rows.checksum, checksum)
        if previous is not None and count > start:
            yield self._batch(previous, epoch, count - 1, True, counted)
        if start > count:
            raise LedgerError(
                f"the input has not returned the same rows as before: {count} mini-batches in epoch {epoch}, of which "
                f"{start} were trained before. {SAVE_ROWS}",
                worker=self._worker,
                step=start,
            )

    def _batch(self, rows: BatchRows, epoch: int, index: int, last: bool, counted: bool) -> Batch:
        batch = rows.batch(epoch, index, last)
        if counted:
            own, padded = rows.gather.steps(rows.rows)
            self._steps += own
            self._padded_steps += padded
        return batch

    def _check_checksum(self, epoch: int, index: int, checksum: int, expected: int | None) -> None:
        if expected is not None and checksum != expected:
            raise LedgerError(
                f"the input has not returned the same rows as before: checksum {checksum:#018x} before mini-batch "
                f"{index} of epoch {epoch}, where it was {expected:#018x}. {SAVE_ROWS}",
                worker=self._worker,
                step=index,
            )


def checked_columns(record: pa.RecordBatch, spec: DataSpec, *, worker: int, step: int, first_row: int) -> ColumnRows:
    """Return the columns of ``spec`` as arrays, after a check that they can be trained on."""
    arrays = []
    for column in spec.columns:
        if record.schema.get_field_index(column.name) < 0:
            raise MissingColumnError(
                f"the rows must have the column {column.name!r}. Received: columns={record.schema.names}",
                worker=worker,
                column=column.name,
            )
        values = record.column(column.name)
        arrays.append(to_numpy(values, column, worker=worker, step=step, first_row=first_row, record=record))
    lengths: dict[str, np.ndarray] = {}
    for column, rows in zip(spec.columns, arrays, strict=True):
        if isinstance(rows, RaggedRows):
            lengths[column.name] = rows.lengths
    for column in spec.columns:
        if column.steps_of:
            unequal = np.flatnonzero(lengths[column.name] != lengths[column.steps_of])
            if unequal.size:
                row = unequal[0]
                raise ShapeError(
                    f"a row must have as many steps as in {column.steps_of!r}, {lengths[column.steps_of][row]}. "
                    f"Received: {lengths[column.name][row]} in row {first_row + row}",
                    worker=worker,
                    column=column.name,
                    step=step,
                )
    return tuple(arrays)


def collect(df: DataFrame, spec: DataSpec, most: int) -> Batch:
    """Return rows of a DataFrame on the driver as one mini-batch, checked as workers check them.

    Of more than ``most`` rows it has that many, effectively a random sample: it depends only on the values of the rows
    and on ``spec.seed``. ``spec`` must have one epoch, without shuffling.
    """
    from pyspark.errors import PySparkException

    ready = partitioned(df, spec, 1).limit(most)
    try:
        table = ready.toArrow()
    except PySparkException as error:
        raise typed_error(error, df.sparkSession) from None
    with BatchSource(iter(table.to_batches()), replace(spec, batch_size=most), worker=0) as source:
        batch = next(source, None)
    if batch is None:
        raise EmptyDataError("the DataFrame must have rows. Received: none")
    return batch
