"""The rows of a table that a snapshot must write, with the values that they had when it was taken.

A snapshot shows one moment, but writing it takes long, and commits continue. So its rows are read in small blocks, each
under a short hold of the lock. Before a commit changes a row that was not read yet, a copy of the row is set aside.
"""

from __future__ import annotations

import numpy as np

from distkeras.ps.protocol.tables import Ids

#: Row numbers, and the rows ``(count, width)``.
Rows = tuple[Ids, np.ndarray]


class TableChanges:
    """The marks of one table's rows; its caller holds the center's lock around every call.

    Args:
        rows: number of rows of the table.
    """

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

    def mark(self, start: int, stop: int) -> None:
        """Mark the rows from ``start`` to ``stop`` as changed, so that the next snapshot writes them."""
        self._changed[start:stop] = True

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
        """Copy the first unread rows from ``start`` to ``stop`` to ``out``, as many as it has room for.

        Args:
            start, stop: the range to search.
            out: ``(most, width)``.

        Returns:
            The numbers of the copied rows, ascending; fewer than ``most`` only if no others are left.
        """
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
