"""The windows of tables at a worker: the rows that they touch and want, and their vectors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from support.ps.toy_model import ToyBatch, ToyReplica

from distkeras.ps.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.loop import CommitRecord, Compute, PullRequest, Reply
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.worker.loop import AutoWindow, work
from distkeras.ps.worker.tables import TableWindows, Window

#: In a vector, two dense elements are followed by the rows of users at 2 to 8, and of items at 8 to 10.
USERS, ITEMS = TableShape("users", 9, 2, 3), TableShape("items", 5, 1, 2)
SIZE = 10


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def windows_of(*windows: Window) -> TableWindows:
    return TableWindows([USERS, ITEMS], 2, iter(windows))


def window(*rows: np.ndarray, first: int = 0, steps: int = 1, last: bool = False) -> Window:
    batches = [ToyBatch(0, first + step, last and step == steps - 1) for step in range(steps)]
    return Window(batches, rows)


def test_a_reply_is_returned_as_one_vector() -> None:
    windows = windows_of(window(ids(1, 4, 8), ids(0)), window(ids(2), ids(3, 4)), window(ids(), ids()))
    assert windows.size == SIZE
    assert [rows.tolist() for rows in windows.wants] == [[1, 4, 8], [0]]
    first = windows.vector(Reply(center=floats(1, 2), rows=(floats(3, 4, 5, 6, 7, 8), floats(9))))
    assert first.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    batches = iter(windows)
    next(batches)
    second = windows.vector(Reply(center=floats(0, 1), rows=(floats(2, 3), floats(4, 5))))
    assert second.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 4, 5]
    assert first.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]  # the rule still reads it
    next(batches)
    third = windows.vector(Reply(center=floats(8, 9), rows=(floats(), floats())))
    assert third.tolist() == [8, 9, 0, 0, 0, 0, 0, 0, 0, 0]
    assert second.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 4, 5]


def test_a_payload_is_split_into_the_dense_vector_and_the_rows() -> None:
    windows = windows_of(window(ids(1, 4), ids(0)), window(ids(2), ids(3)))
    list(zip(range(1), windows, strict=False))
    (payload,) = windows.payload()
    payload[...] = np.arange(SIZE)
    dense, moved = windows.moved(payload)
    assert [part.tolist() for part in (dense, *moved)] == [[0, 1], [2, 3, 4, 5], [8]]


def test_rows_may_have_another_order_in_a_small_table_than_in_messages() -> None:
    memory = np.zeros(SIZE, np.float32)
    single = Window([ToyBatch(0, 0, last=True)], (ids(1, 4, 8), ids(3)), (ids(2, 0, 1), ids(0)))
    windows = TableWindows([USERS, ITEMS], 2, iter([single]), outgoing=lambda: memory)
    vector = windows.vector(Reply(center=floats(1, 2), rows=(floats(3, 4, 5, 6, 7, 8), floats(9))))
    assert vector.tolist() == [1, 2, 5, 6, 7, 8, 3, 4, 9, 0]
    list(windows)
    dense, moved = windows.moved(vector)
    assert [part.tolist() for part in (dense, *moved)] == [[1, 2], [3, 4, 5, 6, 7, 8], [9]]
    assert all(np.shares_memory(part, memory) for part in (dense, *moved))


def test_after_the_last_window_no_rows_are_wanted() -> None:
    windows = windows_of(window(ids(1), ids(0), steps=2))
    assert len(list(windows)) == 2
    assert [rows.tolist() for rows in windows.touched] == [[1], [0]]
    assert [rows.tolist() for rows in windows.wants] == [[], []]
    assert all(rows.dtype == np.int64 for rows in windows.wants)
    assert [rows.tolist() for rows in windows_of().wants] == [[], []]


def test_a_window_is_read_only_when_its_rows_are_wanted() -> None:
    """The mini-batches of the previous window may be computed before."""
    windows_read: list[int] = []

    def source() -> Any:
        for number in range(3):
            windows_read.append(number)
            yield window(ids(number), ids(), steps=2)

    windows = TableWindows([USERS, ITEMS], 2, source())
    batches = iter(windows)
    next(batches)
    next(batches)
    assert windows_read == [0]
    assert windows.wants[0].tolist() == [1]
    assert windows.wants[0].tolist() == [1]
    assert windows_read == [0, 1]
    next(batches)
    assert windows_read == [0, 1]


def test_a_window_can_be_committed_only_at_its_end() -> None:
    windows = windows_of(window(ids(1), ids(0), steps=2))
    with pytest.raises(LocalProtocolError, match="a window must be committed at its end"):
        _ = windows.touched
    next(iter(windows))
    with pytest.raises(LocalProtocolError, match="Received: a commit with 1 mini-batches left"):
        windows.moved(windows.payload()[0])


@pytest.mark.parametrize("rows", [(), (floats(1, 2), floats()), (floats(1), floats(1)), (floats(1, 2),) * 2])
def test_a_reply_with_other_rows_than_the_wanted_ones_is_refused(rows: tuple[np.ndarray, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"a reply must have \[2, 1\] elements of rows, table by table"):
        windows_of(window(ids(1), ids(0))).vector(Reply(center=floats(1, 2), rows=rows))


def test_a_refused_window_is_computed_again_from_its_own_rows() -> None:
    windows = windows_of(window(ids(1), ids(0)), window(ids(2, 3), ids(), first=1, last=True))
    replica = ToyReplica(SIZE, 1.0, lambda theta, value: np.ones_like(theta), np.float32)
    loop = work(make("ringmaster"), replica, iter(windows), windows.payload, tables=windows, now=None)

    def after_compute(reply: Reply) -> CommitRecord:
        assert isinstance(loop.send(reply), Compute)
        record = loop.send(None)
        assert isinstance(record, CommitRecord)
        return record

    pull = next(loop)
    assert isinstance(pull, PullRequest)
    assert [rows.tolist() for rows in pull.wants] == [[1], [0]]
    reply = Reply(center=floats(0, 0), rows=(floats(5, 6), floats(7)))
    for center in (reply, reply._replace(rows=(floats(8, 9), floats(1)), refused=True)):
        record = after_compute(center)
        assert [rows.tolist() for rows in record.touched] == [[1], [0]]
        assert [rows.tolist() for rows in record.wants] == [[2, 3], []]
        assert [moved.tolist() for moved in record.moved] == [[-1, -1], [-1]]
        assert [part.tolist() for part in record.parts] == [[-1, -1]]
    record = after_compute(Reply(center=floats(0, 0), rows=(floats(1, 2, 3, 4), floats())))
    assert [rows.tolist() for rows in record.touched] == [[2, 3], []]
    assert [rows.tolist() for rows in record.wants] == [[], []]
    assert record.epoch_end


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (make("adag", window=2), {}),
        (make("asgd", weight_decay=0.1), {}),
        (make("downpour", window=None), {}),
        (make("downpour"), {"overlap": True}),
        (make("agn", window="auto"), {}),
    ],
    ids=str,
)
def test_a_rule_or_an_option_that_excludes_tables_is_refused(rule: Any, options: dict[str, Any]) -> None:
    windows = windows_of()
    if rule.window == "auto":
        options = {"windows": AutoWindow(rule)}
    loop = work(rule, cast("Any", None), iter(windows), windows.payload, tables=windows, **options)
    with pytest.raises(ConfigurationError, match="tables travel by rows for rules with the trait `rows`"):
        next(loop)
