"""Rows of tables in snapshots: they are the rows at the snapshot's clock, to the bit, despite commits and faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.logs import texts
from support.present import present
from support.ps.saved_tables import SavedTables, small_files

from distkeras.ps.checkpoint.row_files import RowFile
from distkeras.ps.errors import DifferentJobError, SnapshotError


@pytest.fixture(autouse=True)
def files_are_small() -> Iterator[None]:
    with small_files(width=3):
        yield


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Check that two lists of tables are equal to the bit."""
    assert [rows.tobytes() for rows in actual] == [rows.tobytes() for rows in expected]


def kinds(files: tuple[RowFile, ...]) -> list[tuple[int, int, int, bool]]:
    return [(file.table, file.start, file.stop, file.whole) for file in files]


def flip(path: Path, at: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_the_first_snapshot_has_all_rows_and_the_next_one_the_changed_rows(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3), (4, 3)])
    saved.snapshot()
    bases = [(0, 0, 6, True), (0, 6, 12, True), (0, 12, 18, True), (0, 18, 20, True), (1, 0, 4, True)]
    assert kinds(saved.files.files) == bases
    saved.commit([5, 13], [2])
    expected = saved.snapshot()
    assert kinds(saved.files.files) == [*bases, (0, 5, 14, False), (1, 2, 3, False)]
    saved.commit([0], [0])
    assert_same(saved.read(), expected)


def test_nothing_is_written_if_nothing_has_changed(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    saved.snapshot()
    before = saved.table_files()
    expected = saved.snapshot()
    assert_same(saved.read(), expected)
    assert saved.table_files() == before


def test_a_range_with_mostly_changed_rows_is_written_as_a_whole_file(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    saved.snapshot()
    saved.commit([6, 7, 8, 9, 1])
    expected = saved.snapshot()
    others = [(0, 0, 6, True), (0, 12, 18, True), (0, 18, 20, True)]
    assert kinds(saved.files.files) == [*others, (0, 6, 12, True), (0, 1, 2, False)]
    assert_same(saved.read(), expected)


@pytest.mark.parametrize("often", [1, 2, 3, 7])
def test_commits_while_the_rows_are_written_are_not_in_the_snapshot(tmp_path: Path, often: int) -> None:
    """The commits come between two holds of the lock, before or after the rows that they change are read."""
    saved = SavedTables(tmp_path, [(20, 3), (9, 3)])
    turns = itertools.count()

    def meanwhile() -> None:
        turn = next(turns)
        if turn % often == 0:
            saved.commit([turn % 20, 19 - turn % 19, (7 * turn) % 20], [turn % 9])

    for _ in range(4):
        expected = saved.snapshot(meanwhile)
        assert next(turns) > 9
        assert_same(saved.read(), expected)
    assert_same(saved.read(), expected)
    assert saved.rows[0].tobytes() != expected[0].tobytes()


def test_rows_that_change_during_a_snapshot_are_in_the_next_one(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    saved.snapshot(lambda: saved.commit([3, 17]) if saved.center.clock == 0 else None)
    expected = saved.snapshot()
    assert_same(saved.read(), expected)
    assert kinds(saved.files.files)[-1] == (0, 3, 18, False)


@pytest.mark.parametrize("room", range(4))
def test_rows_that_could_not_be_written_are_in_the_next_snapshot(tmp_path: Path, room: int) -> None:
    """The disk is full at the whole file, at one of the partial files, or at the snapshot's own file."""
    saved = SavedTables(tmp_path, [(20, 3), (18, 3)])
    first = saved.snapshot()
    saved.commit([0, 1, 2, 3, 7, 15], [0, 4])
    saved.world.room = room
    moves = iter([([4, 7], [1]), ([], [])])
    with pytest.raises(SnapshotError, match="No space left"):
        saved.snapshot(lambda: saved.commit(*next(moves, ([], []))))
    assert next(moves, None) is None
    assert_same(saved.read(), first)
    expected = saved.snapshot()
    assert_same(saved.read(), expected)
    files = saved.table_files()
    saved.snapshot()
    assert saved.table_files() == files


def test_a_snapshot_that_was_begun_but_not_captured_can_be_begun_again(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    saved.snapshot()
    saved.commit([3])
    with saved.lock:
        saved.files.begin()
    saved.commit([4])
    expected = saved.snapshot()
    assert_same(saved.read(), expected)


@pytest.mark.parametrize("damage", ["torn", "gone", "changed", "empty"])
@pytest.mark.parametrize("which", [0, -1], ids=["of all rows", "of changed rows"])
def test_a_snapshot_whose_rows_are_damaged_is_skipped(
    tmp_path: Path, which: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = SavedTables(tmp_path, [(6, 3)])
    before = saved.snapshot()
    saved.commit([1, 2, 3, 4] if which == 0 else [1])
    saved.snapshot()
    path = saved.path(saved.files.files[which])
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "changed":
        flip(path)
    else:
        path.write_bytes(content[:-5] if damage == "torn" else b"")
    restored = saved.restored()
    assert restored.center.clock == 0
    assert_same(restored.rows, before)
    (record,) = [record for record in caplog.records if getattr(record, "event", None) == "snapshot"]
    assert record.getMessage().startswith(
        f"a damaged snapshot is skipped: {'there is no ' if damage == 'gone' else ''}{path.stem}"
    )


def test_a_snapshot_cannot_be_read_without_its_rows(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    saved.snapshot()
    saved.path(saved.files.files[1]).unlink()
    with pytest.raises(SnapshotError, match="none of 1 snapshots can be read; the latest: there is no table-"):
        saved.restored()


def test_only_files_that_a_kept_snapshot_names_are_kept(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    named = []
    for number in range(12):
        saved.commit([number, 19 - number])
        expected = saved.snapshot(keep=2, merge=False)
        named.append({file.name for file in saved.files.files})
        assert saved.table_files() == set().union(*named[-2:])
        saved.files.merge()
    (tmp_path / f"{present(saved.directory.latest()).name}.dks").unlink()
    latest = present(saved.directory.latest())
    assert latest.state.header["clock"] == 11
    assert latest.state.tables[0][1].tobytes() != expected[0].tobytes()


def test_small_files_are_merged_into_one_that_later_snapshots_name(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(120, 3)])
    saved.snapshot()
    for number in range(3):
        saved.commit([10 * number, 119])
        expected = saved.snapshot()
    assert kinds(saved.files.files)[-1] == (0, 0, 120, False)
    assert [file.size for file in saved.files.files if not file.whole] == [4 * (8 + 12)]
    assert_same(saved.read(), expected)  # from the three small files: no snapshot names the merged one yet
    saved.commit([])
    expected = saved.snapshot(keep=1)
    assert_same(saved.read(), expected)
    assert len([file for file in saved.files.files if not file.whole]) == 1
    assert saved.table_files() == {file.name for file in saved.files.files}


def test_merging_takes_no_lock(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(120, 3)])
    saved.snapshot()
    for number in range(3):
        saved.commit([number])
        saved.snapshot(merge=False)
    holds, files = saved.lock.holds, saved.files.files
    saved.files.merge()
    assert len(saved.files.files) == len(files) - 2  # one file in place of three
    assert saved.lock.holds == holds


def test_a_merged_file_does_not_replace_rows_of_a_later_whole_file(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(120, 3)])
    saved.snapshot()
    saved.commit([1, 60])
    saved.snapshot()
    saved.commit([0, 1, 2, 3, 4])
    saved.snapshot()
    for row in (61, 62):
        saved.commit([row])
        saved.snapshot()
    assert [kind for kind in kinds(saved.files.files) if not kind[-1]] == [(0, 60, 63, False)]
    saved.commit([119])
    expected = saved.snapshot()
    assert_same(saved.read(), expected)


def test_large_partial_files_cause_whole_files_to_be_rewritten_the_oldest_first(tmp_path: Path) -> None:
    """A snapshot therefore needs at most a few times the bytes of its table, for any length of the job."""
    saved = SavedTables(tmp_path, [(60, 3)])
    saved.snapshot()
    rng, sizes, written = np.random.default_rng(3), [], 0
    table = saved.center.tables[0].array.nbytes
    for number in range(60):
        before = saved.table_files()
        saved.commit(rng.choice(60, 8, replace=False))
        expected = saved.snapshot(merge=False)
        new = saved.table_files() - before
        written += sum(file.size for file in saved.files.files if file.name in new)
        sizes.append(sum(file.size for file in saved.files.files))
        if number % 10 == 0:
            saved = saved.restored(f"0000001{number // 10}")
            assert_same(saved.rows, expected)
    assert max(sizes) < 2.9 * table
    assert written < 2.5 * 60 * 8 * (8 + 12)


def test_a_file_that_is_damaged_at_a_merge_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = SavedTables(tmp_path, [(120, 3)])
    for number in range(4):
        saved.commit([number, 60 + 8 * number])
        saved.snapshot(merge=False)
    broken = [file for file in saved.files.files if not file.whole][1]
    flip(saved.path(broken))
    saved.files.merge()
    assert broken not in saved.files.files
    assert [text[:53] for text in texts(caplog, "distkeras.ps.checkpoint")] == [
        "a file with rows of a table cannot be read, and the r"
    ]
    expected = saved.snapshot()
    assert_same(saved.read(), expected)


def test_a_restored_server_writes_only_rows_changed_since_then(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(20, 3)])
    saved.commit([1])
    saved.snapshot()
    restored = saved.restored()
    before = saved.table_files()
    restored.commit([2, 18])
    expected = restored.snapshot()
    (new,) = restored.table_files() - before
    assert new.startswith("table-000002-0000000b-")
    assert_same(restored.read(), expected)


def test_a_snapshot_of_other_tables_is_refused(tmp_path: Path) -> None:
    SavedTables(tmp_path, [(20, 3)]).snapshot()
    with pytest.raises(DifferentJobError, match=r"rows and widths: \[\[20, 4\]\]. Received: \[\[20, 3\]\]"):
        SavedTables(tmp_path, [(20, 4)])
    with pytest.raises(DifferentJobError, match=r"rows and widths: \[\]. Received: \[\[20, 3\]\]"):
        SavedTables(tmp_path, [])
