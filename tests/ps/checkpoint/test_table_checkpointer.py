"""Snapshots of tables that are saved while the server runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.patience import patience, until
from support.present import present
from support.ps.saved_tables import SavedTables, small_files

from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import DistkerasError


@pytest.fixture(autouse=True)
def files_are_small() -> Iterator[None]:
    with small_files(width=3):
        yield


class Running(SavedTables):
    """Tables of which a checkpointer saves a snapshot after every two commits."""

    def __init__(
        self,
        folder: Path,
        token: str = "0000000a",
        keep: int = 99,
        shapes: Sequence[tuple[int, int]] = ((40, 3), (7, 3)),
    ) -> None:
        super().__init__(folder, shapes, token=token)
        #: The rows at each clock.
        self.history = {self.center.clock: self.rows}
        self.lost: list[DistkerasError] = []
        checkpoint = Checkpoint(str(folder), every=2, keep=keep)
        self.checkpointer = Checkpointer(
            checkpoint, self.directory, self.center, self.lock, self.saved, self.world, self.lost.append
        )
        self.checkpointer.start()

    def move(self, count: int, touched: int = 5) -> None:
        """Move rows by ``count`` commits, each of which touches ``touched`` rows of the first table."""
        for _ in range(count):
            with self.lock:
                clock = self.center.clock
                self.commit(self.rng.choice(40, touched), [clock % 7])
                self.history[clock + 1] = self.rows
                self.checkpointer.committed(self.center.clock)

    def covered(self) -> None:
        """Wait for a snapshot that covers all commits."""
        with self.lock:
            mark = self.checkpointer.mark()
        until(lambda: self.checkpointer.covers(mark))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.checkpointer.close(patience(20))
        assert self.lost == []


def snapshots(folder: Path) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield the clock and the rows of each snapshot, the latest first, and remove it."""
    while (saved := SnapshotDirectory(str(folder)).latest()) is not None:
        yield saved.state.header["clock"], [rows for _, rows in saved.state.tables]
        (folder / f"{saved.name}.dks").unlink()


def test_each_snapshot_has_the_rows_at_its_clock(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        for _ in range(4):
            movers = [threading.Thread(target=running.move, args=(15,)) for _ in range(2)]
            for mover in movers:
                mover.start()
            for mover in movers:
                mover.join(patience(30))
            running.covered()
    count = 0
    for clock, rows in snapshots(tmp_path):
        assert [table.tobytes() for table in rows] == [table.tobytes() for table in running.history[clock]]
        count += 1
    assert count >= 4


@pytest.mark.parametrize("room", [0, 1, 2])
def test_after_a_full_disk_no_row_is_missing(tmp_path: Path, room: int) -> None:
    """The disk is full at the rows of the first table, at those of the second one, or at the snapshot's own file."""
    with Running(tmp_path, keep=1) as running:
        running.covered()
        with running.lock:
            running.move(1)
            running.world.room = room
            running.checkpointer.covers(running.checkpointer.mark())
        until(lambda: running.world.room is None)
        running.move(1)
        running.covered()
    ((clock, rows),) = snapshots(tmp_path)
    assert clock == 2
    assert [table.tobytes() for table in rows] == [table.tobytes() for table in running.history[2]]


def test_a_server_that_is_restarted_repeatedly_continues_exactly(tmp_path: Path) -> None:
    for start in range(4):
        with Running(tmp_path, token=f"{start:08x}", keep=1) as running:
            running.move(2, touched=1)
            running.covered()
    ((clock, rows),) = snapshots(tmp_path)
    assert clock == 8
    assert [table.tobytes() for table in rows] == [table.tobytes() for table in running.history[8]]


def test_a_snapshot_without_tables_has_no_table_fields(tmp_path: Path) -> None:
    with Running(tmp_path, shapes=()) as running:
        running.covered()
    assert running.table_files() == set()
    newest = present(SnapshotDirectory(str(tmp_path)).latest())
    assert "tables" not in newest.state.header
    assert b"row_files" not in (tmp_path / f"{newest.name}.dks").read_bytes()
