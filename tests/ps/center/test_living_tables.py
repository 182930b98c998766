"""Rows that are admitted, expire and are removed, compared with an independent count, also after restarts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import scaled_down
from support.ps.saved_tables import SavedTables, add, small_files
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.center import living_tables
from distkeras.ps.center.living_tables import LivingTable
from distkeras.ps.center.tables import PartialTable
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import RowIndex, TableShape, initial_rows

ROWS, WIDTH = 12, 2


class Count:
    """What each row is, by a dictionary of its touches: an independent count of the same commits."""

    def __init__(self, shape: TableShape) -> None:
        self.shape, self.clock, self.seconds = shape, 0, 0.0
        #: By row: touches, the clock and the time of the last one, and the value.
        self.rows: dict[int, tuple[int, int, float, np.ndarray]] = {}
        self.admitted = self.removed = 0

    def lasting(self, row: int) -> bool:
        """Return whether the last touch of a row is not too old."""
        if row not in self.rows:
            return False
        _, clock, seconds, _ = self.rows[row]
        after, span = self.shape.expire_commits, self.shape.expire_seconds
        return not ((after and self.clock - clock >= after) or (span and self.seconds - seconds >= span))

    def live(self, row: int) -> bool:
        return self.lasting(row) and self.rows[row][0] >= self.shape.admit

    def value(self, row: int) -> np.ndarray:
        return self.rows[row][3] if self.live(row) else initial_rows(self.shape, np.array([row]))[0]

    def commit(self, moved: dict[int, np.ndarray], seconds: float) -> None:
        rows, seconds = {}, max(seconds, self.seconds)  # a system's clock may go back
        for row, payload in moved.items():
            touches = 1 + (self.rows[row][0] if self.lasting(row) else 0)
            live = touches >= self.shape.admit
            self.admitted += live and not self.live(row)
            rows[row] = touches, self.clock + 1, seconds, self.value(row) + payload if live else self.value(row)
        self.rows |= rows
        self.clock, self.seconds = self.clock + 1, seconds

    def remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.removed += self.live(row)
            self.rows.pop(row, None)


class Both:
    """Saved tables, and the count of the same commits."""

    def __init__(self, folder: Path, lives: dict[str, Any]) -> None:
        self.saved = SavedTables(folder, [(ROWS, WIDTH)], partial=True, **lives)
        self.count, self.seconds = Count(self.table.shape), 0.0
        #: The count when the latest snapshot was begun.
        self.before: Count | None = None
        self.restarts = 0
        #: What a reader of versions has, and the clock of the last one; None: it must read all rows.
        self.read: dict[int, list[float]] = {}
        self.read_at: int | None = None

    @property
    def table(self) -> LivingTable:
        (table,) = self.saved.center.tables
        assert isinstance(table, LivingTable)
        return table

    def commit(self, rows: list[int], wait: int = 1) -> None:
        self.seconds += wait
        rows = sorted(set(rows))
        state = self.saved.rng.bit_generator.state
        moved = self.saved.rng.random(len(rows) * WIDTH, np.float32).reshape(-1, WIDTH)
        self.saved.rng.bit_generator.state = state  # `SavedTables.commit` draws the same numbers
        self.saved.commit(rows, seconds=self.seconds)
        self.count.commit(dict(zip(rows, moved, strict=True)), self.seconds)

    def remove(self, rows: list[int]) -> None:
        self.table.remove(np.array(sorted(set(rows)), np.int64), self.saved.center.clock + 1)
        self.count.remove(rows)

    def publish(self) -> None:
        """Read the changes since the last time, or all rows, as the publisher of versions does."""
        table, known = self.table, False
        if self.read_at is None:
            assert not table.begin_changes(-1, self.saved.center.clock)
        else:
            known = table.begin_changes(self.read_at, self.saved.center.clock)
            assert known
        if known:
            for start in range(0, table.marks.count, 7):
                ids, rows, gone = table.changed(slice(start, min(start + 7, table.marks.count)))
                self.read |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
                for row in gone.tolist():
                    self.read.pop(row, None)
        else:
            every, rows = table.present(slice(0, table.count))
            assert every is not None
            self.read = dict(zip(every.tolist(), rows.tolist(), strict=True))
        self.read_at = self.saved.center.clock
        expected = {row: self.count.value(row).tolist() for row in range(ROWS) if self.count.live(row)}
        assert self.read == expected

    def fail_to_publish(self) -> None:
        """Read as `publish` does, without a version that comes of it."""
        self.table.begin_changes(-1 if self.read_at is None else self.read_at, self.saved.center.clock)

    def snapshot(self, meanwhile: list[list[int]]) -> None:
        """Take a snapshot while commits come."""
        self.before = Count(self.table.shape)
        self.before.__dict__ |= self.count.__dict__ | {"rows": dict(self.count.rows)}
        self.saved.snapshot(partial(self._commit_one, list(meanwhile)))

    def restart(self) -> None:
        """Go back to the latest snapshot."""
        assert self.before is not None
        rng, self.restarts = self.saved.rng, self.restarts + 1
        self.saved, self.count = self.saved.restored(token=f"{self.restarts:08x}"), self.before
        self.saved.rng, self.seconds = rng, self.before.seconds
        self.before = Count(self.table.shape)
        self.before.__dict__ |= self.count.__dict__ | {"rows": dict(self.count.rows)}
        if self.read_at is not None and self.read_at > self.saved.center.clock:
            self.read_at = None  # the stream goes on from an older snapshot, with other versions
        if self.read_at is not None and not self._knows(self.read_at):
            self.read_at = None  # it was published after the snapshot was begun

    def _knows(self, clock: int) -> bool:
        state = self.table.state()
        return any(state[name] is not None and state[name].clock == clock for name in ("since", "read_at"))

    def _commit_one(self, waiting: list[list[int]]) -> None:
        if waiting:
            self.commit(waiting.pop())

    def check(self) -> None:
        every = np.arange(ROWS)
        rows = self.table.gather(every).reshape(-1, WIDTH)
        np.testing.assert_array_equal(rows, [self.count.value(row) for row in range(ROWS)])
        assert self.table.is_live(every).tolist() == [self.count.live(row) for row in range(ROWS)]
        ids, present = self.table.present(slice(0, self.table.count))
        assert ids is not None
        assert sorted(ids.tolist()) == [row for row in range(ROWS) if self.count.live(row)]
        np.testing.assert_array_equal(present, rows[ids])
        kept, *counts = self.table.counts
        assert counts[::2] == [self.count.admitted, self.count.removed]
        assert len(ids) <= kept  # the memory of some is not freed yet


def some_rows(rng: random.Random) -> list[int]:
    return rng.sample(range(ROWS), rng.choice([0, 1, 1, 2, 4]))


def some_step(rng: random.Random, both: Both) -> None:
    """Do what a job may do next: most often a commit, whose time may be the same, later, or earlier."""
    kind = rng.random()
    if kind < 0.75:
        both.commit(some_rows(rng), rng.choice([-2, 0, 0, 1, 1, 2, 3]))
    elif kind < 0.8:
        both.remove(some_rows(rng))
    elif kind < 0.92:
        both.publish()
    elif kind < 0.94:
        both.fail_to_publish()
    elif kind < 0.98 or both.before is None:
        both.snapshot([some_rows(rng) for _ in range(rng.randrange(5))])
    else:
        both.restart()


LIVES: list[dict[str, Any]] = [
    {"tracked": True},
    {"admit": 3},
    {"expire_commits": 1},
    {"expire_commits": 5},
    {"expire_seconds": 1.0},
    {"expire_seconds": 6.0},
    {"admit": 2, "expire_commits": 9},
    {"admit": 2, "expire_seconds": 12.0},
    {"admit": 2, "expire_commits": 12, "expire_seconds": 9.0},
]


@pytest.mark.parametrize("searched", [0, 1, 4])
@pytest.mark.parametrize("lives", LIVES, ids=str)
def test_rows_are_those_of_an_independent_count(
    lives: dict[str, Any], searched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead rows are freed never, late, or soon."""
    monkeypatch.setattr(living_tables, "_SEARCHED", searched)
    for seed in range(scaled_down(4)):
        rng = random.Random(seed)
        with small_files(WIDTH):
            both = Both(tmp_path / str(seed), lives)
            for _ in range(70):
                some_step(rng, both)
                both.check()


def test_a_row_is_admitted_by_its_second_touch_by_hand() -> None:
    table = LivingTable(TableShape("users", 9, 1, 9, seed=0, admit=2))
    for clock in (1, 2, 3):
        share = table.apply(np.array([4]), np.ones(1, np.float32), add, clock)
        assert (share, table.gather(np.array([4])).tolist()) == [(0.0, [0.0]), (None, [1.0]), (None, [2.0])][clock - 1]
    assert (table.counts, table.count) == ((1, 1, 0, 0), 1)


def test_the_memory_of_rows_that_come_once_is_used_again() -> None:
    table = LivingTable(TableShape("users", 1 << 50, 64, 100, seed=0, expire_commits=5))
    for clock in range(1, 1000):
        ids = (np.arange(100) + 100 * clock) << 20
        table.apply(ids, np.ones(6400, np.float32), add, clock)
        table.tick(clock, 0.0)
    assert np.count_nonzero(table.is_live(np.arange(100_000) << 20)) == 500
    assert max(len(table.array), len(table.marks.array)) < 4000  # of 99 900 rows
    kept, admitted, expired, removed = table.counts
    assert (admitted, expired + kept, removed) == (99_900, 99_900, 0)
    assert 500 <= kept < 2000


def test_rows_that_are_not_admitted_take_no_memory_for_values() -> None:
    table = LivingTable(TableShape("users", 1 << 50, 64, 100, seed=0, admit=2))
    for clock in range(1, 50):
        table.apply((np.arange(100) + 100 * clock) << 20, np.ones(6400, np.float32), add, clock)
    assert (table.count, table.marks.count) == (0, 4900)


numbers = st.integers(0, 300).map(lambda number: number * 10**12)


@given(st.lists(st.tuples(st.booleans(), st.lists(numbers, max_size=60, unique=True)), max_size=30))
def test_an_index_forgets_what_was_removed(groups: list[tuple[bool, list[int]]]) -> None:
    index, expected, place = RowIndex(), dict[int, int](), 0
    for adds, group in groups:
        ids = np.array([row for row in group if (row in expected) != adds], np.int64)
        if adds:
            places = np.arange(place, place + len(ids))
            np.testing.assert_array_equal(index.add(ids, places), places)
            expected |= dict(zip(ids.tolist(), places.tolist(), strict=True))
            place += len(ids)
        else:
            np.testing.assert_array_equal(index.remove(ids), [expected.pop(row) for row in ids.tolist()])
        every = np.arange(301) * 10**12
        np.testing.assert_array_equal(index.find(every), [expected.get(row, -1) for row in every.tolist()])
        assert len(index) == len(expected)


@pytest.mark.parametrize(
    "wrong", [{"admit": 0}, {"expire_commits": -1}, {"expire_seconds": -1.0}, {"admit": 2, "seed": None}]
)
def test_an_invalid_life_is_refused(wrong: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"name": "users", "rows": 9, "width": 2, "most": 2, "seed": 0}
    with pytest.raises(ConfigurationError, match=f"`{list(wrong)[-1]}` must be"):
        TableShape(**(shape | wrong))


def test_the_commits_of_a_center_let_rows_expire_and_a_reply_has_their_initial_values() -> None:
    seconds = iter([0.0, 10.0, 11.0, 15.0])  # the worker joins at second 0
    tables = [
        LivingTable(TableShape("by commits", 9, 1, 9, seed=0, expire_commits=2)),
        LivingTable(TableShape("by seconds", 9, 1, 9, seed=0, expire_seconds=4.0)),
    ]
    center = center_of(workers=1, tables=tables, now=lambda: next(seconds))
    one, other = np.array([1]), np.array([2])
    joined(center)
    found = []
    for number, ids in enumerate([one, other, other]):
        moved = tuple(np.ones(1, np.float32) for _ in tables)
        send(center, commit_of(sequence=number + 1, first=number, last=number, touched=(ids, ids), moved=moved))
        found.append([float(rows[0]) for rows in center.release(0, 0, (one, one)).rows])
    # The row is touched at second 10; then it is 1 and 5 seconds old, or one and two commits.
    assert found == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("more", [False, True], ids=["that snapshot", "the next one"])
def test_a_snapshot_has_neither_forgotten_rows_nor_later_ones_in_their_places(tmp_path: Path, more: bool) -> None:
    with small_files(WIDTH):
        saved = SavedTables(tmp_path, [(ROWS, WIDTH)], partial=True)
        (table,) = saved.center.tables
        assert isinstance(table, PartialTable)
        saved.commit(range(8))
        saved.snapshot()
        table.forget(np.array([2, 5, 7]))
        expected, later = np.array([0, 1, 3, 4, 6]), [[8], [9], [10, 11]]
        rows = table.gather(expected)
        saved.snapshot(lambda: saved.commit(later.pop()) if later else None)
        assert not later
        assert table.count == len(expected) + 4  # three of the later rows are in places that were free
        if more:
            expected = np.concatenate([expected, np.arange(8, 12)])
            rows = table.gather(expected)
            saved.snapshot()
        (restored,) = saved.restored().center.tables
        assert isinstance(restored, PartialTable)
        np.testing.assert_array_equal(np.flatnonzero(restored.find(np.arange(ROWS)) >= 0), expected)
        np.testing.assert_array_equal(restored.gather(expected), rows)


def test_places_are_used_again_though_snapshots_are_always_being_written(tmp_path: Path) -> None:
    """So a driver that asks for as many places as the table has rows misses none."""
    with small_files(WIDTH):
        saved = SavedTables(tmp_path, [(ROWS, WIDTH)], partial=True, expire_commits=4)
        (table,) = saved.center.tables
        assert isinstance(table, LivingTable)
        rng = random.Random(1)
        for _ in range(scaled_down(40)):
            saved.commit(some_rows(rng))
            saved.snapshot(lambda: saved.commit(some_rows(rng)))
            saved.commit(some_rows(rng))
            assert max(table.count, table.marks.count) <= ROWS
            ids, _ = table.present(slice(0, table.count))
            assert ids is not None
            assert sorted(ids.tolist()) == np.flatnonzero(table.is_live(np.arange(ROWS))).tolist()
