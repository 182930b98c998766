"""One center, and the same center divided among shards, which are given the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.driver_values import RATE
from distkeras.ps.center.living_tables import make_table
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.center.tables import Table
from distkeras.ps.protocol.driver_messages import Inspect, SetValues
from distkeras.ps.protocol.loop import NO_FLOATS, NO_ROWS
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.protocol.shard_messages import DividedInspect, DividedRemoval
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.rules import Rule
from distkeras.ps.server.table_requests import rows_to_inspect
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.owned_tables import make_owned_table
from distkeras.ps.shards.sequencer import ELEMENTS, SequencingCenter
from distkeras.ps.shards.shard import CommitPart, Shard
from distkeras.ps.shards.spread_client import without_payload
from distkeras.ps.shards.tickets import PartKey, rows_of, tickets_of
from support.present import present

#: Elements of a block in these tests.
SMALL_BLOCK = 8


class DividedCenter:
    """A sequencer and its shards, without threads; `one` is the center that they must equal to the bit."""

    def __init__(
        self,
        rule: Rule,
        size: int,
        workers: int,
        shards: int,
        seed: int,
        rate: float | None = None,
        moving: int = 0,
        tables: Sequence[TableShape] = (),
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rule, self.workers, self.size = rule, workers, size
        vector = self.rng.normal(size=size).astype(np.float32)
        self.cut = Cut(size, shards, SMALL_BLOCK)
        self.seconds = 1000.0
        options: dict[str, Any] = {"workers": workers, "learning_rate": rate, "check_finite": True}
        statistics = self.rng.normal(size=moving).astype(np.float32)
        whole = options | {"now": lambda: self.seconds, "monotonic": lambda: self.seconds, "block": SMALL_BLOCK}
        rows = [self.rng.normal(size=(shape.rows, shape.width)).astype(np.float32) for shape in tables]
        self.shapes = tuple(tables)
        self.one = Center(rule, vector, moving_statistics=statistics, tables=self._tables(rows), **whole)
        self.sequencer = SequencingCenter(
            rule, vector, shards=shards, shapes=tables, moving_statistics=statistics, **whole
        )
        self.shards = [
            Shard(
                lambda now, number=number: Center(  # type: ignore[misc]  # mypy does not infer a default
                    rule,
                    vector[self.cut.slices[number]],
                    block=SMALL_BLOCK,
                    now=now,
                    tables=self._tables(rows, number),
                    **options,
                ),
                lambda: scheduler_for(rule, workers),
            )
            for number in range(shards)
        ]

    def _tables(self, rows: Sequence[np.ndarray], shard: int | None = None) -> list[Table]:
        """Return the tables of ``shard``, or of one server; those that are kept whole have these ``rows``."""
        tables = []
        for shape, array in zip(self.shapes, rows, strict=True):
            table = make_table(shape) if shard is None else make_owned_table(shape, self.cut, shard)
            if not shape.partial:
                table.array[...] = array if shard is None else array[self.cut.own(shape.rows, shard)]
            tables.append(table)
        return tables

    def some_rows(self) -> tuple[Ids, ...]:
        """Return rows of each table that a window may touch, sometimes none."""
        draws = [(shape, self.rng.integers(shape.most + 1)) for shape in self.shapes]
        return tuple(np.sort(self.rng.choice(shape.rows, count, replace=False)) for shape, count in draws)

    def with_rows(self, commit: Commit, wants: tuple[Ids, ...]) -> Commit:
        """Return ``commit`` with drawn rows, and with those that its reply must contain."""
        touched = self.some_rows()
        sizes = [ids.size * shape.width for ids, shape in zip(touched, self.shapes, strict=True)]
        moved = tuple(self.rng.normal(size=size).astype(np.float32) for size in sizes)
        return replace(commit, touched=touched, moved=moved, wants=wants)

    def own(self, several: Sequence[Ids], shard: int) -> tuple[Ids, ...]:
        """Return those of the rows of each table that belong to ``shard``."""
        return tuple(ids[self.cut.rows(ids, shard)] for ids in several)

    def join(self, worker: int, attempt: int, connection: int) -> None:
        for center in (self.one, self.sequencer):
            if attempt != getattr(center.leases.get(worker), "attempt", attempt):
                center.leases.disconnected(worker, center.leases[worker].attempt)
            present(center.join(worker, attempt))
        self.sequencer.connections[worker] = connection

    def payload(self) -> list[np.ndarray]:
        return [self.rng.normal(size=self.size).astype(np.float32) for _ in range(self.rule.traits.parts)]

    def prepare(self, commit: Commit, vectors: list[np.ndarray]) -> None:
        """Send the parts of ``commit`` to the shards, in an arbitrary order."""
        key = PartKey(commit.worker, commit.attempt, self.sequencer.connections[commit.worker], commit.sequence)
        for number in self.rng.permutation(len(self.shards)):
            shard = self.shards[number]
            parts = self.cut.parts(vectors, int(number))
            moved = tuple(
                rows.reshape(-1, shape.width)[self.cut.rows(ids, int(number))].reshape(-1)
                for shape, ids, rows in zip(self.shapes, commit.touched, commit.moved, strict=True)
            )
            touched, wants = self.own(commit.touched, int(number)), self.own(commit.wants, int(number))
            buffers = [shard.center.pool.adopt(part.copy()) for part in parts]
            assert shard.put(CommitPart(key, buffers, touched, moved, wants))

    def commit(self, commit: Commit, vectors: list[np.ndarray]) -> bool:
        zeros = [np.zeros(ELEMENTS, np.float32) for _ in vectors]
        whole, bare = replace(commit, moved=tuple(map(np.copy, commit.moved))), without_payload(commit)
        results = [
            center.commit(message, [center.pool.adopt(array.copy()) for array in arrays])
            for center, message, arrays in ((self.one, whole, vectors), (self.sequencer, bare, zeros))
        ]
        assert results[0] == results[1]
        return results[0]

    def skip(self, commit: Commit) -> None:
        assert self.one.skip(commit)
        assert self.sequencer.skip(without_payload(commit))

    def set_rate(self, rate: float, number: int) -> None:
        for center in (self.one, self.sequencer):
            center.values.set(SetValues(np.array([[RATE, rate]]), number), center.clock)

    def deliver(self, *, most: int | None = None) -> None:
        """Let each shard apply its next tickets, at most ``most`` of them, after a passage over the wire."""
        for number, shard in enumerate(self.shards):
            tickets = self.sequencer.log_of_tickets.after(number, shard.applied)
            for ticket in tickets_of(rows_of(tickets))[:most]:
                shard.apply(ticket)

    def want(self, worker: int, attempt: int, wants: tuple[Ids, ...]) -> None:
        """Ask the shards for the rows of the worker's next pull."""
        for number, shard in enumerate(self.shards):
            key = PartKey(worker, attempt, self.sequencer.connections[worker], 0)
            shard.want(key, self.own(wants, number))

    def release(self, worker: int, attempt: int, wants: tuple[Ids, ...] = ()) -> tuple[Released, np.ndarray]:
        """Return what the worker is sent by one server, and by the shards, with the rows that it has asked for."""
        expected, decided = self.one.release(worker, attempt, wants), self.sequencer.release(worker, attempt)
        for name in ("clock", "sequence", "learning_rate", "window", "end"):
            assert getattr(expected, name) == getattr(decided, name)
        np.testing.assert_array_equal(expected.moving_statistics, decided.moving_statistics)
        self.deliver()
        pieces = [present(shard.fetch(worker, decided.ticket)) for shard in self.shards]
        self._assert_rows_are_equal(pieces, wants, expected.rows)
        return expected, self._joined(pieces)

    def read(self, moved_after: int = -1, wants: tuple[Ids, ...] = ()) -> np.ndarray:
        """Return the center; compare the rows that the driver reads with it: the moved ones, and ``wants``."""
        request = int(self.rng.integers(1, 1 << 48)) if moved_after >= 0 or wants else 0
        for number, shard in enumerate(self.shards if request else ()):
            shard.ask(DividedInspect(moved_after, self.own(wants, number), request=request))
        expected = self.one.inspect(rows_to_inspect(self.one.tables, Inspect(moved_after, wants)))
        ticket = self.sequencer.inspect(request=request).ticket
        self.deliver()
        pieces = [present(shard.fetch(-1, ticket)) for shard in self.shards]
        self._assert_rows_are_equal(pieces, expected.moved, expected.rows)
        for piece in pieces:
            assert len(piece.moved) == len(expected.moved)
        expected.buffer.drop()
        return self._joined(pieces)

    def _assert_rows_are_equal(
        self, pieces: Sequence[Released], several: Sequence[Ids], expected: Sequence[np.ndarray]
    ) -> None:
        """Check that each shard sends its rows among those of one server."""
        for shard, piece in enumerate(pieces):
            assert len(piece.rows) == len(several) == len(expected)
            for shape, ids, rows, received in zip(self.shapes, several, expected, piece.rows, strict=False):
                own = rows.reshape(-1, shape.width)[self.cut.rows(ids, shard)]
                np.testing.assert_array_equal(received.reshape(-1, shape.width), own)

    def remove(self, table: int, ids: Ids) -> None:
        """Remove rows of a table whose touches are counted."""
        request = int(self.rng.integers(1, 1 << 48))
        for number, shard in enumerate(self.shards):
            shard.ask(DividedRemoval(table, *self.own([ids], number), request=request))
        self.one.remove_rows(table, ids)
        self.sequencer.remove_requested(request)

    def begin_changes(self, since: int) -> bool:
        known = self.one.begin_changes(since)
        assert self.sequencer.begin_changes(since) == known
        return known

    @staticmethod
    def _joined(pieces: Sequence[Released]) -> np.ndarray:
        arrays = [piece.buffer.array.copy() for piece in pieces]
        for piece in pieces:
            piece.buffer.drop()
        return np.concatenate(arrays)

    def assert_equal(self) -> None:
        """Compare the center, the vectors of the rule and of the workers, and everything that is decided."""
        np.testing.assert_array_equal(self.read(), self.one.current.array)
        for number, vector in enumerate(self.one.model):
            np.testing.assert_array_equal(np.concatenate([s.center.model[number] for s in self.shards]), vector)
        for worker, lease in self.one.leases.items():
            for number, vector in enumerate(lease.vectors):
                pieces = [shard.center.leases[worker].vectors[number] for shard in self.shards]
                np.testing.assert_array_equal(np.concatenate(pieces), vector)
        for center in (self.sequencer, *(shard.center for shard in self.shards)):
            assert center.counters == self.one.counters
            assert center.clock == self.one.clock
            assert center.scheduler.progress() == self.one.scheduler.progress()
        np.testing.assert_array_equal(self.sequencer.moving_statistics, self.one.moving_statistics)
        self._assert_logs_are_equal()

    def _assert_logs_are_equal(self) -> None:
        ours, expected = self.sequencer.log.commits(), self.one.log.commits()
        names = [name for name in expected.dtype.names or () if name not in ("bytes", "gap")]
        names.remove("scale")
        of_rows = not self.size and self.one.living  # only the shards know which rows are not admitted
        if not (self.rule.scales_elements or of_rows):  # a mean over another number of equal factors
            np.testing.assert_allclose(ours["scale"], expected["scale"], rtol=1e-15 * self.size + 1e-15)
        for name in names:
            np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)


def commit_for(
    center: Center, worker: int, attempt: int, steps: int, *, wants_center: bool, overlapped: bool
) -> Commit:
    """Return the next commit of a partition, as a sequencer receives it."""
    lease = center.leases[worker]
    return Commit(
        epoch=lease.epoch,
        first=lease.batch,
        last=lease.batch + steps - 1,
        epoch_end=False,
        wants_center=wants_center,
        learning_rate=0.05,
        scale=1.0,
        parts=tuple(np.zeros(ELEMENTS, np.float32) for _ in range(center.traits.parts)),  # as to a sequencer
        moving_statistics=NO_FLOATS,
        history=NO_ROWS,
        overlapped=overlapped,
        worker=worker,
        attempt=attempt,
        incarnation=center.incarnation,
        sequence=lease.sequence + 1,
    )
