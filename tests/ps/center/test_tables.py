"""Tables of the center, whole and partial: commits computed by hand, and the checks of a commit's rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps.frames import some_commit
from support.ps.saved_tables import SavedTables, add, small_files
from support.ps.toy_tables import TableBatch, TableJob, ToyTables
from support.ps.virtual_centers import commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.checks import check_hello, check_shapes, check_wants, not_finite
from distkeras.ps.center.tables import PartialTable, Table
from distkeras.ps.errors import ConfigurationError, NonFiniteError, ShapeError
from distkeras.ps.protocol.messages import Commit, Hello
from distkeras.ps.protocol.tables import TableShape, describe, initial_rows
from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.base import BLOCK, Chunk
from distkeras.ps.rules.schedules import StepDecay

SHAPE = TableShape("users", 3, 2, 2)


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def center_of(name: str = "downpour", *, rows: Sequence[float] = (1, 2, 3, 4, 5, 6), **options: Any) -> Center:
    """Return a center of three zeros, with a table of three rows of two elements."""
    rule, workers = make(name, **options.pop("hyper", {})), options.pop("workers", 2)
    table = Table(SHAPE, floats(*rows).reshape(3, 2))
    return Center(rule, np.zeros(3, np.float32), workers=workers, tables=[table], **options)


def moving(rows: np.ndarray, moved: np.ndarray, worker: int = 0, **fields: Any) -> Commit:
    return commit_of(worker, touched=(rows,), moved=(moved,), wants=(ids(),), **fields)


def rows_of(center: Center) -> list[float]:
    return center.tables[0].array.reshape(-1).tolist()


def test_downpour_adds_to_the_rows_that_a_commit_names() -> None:
    center = center_of()
    joined(center)
    assert send(center, moving(ids(0, 2), floats(0.5, -1, 2, 2)))
    assert rows_of(center) == [1.5, 1, 3, 4, 7, 8]
    assert center.current.array.tolist() == [1, 1, 1]
    (rows,) = center.release(0, 0, (ids(1, 2),)).rows
    assert rows.tolist() == [3, 4, 7, 8]
    # The rows that were sent do not change with the next commit.
    assert send(center, moving(ids(2), floats(1, 1), sequence=2, first=1, last=1))
    assert rows.tolist() == [3, 4, 7, 8]
    assert rows_of(center) == [1.5, 1, 3, 4, 8, 9]


def test_dynsgd_scales_rows_by_the_staleness_of_the_commit() -> None:
    center = center_of("dynsgd")
    joined(center, 0)
    joined(center, 1)
    assert send(center, moving(ids(0), floats(1, 1)))
    # One commit since worker 1 received the center: a scale of 1/2.
    assert send(center, moving(ids(0, 1), floats(4, 2, -2, 1), worker=1))
    assert rows_of(center) == [1 + 1 + 2, 2 + 1 + 1, 3 - 1, 4 + 0.5, 5, 6]
    assert center.log.commits()["scale"].tolist() == [1, 0.5]


def test_asgd_applies_rows_with_the_servers_learning_rate() -> None:
    center = center_of("asgd", learning_rate=StepDecay(0.5, (1,), 0.5), workers=1)
    joined(center)
    assert send(center, moving(ids(1), floats(2, 4)))
    assert rows_of(center) == [1, 2, 3 - 1, 4 - 2, 5, 6]
    center.release(0, 0, (ids(),))
    assert send(center, moving(ids(1), floats(2, 4), sequence=2, first=1, last=1))
    assert rows_of(center) == [1, 2, 2 - 0.5, 2 - 1, 5, 6]


@pytest.mark.parametrize(("name", "moved"), [("downpour", -0.095), ("agn", -0.0475)])
def test_a_window_of_two_steps_without_dense_parameters(name: str, moved: float) -> None:
    # Row 1 is 1. Step 1: the gradient 1 * 1 - .5 = .5 moves it to .95; step 2: .45 moves it to .905.
    model = ToyTables(floats(), (TableShape("items", 3, 1, 2),), (floats(7, 1, 9).reshape(3, 1),))
    data = [TableBatch(0, index, index == 1, (ids(1),), np.ones(1)) for index in range(2)]
    job = TableJob(make(name, window=2), model, [data], by_rows=True)
    job.commit(0)
    np.testing.assert_allclose(job.result(), [7, 1 + moved, 9], rtol=1e-6)
    assert not job.pending


def test_the_recorded_scale_is_that_of_the_rows_if_the_dense_vector_is_empty() -> None:
    table = Table(SHAPE)
    center = Center(make("dynsgd"), np.zeros(0, np.float32), workers=2, tables=[table])
    joined(center, 0)
    joined(center, 1)
    for worker in (0, 1):
        assert send(center, moving(ids(1), floats(4, 8), worker=worker, size=0))
    assert table.array.tolist() == [[0, 0], [6, 12], [0, 0]]
    joined(center, 0)
    assert send(center, moving(ids(), floats(), sequence=2, first=1, last=1, size=0))
    assert center.log.commits()["scale"].tolist() == [1, 0.5, 1]


@examples(40)
@given(st.data())
def test_many_rows_are_applied_block_by_block(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([1, BLOCK // 3, BLOCK - 1, BLOCK, BLOCK + 1]))
    rows_max = 3 * max(1, BLOCK // width) + 1 if width > 1 else BLOCK + 5
    count = data.draw(st.integers(0, rows_max))
    rng = np.random.default_rng(1)
    start = rng.normal(size=(rows_max + 3, width)).astype(np.float32)
    table = Table(TableShape("users", rows_max + 3, width, rows_max), start.copy())
    rows = np.sort(rng.permutation(rows_max + 3)[:count])
    moved = rng.normal(size=count * width).astype(np.float32)
    expected = start.copy()
    expected[rows] += moved.reshape(-1, width) * np.float32(0.5)
    sizes: list[int] = []

    def halve(chunk: Chunk) -> float:
        assert chunk.scratch.shape == chunk.out.shape == chunk.center.shape
        sizes.append(chunk.out.size)
        np.multiply(chunk.payload[0], np.float32(0.5), out=chunk.scratch)
        np.add(chunk.center, chunk.scratch, out=chunk.out)
        return 0.5 * chunk.out.size

    scale = table.apply(rows, moved, halve)
    np.testing.assert_array_equal(table.array, expected)
    assert (scale or 0.0) == 0.5 * moved.size
    assert not sizes or max(sizes) <= max(BLOCK, width)
    table.changes.begin()
    assert table.changes.unread(0, rows_max + 3) == rows.size
    np.testing.assert_array_equal(table.changes.read(table.array, 0, rows_max + 3, np.empty_like(start)), rows)


def changed(table: Table) -> list[int]:
    """Return the changed rows of the snapshot that has just begun."""
    return table.changes.read(table.array, 0, len(table.array), np.empty_like(table.array)).tolist()


def test_a_changed_row_is_in_the_next_snapshot_that_is_saved() -> None:
    table = Table(SHAPE)
    table.apply(ids(0, 2), np.ones(4, np.float32), lambda chunk: None)
    table.changes.begin()
    assert changed(table) == [0, 2]
    table.changes.end(saved=True)
    table.apply(ids(1), np.ones(2, np.float32), lambda chunk: None)
    table.changes.begin()
    table.apply(ids(0), np.ones(2, np.float32), lambda chunk: None)
    assert changed(table) == [1]
    table.changes.end(saved=False)
    table.changes.begin()
    assert changed(table) == [0, 1]


def test_the_old_value_of_a_row_that_changes_before_it_is_read_is_set_aside() -> None:
    """It is set aside once even if the row changes twice, and not at all if the row was read before."""
    table = Table(SHAPE)
    rows, moved = table.changes, np.array([1, 2, 3, 4], np.float32)
    table.apply(ids(0, 2), moved.copy(), lambda chunk: None)
    rows.begin()
    for _ in range(2):
        table.apply(ids(1, 2), 2 * moved, lambda chunk: None)
    assert [(numbers.tolist(), part.tolist()) for numbers, part in rows.take_aside()] == [([2], [[3, 4]])]
    assert changed(table) == [0]
    table.apply(ids(0), np.zeros(2, np.float32), lambda chunk: None)
    assert rows.take_aside() == []


def test_rows_that_overflow_are_an_error_of_the_commit() -> None:
    center = center_of(rows=[3e38] * 6, check_finite=True)
    joined(center)
    with pytest.raises(NonFiniteError, match="rule 'downpour' made the center non-finite at clock 0"):
        send(center, moving(ids(1), floats(3e38, 0)))
    assert center.corrupt


@pytest.mark.parametrize("name", [name for name, kind in center_rules().items() if not kind().traits.rows])
def test_rules_without_the_trait_rows_refuse_tables(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`tables` must be empty: rule '{name}'.* Received: 1 tables"):
        center_of(name, learning_rate=0.1)


class TestChecks:
    def commit(self, **fields: Any) -> Commit:
        valid = {"touched": (ids(0, 2),), "moved": (np.ones(4, np.float32),), "wants": (ids(),)}
        return some_commit(np.ones(3, np.float32), history=np.zeros((1, 3)), **(valid | fields))

    def test_valid_rows_are_accepted(self) -> None:
        check_shapes(center_of(), self.commit())
        check_shapes(center_of(), self.commit(touched=(ids(),), moved=(floats(),), wants=(ids(0, 1),)))

    @pytest.mark.parametrize("name", ["touched", "wants"])
    @pytest.mark.parametrize(
        ("rows", "text"),
        [
            ((ids(1, 0),), "in ascending order, each once. Received: 0 behind 1"),
            ((ids(1, 1),), "in ascending order, each once. Received: 1 behind 1"),
            ((ids(-1, 2),), r"rows of table 'users' in \[0, 3\). Received: -1"),
            ((ids(0, 3),), r"rows of table 'users' in \[0, 3\). Received: 3"),
            ((ids(-(2**63), 2**63 - 1),), r"in \[0, 3\). Received: -9223372036854775808"),
            ((ids(0, 1, 2),), "at most 2 rows of table 'users'. Received: 3"),
            ((), "an array of rows for each of 1 tables. Received: 0"),
            ((ids(0), ids(0)), "an array of rows for each of 1 tables. Received: 2"),
        ],
    )
    def test_invalid_rows_are_refused(self, name: str, rows: tuple[np.ndarray, ...], text: str) -> None:
        with pytest.raises(ShapeError, match=f"`{name}` must .*{text}") as caught:
            check_shapes(center_of(), self.commit(**{name: rows}))
        assert (caught.value.worker, caught.value.step) == (0, 0)
        if name == "wants":
            with pytest.raises(ShapeError, match=text):
                check_wants([SHAPE], rows, 0)

    @pytest.mark.parametrize(
        "moved", [(), (floats(1, 1),), (np.ones(4, np.float32), floats()), (np.ones(6, np.float32),)]
    )
    def test_movements_of_a_wrong_size_are_refused(self, moved: tuple[np.ndarray, ...]) -> None:
        with pytest.raises(ShapeError, match=r"a commit must move its rows by \[4\] elements, table by table"):
            check_shapes(center_of(), self.commit(moved=moved))

    @pytest.mark.parametrize("name", ["touched", "moved", "wants"])
    def test_a_center_without_tables_refuses_rows(self, name: str) -> None:
        center = Center(make("downpour"), np.zeros(3, np.float32), workers=1)
        no_tables = {"touched": (), "moved": (), "wants": ()}
        check_shapes(center, self.commit(**no_tables))
        with pytest.raises(ShapeError):
            check_shapes(center, self.commit(**no_tables | {name: (floats() if name == "moved" else ids(),)}))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_number_that_is_not_finite_is_detected(self, bad: float) -> None:
        commit = self.commit(moved=(floats(1, 1, bad, 1),))
        error = present(not_finite(commit, [np.ones(3, np.float32)], (), [SHAPE]))
        assert error.message.startswith(
            f"a commit holds {bad} in column 0 of row 2 of table 'users' (1 such elements), from mini-batches 0-0 of"
        )
        assert (error.worker, error.step) == (0, 0)

    def test_large_finite_numbers_are_accepted(self) -> None:
        commit = self.commit(moved=(floats(3e38, 3e38, -3e38, 1),))
        assert not_finite(commit, [np.ones(3, np.float32)], (), [SHAPE]) is None

    def test_a_worker_with_other_tables_is_refused(self) -> None:
        center = center_of()
        check_hello(center, Hello(0, 0, 3, 0, tables=describe([SHAPE])))
        for shapes in ([], [TableShape("users", 3, 2, 1)], [TableShape("items", 3, 2, 2)], [SHAPE, SHAPE]):
            with pytest.raises(
                ShapeError,
                match=r"the worker's tables must be \[\[\"users\", 3, 2, 2, null, 0\.0, 1, 0, 0\.0, false\]\]",
            ):
                check_hello(center, Hello(0, 0, 3, 0, tables=describe(shapes)))
        dense = Center(make("downpour"), np.zeros(3, np.float32), workers=1)
        with pytest.raises(ShapeError, match="the worker's tables must be none"):
            check_hello(dense, Hello(0, 0, 3, 0, tables=describe([SHAPE])))

    @pytest.mark.parametrize("wire_format", ["bfloat16", "int8"])
    def test_a_compressed_wire_format_is_refused(self, wire_format: str) -> None:
        with pytest.raises(ConfigurationError, match="`wire_format` must be 'float32' where tables travel by rows"):
            check_hello(center_of(), Hello(0, 0, 3, 0, "", wire_format, tables=describe([SHAPE])))


ROWS, WIDTH = 60, 3
PARTIAL = TableShape("users", ROWS, WIDTH, ROWS, seed=3, scale=0.5)
some = st.lists(st.integers(0, ROWS - 1), max_size=15, unique=True).map(sorted)


@given(st.lists(st.tuples(some, some), max_size=12))
def test_commits_and_replies_equal_those_of_a_whole_table(steps: list[tuple[list[int], list[int]]]) -> None:
    rng = np.random.default_rng(1)
    table, touched = PartialTable(PARTIAL), set[int]()
    whole = Table(TableShape("users", ROWS, WIDTH, ROWS), initial_rows(PARTIAL, np.arange(ROWS)))
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
    table = PartialTable(PARTIAL)
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


@examples(60)
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
