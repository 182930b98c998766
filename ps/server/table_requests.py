"""The server's answers to requests about rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.living_tables import LivingTable, make_table
from distkeras.ps.center.tables import PartialTable, Table
from distkeras.ps.errors import ConfigurationError, RemoteProtocolError
from distkeras.ps.protocol import driver_messages
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape, block_rows
from distkeras.ps.server.job_state import JobCondition


class TableRequests:
    """Collects the initial rows before the center is made, and sends rows; ``make`` returns a new table."""

    def __init__(
        self,
        shapes: Sequence[TableShape],
        changed: JobCondition,
        make: Callable[[TableShape], Table] = make_table,
    ) -> None:
        self._changed = changed
        #: The tables of the new center; the system allocates their memory when rows are written.
        self.tables = tuple(make(shape) for shape in shapes)
        #: How many rows of each table have arrived, from the first one on.
        self._published = [0] * len(self.tables)

    def require_complete(self) -> None:
        """Raise a RemoteProtocolError unless all rows of all tables have arrived."""
        for table, published in zip(self.tables, self._published, strict=True):
            if published < table.count and not table.shape.partial:
                raise RemoteProtocolError(
                    f"all {table.count} rows of table {table.shape.name!r} must be published before the center. "
                    f"Received: {published}"
                )

    def publish(self, center: Center | None, message: driver_messages.PublishRows) -> Message:
        """Store the rows, unless a published or restored ``center`` already has them."""
        table = self._table(message.table)
        shape, end = table.shape, message.start + message.rows.size // table.shape.width
        with self._changed:
            if center is not None:
                return driver_messages.RowsPublished(shape.rows)
            filled, most = self._published[message.table], shape.rows if shape.partial else table.count
            whole = message.rows.size % shape.width == 0
            if not whole or not 0 <= message.start <= filled or not message.start < end <= most:
                raise RemoteProtocolError(
                    f"rows of table {shape.name!r} must be whole ones of {shape.width} elements that follow the first "
                    f"{filled} of {most}. Received: {message.rows.size} elements from row {message.start} on"
                )
            if isinstance(table, PartialTable):
                _put(table, message)
            else:
                table.array[message.start : end] = message.rows.reshape(-1, shape.width)
            self._published[message.table] = max(filled, end)
            return driver_messages.RowsPublished(end)

    def inspect(self, require_center: Callable[[], Center], message: driver_messages.InspectRows) -> Message:
        """Return a copy of the present rows."""
        shape, count = self._table(message.table).shape, message.count
        end = message.start + count
        if not 0 <= message.start < end <= shape.rows or count > block_rows(shape):
            raise RemoteProtocolError(
                f"from 1 to {block_rows(shape)} rows of table {shape.name!r} in [0, {shape.rows}) may be asked for at "
                f"a time. Received: {count} from row {message.start} on"
            )
        with self._changed:
            center = require_center()
            table = center.tables[message.table]
            if message.changed:
                return self._changes(center, table, slice(message.start, end))
            ids, rows = table.present(slice(message.start, min(end, table.count)))
            return driver_messages.TableRows(
                center.clock, table.count, rows.reshape(-1), NO_IDS if ids is None else ids
            )

    def _changes(self, center: Center, table: Table, places: slice) -> Message:
        if not isinstance(table, LivingTable):
            raise RemoteProtocolError(
                f"changes must be those of a table that is tracked. Received: a request for table {table.shape.name!r}"
            )
        places = slice(places.start, min(places.stop, table.marks.count))
        ids, rows, gone = table.changed(places)
        return driver_messages.TableRows(center.clock, table.marks.count, rows.reshape(-1), ids, gone)

    def begin_changes(self, center: Center, message: driver_messages.BeginChanges) -> Message:
        """Note from which moment on changes are asked for; the caller holds the lock."""
        known = center.begin_changes(message.since)
        return driver_messages.ChangesBegun(center.clock, known)

    def remove(self, center: Center, message: driver_messages.RemoveRows) -> None:
        """Remove rows, which are checked; the caller holds the lock."""
        self.require_removable(message)
        center.remove_rows(message.table, message.ids)

    def require_removable(self, message: driver_messages.RemoveRows) -> None:
        """Check the rows to remove.

        Raises:
            ConfigurationError: the table cannot lose rows.
            RemoteProtocolError: there is no such table, or not such rows.
        """
        table, ids = self._table(message.table), message.ids
        if not isinstance(table, LivingTable):
            raise ConfigurationError(
                f"table {table.shape.name!r} must be one whose touches are counted, so that rows can be removed. "
                "Received: another table"
            )
        if ids.size and not ((ids[1:] > ids[:-1]).all() and 0 <= ids[0] <= ids[-1] < table.shape.rows):
            raise RemoteProtocolError(
                f"`ids` must be rows of table {table.shape.name!r} in [0, {table.shape.rows}), in ascending order. "
                f"Received: {ids.size} from {ids.min()} to {ids.max()}"
            )

    def _table(self, number: int) -> Table:
        if not 0 <= number < len(self.tables):
            raise RemoteProtocolError(
                f"`table` must be the number of one of {len(self.tables)} tables. Received: table={number}"
            )
        return self.tables[number]


def rows_to_inspect(tables: Sequence[Table], message: driver_messages.Inspect) -> tuple[Ids, ...]:
    """Return the rows that a driver is sent with the center, table by table; an empty tuple if it requests none."""
    if message.moved_after < 0 and not message.wants:
        return ()
    wants = message.wants or (NO_IDS,) * len(tables)
    if len(wants) != len(tables):
        raise RemoteProtocolError(
            f"`wants` must have an array of rows for each of {len(tables)} tables. Received: {len(wants)}"
        )
    for table, ids in zip(tables, wants, strict=True):
        shape, ascends = table.shape, bool((ids[1:] > ids[:-1]).all())
        if ids.size and not (shape.partial and ascends and 0 <= ids[0] <= ids[-1] < shape.rows):
            raise RemoteProtocolError(
                f"`wants` must name rows of a table that has touched rows alone, in [0, {shape.rows}), in ascending "
                f"order. Received: {ids.size} rows of {shape.name!r} from {ids.min()} to {ids.max()}"
            )
    return tuple(
        ids if table.shape.partial or message.moved_after < 0 else table.moved_since(message.moved_after)
        for table, ids in zip(tables, wants, strict=True)
    )


def _put(table: PartialTable, message: driver_messages.PublishRows) -> None:
    """Store touched rows; raise a RemoteProtocolError if one is out of range or occurs twice."""
    ids, rows = message.ids, message.rows.reshape(-1, table.shape.width)
    if len(ids) != len(rows) or ids.min() < 0 or ids.max() >= table.shape.rows:
        raise RemoteProtocolError(
            f"`ids` must be {len(rows)} rows of table {table.shape.name!r} in [0, {table.shape.rows}). "
            f"Received: {len(ids)} from {ids.min(initial=0)} to {ids.max(initial=0)}"
        )
    try:
        table.put(message.start, ids, rows)
    except ValueError as error:
        raise RemoteProtocolError(
            f"rows of table {table.shape.name!r} must be published once. Received: {error}"
        ) from error


def bytes_of_rows(shapes: Sequence[TableShape]) -> int:
    """Return the largest number of bytes of row numbers and rows in one commit."""
    ids = sum(2 * shape.most for shape in shapes)
    return np.dtype(np.int64).itemsize * ids + np.dtype(np.float32).itemsize * sum(s.most * s.width for s in shapes)
