"""Tables that keep only their touched rows: their numbers equal those of whole tables, in memory and in snapshots."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.present import present
from support.ps.saved_tables import SavedTables, add, small_files

from distkeras.ps.center.tables import PartialTable, Table
from distkeras.ps.protocol.tables import TableShape, initial_rows

ROWS, WIDTH = 60, 3
SHAPE = TableShape("users", ROWS, WIDTH, ROWS, seed=3, scale=0.5)
some = st.lists(st.integers(0, ROWS - 1), max_size=15, unique=True).map(sorted)


@given(st.lists(st.tuples(some, some), max_size=12))
def test_commits_and_replies_equal_those_of_a_whole_table(steps: list[tuple[list[int], list[int]]]) -> None:
    rng = np.random.default_rng(1)
    table, touched = PartialTable(SHAPE), set[int]()
    whole = Table(TableShape("users", ROWS, WIDTH, ROWS), initial_rows(SHAPE, np.arange(ROWS)))
    for moved, wanted in steps:
        ids, wants = np.array(moved, np.int64), np.array(wanted, np.int64)
        payload = rng.random(ids.size * WIDTH, np.float32)
        for each in (table, whole):
            each.apply(ids, payload.copy(), add)
        np.testing.assert_array_equal(table.gather(wants), whole.gather(wants))
        touched |= set(moved)
        assert table.count == len(touched)  # sending a row does not touch it
    np.testing.assert_array_equal(np.sort(table.ids_of(slice(0, table.count))), sorted(touched))


def test_memory_is_proportional_to_the_touched_rows() -> None:
    table = PartialTable(TableShape("users", 1 << 60, 64, 1000, seed=3, scale=0.5))
    for first in range(0, 20_000, 1000):
        ids = (np.arange(first, first + 1000) + 1) << 40
        table.apply(ids, np.ones(64_000, np.float32), add)
        table.gather(ids + 1)
    assert table.count == 20_000
    assert table.array.nbytes <= 2 * 20_000 * 64 * 4


def test_a_published_row_is_stored_once() -> None:
    table = PartialTable(SHAPE)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(2):  # a block may be sent again
        table.put(0, np.array([9, 4]), rows)
    np.testing.assert_array_equal(table.gather(np.array([4, 9])), rows[::-1].reshape(-1))
    for start, ids in ((2, [9, 5]), (1, [9, 5]), (2, [7, 7])):
        with pytest.raises(ValueError, match="there twice"):
            table.put(start, np.array(ids), rows)
    assert table.count == 2


def assert_restored(saved: SavedTables, rows: list[np.ndarray], touched: list[np.ndarray | None]) -> None:
    restored = saved.restored()
    for actual, expected in zip(restored.rows, rows, strict=True):
        np.testing.assert_array_equal(actual, expected)
    for actual_touched, expected_touched in zip(restored.touched, touched, strict=True):
        np.testing.assert_array_equal(present(actual_touched), present(expected_touched))
    for table, ids in zip(restored.center.tables, touched, strict=True):
        assert ids is not None
        np.testing.assert_array_equal(table.gather(ids), table.array[: table.count].reshape(-1))


def _commit_one(saved: SavedTables, waiting: list[list[int]]) -> None:
    if waiting:
        saved.commit(waiting.pop())


moves = st.lists(st.integers(0, ROWS - 1), max_size=9)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(moves, max_size=3), st.lists(moves, max_size=4)), min_size=1, max_size=6))
def test_a_snapshot_has_the_rows_at_the_time_it_began(rounds: list[tuple[list[list[int]], list[list[int]]]]) -> None:
    with small_files(WIDTH), TemporaryDirectory() as folder:
        saved = SavedTables(Path(folder), [(ROWS, WIDTH)], partial=True)
        for before, meanwhile in rounds:
            for ids in before:
                saved.commit(ids)
            touched = saved.touched
            rows = saved.snapshot(partial(_commit_one, saved, list(meanwhile)))
        assert_restored(saved, rows, touched)


def test_a_later_snapshot_writes_only_the_changed_rows(tmp_path: Path) -> None:
    saved = SavedTables(tmp_path, [(1 << 50, 64)], partial=True)
    ids = np.arange(2000) * 10**9
    saved.commit(ids)
    saved.snapshot()
    first = sum(file.size for file in saved.files.files)
    before = set(saved.files.files)
    saved.commit([*ids[:10], *(np.arange(10) * 10**9 + 7)])
    touched, rows = saved.touched, saved.snapshot()
    assert sum(file.size for file in set(saved.files.files) - before) < first / 50
    assert_restored(saved, rows, touched)
