"""Tables of a run: the center's vector determines the values of their rows at every clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.protocol.messages import CenterReply
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape
from distkeras.ps.simulation.virtual_job import VirtualBatch
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.worker.tables import Window
from simulation.plan import Plan
from simulation.reference import close
from simulation.scheduler import Finding

#: Rows of the second table.
_SHARED = 3
#: The first row of the third table that is ever touched.
_FAR = 1 << 40
#: Rows of the fourth table that are touched, each by many mini-batches, and its place among the tables.
VISITED, VISITS = 5, 3


def shapes_of(plan: Plan, size: int) -> tuple[TableShape, ...]:
    """Return the shapes of the tables that accompany a center of ``size`` elements.

    The first one has a row for each mini-batch, which moves its first number as it moves the center's element; the
    second number does not change. The second table has few rows, each of which many mini-batches move. Half of the
    runs have the third one, of which only touched rows exist; these move as the center's elements do. In half of these
    runs, the server counts their touches. In runs with `Plan.visits`, rows of a fourth table come and go.
    """
    window = plan.make_rule().window
    if not plan.tables:
        return ()
    assert isinstance(window, int)
    shapes = TableShape("own", size, 2, min(size, window)), TableShape("shared", _SHARED, 1, min(_SHARED, window))
    batches = sum(plan.batches)
    far = TableShape("far", 1 << 50, 1, window, seed=0, tracked=batches % 4 == 1)
    if not plan.visits:
        return (*shapes, far) if batches % 2 else shapes
    expires = {"expire_commits": 3} if batches % 3 else {"expire_seconds": 8.0}
    lives: dict[str, Any] = {"admit": 1 + batches % 2, "tracked": True, **expires}
    return (*shapes, far, TableShape("visits", 1 << 50, 2, min(VISITED, window), seed=1, scale=0.5, **lives))


def start_of(shapes: Sequence[TableShape]) -> list[tuple[TableShape, np.ndarray]]:
    """Return the initial rows of the tables of which all rows exist."""
    shapes = [shape for shape in shapes if not shape.partial]
    rows = [np.zeros((shape.rows, shape.width), np.float32) for shape in shapes]
    if rows:
        rows[0][:, 1] = _standing(shapes[0].rows)
    return list(zip(shapes, rows, strict=True))


def _standing(size: int) -> np.ndarray:
    return np.arange(1, size + 1, dtype=np.float32)


@dataclass(slots=True)
class TableBatch(VirtualBatch):
    """A mini-batch, with the positions of its row in each table's rows of the window."""

    local: tuple[int, ...] = ()


def cut_windows(
    batches: Iterator[VirtualBatch], element: Callable[[VirtualBatch], int], steps: int, tables: int
) -> Iterator[Window]:
    """Yield windows of so many mini-batches, none across the end of an epoch, with their rows."""
    group: list[VirtualBatch] = []
    for batch in batches:
        group.append(batch)
        if batch.last or len(group) == steps:
            yield _window_of(group, [element(batch) for batch in group], tables)
            group = []


def _window_of(group: Sequence[VirtualBatch], elements: Sequence[int], tables: int) -> Window:
    touched = [_rows_of(element) for element in elements]
    rows = [_ids(ids) for ids in zip(*touched, strict=True)][:tables]
    batches = [
        TableBatch(
            batch.index,
            batch.epoch,
            batch.last,
            batch.size,
            batch.checksum,
            tuple(int(np.searchsorted(ids, number)) for ids, number in zip(rows, own, strict=False)),
        )
        for batch, own in zip(group, touched, strict=True)
    ]
    return Window(batches, tuple(rows))


def _rows_of(element: int) -> tuple[int, ...]:
    """Return the row of each table that the mini-batch of an element touches."""
    return element, element % _SHARED, element + _FAR, element % VISITED


def _ids(numbers: Iterable[int]) -> Ids:
    return np.array(sorted(set(numbers)), np.int64)


def rows_of(center: Center) -> list[np.ndarray]:
    """Return the rows of the first three tables of a center that are ever touched."""
    far = np.arange(center.size) + _FAR
    return [table.gather(far)[:, None] if table.shape.partial else table.array for table in center.tables[:VISITS]]


def read_rows(driver: DriverClient, shapes: Sequence[TableShape], size: int) -> list[np.ndarray]:
    """Return the same rows as a driver reads them."""
    tables = list[np.ndarray]()
    for number, shape in enumerate(shapes[:VISITS]):
        if not shape.partial:
            tables.append(driver.table(number, shape))
            continue
        tables.append(np.zeros((size, 1), np.float32))
        for ids, rows in driver.touched(number, shape):
            tables[-1][ids - _FAR] = rows
    return tables


def check_whole_center(driver: DriverClient, shapes: Sequence[TableShape], size: int) -> None:
    """Raise a finding unless a driver's reads during commits have one clock."""
    whole = [shape for shape in shapes if not shape.partial]
    far = np.arange(size) + _FAR
    wants = ((NO_IDS,) * len(whole) + (far, np.arange(VISITED)))[: len(shapes)]
    reply, vector = driver.whole_center(whole, wants)
    stops = np.cumsum([size, *(shape.rows * shape.width for shape in whole)])
    tables = [
        vector[start:stop].reshape(-1, shape.width) for shape, start, stop in zip(whole, stops, stops[1:], strict=False)
    ]
    tables += [rows[:, None] for rows in reply.rows[len(whole) : VISITS]]
    check_tables(tables, vector[:size], f"as read at clock {reply.clock}")


def check_tables(tables: Sequence[np.ndarray], center: np.ndarray, where: str) -> None:
    """Raise a finding unless the rows correspond to the elements of ``center``."""
    if not tables:
        return
    own, shared, *far = tables
    totals = _totals(center)
    if not np.array_equal(own[:, 0], center):
        raise Finding("rows", f"the rows must be {center.tolist()}, {where}. Received: {own[:, 0].tolist()}")
    if not np.array_equal(own[:, 1], _standing(own.shape[0])):
        raise Finding("rows", f"the second number of a row must stay, {where}. Received: {own[:, 1].tolist()}")
    if not close(totals, shared[:, 0]):
        raise Finding("rows", f"the shared rows must be {totals.tolist()}, {where}. Received: {shared[:, 0].tolist()}")
    if far and not np.array_equal(far[0][:, 0], center):
        raise Finding("rows", f"far rows must be {center.tolist()}, {where}. Received: {far[0][:, 0].tolist()}")


def check_reply(reply: CenterReply, wants: Sequence[Ids]) -> None:
    """Raise a finding unless a reply has the requested rows at the clock of its center."""
    if not wants:
        return
    own = reply.rows[0].reshape(-1, 2)
    first, second = reply.center[wants[0]], wants[0] + 1
    if not (np.array_equal(own[:, 0], first) and np.array_equal(own[:, 1], second)):
        raise Finding(
            "rows",
            f"rows {wants[0].tolist()} must be {first.tolist()}, with clock {reply.clock}. Received: {own.tolist()}",
        )
    totals = _totals(reply.center)[wants[1]]
    if reply.rows[1].size != wants[1].size or not close(totals, reply.rows[1]):
        text = f"shared rows {wants[1].tolist()} must be {totals.tolist()}, with clock {reply.clock}"
        raise Finding("rows", f"{text}. Received: {reply.rows[1].tolist()}")
    if len(wants) > 2 and not np.array_equal(reply.rows[2], first):
        raise Finding("rows", f"far rows must be {first.tolist()}. Received: {reply.rows[2].tolist()}")


def _totals(center: np.ndarray) -> np.ndarray:
    """Return the expected values of the shared rows."""
    return np.array([center[row::_SHARED].sum() for row in range(_SHARED)])
