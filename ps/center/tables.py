"""Tables of the center: rows that commits name, and that change in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distkeras.ps.center.table_changes import TableChanges
from distkeras.ps.errors import NonFiniteError, ShapeError
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.protocol.touched_rows import RowIndex, grown, initial_rows, put_rows
from distkeras.ps.rules.base import BLOCK, Chunk, Vector, all_finite


class Table:
    """One table of the center; its caller holds the center's lock around every call.

    Args:
        shape: its name, rows and width.
        array: the initial rows, float32 (float64 in simulations) ``(rows, width)``; not copied; None: zeros.
    """

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

    def ids_of(self, places: slice | Ids) -> Ids | None:
        """Return the row numbers of the rows of `array` at ``places``; None: they equal ``places``."""
        return None

    def _places(self, ids: Ids) -> Ids:
        """Return the places of the rows ``ids`` in `array`; missing rows are added."""
        return ids

    def moved_since(self, clock: int) -> Ids:
        """Return the rows that commits after ``clock`` have moved; for a table that is kept whole."""
        return np.flatnonzero(self._moved_at > clock)

    def apply(self, ids: Ids, moved: Vector, kernel: Callable[[Chunk], float | None], clock: int = 0) -> float | None:
        """Move the rows ``ids`` by a rule's ``kernel``.

        Args:
            ids: rows, unique and in range.
            moved: the payload for these rows, flat; it is overwritten.
            kernel: works on a chunk of gathered rows, as `Rule.apply` does.
            clock: the clock after this commit.

        Returns:
            The sum of the scale factors used; None if each was 1.
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
            self._moved_at[ids] = clock
        return scale

    def gather(self, ids: Ids, out: Vector | None = None) -> Vector:
        """Return a copy of the rows ``ids``, flat; in ``out``, if that is given."""
        out = np.empty(ids.size * self.shape.width, self.array.dtype) if out is None else out
        np.take(self.array, ids, axis=0, out=out.reshape(-1, self.shape.width), mode="clip")
        return out

    def restore(self, rows: np.ndarray, ids: Ids) -> None:
        """Take over the rows of a snapshot into a new table; ``ids`` are the row numbers in a `PartialTable`."""
        self.array = rows


class PartialTable(Table):
    """A table that stores only the rows that commits have moved; see `Table`.

    `array` has the touched rows, in the order in which they were first touched, and room for more: its size doubles
    when it is full. A row that is sent before its first commit is computed each time, and is not stored.

    Args:
        shape: with a seed.
        dtype: of the rows.
    """

    def __init__(self, shape: TableShape, dtype: Any = np.float32) -> None:
        super().__init__(shape, np.zeros((0, shape.width), dtype))
        self._ids = np.zeros(0, np.int64)
        self._index = RowIndex()

    @property
    def count(self) -> int:
        """The number of touched rows."""
        return len(self._index)

    def ids_of(self, places: slice | Ids) -> Ids:
        """Return the row numbers of the rows of `array` at ``places``."""
        return self._ids[places]

    def _places(self, ids: Ids) -> Ids:
        places = self._index.find(ids)
        new = places < 0
        if new.any():
            places[new] = self._add(ids[new])
            self.array[places[new]] = initial_rows(self.shape, ids[new])
        return places

    def _add(self, ids: Ids) -> Ids:
        """Add rows that are not touched yet; return their places. The caller sets their values."""
        places = self._index.add(ids)
        self.array, self._ids = grown(self.array, self.count), grown(self._ids, self.count)
        self.changes.grow(len(self.array))
        self._ids[places] = ids
        return places

    def gather(self, ids: Ids, out: Vector | None = None) -> Vector:
        """Return a copy of the rows ``ids``, flat; in ``out``, if that is given."""
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
        """Set touched rows from place ``start`` on, with the rows that a driver publishes.

        Raises:
            ValueError: a row occurs twice, or is at another place already.
        """
        places = self._index.find(ids)
        new, expected = places < 0, np.arange(start, start + len(ids))
        if len(np.unique(ids)) < len(ids) or (places[~new] != expected[~new]).any():
            raise ValueError("a row is there twice")
        if new.any():
            places[new] = self._add(ids[new])
        self.array[places] = rows
        self.changes.mark(start, start + len(ids))

    def restore(self, rows: np.ndarray, ids: Ids) -> None:
        """Take over the touched rows of a snapshot, and their numbers."""
        self._index.add(ids)
        self.array, self._ids = rows, ids
        self.changes.grow(len(rows))


def make_table(shape: TableShape) -> Table:
    """Return a new table of this shape: all rows are zero, or none is touched."""
    return PartialTable(shape) if shape.partial else Table(shape)


def check_wants(shapes: Sequence[TableShape], wants: Sequence[Ids], worker: int) -> None:
    """Check the rows that a worker requests with a reply.

    Raises:
        ShapeError: there is not one array for each table, or its rows are too many, not ascending, or out of range.
    """
    _check_ids(shapes, "wants", wants, worker, None)


def check_rows(shapes: Sequence[TableShape], commit: Commit) -> None:
    """Check the rows that ``commit`` names, and the sizes of its payload for them.

    Raises:
        ShapeError: there is not one array for each table; its rows are too many, not ascending, or out of range; or the
            payload has another number of elements.
    """
    _check_ids(shapes, "touched", commit.touched, commit.worker, commit.first)
    _check_ids(shapes, "wants", commit.wants, commit.worker, commit.first)
    expected = [ids.size * shape.width for ids, shape in zip(commit.touched, shapes, strict=True)]
    sizes = [moved.size for moved in commit.moved]
    if sizes != expected:
        raise ShapeError(
            f"a commit must move its rows by {expected} elements, table by table. Received: {sizes}",
            worker=commit.worker,
            step=commit.first,
        )


def _check_ids(shapes: Sequence[TableShape], name: str, several: Sequence[Ids], worker: int, step: int | None) -> None:
    problem = None
    if len(several) != len(shapes):
        problem = f"`{name}` must have an array of rows for each of {len(shapes)} tables. Received: {len(several)}"
    for shape, ids in zip(shapes, several, strict=False):
        if ids.size > shape.most:
            problem = f"`{name}` must name at most {shape.most} rows of table {shape.name!r}. Received: {ids.size}"
        elif ids.size and not (ids[1:] > ids[:-1]).all():
            at = int(np.flatnonzero(ids[1:] <= ids[:-1])[0])
            problem = (
                f"`{name}` must name rows of table {shape.name!r} in ascending order, each once. "
                f"Received: {ids[at + 1]} behind {ids[at]}"
            )
        elif ids.size and not 0 <= ids[0] <= ids[-1] < shape.rows:
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            problem = f"`{name}` must name rows of table {shape.name!r} in [0, {shape.rows}). Received: {wrong}"
    if problem is not None:
        raise ShapeError(problem, worker=worker, step=step)


def row_not_finite(commit: Commit, shapes: Sequence[TableShape]) -> NonFiniteError | None:
    """Return an error that names the first NaN or infinity in the rows of ``commit``; None if all are finite."""
    for shape, ids, moved in zip(shapes, commit.touched, commit.moved, strict=True):
        if not all_finite(moved):
            bad = np.flatnonzero(~np.isfinite(moved))
            row, column = divmod(int(bad[0]), shape.width)
            return NonFiniteError(
                f"a commit holds {moved[bad[0]]} in column {column} of row {ids[row]} of table {shape.name!r} "
                f"({bad.size} such elements), from mini-batches {commit.first}-{commit.last} of epoch {commit.epoch}. "
                "Lower the learning rate or clip gradients",
                worker=commit.worker,
                step=commit.first,
            )
    return None
