"""Tables of the center: rows that commits name, and that change in place.

A snapshot shows one moment, but writing it takes long, and commits continue. So its rows are read in small blocks, each
under a short hold of the lock. Before a commit changes a row that was not read yet, a copy of the row is set aside
(`TableChanges`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distkeras.ps.protocol.tables import Ids, RowIndex, TableShape, grown, initial_rows, put_rows
from distkeras.ps.rules.base import BLOCK, Chunk, Vector

#: Row numbers, and the rows ``(count, width)``.
Rows = tuple[Ids, np.ndarray]


class TableChanges:
    """The marks of one table's rows; its caller holds the center's lock around every call."""

    def __init__(self, rows: int) -> None:
        #: Whether each row has changed since the latest snapshot was taken.
        self._changed = np.zeros(rows, np.bool_)
        #: Whether each row belongs to the snapshot that is being written, and is neither read nor set aside yet.
        self._unread = np.zeros(rows, np.bool_)
        #: `_changed` as it was when the snapshot was begun.
        self._before = np.zeros(rows, np.bool_)
        self._aside: list[Rows] = []
        #: Whether a snapshot is being written.
        self.active = False

    def note(self, ids: Ids, rows: np.ndarray) -> None:
        """Note that the rows ``ids``, which are unique, are about to change; ``rows`` are their present values."""
        if self.active:
            unread = self._unread[ids]
            if unread.any():
                self._aside.append((ids[unread], rows[unread]))
                self._unread[ids] = False
        self._changed[ids] = True

    def grow(self, rows: int) -> None:
        """Extend the marks to ``rows`` rows; the new ones have not changed and do not belong to a snapshot."""
        missing = rows - len(self._changed)
        if missing > 0:
            self._changed, self._unread, self._before = (
                np.pad(marks, (0, missing)) for marks in (self._changed, self._unread, self._before)
            )

    def mark(self, rows: slice | Ids) -> None:
        """Mark rows as changed, so that the next snapshot writes them."""
        self._changed[rows] = True

    def begin(self) -> None:
        """Begin a snapshot of the rows that have changed since the previous one."""
        np.copyto(self._before, self._changed)
        self._changed, self._unread = self._unread, self._changed  # no row is unread now
        self.active = True

    def include(self, start: int, stop: int) -> None:
        """Add the rows from ``start`` to ``stop`` to the snapshot, right after it was begun."""
        self._unread[start:stop] = True

    def unread(self, start: int, stop: int) -> int:
        """Return how many of the snapshot's rows from ``start`` to ``stop`` are neither read nor set aside yet."""
        return int(np.count_nonzero(self._unread[start:stop]))

    def read(self, array: np.ndarray, start: int, stop: int, out: np.ndarray) -> Ids:
        """Copy the first unread rows from ``start`` to ``stop`` that fit to ``out``, and return their numbers."""
        ids = np.flatnonzero(self._unread[start:stop])[: len(out)] + start
        np.take(array, ids, axis=0, out=out[: len(ids)], mode="clip")  # unlike "raise", it writes straight into `out`
        self._unread[ids] = False
        return ids

    def read_all(self, array: np.ndarray, start: int, out: np.ndarray) -> None:
        """Copy all rows from ``start`` on, which `include` has added, to ``out`` ``(count, width)``.

        Rows that were set aside are copied with their new values, and the caller must replace these by the old ones.
        """
        stop = start + len(out)
        np.copyto(out, array[start:stop])
        self._unread[start:stop] = False

    def take_aside(self) -> list[Rows]:
        """Return the rows that were set aside since the previous call."""
        aside, self._aside = self._aside, []
        return aside

    def end(self, *, saved: bool) -> None:
        """End the snapshot; unless it was ``saved``, its changed rows belong to the next one too."""
        if not saved:
            self._changed |= self._before
            self._unread[:] = False
        self._aside = []
        self.active = False


class Table:
    """One table of the center; its caller holds the center's lock around every call. ``array`` has the initial rows."""

    def __init__(self, shape: TableShape, array: np.ndarray | None = None) -> None:
        self.shape = shape
        self.array = np.zeros((shape.rows, shape.width), np.float32) if array is None else array
        self.changes = TableChanges(len(self.array))
        #: For each row of a table that is kept whole, the clock after the latest commit that moved it.
        self._moved_at = np.zeros(0 if shape.partial else len(self.array), np.int64)
        #: Rows of one block, which stay in a core's cache while the kernel works on them.
        self._block = max(1, BLOCK // shape.width)
        self._gathered = np.empty((min(self._block, shape.most), shape.width), self.array.dtype)
        self._scratch = np.empty(self._gathered.size, self.array.dtype)

    @property
    def count(self) -> int:
        """The number of rows of `array` that are in use: all of them, or the touched ones."""
        return len(self.array)

    def begin_snapshot(self) -> None:
        self.changes.begin()

    def saved_ids(self, places: slice | Ids) -> Ids | None:
        """Return the numbers of the rows of `array` at ``places``; None: they equal ``places``.

        While a snapshot is being written, they are those from when it was begun.
        """
        return None

    def _places(self, ids: Ids) -> Ids:
        """Return the places of the rows ``ids`` in `array`; missing rows are added."""
        return ids

    def moved_since(self, clock: int) -> Ids:
        """Return the rows that commits after ``clock`` have moved; for a table that is kept whole."""
        return np.flatnonzero(self._moved_at > clock)

    def apply(self, ids: Ids, moved: Vector, kernel: Callable[[Chunk], float | None], clock: int = 0) -> float | None:
        """Move the rows ``ids``, unique and in range, by a rule's ``kernel``, which works on chunks.

        ``moved``, the payload for them, is overwritten. Return the sum of the scale factors; None if each was 1.
        """
        width, chunk = self.shape.width, Chunk()
        chunk.model, chunk.worker = (), ()
        scale: float | None = None
        places = self._places(ids)
        for first in range(0, ids.size, self._block):
            rows = places[first : first + self._block]
            payload = moved[first * width : (first + rows.size) * width]
            # Unlike "raise", "clip" writes straight into `out`.
            gathered = np.take(self.array, rows, axis=0, out=self._gathered[: rows.size], mode="clip")
            chunk.out, chunk.payload, chunk.scratch = payload, (payload,), self._scratch[: payload.size]
            chunk.center = chunk.sent = gathered.reshape(-1)
            share = kernel(chunk)
            if share is not None:
                scale = share if scale is None else scale + share
            self.changes.note(rows, gathered)
            put_rows(self.array, rows, payload.reshape(-1, width))
        if self._moved_at.size:
            self._moved_at[places] = clock
        return scale

    def gather(self, ids: Ids, out: Vector | None = None) -> Vector:
        """Return a copy of the rows ``ids``, flat; in ``out``, if that is given."""
        out = np.empty(ids.size * self.shape.width, self.array.dtype) if out is None else out
        np.take(self.array, ids, axis=0, out=out.reshape(-1, self.shape.width), mode="clip")
        return out

    def restore(self, rows: np.ndarray, ids: Ids) -> None:
        """Take over the rows of a snapshot into a new table; ``ids`` are their `saved_ids`, empty for None."""
        if ids.size:
            self.array[self._places(ids)] = rows
        else:
            self.array = rows

    def present(self, places: slice) -> tuple[Ids | None, np.ndarray]:
        """Return copies of the rows of `array` at ``places`` that a driver is sent, and their numbers, or None."""
        return None, self.array[places].copy()

    def tick(self, clock: int, seconds: float) -> None:
        """Note that a commit was applied: the center's clock is ``clock`` now, at ``seconds`` since the epoch."""


#: The row number at a free place.
NO_ROW = -1


class PartialTable(Table):
    """A table that stores only the rows that commits have moved; see `Table`.

    `array` has the touched rows, in the order in which they were first touched, and room for more: its size doubles
    when it is full. A row that is sent before its first commit is computed each time, and is not stored. The place of
    a row that was forgotten is free, and later rows get it.
    """

    def __init__(self, shape: TableShape, dtype: Any = np.float32) -> None:
        super().__init__(shape, np.zeros((0, shape.width), dtype))
        self._ids = np.zeros(0, np.int64)
        self._index = RowIndex()
        self._count = 0
        #: The places without a row, the first ``_free_count`` elements of an array that grows.
        self._free, self._free_count = np.zeros(0, np.int64), 0
        #: The places that were free when the present snapshot was begun, and have rows now.
        self._taken: list[Ids] = []

    @property
    def count(self) -> int:
        return self._count

    def ids_of(self, places: slice | Ids) -> Ids:
        """Return the numbers of the rows of `array` at ``places``; `NO_ROW` at a free place."""
        return self._ids[places]

    def begin_snapshot(self) -> None:
        self._taken = []
        super().begin_snapshot()

    def saved_ids(self, places: slice | Ids) -> Ids:
        ids = self._ids[places].copy()
        if self.changes.active and self._taken:
            numbers = np.arange(places.start, places.stop) if isinstance(places, slice) else places
            ids[np.isin(numbers, np.concatenate(self._taken))] = NO_ROW
        return ids

    def find(self, ids: Ids) -> Ids:
        """Return the place of each row; -1 if it was not touched."""
        return self._index.find(ids)

    def add(self, ids: Ids) -> Ids:
        """Return the places of rows; those of rows that were not touched are added, with their initial values."""
        places = self._index.find(ids)
        new = places < 0
        if new.any():
            places[new] = self._add(ids[new])
            self.array[places[new]] = initial_rows(self.shape, ids[new])
        return places

    _places = add

    def _add(self, ids: Ids) -> Ids:
        """Add rows that are not touched yet; return their places. The caller sets their values."""
        left = max(0, self._free_count - len(ids))
        free = self._free[left : self._free_count].copy()
        self._free_count = left
        if self.changes.active and len(free):
            self._taken = [*self._taken, free]  # before the ids below, which a snapshot's thread reads without the lock
        places = np.concatenate([free, np.arange(self._count, self._count + len(ids) - len(free))])
        self._index.add(ids, places)
        self._count += len(ids) - len(free)
        self.array, self._ids = grown(self.array, self._count), grown(self._ids, self._count)
        self.changes.grow(len(self.array))
        self._ids[places] = ids
        return places

    def set(self, places: Ids, rows: Any) -> None:
        """Replace rows that were touched."""
        self.changes.note(places, self.array[places])
        self.array[places] = rows

    def forget(self, ids: Ids) -> None:
        """Forget touched rows, unique, whose places are free from now on; not while a snapshot is being written."""
        assert not self.changes.active, "a snapshot names rows by their places"
        places = self._index.remove(ids)
        self._ids[places] = NO_ROW
        self.changes.mark(places)
        end = self._free_count + len(places)
        self._free = grown(self._free, end)
        self._free[self._free_count : end], self._free_count = places, end

    def gather(self, ids: Ids, out: Vector | None = None) -> Vector:
        out = np.empty(ids.size * self.shape.width, self.array.dtype) if out is None else out
        rows = out.reshape(-1, self.shape.width)
        places = self._index.find(ids)
        new = places < 0
        if not new.all():
            np.take(self.array, places, axis=0, out=rows, mode="clip")
        if new.any():
            rows[new] = initial_rows(self.shape, ids[new])
        return out

    def put(self, start: int, ids: Ids, rows: np.ndarray) -> None:
        """Set touched rows from place ``start`` on, with the rows that a driver publishes."""
        places = self._index.find(ids)
        new, expected = places < 0, np.arange(start, start + len(ids))
        if len(np.unique(ids)) < len(ids) or (places[~new] != expected[~new]).any():
            raise ValueError("a row is there twice")
        if new.any():
            places[new] = self._add(ids[new])
        self.array[places] = rows
        self.changes.mark(slice(start, start + len(ids)))

    def restore(self, rows: np.ndarray, ids: Ids) -> None:
        places = np.flatnonzero(ids != NO_ROW)
        self._index.add(ids[places], places)
        self.array, self._ids = rows.astype(self.array.dtype, copy=False), ids
        self._count, self._free = len(rows), np.flatnonzero(ids == NO_ROW)
        self._free_count = len(self._free)
        self.changes.grow(len(rows))

    def present(self, places: slice) -> tuple[Ids | None, np.ndarray]:
        ids = self._ids[places]
        taken = ids != NO_ROW
        return ids[taken], self.array[places][taken]
