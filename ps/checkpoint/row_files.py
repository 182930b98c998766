"""The files with the rows of tables that a server, or a shard, has saved; how they are read, whole or in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.living_tables import COUNTS
from distkeras.ps.center.tables import NO_ROW, Rows
from distkeras.ps.protocol.tables import NO_IDS, Ids

#: Returns the arrays of the file of this name.
Load = Callable[[str], Mapping[str, np.ndarray]]
#: Returns for each row number whether the row is wanted.
Keep = Callable[[Ids], np.ndarray]


@dataclass(frozen=True)
class RowFile:
    """One file with rows of a table, ``whole``: all rows of that range; ``size`` is in bytes, with the row numbers."""

    name: str
    table: int
    start: int
    stop: int
    whole: bool
    size: int


@dataclass(frozen=True)
class RowFiles:
    """What one server, or one shard of several, has saved of its tables.

    Args:
        shapes: the rows that it has of each table, and their width.
        files: in the order in which they are read.
        living: the `LivingTable.state` of each table that has one.
    """

    shapes: Sequence[Sequence[int]] = ()
    files: tuple[RowFile, ...] = ()
    living: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> RowFiles:
        """Return what the JSON values of a snapshot, or of a part, describe."""
        return cls(state.get("tables", ()), tuple(RowFile(**file) for file in files), state.get("living", ()))

    def tables(self, load: Load) -> tuple[Rows, ...]:
        """Return the row numbers (empty if they equal the places) and the rows of each table, at their places."""
        tables = [np.zeros(shape, np.float32) for shape in self.shapes]
        touched: dict[int, Ids] = {}
        for file in self.files:
            arrays = load(file.name)
            places = slice(file.start, file.stop) if file.whole else arrays["ids"]
            tables[file.table] = tables[file.table].astype(arrays["rows"].dtype, copy=False)  # marks are integers
            tables[file.table][places] = arrays["rows"]
            if "of" in arrays:
                touched.setdefault(file.table, np.zeros(self.shapes[file.table][0], np.int64))[places] = arrays["of"]
        return tuple((touched.get(number, NO_IDS), rows) for number, rows in enumerate(tables))

    def pieces(self, number: int, load: Load, keep: Keep) -> Iterator[Rows]:
        """Yield the rows of a table that ``keep`` wants, with their numbers; one file is in memory at a time."""
        settled = np.zeros(self.shapes[number][0], np.bool_)  # the places of which a later file has the rows
        for file in reversed([file for file in self.files if file.table == number]):
            arrays = load(file.name)
            places = np.arange(file.start, file.stop) if file.whole else arrays["ids"]
            ids = arrays.get("of", places)
            chosen = ~settled[places] & (ids != NO_ROW) & keep(ids)
            settled[places] = True
            yield ids[chosen], arrays["rows"][chosen]


def chosen_rows(several: Sequence[RowFiles], load: Load, keep: Keep) -> tuple[Rows, ...]:
    """Return the numbers and rows of each table that ``keep`` wants, from those that have saved them."""
    tables = list[Rows]()
    for number, (_, width) in enumerate(several[0].shapes):
        pieces = [piece for saved in several for piece in saved.pieces(number, load, keep)]
        ids = [ids for ids, _ in pieces] or [NO_IDS]
        rows = [rows for _, rows in pieces] or [np.zeros((0, width), np.float32)]
        tables.append((np.concatenate(ids), np.concatenate(rows)))
    return tuple(tables)


def joined_living(several: Sequence[RowFiles], *, counted: bool = True) -> list[dict[str, Any]]:
    """Return the states of the living tables; their counts are the sums, or 0 unless they are ``counted``."""
    # All shards have the same moments. One of the new shards goes on with the sum of what all of them have counted.
    return [
        dict(states[0]) | {name: counted * sum(state[name] for state in states) for name in COUNTS}
        for states in zip(*(saved.living for saved in several), strict=True)
    ]
