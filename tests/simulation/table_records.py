"""The rows of a center's tables at a moment, to be compared and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.living_tables import LivingTable
from distkeras.ps.center.tables import PartialTable, Rows, Table
from distkeras.ps.protocol.tables import NO_IDS, TableShape, initial_rows


class TableRecord(NamedTuple):
    """The rows of one table.

    Args:
        ids, rows: all rows, or the touched ones that live, with their numbers in ascending order.
        marked, marks: the rows whose touches count, and touches and latest clock of each.
    """

    shape: TableShape
    ids: np.ndarray
    rows: np.ndarray
    marked: np.ndarray
    marks: np.ndarray

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Return rows as a worker is sent them."""
        rows = initial_rows(self.shape, ids) if self.shape.partial else np.zeros((len(ids), self.shape.width))
        if not len(self.ids):
            return rows
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        there = self.ids[places] == ids
        rows[there] = self.rows[places[there]]
        return rows

    def difference(self, own: TableRecord, owns: Callable[[np.ndarray], np.ndarray]) -> str:
        """Describe the difference between the rows that ``owns`` is true of, and a shard's ``own``; "" if none."""
        rows, touches = (
            ("rows", self.ids, self.rows, own.ids, own.rows),
            (self.marked, self.marks, own.marked, own.marks),
        )
        for what, ids, values, own_ids, own_values in (rows, ("touches", *touches)):
            mine = owns(ids)
            if not (np.array_equal(ids[mine], own_ids) and np.array_equal(values[mine], own_values)):
                expected, found = _text(ids[mine], values[mine]), _text(own_ids, own_values)
                return f"these {what}: {expected}. Received: {found}"
        return ""


def _text(ids: np.ndarray, values: np.ndarray) -> str:
    return str(dict(zip(ids.tolist(), values.tolist(), strict=True)))


def record_tables(center: Center) -> tuple[TableRecord, ...]:
    """Return the present rows of all tables."""
    return tuple([_record_of(table) for table in center.tables])


def _record_of(table: Table) -> TableRecord:
    ids, rows = table.present(slice(0, table.count))
    ids = np.arange(len(rows)) if ids is None else ids
    order = np.argsort(ids)
    marked: np.ndarray = NO_IDS
    marks: np.ndarray = np.empty((0, 2), np.int64)
    if isinstance(table, LivingTable):
        count = table.marks.count
        marked, marks = table.marks.ids_of(slice(0, count)), table.marks.array[:count, :2]
        # When the memory of others is freed is up to each server.
        counts = (marked >= 0) & (marks[:, 0] > 0) & (marks[:, 1] >= table.alive_from)
        marked, marks = marked[counts], marks[counts]
    by_number = np.argsort(marked)
    return TableRecord(table.shape, ids[order], rows[order], marked[by_number], marks[by_number])


def saved_rows(center: Center) -> tuple[Rows, ...]:
    """Return what `Table.restore` takes of each saved table."""
    return tuple([_saved_rows_of(table) for table in center.saved_tables])


def _saved_rows_of(table: Table) -> Rows:
    places = slice(0, table.count)
    ids = table.ids_of(places) if isinstance(table, PartialTable) else table.present(places)[0]
    return NO_IDS if ids is None else ids.copy(), table.array[places].copy()
