"""The tables of a shard, which have its own rows alone."""

from __future__ import annotations

import numpy as np

from distkeras.ps.center.living_tables import make_table
from distkeras.ps.center.tables import Table
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.rules.base import Vector
from distkeras.ps.shards.cut import Cut


class OwnedTable(Table):
    """The rows ``own``, ascending, of a table that is kept whole by all shards together; see `Table`.

    `array` has them in this order. ``shape`` is that of the whole table, and row numbers are those of the whole table.
    """

    def __init__(self, shape: TableShape, own: Ids) -> None:
        super().__init__(shape, np.zeros((len(own), shape.width), np.float32))
        self._own = own

    def _places(self, ids: Ids) -> Ids:
        places: Ids = np.searchsorted(self._own, ids)
        return places

    def saved_ids(self, places: slice | Ids) -> Ids:
        return self._own[places]

    def moved_since(self, clock: int) -> Ids:
        moved: Ids = self._own[super().moved_since(clock)]
        return moved

    def gather(self, ids: Ids, out: Vector | None = None) -> Vector:
        return super().gather(self._places(ids), out)

    def present(self, places: slice) -> tuple[Ids, np.ndarray]:
        return self._own[places], self.array[places].copy()


def make_owned_table(shape: TableShape, cut: Cut, shard: int) -> Table:
    """Return a new table with the rows of ``shard`` in a table of ``shape``: all are zero, or none is touched."""
    return make_table(shape) if shape.partial else OwnedTable(shape, cut.own(shape.rows, shard))
