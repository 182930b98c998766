"""Writing the rows of a center's tables for its snapshots: each snapshot writes the rows that have changed.

A snapshot names the files of its tables in order; the rows of each replace those of earlier files. A *whole* file has
all rows of a range, a *partial* file only the changed rows in a range.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.tables import Rows, Table
from distkeras.ps.checkpoint.row_files import RowFile
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.checkpoint.store import DamagedError
from distkeras.ps.events import report
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.world.world import Condition

log = logging.getLogger(__name__)
#: Bytes of rows in one file, at most.
LARGEST = 64 << 20
#: When a table has ``MERGED`` successive partial files, each of fewer bytes than ``SMALL``, they are merged into one.
MERGED, SMALL = 16, 4 << 20

#: Bytes that are copied, and rows that are searched, during one hold of the lock.
AT_ONCE, SEARCHED = 4 << 20, 1 << 20
#: If the partial files of a table have more than this share of its bytes, whole files replace the oldest ones.
SHARE = 0.5


class TableFiles:
    """Writes the rows of one center's tables, between `begin` and `save`, while commits change them.

    The first snapshot writes all rows, as whole files. A later one writes a partial file of the rows that have changed
    since the previous one, or a whole file of a range in which most rows have changed. When the partial files have
    become large, the oldest whole files are replaced as well. So the files of a snapshot are at most about 2.5 times as
    large as its tables, and in the long run about twice the changed bytes are written.
    """

    def __init__(
        self, directory: SnapshotDirectory, center: Center, changed: Condition, files: Sequence[RowFile] = ()
    ) -> None:
        self._directory, self._tables, self._changed = directory, center.saved_tables, changed
        #: The files of the latest snapshot, in order.
        self.files = tuple(files)
        #: For each table, the ranges that are written as whole files in the present snapshot.
        self._ranges: list[list[tuple[int, int]]] = []
        #: How many rows each table had when the present snapshot was begun.
        self._counts: list[int] = []

    def begin(self) -> None:
        """Begin a snapshot of the present rows; the caller holds the lock."""
        self._end()  # the previous one, if it could not be captured
        self._ranges, self._counts = [], [table.count for table in self._tables]
        for number, table in enumerate(self._tables):
            table.begin_snapshot()
            ranges = self._whole_ranges(number, table)
            for start, stop in ranges:
                table.changes.include(start, stop)
            self._ranges.append(ranges)

    def save(self) -> tuple[RowFile, ...]:
        """Write the rows; return the files that together contain all rows as they were at `begin`."""
        new = [file for number, table in enumerate(self._tables) for file in self._save_table(number, table)]
        with self._changed:
            for table in self._tables:
                table.changes.end(saved=True)
        self.files = needed((*self.files, *new))
        return self.files

    def end(self) -> None:
        """End a snapshot that could not be saved, so that the next one writes its rows; after `save`, do nothing."""
        with self._changed:
            self._end()

    def merge(self) -> bool:
        """Read many small files and merge them into one; the next snapshot names it instead of them.

        It may come between `begin` and `save`; then a False result, after which a damaged file is no longer named,
        says that this snapshot would lack rows, and must end.
        """
        complete = True
        for number in range(len(self._tables)):
            files = due(self.files, number)
            contents = [self._load(file) for file in files]
            complete = complete and all(rows is not None for rows in contents)
            if files and all(rows is not None for rows in contents):
                ids, rows = merged(files, [content for content in contents if content is not None], self.files)
                outgoing = self._outgoing(number)
                outgoing.put(ids, rows)
                self.files = replaced(self.files, files, outgoing.flush())
        return complete

    def _load(self, file: RowFile) -> Rows | None:
        """Return the rows of a partial file; None if it is damaged, and then the next snapshot writes its rows."""
        try:
            return self._directory.load_rows(file)
        except DamagedError as error:
            report(
                log, "snapshot", "a file with rows of a table cannot be read, and the rows are written again: %s", error
            )
            with self._changed:
                self._tables[file.table].changes.mark(slice(file.start, file.stop))
            self.files = tuple(other for other in self.files if other != file)
            return None

    def _end(self) -> None:
        for table in self._tables:
            if table.changes.active:
                table.changes.end(saved=False)

    def _whole_ranges(self, number: int, table: Table) -> list[tuple[int, int]]:
        rows, row_bytes = self._counts[number], table.array.itemsize * table.shape.width
        present = whole_files(self.files, number)
        covered = [(file.start, file.stop) for file in present]
        step, changes, ranges = max(1, LARGEST // row_bytes), table.changes, list[tuple[int, int]]()
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            # The last range of a growing table is covered in part; its new rows are among the changed ones.
            if not covers(covered, start, (start + stop + 1) // 2) or 2 * changes.unread(start, stop) > stop - start:
                ranges.append((start, stop))
        partial = sum(file.size for file in partial_files(self.files, number))
        budget = (changes.unread(0, rows) - sum(changes.unread(*bounds) for bounds in ranges)) * row_bytes
        for file in present:  # the oldest one first
            if partial <= SHARE * rows * row_bytes or budget < 0:
                break
            if not covers(ranges, file.start, file.stop):
                ranges.append((file.start, file.stop))
                budget -= file.size
        return ranges

    def _save_table(self, number: int, table: Table) -> list[RowFile]:
        # This array keeps the unread rows even if the table grows into a larger array meanwhile.
        changes, array, count = table.changes, table.array, self._counts[number]
        block = np.empty((min(max(1, count), _rows_in(AT_ONCE, array)), array.shape[1]), array.dtype)
        block.fill(0)  # cause the page faults now: under the lock, they may take longer than the copy
        outgoing, whole, ranges = self._outgoing(number), list[RowFile](), self._ranges[number]
        memory = np.empty((max((stop - start for start, stop in ranges), default=0), array.shape[1]), array.dtype)
        for start, stop in ranges:
            rows = memory[: stop - start]
            for at in range(0, len(rows), len(block)):
                part = rows[at : at + len(block)]
                with self._changed:
                    changes.read_all(array, start + at, block[: len(part)])
                part[...] = block[: len(part)]
            whole.append(self._directory.save_rows(number, start, rows, of=table.saved_ids(slice(start, stop))))
            self._put_aside(table, outgoing)
        at = 0
        while at < count:
            stop = min(at + SEARCHED, count)
            with self._changed:
                ids = changes.read(array, at, stop, block)
            outgoing.put(ids, block[: len(ids)])
            at = int(ids[-1]) + 1 if len(ids) == len(block) else stop
            self._put_aside(table, outgoing)
        # Rows that were set aside while a whole file was read are in a partial file, which must follow it.
        return [*whole, *outgoing.flush()]

    def _put_aside(self, table: Table, outgoing: Outgoing) -> None:
        with self._changed:
            aside = table.changes.take_aside()
        for ids, rows in aside:
            outgoing.put(ids, rows)

    def _outgoing(self, number: int) -> Outgoing:
        table = self._tables[number]
        array = table.array
        capacity = min(max(1, table.count), _rows_in(LARGEST, array))
        return Outgoing(
            np.empty(capacity, np.int64),
            np.empty((capacity, array.shape[1]), array.dtype),
            lambda ids, rows: self._directory.save_rows(number, int(ids.min()), rows, ids, of=table.saved_ids(ids)),
        )


def _rows_in(nbytes: int, array: np.ndarray) -> int:
    """Return how many rows of ``array`` fit into ``nbytes`` bytes, at least one."""
    return max(1, nbytes // (array.itemsize * int(array.shape[1])))


class Outgoing:
    """Collects rows in the memory of one file, ``ids`` and ``rows``, and writes each partial file that is full."""

    def __init__(self, ids: Ids, rows: np.ndarray, save: Callable[[Ids, np.ndarray], RowFile]) -> None:
        self._ids, self._rows, self._save = ids, rows, save
        self._count = 0
        self._files: list[RowFile] = []

    def put(self, ids: Ids, rows: np.ndarray) -> None:
        """Add rows, and write each file that is full."""
        while len(ids):
            taken = min(len(ids), len(self._ids) - self._count)
            end = self._count + taken
            self._ids[self._count : end], self._rows[self._count : end] = ids[:taken], rows[:taken]
            ids, rows, self._count = ids[taken:], rows[taken:], end
            if end == len(self._ids):
                self._write()

    def flush(self) -> list[RowFile]:
        """Write the remaining rows; return all files."""
        if self._count:
            self._write()
        return self._files

    def _write(self) -> None:
        self._files.append(self._save(self._ids[: self._count], self._rows[: self._count]))
        self._count = 0


def covers(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether each number from ``start`` to ``stop`` is in one of the ``ranges``."""
    for first, end in sorted(ranges):
        if first > start:
            break
        start = max(start, end)
    return start >= stop


def whole_files(files: Iterable[RowFile], table: int) -> list[RowFile]:
    return [file for file in files if file.table == table and file.whole]


def partial_files(files: Iterable[RowFile], table: int) -> list[RowFile]:
    return [file for file in files if file.table == table and not file.whole]


def needed(files: Sequence[RowFile]) -> tuple[RowFile, ...]:
    """Return ``files`` without those whose rows are all replaced by later whole files."""
    kept, ranges = list[RowFile](), defaultdict[int, list[tuple[int, int]]](list)
    for file in reversed(files):
        replacing = ranges[file.table]
        if not covers(replacing, file.start, file.stop):
            kept.append(file)
        if file.whole:
            replacing.append((file.start, file.stop))
    return tuple(reversed(kept))


def due(files: Sequence[RowFile], table: int) -> list[RowFile]:
    """Return the last partial files of ``table``, if they must be merged into one; else an empty list."""
    small = list[RowFile]()
    for file in reversed(partial_files(files, table)):
        if file.size >= SMALL:
            break
        small.append(file)
    return small[::-1] if len(small) >= MERGED else []


def merged(files: Sequence[RowFile], contents: Sequence[Rows], among: Sequence[RowFile]) -> Rows:
    """Return the rows of a file that can replace the partial ``files`` of a table at the last one's position."""
    last, pieces = among.index(files[-1]), list[Rows]()
    for file, (ids, rows) in zip(files, contents, strict=True):
        valid = np.ones(len(ids), np.bool_)
        for later in whole_files(among[among.index(file) : last], file.table):
            valid &= (ids < later.start) | (ids >= later.stop)
        pieces.append((ids[valid], rows[valid]))
    ids = np.concatenate([ids for ids, _ in reversed(pieces)])
    unique, first = np.unique(ids, return_index=True)  # the first occurrence, which is the latest in reversed order
    return unique, np.concatenate([rows for _, rows in reversed(pieces)])[first]


def replaced(files: Sequence[RowFile], old: Sequence[RowFile], new: Sequence[RowFile]) -> tuple[RowFile, ...]:
    """Return ``files`` with the last one of ``old`` replaced by ``new``, and the others of ``old`` removed."""
    last = files.index(old[-1])
    before, after = files[:last], files[last + 1 :]
    return (*(file for file in before if file not in old), *new, *after)
