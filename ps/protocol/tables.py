"""Tables: sections of the center that travel by rows, in addition to its dense vector.

A *partial* table stores only its touched rows: a row has its initial value before it is touched, and an index maps the
numbers of the touched rows to their places.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from distkeras.ps.validate import check_field, invalid, require_boolean, require_integer, require_number, require_text

#: Row numbers of one table: int64 ``(count,)``, strictly ascending.
Ids = Annotated[np.ndarray, np.dtype("<i8")]

NO_IDS = np.empty(0, np.int64)

#: The largest number of rows, and the largest seed: row numbers are int64.
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class TableShape:
    """A table of float32 rows.

    Args:
        name: of its layer; for errors.
        most: the largest number of rows that one window can touch.
        seed: of the initial rows of a partial table: see `initial_rows`. None: the table is kept whole,
            and its initial rows are published.
        scale: the largest absolute value of the initial rows.
        admit: a partial table keeps a row from its touch of this number on; a touch is a commit that names the row.
        expire_commits: commits without a touch after which a row of a partial table expires; 0: rows do not.
        expire_seconds: seconds after which it does so, by the times of commits; 0: rows do not.
        tracked: the server also knows which rows have changed since a version was published, as a stream needs.
    """

    name: str
    rows: int
    width: int
    most: int
    seed: int | None = None
    scale: float = 0.0
    admit: int = 1
    expire_commits: int = 0
    expire_seconds: float = 0.0
    tracked: bool = False

    def __post_init__(self) -> None:
        require_text("name", self.name, "the name of a layer")
        for name in ("rows", "width"):
            check_field(self, name, require_integer)
        check_field(self, "most", require_integer, 1, self.rows)
        if self.seed is not None:
            check_field(self, "seed", require_integer, 0, _LARGEST)
        if not 0 <= self.scale < np.inf:
            raise invalid("scale", self.scale, "a finite number that is not negative")
        if self.rows > _LARGEST:
            raise invalid("rows", self.rows, f"at most {_LARGEST}")
        check_field(self, "admit", require_integer)
        check_field(self, "expire_commits", require_integer, 0)
        check_field(self, "expire_seconds", require_number, inclusive=True)
        check_field(self, "tracked", require_boolean)
        if self.living and not self.partial:
            raise invalid("seed", self.seed, "a number for a table whose touches are counted")

    @property
    def partial(self) -> bool:
        """Return whether the table is partial: the server stores only its touched rows."""
        return self.seed is not None

    @property
    def living(self) -> bool:
        """Return whether the server counts the touches of its rows: see `living_tables`."""
        return self.tracked or self.admit > 1 or self.expire_commits > 0 or self.expire_seconds > 0


def describe(shapes: Sequence[TableShape]) -> str:
    """Return the shapes as text, equal for equal tables; empty if there are none."""
    return json.dumps([dataclasses.astuple(shape) for shape in shapes]) if shapes else ""


#: A driver sends or reads rows in blocks of this many bytes, or of one row; the server copies them under its lock.
_BLOCK_BYTES = 4 << 20


def block_rows(shape: TableShape) -> int:
    """Return how many rows a driver sends or reads at a time."""
    return max(1, _BLOCK_BYTES // (4 * shape.width))


def block_bytes(shape: TableShape) -> int:
    """Return the bytes of `block_rows` rows, and of their numbers for a partial table."""
    return (4 * shape.width + 8 * shape.partial) * block_rows(shape)


class Span(NamedTuple):
    """The position of a small table in a worker's vector: elements ``start`` to ``stop``, rows of ``width``."""

    start: int
    stop: int
    width: int


def row_elements(shapes: Sequence[TableShape]) -> tuple[int, ...]:
    """Return the largest number of elements in the rows that a window touches, for each table."""
    return tuple(shape.most * shape.width for shape in shapes)


def spans(dense: int, shapes: Sequence[TableShape]) -> tuple[Span, ...]:
    """Return the positions of the small tables, which follow the ``dense`` elements of a worker's vector."""
    positions, start = [], dense
    for shape, elements in zip(shapes, row_elements(shapes), strict=True):
        positions.append(Span(start, start + elements, shape.width))
        start = positions[-1].stop
    return tuple(positions)


#: The largest optimizer state: this many vectors of the model's size (float32), and this many bytes more.
_STATE_VECTORS, _STATE_BYTES = 4, 64 * 1024
#: The largest part of a state for the rows of one partial table, in bytes; the table may be larger than a disk.
STATE_BYTES_OF_ROWS = 256 << 20


def most_state_bytes(size: int, tables: Sequence[TableShape] = ()) -> int:
    """Return the bytes of the largest optimizer state that is kept for a model of ``size`` elements and ``tables``."""
    of_rows = [table.rows * (4 * _STATE_VECTORS * table.width + np.dtype(np.int64).itemsize) for table in tables]
    most = [min(n, STATE_BYTES_OF_ROWS) if table.partial else n for n, table in zip(of_rows, tables, strict=True)]
    return 4 * _STATE_VECTORS * size + _STATE_BYTES + sum(most)


#: The constants of SplitMix64, the generator whose finalizer makes the initial numbers: Steele, Lea and Flood 2014.
_STEP, _FIRST, _SECOND = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: The number of places of a new index.
_PLACES = 1 << 10


def mixed(bits: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 to uint64 ``bits``, in place, and return them."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits ^= bits >> np.uint64(shift)
        bits *= factor
    bits ^= bits >> np.uint64(31)
    return bits


def initial_rows(shape: TableShape, ids: Ids, width: int | None = None) -> np.ndarray:
    r"""Return the initial rows ``ids`` of a table, float32 ``(len(ids), width)``; by default they are whole.

    A number depends only on the table's seed, its row and its column, on every machine: with the finalizer
    :math:`m` of SplitMix64 and its step :math:`\gamma`, it is ``scale`` times :math:`2u - 1`, where :math:`u` are the
    first 24 bits of :math:`m(m(m(s) + \gamma (r + 1)) + \gamma (c + 1))` as a fraction.
    """
    assert shape.seed is not None, "only a table with a seed has initial rows"
    width = shape.width if width is None else width
    if not shape.scale:
        return np.zeros((len(ids), width), np.float32)
    seed = mixed(np.array([shape.seed], np.uint64))
    keys = mixed(seed + _STEP * (np.asarray(ids).astype(np.uint64) + np.uint64(1)))
    bits = mixed(keys[:, None] + _STEP * np.arange(1, width + 1, dtype=np.uint64))
    fractions = (bits >> np.uint64(40)).astype(np.float32)
    fractions *= np.float32(2.0**-23)
    fractions -= np.float32(1)
    fractions *= np.float32(shape.scale)
    return fractions


#: What a slot of an index has instead of a row number: it was never taken, or its row was removed.
_FREE, _GONE = -1, -2


class RowIndex:
    """Maps row numbers to places: a hash table, at least half of whose slots are free."""

    def __init__(self) -> None:
        self._ids = np.full(_PLACES, _FREE, np.int64)
        self._places = np.empty(_PLACES, np.int64)
        self._count = self._gone = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._places.nbytes

    def rows(self) -> Ids:
        """Return the rows that were added, in the order of their places."""
        taken, rows = self._ids >= 0, np.empty(self._count, np.int64)
        rows[self._places[taken]] = self._ids[taken]
        return rows

    def find(self, ids: Ids) -> np.ndarray:
        """Return the place of each row, int64; -1 if the row is not there."""
        slots = self._slots(ids)
        places: np.ndarray = self._places[slots]
        places[slots < 0] = -1
        return places

    def _slots(self, ids: Ids) -> np.ndarray:
        """Return the slot of each row; -1 if the row is not there."""
        slots = self._first(ids)
        known: np.ndarray = self._ids[slots]
        left = np.flatnonzero(known != ids)
        known = known[left]
        while left.size:
            slots[left[known == _FREE]] = -1
            left = left[known != _FREE]
            at = self._next(slots[left])
            slots[left] = at
            known = self._ids[at]
            on = known != ids[left]
            left, known = left[on], known[on]
        return slots

    def add(self, ids: Ids, places: np.ndarray | None = None) -> np.ndarray:
        """Add rows, which are unique and new, and return their places. Default: those that follow the last one.

        With places of the caller's own, all calls must give them.
        """
        places = np.arange(self._count, self._count + len(ids)) if places is None else places
        self._count += len(ids)
        if 2 * (self._count + self._gone) > len(self._ids):
            taken = self._ids >= 0
            before, where = self._ids[taken], self._places[taken]
            size = 1 << (4 * self._count - 1).bit_length()
            self._ids, self._places = np.full(size, _FREE, np.int64), np.empty(size, np.int64)
            self._gone = 0
            self._insert(before, where)
        self._insert(ids, places)
        return places

    def remove(self, ids: Ids) -> np.ndarray:
        """Remove rows, which are unique and there, and return their places."""
        slots = self._slots(ids)
        self._ids[slots] = _GONE
        self._count -= len(ids)
        self._gone += len(ids)
        places: np.ndarray = self._places[slots]
        return places

    def _insert(self, ids: Ids, places: np.ndarray) -> None:
        left, at = np.arange(len(ids)), self._first(ids)
        while left.size:
            free = self._ids[at] == _FREE
            self._ids[at[free]] = ids[left[free]]  # if several rows hash to one place, the last one gets it
            won = self._ids[at] == ids[left]
            self._places[at[won]] = places[left[won]]
            left, at = left[~won], self._next(at[~won])

    def _first(self, ids: Ids) -> np.ndarray:
        hashed = mixed(np.asarray(ids).astype(np.uint64))
        return (hashed & np.uint64(len(self._ids) - 1)).astype(np.int64)

    def _next(self, at: np.ndarray) -> np.ndarray:
        following: np.ndarray = (at + 1) & (len(self._ids) - 1)
        return following


def grown(array: np.ndarray, rows: int) -> np.ndarray:
    """Return ``array``, or a copy that is at least twice as long, so that it has at least ``rows`` rows."""
    if rows <= len(array):
        return array
    larger = np.zeros((max(rows, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def put_rows(array: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """Set ``array[places] = rows``, with contiguous arrays ``(count, width)`` of one dtype, and places in range.

    Each row is viewed as one element, which NumPy copies in about half of the time that single numbers take.
    """
    if rows.size:
        row = np.dtype((np.void, array.itemsize * array.shape[1]))
        np.put(array.view(row).reshape(-1), places, rows.view(row).reshape(-1), mode="clip")
