"""A center with tables in a checkpoint's directory, which can receive commits at chosen moments of a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.living_tables import make_table
from distkeras.ps.center.tables import PartialTable
from distkeras.ps.checkpoint import table_files
from distkeras.ps.checkpoint.row_files import RowFile
from distkeras.ps.checkpoint.snapshots import LogFiles, Saved, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.checkpoint.table_files import TableFiles
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.rules.base import Chunk
from support.present import present
from support.ps.watched_files import WatchedFiles

Meanwhile = Callable[[], object]


def nothing() -> None:
    """Do nothing during a snapshot."""


@contextmanager
def small_files(width: int) -> Iterator[None]:
    """Limit files to 6 rows of that width, merge 3 small files into one, and copy 2 rows per hold of the lock."""
    row = 4 * width
    small = 4 * (8 + row)
    with mock.patch.multiple(table_files, LARGEST=6 * row, MERGED=3, SMALL=small, AT_ONCE=2 * row, SEARCHED=5):
        yield


class Lock(threading.Condition):
    """A lock that calls ``meanwhile`` after each release."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Meanwhile = nothing
        self.holds = 0

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self.holds += 1
        self.meanwhile()


class FullDisk(WatchedFiles):
    """The system's files, except that one write fails after ``room`` successful writes."""

    def __init__(self) -> None:
        super().__init__(self.count_writes, syncs=False)
        self.room: int | None = None

    def count_writes(self, method: str, name: str) -> None:
        if method == "write" and self.room is not None:
            self.room = self.room - 1 if self.room else None
            if self.room is None:
                raise OSError("No space left on device")


def add(chunk: Chunk) -> None:
    """Add a payload to the center, as the server's part of DOWNPOUR does."""
    np.add(chunk.center, chunk.payload[0], out=chunk.out)


class Taken(NamedTuple):
    """A saved snapshot: its name, the files with its rows, and the expected rows."""

    name: str
    files: frozenset[str]
    rows: list[np.ndarray]


class SavedTables:
    """Tables with these numbers of rows and widths, and the files that their snapshots leave in a folder."""

    def __init__(
        self,
        folder: Path,
        shapes: Sequence[tuple[int, int]],
        *,
        token: str = "0000000a",
        partial: bool = False,
        **lives: Any,
    ) -> None:
        self.folder, self.world, self.lock = folder, FullDisk(), Lock()
        self.rng = np.random.default_rng(7)
        #: The saved snapshots, the latest last.
        self.taken: list[Taken] = []
        self.partial, self.lives = partial, lives
        own: dict[str, Any] = {"seed": 5, "scale": 2.0, **lives} if partial else {}
        tables = [make_table(TableShape(f"table {n}", *shape, most=shape[0], **own)) for n, shape in enumerate(shapes)]
        self.center = Center(make("downpour"), np.zeros(3, np.float32), workers=1, tables=tables)
        self.center.join(0, 0)
        self.directory = SnapshotDirectory(str(folder), token=token, world=self.world)
        self.saved: Saved | None = self.directory.take_over()
        if self.saved is not None:
            self.center.leases.clear()
            self.directory.restore(self.center, self.saved, same_attempts=True)
        else:
            for table in self.center.tables:
                table.array[...] = self.rng.random(table.array.shape, np.float32)
        files = () if self.saved is None else self.saved.row_files
        self.files = TableFiles(self.directory, self.center, self.lock, files)

    @property
    def rows(self) -> list[np.ndarray]:
        """Return a copy of the current rows of each table."""
        return [table.array[: table.count].copy() for table in self.center.tables]

    @property
    def touched(self) -> list[np.ndarray | None]:
        """Return the touched rows of each table, if it keeps only these."""
        tables = self.center.tables
        return [each.ids_of(slice(0, each.count)) if isinstance(each, PartialTable) else None for each in tables]

    def commit(self, *touched: Iterable[int], seconds: float = 0.0) -> None:
        """Add random numbers to these rows of each table, at a time."""
        for table, numbers in zip(self.center.tables, touched, strict=True):
            ids = np.array(sorted(set(numbers)), np.int64)
            moved = self.rng.random(ids.size * table.shape.width, np.float32)
            table.apply(ids, moved, add, self.center.clock + 1)
            table.tick(self.center.clock + 1, seconds)
        self.center.clock += 1

    def snapshot(self, meanwhile: Meanwhile = nothing, *, keep: int = 99, merge: bool = True) -> list[np.ndarray]:
        """Take a snapshot, with ``meanwhile`` after each release of the lock; return the expected rows.

        Raises:
            SnapshotError: a file cannot be written.
        """
        with self.lock:
            self.files.begin()
            state, rows = capture(self.center), self.rows
        self.lock.meanwhile, before = meanwhile, self._stems("snapshot")
        try:
            self.directory.save(state, LogFiles(), row_files=self.files.save())
            (name,) = self._stems("snapshot") - before
            self.taken.append(Taken(name, frozenset(file.name for file in self.files.files), rows))
        finally:
            self.lock.meanwhile = nothing
            state.drop()
            self.files.end()
        self.directory.prune(keep, LogFiles(), self.directory.require_owned())
        if merge:
            self.files.merge()
        return rows

    def read(self) -> list[np.ndarray]:
        """Return the rows of the latest snapshot that is not damaged."""
        return [rows for _, rows in present(SnapshotDirectory(str(self.folder)).latest()).state.tables]

    def restored(self, token: str = "0000000b") -> SavedTables:
        """Return the tables that another job's server restores from the folder."""
        shapes = [(table.shape.rows, table.shape.width) for table in self.center.tables]
        return SavedTables(self.folder, shapes, token=token, partial=self.partial, **self.lives)

    def path(self, file: RowFile) -> Path:
        """Return a file's path."""
        return self.folder / f"{file.name}.dks"

    def table_files(self) -> set[str]:
        """Return the names of the existing files with rows."""
        return self._stems("table")

    def _stems(self, kind: str) -> set[str]:
        return {path.stem for path in self.folder.glob(f"{kind}-*.dks")}
