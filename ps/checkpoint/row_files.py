"""Lists of the files with the rows of tables: what a snapshot needs, and what becomes one file.

A snapshot names the files of its tables in order; each replaces rows of those before it. A *whole* file has all rows of
a range, and a *partial* one the rows in a range that had changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distkeras.ps.center.table_changes import Rows

#: Bytes of rows in one file, at most.
LARGEST = 64 << 20
#: So many partial files of a table that follow one another, each of fewer bytes than that, become one.
MERGED, SMALL = 16, 4 << 20


@dataclass(frozen=True)
class RowFile:
    """One file with rows of a table.

    Args:
        start, stop: the range of its rows.
        whole: whether it has all rows of that range.
        size: bytes of its rows, and of their numbers in a partial file.
    """

    name: str
    table: int
    start: int
    stop: int
    whole: bool
    size: int


def covers(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether each number from ``start`` to ``stop`` is in one of the ``ranges``."""
    for first, end in sorted(ranges):
        if first > start:
            break
        start = max(start, end)
    return start >= stop


def wholes(files: Iterable[RowFile], table: int) -> list[RowFile]:
    """Return the whole files of ``table``."""
    return [file for file in files if file.table == table and file.whole]


def partials(files: Iterable[RowFile], table: int) -> list[RowFile]:
    """Return the partial files of ``table``."""
    return [file for file in files if file.table == table and not file.whole]


def needed(files: Sequence[RowFile]) -> tuple[RowFile, ...]:
    """Return ``files`` without those of which later whole files replace every row."""
    kept, ranges = list[RowFile](), defaultdict[int, list[tuple[int, int]]](list)
    for file in reversed(files):
        replacing = ranges[file.table]
        if not covers(replacing, file.start, file.stop):
            kept.append(file)
        if file.whole:
            replacing.append((file.start, file.stop))
    return tuple(reversed(kept))


def due(files: Sequence[RowFile], table: int) -> list[RowFile]:
    """Return the last partial files of ``table``, if these are to become one; else nothing."""
    small = list[RowFile]()
    for file in reversed(partials(files, table)):
        if file.size >= SMALL:
            break
        small.append(file)
    return small[::-1] if len(small) >= MERGED else []


def merged(files: Sequence[RowFile], contents: Sequence[Rows], among: Sequence[RowFile]) -> Rows:
    """Return the rows of some partial files as those of one, which is read where the last one of them was.

    Args:
        files: partial files of one table, in order.
        among: the list that they are of.
    """
    last, pieces = among.index(files[-1]), list[Rows]()
    for file, (ids, rows) in zip(files, contents, strict=True):
        stays = np.ones(len(ids), np.bool_)
        for later in wholes(among[among.index(file) : last], file.table):
            stays &= (ids < later.start) | (ids >= later.stop)
        pieces.append((ids[stays], rows[stays]))
    ids = np.concatenate([ids for ids, _ in reversed(pieces)])
    unique, first = np.unique(ids, return_index=True)  # the first one of each, which is the latest here
    return unique, np.concatenate([rows for _, rows in reversed(pieces)])[first]


def replaced(files: Sequence[RowFile], old: Sequence[RowFile], new: Sequence[RowFile]) -> tuple[RowFile, ...]:
    """Return ``files`` with ``new`` in the place of the last one of ``old``, and without the others of these."""
    last = files.index(old[-1])
    before, after = files[:last], files[last + 1 :]
    return (*(file for file in before if file not in old), *new, *after)
