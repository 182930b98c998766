"""Partial tables: the initial value of a row before it is touched, and an index of the touched rows."""

from __future__ import annotations

import numpy as np

from distkeras.ps.protocol.tables import Ids, TableShape

#: The constants of SplitMix64, the generator whose finalizer makes the initial numbers: Steele, Lea and Flood 2014.
_STEP, _FIRST, _SECOND = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: The number of places of a new index.
_PLACES = 1 << 10


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 to uint64 ``bits``, in place, and return them."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits ^= bits >> np.uint64(shift)
        bits *= factor
    bits ^= bits >> np.uint64(31)
    return bits


def initial_rows(shape: TableShape, ids: Ids) -> np.ndarray:
    r"""Return the initial rows ``ids`` of a table, float32 ``(len(ids), width)``.

    A number depends only on the table's seed, its row and its column, on every machine: with the finalizer
    :math:`m` of SplitMix64 and its step :math:`\gamma`, it is ``scale`` times :math:`2u - 1`, where :math:`u` are the
    first 24 bits of :math:`m(m(m(s) + \gamma (r + 1)) + \gamma (c + 1))` as a fraction.

    Args:
        shape: of a table with a seed.
        ids: rows, int64.
    """
    assert shape.seed is not None, "only a table with a seed has initial rows"
    if not shape.scale:
        return np.zeros((len(ids), shape.width), np.float32)
    seed = _mixed(np.array([shape.seed], np.uint64))
    keys = _mixed(seed + _STEP * (np.asarray(ids).astype(np.uint64) + np.uint64(1)))
    bits = _mixed(keys[:, None] + _STEP * np.arange(1, shape.width + 1, dtype=np.uint64))
    fractions = (bits >> np.uint64(40)).astype(np.float32)
    fractions *= np.float32(2.0**-23)
    fractions -= np.float32(1)
    fractions *= np.float32(shape.scale)
    return fractions


class RowIndex:
    """Maps row numbers to places, in the order in which rows are added; its memory grows with the number of rows.

    It is a hash table with open addressing, and at least half of it is free.
    """

    def __init__(self) -> None:
        self._ids = np.full(_PLACES, -1, np.int64)
        self._places = np.empty(_PLACES, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Return the bytes of its memory."""
        return self._ids.nbytes + self._places.nbytes

    def rows(self) -> Ids:
        """Return the rows that were added, in the order of their places."""
        taken, rows = self._ids >= 0, np.empty(self._count, np.int64)
        rows[self._places[taken]] = self._ids[taken]
        return rows

    def find(self, ids: Ids) -> np.ndarray:
        """Return the place of each row, int64; -1 if the row was not added."""
        at = self._first(ids)
        known: np.ndarray = self._ids[at]
        places: np.ndarray = self._places[at]
        left = np.flatnonzero(known != ids)
        known, at = known[left], at[left]
        while left.size:
            places[left[known < 0]] = -1
            on = known >= 0
            left, at = left[on], self._next(at[on])
            known = self._ids[at]
            hit = known == ids[left]
            places[left[hit]] = self._places[at[hit]]
            left, at, known = left[~hit], at[~hit], known[~hit]
        return places

    def add(self, ids: Ids) -> np.ndarray:
        """Add rows, which are unique and new; return their places, which follow the last one."""
        places = np.arange(self._count, self._count + len(ids))
        self._count += len(ids)
        if 2 * self._count > len(self._ids):
            taken = self._ids >= 0
            before, where = self._ids[taken], self._places[taken]
            size = 1 << (4 * self._count - 1).bit_length()
            self._ids, self._places = np.full(size, -1, np.int64), np.empty(size, np.int64)
            self._insert(before, where)
        self._insert(ids, places)
        return places

    def _insert(self, ids: Ids, places: np.ndarray) -> None:
        left, at = np.arange(len(ids)), self._first(ids)
        while left.size:
            free = self._ids[at] < 0
            self._ids[at[free]] = ids[left[free]]  # if several rows hash to one place, the last one gets it
            won = self._ids[at] == ids[left]
            self._places[at[won]] = places[left[won]]
            left, at = left[~won], self._next(at[~won])

    def _first(self, ids: Ids) -> np.ndarray:
        hashed = _mixed(np.asarray(ids).astype(np.uint64))
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
