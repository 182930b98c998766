"""The driver's end of a connection to the parameter server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.layout import Layout, encode
from distkeras.ps.protocol.loop import NO_BYTES, NO_FLOATS
from distkeras.ps.protocol.tables import Ids, TableShape, block_bytes, block_rows
from distkeras.ps.rules.base import Vector
from distkeras.ps.transport.client import Client


def publication(
    center: Vector,
    moving_statistics: np.ndarray = NO_FLOATS,
    model: bytes = b"",
    layouts: Sequence[Layout] = (),
) -> driver_messages.Publish:
    """Return the message with initial center (float32), moving statistics and model; ``layouts`` name arrays."""
    blobs = (model, encode(layouts) if layouts else b"")
    arrays = [np.frombuffer(blob, np.uint8) if blob else NO_BYTES for blob in blobs]
    return driver_messages.Publish(center, moving_statistics, *arrays)


#: Rows that one request removes, at most: the server holds its lock meanwhile.
_REMOVED_AT_ONCE = 1 << 18


class DriverClient(Client):
    """The driver's connection to the server; arguments as for `Client`."""

    def publish(
        self,
        center: Vector,
        moving_statistics: np.ndarray = NO_FLOATS,
        model: bytes = b"",
        layouts: Sequence[Layout] = (),
        tables: Sequence[tuple[TableShape, np.ndarray]] = (),
    ) -> None:
        """Send the rows of the ``tables`` (float32 ``(rows, width)``), then a `publication`; idempotent."""
        self.publish_rows(tables)
        self.send_publication(publication(center, moving_statistics, model, layouts))

    def send_publication(self, message: driver_messages.Publish) -> None:
        """Send what `publication` returned; idempotent."""
        self.request(message, messages.Ack)

    def publish_rows(self, tables: Sequence[tuple[TableShape, np.ndarray]]) -> None:
        """Send the initial rows of all tables, float32 ``(rows, width)``, unless the server has restored them."""
        for number, (shape, array) in enumerate(tables):
            start, step = 0, block_rows(shape)
            while start < shape.rows:
                rows = np.ascontiguousarray(array[start : start + step], np.float32).reshape(-1)
                start = self.request(
                    driver_messages.PublishRows(number, start, rows), driver_messages.RowsPublished
                ).rows

    def observe(self, clock: int, patience: float) -> driver_messages.Status:
        """Wait until more than ``clock`` commits are applied, or for ``patience`` seconds; return the status."""
        return self.request(
            driver_messages.Observe(clock, patience), driver_messages.Status, patience + self.deadlines.frame
        )

    def ping(self) -> driver_messages.Status:
        return self.request(driver_messages.Observe(-1, 0.0), driver_messages.Status, self.deadlines.handshake)

    def center(self, moved_after: int = -1, wants: tuple[Ids, ...] = ()) -> messages.CenterReply:
        """Return the present center, with the rows that `driver_messages.Inspect` requests."""
        return self.request(driver_messages.Inspect(moved_after, wants), messages.CenterReply)

    def set_values(self, rows: np.ndarray, number: int) -> int:
        """Set numbers for all workers, as `SetValues` says; return the clock of the first commit after that.

        ``number`` rises from request to request of a driver, and is the same in a repetition.
        """
        return self.request(
            driver_messages.SetValues(np.ascontiguousarray(rows, np.float64), number), messages.Ack
        ).clock

    def remove_rows(self, number: int, ids: Ids) -> None:
        """Remove rows, ascending, of table ``number``; return once that is saved."""
        for first in range(0, max(1, len(ids)), _REMOVED_AT_ONCE):
            self._remove(driver_messages.RemoveRows(number, ids[first : first + _REMOVED_AT_ONCE]))

    def _remove(self, message: driver_messages.RemoveRows) -> None:
        self.request(message, messages.Ack)

    def whole_center(
        self, tables: Sequence[TableShape], wants: tuple[Ids, ...] = ()
    ) -> tuple[messages.CenterReply, Vector]:
        """Return the present center, and a vector of its elements and those of ``tables``, all of the same clock.

        The tables, the first and whole ones, are read in blocks, while workers commit. Rows that move meanwhile are
        read again with the center. ``wants`` are rows of the other tables, which follow in the reply.
        """
        while True:
            before = self.center()
            stops = np.cumsum([before.center.size, *(shape.rows * shape.width for shape in tables)])
            vector, arrays = np.empty(stops[-1], np.float32), list[np.ndarray]()
            for number, shape in enumerate(tables):
                arrays.append(vector[stops[number] : stops[number + 1]].reshape(shape.rows, shape.width))
                self.table(number, shape, arrays[-1])
            reply = self.center(before.clock, wants)
            vector[: stops[0]] = reply.center
            for array, ids, rows in zip(arrays, reply.moved, reply.rows, strict=False):  # partial tables follow
                array[ids] = rows.reshape(-1, array.shape[1])
            if reply.incarnation == before.incarnation:  # else some blocks may be those of another server
                return reply, vector

    def table(self, number: int, shape: TableShape, out: np.ndarray | None = None) -> np.ndarray:
        """Return table ``number``, float32 ``(rows, width)``, in ``out`` if given; its blocks have different clocks."""
        out = np.empty((shape.rows, shape.width), np.float32) if out is None else out
        for request, answer in self._blocks(number, shape):
            if answer.rows.size:  # a divided table is read in blocks of its shards, of which the last ones are empty
                places = answer.ids if len(answer.ids) else slice(request.start, request.start + request.count)
                out[places] = answer.rows.reshape(-1, shape.width)
        return out

    def publish_touched(self, number: int, shape: TableShape, blocks: Iterable[tuple[Ids, np.ndarray]]) -> None:
        """Send the initial touched rows of a partial table, in blocks of numbers and rows, each row in one block.

        The blocks are not read if the server has restored the table.
        """
        start, step = 0, block_rows(shape)
        for ids, rows in blocks:
            for first in range(0, len(ids), step):
                part = ids[first : first + step]
                flat = np.ascontiguousarray(rows[first : first + step], np.float32).reshape(-1)
                published = self.request(
                    driver_messages.PublishRows(number, start, flat, part), driver_messages.RowsPublished
                ).rows
                start += len(part)
                if published > start:  # the server has restored the table
                    return

    def touched(self, number: int, shape: TableShape) -> Iterator[tuple[Ids, np.ndarray]]:
        """Yield the touched rows of table ``number``: numbers and rows, in blocks, which have different clocks."""
        for _, answer in self._blocks(number, shape):
            if len(answer.ids):
                yield answer.ids, answer.rows.reshape(-1, shape.width)

    def begin_changes(self, since: int) -> driver_messages.ChangesBegun:
        """Ask for the changes since a clock at which this was called before; see `driver_messages.BeginChanges`."""
        return self.request(driver_messages.BeginChanges(since), driver_messages.ChangesBegun)

    def changes(self, number: int, shape: TableShape) -> Iterator[tuple[Ids, np.ndarray, Ids]]:
        """Yield the changes of table ``number``: numbers and rows that have changed, and numbers that are gone."""
        for _, answer in self._blocks(number, shape, changed=True):
            if len(answer.ids) or len(answer.gone):
                yield answer.ids, answer.rows.reshape(-1, shape.width), answer.gone

    def _blocks(
        self, number: int, shape: TableShape, *, changed: bool = False
    ) -> Iterator[tuple[driver_messages.InspectRows, driver_messages.TableRows]]:
        """Yield the request for each block of table ``number``, and its answer."""
        step, count = block_rows(shape), shape.rows
        requests = (
            driver_messages.InspectRows(number, start, min(step, shape.rows - start), changed)
            for start in takewhile(lambda start: start < count, range(0, shape.rows, step))
        )
        for request, answer in self.read_blocks(requests, block_bytes(shape)):
            yield request, answer
            count = answer.count

    def read_blocks(
        self, requests: Iterable[driver_messages.InspectRows], nbytes: int
    ) -> Iterator[tuple[driver_messages.InspectRows, driver_messages.TableRows]]:
        """Yield each of ``requests``, in order, with its answer of at most ``nbytes`` bytes."""
        for message in requests:
            yield message, self.request(message, driver_messages.TableRows)

    def begin_micro_batch(self, stream: str, number: int) -> driver_messages.MicroBatchBegun:
        """Begin a micro-batch; idempotent; raise DifferentJobError if another one must come next."""
        return self.request(driver_messages.BeginMicroBatch(stream, number), driver_messages.MicroBatchBegun)

    def drain(self, start: int = 0, count: int = 4096) -> driver_messages.Records:
        """Return commit records from number ``start`` on, with their history."""
        return self.request(driver_messages.Drain(start, count), driver_messages.Records)

    def finish(self, reason: str) -> None:
        """End the job early and successfully: every worker commits its window, and leaves."""
        self.request(driver_messages.EndEarly(reason), messages.Ack, self.deadlines.handshake)

    def list_workers(self) -> np.ndarray:
        """Return float64 rows of worker, attempt, last commit, and seconds since: see `driver_messages.WorkerTable`."""
        return self.request(driver_messages.ListWorkers(), driver_messages.WorkerTable, self.deadlines.frame).rows

    def stop(self, reason: str) -> None:
        """End the job: every worker's next request fails."""
        self.request(driver_messages.Abort(reason), messages.Ack, self.deadlines.handshake)

    def goodbye(self) -> None:
        """End the server; this must be the last request."""
        self.request(driver_messages.Goodbye(), messages.Ack, self.deadlines.handshake)
