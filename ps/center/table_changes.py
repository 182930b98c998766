"""Which rows of a table a snapshot must write, and what they were when it was taken.

A snapshot is of one moment, but writing takes long, and commits continue. So its rows are read in small blocks, each
under the lock for a moment. A row that a commit changes before it was read is set aside first, as it was.
"""

from __future__ import annotations

import numpy as np

from distkeras.ps.protocol.tables import Ids

#: Row numbers, and these rows ``(count, width)``.
Rows = tuple[Ids, np.ndarray]


class TableChanges:
    """Marks of one table's rows; its caller holds the center's lock around every call.

    Args:
        rows: number of rows of the table.
    """

    def __init__(self, rows: int) -> None:
        #: Whether each row has changed since the latest snapshot was taken.
        self._changed = np.zeros(rows, np.bool_)
        #: Whether each row is of the snapshot that is being written, and neither read nor set aside yet.
        self._unread = np.zeros(rows, np.bool_)
        #: The marks of changed rows that this snapshot began with.
        self._before = np.zeros(rows, np.bool_)
        self._aside: list[Rows] = []
        #: Whether a snapshot is being written.
        self.active = False

    def note(self, ids: Ids, rows: np.ndarray) -> None:
        """Note that the rows ``ids``, each there once, are about to change; ``rows`` are these rows until then."""
        if self.active:
            unread = self._unread[ids]
            if unread.any():
                self._aside.append((ids[unread], rows[unread]))
                self._unread[ids] = False
        self._changed[ids] = True

    def grow(self, rows: int) -> None:
        """Let there be marks of so many rows; the new ones have not changed, and are of no snapshot."""
        missing = rows - len(self._changed)
        if missing > 0:
            self._changed, self._unread, self._before = (
                np.pad(marks, (0, missing)) for marks in (self._changed, self._unread, self._before)
            )

    def mark(self, start: int, stop: int) -> None:
        """Count the rows from ``start`` to ``stop`` as changed: the file that has them is lost."""
        self._changed[start:stop] = True

    def begin(self) -> None:
        """Begin a snapshot of the rows that have changed since the one before."""
        np.copyto(self._before, self._changed)
        self._changed, self._unread = self._unread, self._changed  # no row is unread now
        self.active = True

    def include(self, start: int, stop: int) -> None:
        """Add the rows from ``start`` to ``stop`` to the snapshot, right after it was begun."""
        self._unread[start:stop] = True

    def unread(self, start: int, stop: int) -> int:
        """Return how many rows from ``start`` to ``stop`` are of the snapshot, and neither read nor set aside yet."""
        return int(np.count_nonzero(self._unread[start:stop]))

    def read(self, array: np.ndarray, start: int, stop: int, out: np.ndarray) -> Ids:
        """Copy the first unread rows from ``start`` to ``stop`` to ``out``, as many as it has room for.

        Args:
            start, stop: where to look for them.
            out: ``(most, width)``.

        Returns:
            Their numbers, ascending; fewer than ``most`` only where no others are left.
        """
        ids = np.flatnonzero(self._unread[start:stop])[: len(out)] + start
        np.take(array, ids, axis=0, out=out[: len(ids)], mode="clip")  # unlike "raise", it writes straight into `out`
        self._unread[ids] = False
        return ids

    def read_all(self, array: np.ndarray, start: int, out: np.ndarray) -> None:
        """Copy all rows from ``start`` on, which were included, to ``out`` ``(count, width)``.

        Those that were set aside are copied too, as they are now: what was set aside must replace them.
        """
        stop = start + len(out)
        np.copyto(out, array[start:stop])
        self._unread[start:stop] = False

    def take_aside(self) -> list[Rows]:
        """Return the rows that were set aside since the last call."""
        aside, self._aside = self._aside, []
        return aside

    def end(self, *, saved: bool) -> None:
        """End the snapshot; unless it is ``saved``, its changed rows are those of the next one too."""
        if not saved:
            self._changed |= self._before
            self._unread[:] = False
        self._aside = []
        self.active = False
