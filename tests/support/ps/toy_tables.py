"""A model of a dense vector and tables, trained by rows or as one vector with bitwise the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.tables import Table
from distkeras.ps.protocol.loop import CommitRecord, Compute, Loop, PullRequest, Reply, Request
from distkeras.ps.protocol.messages import Commit, Welcome
from distkeras.ps.protocol.tables import Ids, TableShape, spans
from distkeras.ps.rules import Rule
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import work
from distkeras.ps.worker.tables import TableWindows, Window
from support.ps.toy_model import Connected, ToyReplica


@dataclass(frozen=True)
class TableBatch:
    """A mini-batch: the row of each table that each sample looks up, and one number for each sample."""

    epoch: int
    index: int
    last: bool
    #: int64; an array for each table with one entry for each sample.
    ids: tuple[np.ndarray, ...]
    values: np.ndarray
    checksum: int = 0

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def value(self) -> TableBatch:
        """Return what a `ToyReplica` passes to its gradient function."""
        return self


@dataclass(frozen=True)
class ToyTables:
    """A model's initial parameters: a dense vector, and tables with their rows."""

    dense: np.ndarray
    shapes: tuple[TableShape, ...]
    rows: tuple[np.ndarray, ...]

    def vector(self) -> np.ndarray:
        """Return the dense vector and all tables as one float32 vector."""
        return np.concatenate([self.dense, *(rows.reshape(-1) for rows in self.rows)]).astype(np.float32)

    def whole(self) -> tuple[TableShape, ...]:
        """Return the shapes of small tables that contain all rows."""
        return tuple(replace(shape, most=shape.rows) for shape in self.shapes)

    def whole_rows(self) -> list[tuple[TableShape, np.ndarray]]:
        """Return the tables whose rows are published, and these rows."""
        return [(shape, rows) for shape, rows in zip(self.shapes, self.rows, strict=True) if not shape.partial]

    def tables(self) -> list[Table]:
        return [Table(shape, rows.astype(np.float32)) for shape, rows in zip(self.shapes, self.rows, strict=True)]


def gradient_of(dense: int, shapes: Sequence[TableShape]) -> Callable[[np.ndarray, TableBatch], np.ndarray]:
    """Return the gradient on one flat vector with these small tables; each operation uses the numbers of one sample."""
    places = spans(dense, shapes)

    def gradient(theta: np.ndarray, batch: TableBatch) -> np.ndarray:
        result = np.zeros_like(theta)
        level = theta[:dense].sum() if dense else np.float32(0.5)
        for place, ids in zip(places, batch.ids, strict=True):
            table = theta[place.start : place.stop].reshape(-1, place.width)
            slope = result[place.start : place.stop].reshape(-1, place.width)
            for row, value in zip(ids, batch.values, strict=True):
                error = np.clip(table[row] * np.float32(value) - level, -1, 1)
                slope[row] += error
                result[:dense] += error.sum() * np.clip(theta[:dense], -1, 1)
        return result

    return gradient


def cut_windows(batches: Iterator[TableBatch], window: int) -> Iterator[Window]:
    """Cut mini-batches into windows with local ids, in order of first use; no window crosses the end of an epoch."""
    group: list[TableBatch] = []
    for batch in batches:
        group.append(batch)
        if batch.last or len(group) == window:
            yield _window_of(group)
            group = []


def _window_of(group: Sequence[TableBatch]) -> Window:
    rows: list[Ids] = []
    local: list[list[np.ndarray]] = [[] for _ in group]
    for number in range(len(group[0].ids)):
        unique, inverse = np.unique(np.concatenate([batch.ids[number] for batch in group]), return_inverse=True)
        rows.append(unique)
        inverse = len(unique) - 1 - inverse
        cuts = np.cumsum([batch.size for batch in group])[:-1]
        for place, ids in zip(local, np.split(inverse.reshape(-1), cuts), strict=True):
            place.append(ids)
    return Window(
        [replace(batch, ids=tuple(ids)) for batch, ids in zip(group, local, strict=True)],
        tuple(rows),
        tuple(np.arange(len(ids))[::-1] for ids in rows),
    )


def continued(batches: Sequence[TableBatch], welcome: Welcome) -> Iterator[TableBatch]:
    """Return the mini-batches from the position of ``welcome`` on."""
    return iter([batch for batch in batches if (batch.epoch, batch.index) >= (welcome.epoch, welcome.batch)])


def table_worker(  # noqa: PLR0913 - keywords, of which a test gives few
    address: Address,
    rule: Rule,
    model: ToyTables,
    batches: Sequence[TableBatch],
    *,
    worker: int = 0,
    attempt: int = 0,
    eta: float = 0.1,
    gradient: Callable[[np.ndarray, TableBatch], np.ndarray] | None = None,
    connect: type[WorkerClient] = WorkerClient,
    **options: Any,
) -> Connected:
    """Return a client made by ``connect``, its welcome, and a function that begins with a replica, for `run_worker`."""
    size = model.dense.size
    client = connect(address, worker=worker, attempt=attempt, size=size, tables=model.shapes, **options)

    def begin(welcome: Welcome) -> Loop:
        cut = cut_windows(continued(batches, welcome), rule.window)  # type: ignore[arg-type]  # the window is a number
        windows = TableWindows(model.shapes, size, cut, outgoing=lambda: client.payload(1)[0])
        replica = ToyReplica(windows.size, eta, gradient or gradient_of(size, model.shapes), np.float32)
        return work(rule, replica, iter(windows), windows.payload, tables=windows)

    return client, client.join(), begin


class TableJob:
    """Workers and a center in this process that exchange rows, or one dense vector with the same numbers."""

    def __init__(
        self, rule: Rule, model: ToyTables, data: Sequence[Sequence[TableBatch]], *, by_rows: bool, eta: float = 0.1
    ) -> None:
        self.rule, self.model, self.by_rows = rule, model, by_rows
        self.center = Center(
            rule,
            model.dense.astype(np.float32) if by_rows else model.vector(),
            workers=len(data),
            learning_rate=eta if rule.traits.gradient else None,
            check_finite=True,
            now=lambda: 0.0,
            tables=model.tables() if by_rows else (),
        )
        self.refused = 0
        self._loops: dict[int, Loop] = {}
        self.pending: dict[int, Request] = {}
        for worker, batches in enumerate(data):
            self.center.join(worker, 0)
            self._loops[worker] = loop = self._loop(batches, eta)
            self._advance(worker, self._pull(worker, next(loop)))

    def _loop(self, batches: Sequence[TableBatch], eta: float) -> Loop:
        size, source = self.model.dense.size, iter(batches)
        if not self.by_rows:
            whole = self.model.vector()
            replica = ToyReplica(whole.size, eta, gradient_of(size, self.model.whole()), np.float32)
            return work(self.rule, replica, source, lambda: (np.empty_like(whole),), now=None)
        assert isinstance(self.rule.window, int)
        windows = TableWindows(self.model.shapes, size, cut_windows(source, self.rule.window))
        replica = ToyReplica(windows.size, eta, gradient_of(size, self.model.shapes), np.float32)
        return work(self.rule, replica, iter(windows), windows.payload, tables=windows, now=None)

    def _pull(self, worker: int, request: Request) -> Reply:
        assert isinstance(request, (PullRequest, CommitRecord))
        released = self.center.release(worker, 0, request.wants)
        released.buffer.hold()
        return Reply(released.learning_rate, released.buffer.array, rows=released.rows)

    def _advance(self, worker: int, reply: Reply) -> None:
        """Run a worker up to its next commit or its end."""
        try:
            request = self._loops[worker].send(reply)
            while isinstance(request, Compute):
                request = self._loops[worker].send(None)
            self.pending[worker] = request
        except StopIteration:
            self.pending.pop(worker, None)
            self.center.leave(worker, 0)

    def commit(self, worker: int) -> None:
        """Complete the next exchange of ``worker``."""
        record = self.pending[worker]
        assert isinstance(record, CommitRecord)
        sequence = self.center.leases[worker].sequence + 1
        commit = Commit.of(record, worker=worker, attempt=0, incarnation=1, sequence=sequence)
        buffers = [self.center.pool.take() for _ in record.parts]
        for buffer, part in zip(buffers, record.parts, strict=True):
            buffer.array[...] = part
        if self.center.commit(commit, buffers):
            self._advance(worker, self._pull(worker, record))
        else:
            self.refused += 1
            self._advance(worker, self._pull(worker, PullRequest(record.touched))._replace(refused=True))

    def result(self) -> np.ndarray:
        """Return the dense vector and all tables as one vector."""
        return np.concatenate([self.center.current.array, *(table.array.reshape(-1) for table in self.center.tables)])
