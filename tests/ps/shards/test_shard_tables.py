"""Tables that are divided among shards equal those of one server, to the bit: rows, replies, changes and removals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.patience import PATIENT, until
from support.present import present
from support.ps.divided_center import DividedCenter, commit_for
from support.ps.divided_server import DividedServer
from support.ps.running_server import KEY, Running, Turns
from support.ps.toy_tables import TableBatch, ToyTables, table_worker

from distkeras.ps.center.center import Center
from distkeras.ps.center.living_tables import LivingTable
from distkeras.ps.errors import ConfigurationError, NonFiniteError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import ALL_ROWS, PublishRows, RowsPublished
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.messages import Ack, Message
from distkeras.ps.protocol.shard_messages import AskRows, DividedInspect, DividedRemoval, Greet, PartStored, SendPart
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.owned_tables import OwnedTable
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.shards.spread_driver import SpreadDriverClient, WholeDriverClient
from distkeras.ps.shards.tickets import PartKey
from distkeras.ps.transport.client import Address, Client
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient

#: Every rule under which tables travel by rows.
RULES = [make(name) for name in center_rules() if make(name).traits.rows]
WHOLE = TableShape("whole", 7, 3, 5)
PARTIAL = TableShape("partial", 30, 2, 6, seed=1, scale=0.5)
LIVES: dict[str, dict[str, Any]] = {
    "admitted": {"admit": 2},
    "expiring": {"expire_commits": 4},
    "timed": {"expire_seconds": 5.0},
    "all": {"admit": 2, "expire_commits": 6, "expire_seconds": 9.0},
}
LIVING = [
    TableShape(name, 12, 2, 5, seed=number, scale=0.5, tracked=True, **lives)
    for number, (name, lives) in enumerate(LIVES.items())
]
SHAPES = (WHOLE, PARTIAL, *LIVING)
ACTIONS = ("work", "work", "work", "work", "skip", "die", "again", "lag", "wait", "remove", "changes", "read")


def contents(center: Center, number: int) -> dict[int, list[float]]:
    """Return the rows of a table that a driver is sent."""
    table = center.tables[number]
    ids, rows = table.present(slice(0, table.count))
    return dict(zip(range(len(rows)) if ids is None else ids.tolist(), rows.tolist(), strict=True))


def changes(center: Center, number: int) -> tuple[dict[int, list[float]], set[int]]:
    """Return the changed rows of a table, and the numbers of those that are gone."""
    table = center.tables[number]
    assert isinstance(table, LivingTable)
    ids, rows, gone = table.changed(slice(0, table.marks.count))
    return dict(zip(ids.tolist(), rows.tolist(), strict=True)), set(gone.tolist())


@dataclass
class Run:
    """A drawn run of workers, and of a driver that reads and removes rows."""

    center: DividedCenter
    attempts: dict[int, int] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    read_at: int = ALL_ROWS

    def act(self, action: str, worker: int, steps: int) -> None:
        center = self.center
        if action == "lag":
            center.deliver(most=steps)
        elif action == "wait":
            center.seconds += steps
        elif action == "remove":
            number = len(SHAPES) - 1 - worker
            center.remove(number, center.some_rows()[number])
        elif action == "changes":
            self._read_changes()
        elif action == "read":
            self._read()
        elif action in ("die", "again") or worker not in self.attempts:
            self._join(worker, new=action == "die" or worker not in self.attempts)
        else:
            self._commit(worker, steps, skip=action == "skip")

    def _join(self, worker: int, *, new: bool) -> None:
        self.attempts[worker] = self.attempts.get(worker, -1) + new
        self.connections[worker] = self.connections.get(worker, 0) + 1
        self.center.join(worker, self.attempts[worker], self.connections[worker])
        self._pull(worker)

    def _pull(self, worker: int) -> None:
        wants = self.center.some_rows()
        self.center.want(worker, self.attempts[worker], wants)
        self._ask_late(worker)
        self._receive(worker, wants)

    def _receive(self, worker: int, wants: Any) -> None:
        expected, received = self.center.release(worker, self.attempts[worker], wants)
        np.testing.assert_array_equal(received, expected.buffer.array)
        expected.buffer.drop()

    def _commit(self, worker: int, steps: int, *, skip: bool) -> None:
        center = self.center
        wants, overlapped = center.some_rows(), False
        bare = commit_for(center.one, worker, self.attempts[worker], steps, wants_center=True, overlapped=overlapped)
        commit, vectors = center.with_rows(bare, wants), center.payload()
        center.prepare(commit, vectors)
        self._ask_late(worker)
        if skip:
            center.skip(commit)
            self._pull(worker)
        elif center.commit(commit, vectors) and steps < 3:
            self._receive(worker, wants)
        else:  # it is refused, or the reply is lost: other rows are pulled while shards may not know the commit
            self._pull(worker)

    def _ask_late(self, worker: int) -> None:
        """Ask for rows over connections that have ended: the requests come late, and answer nothing."""
        attempt, connection = self.attempts[worker], self.connections[worker]
        for former in (PartKey(worker, attempt, connection - 1, 0), PartKey(worker, attempt - 1, connection, 0)):
            for number, shard in enumerate(self.center.shards):
                if self.center.rng.random() < 0.5:
                    shard.want(former, self.center.own(self.center.some_rows(), number))

    def _read_changes(self) -> None:
        center = self.center
        known = center.begin_changes(self.read_at)
        assert known == (self.read_at != ALL_ROWS)
        center.deliver()
        for number, shape in enumerate(SHAPES):
            if shape.living and known:
                pieces = [changes(shard.center, number) for shard in center.shards]
                rows, gone = changes(center.one, number)
                assert merged(changed for changed, _ in pieces) == rows
                assert set().union(*(lost for _, lost in pieces)) == gone
        self.read_at = center.one.clock

    def _read(self) -> None:
        center = self.center
        wants = tuple(ids if shape.partial else ids[:0] for shape, ids in zip(SHAPES, center.some_rows(), strict=True))
        after = int(center.rng.integers(-1, center.one.clock + 1))
        np.testing.assert_array_equal(center.read(after, wants), center.one.current.array)

    def assert_equal(self) -> None:
        self.center.assert_equal()
        for number in range(len(SHAPES)):
            pieces = [contents(shard.center, number) for shard in self.center.shards]
            assert merged(pieces) == contents(self.center.one, number)


def merged(pieces: Iterable[dict[int, list[float]]]) -> dict[int, list[float]]:
    """Return the rows of all pieces, which have none in common."""
    result: dict[int, list[float]] = {}
    for piece in pieces:
        assert not result.keys() & piece.keys()
        result |= piece
    return result


drawn_actions = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(1, 3)), min_size=5, max_size=60
)


@pytest.mark.parametrize("rule", [*RULES, make("ringmaster", threshold=1, patience=None)], ids=str)
@examples(15)
@given(
    actions=drawn_actions,
    workers=st.integers(1, 4),
    shards=st.integers(1, 5),
    size=st.sampled_from([0, 1, 30]),
    seed=st.integers(0, 1 << 30),
)
def test_divided_tables_equal_those_of_one_server(
    rule: Rule, actions: list[tuple[str, int, int]], workers: int, shards: int, size: int, seed: int
) -> None:
    rate = 0.05 if rule.traits.gradient else None
    center = DividedCenter(rule, size, workers, shards, seed, rate, tables=SHAPES)
    run = Run(center)
    for action, worker, steps in actions:
        run.act(action, worker if action == "remove" else worker % workers, steps)
    run.assert_equal()


#: The tables of a job with real servers; the first one is kept whole.
SERVED = (
    TableShape("whole", 40, 3, 8),
    TableShape("partial", 1 << 40, 2, 8, seed=3, scale=0.5),
    TableShape("living", 50, 2, 8, seed=4, scale=0.5, admit=2, expire_commits=6, tracked=True),
)
#: Which worker commits next.
ORDER = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1]


def some_model(dense: int = 5) -> ToyTables:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(40, 3)), np.empty((0, 2)), np.empty((0, 2))
    return ToyTables(rng.normal(size=dense).astype(np.float32), SERVED, rows)


def some_batches(model: ToyTables, count: int, seed: int) -> list[TableBatch]:
    rng = np.random.default_rng(seed)

    def batch(index: int) -> TableBatch:
        ids = tuple(rng.integers(0, min(shape.rows, 30), 4) for shape in model.shapes)
        return TableBatch(0, index, index == count - 1, ids, rng.normal(size=4))

    return [batch(index) for index in range(count)]


def turns(server: Running | DividedServer, model: ToyTables, worker: int, data: list[TableBatch]) -> Turns:
    connect = SpreadWorkerClient if isinstance(server, DividedServer) else WorkerClient
    connected = table_worker(
        server.address, server.rule, model, data, worker=worker, connect=connect, deadlines=PATIENT
    )
    return Turns(connected)


def started(model: ToyTables, shards: int, rule: Rule, **options: Any) -> Running | DividedServer:
    """Return one server, if ``shards`` is 0, or a divided one."""
    options |= {"tables": model, "deadlines": PATIENT}
    return (
        DividedServer(rule, model.dense, shards=shards, **options)
        if shards
        else Running(rule, start=model.dense, **options)
    )


def rows_of(blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[int, list[float]]:
    return merged(dict(zip(ids.tolist(), rows.tolist(), strict=True)) for ids, rows in blocks)


def read_tables(driver: DriverClient) -> list[Any]:
    """Return all rows of all tables, as the driver reads them."""
    return [driver.table(0, SERVED[0]).tolist(), *(rows_of(driver.touched(n, SERVED[n])) for n in (1, 2))]


def read_changes(driver: DriverClient) -> tuple[dict[int, list[float]], set[int]]:
    blocks = [*driver.changes(2, SERVED[2])]
    return rows_of((ids, rows) for ids, rows, _ in blocks), {row for *_, gone in blocks for row in gone.tolist()}


class Carried(DriverClient):
    """The driver of one server, whose requests are answered as in a task that carries them to a divided one."""

    def exchange(self, message: Message, timeout: float) -> Message:
        with contextlib.closing(WholeDriverClient(self.address, self.deadlines)) as client:
            return client.exchange(message, timeout)


def observed(server: Running | DividedServer, model: ToyTables) -> list[Any]:
    """Train two workers in a fixed order, while the driver reads and removes rows; return everything that it reads."""
    driver, seen = server.driver, list[Any]()
    workers = [turns(server, model, worker, some_batches(model, 10, worker)) for worker in range(2)]
    clock = driver.begin_changes(ALL_ROWS).clock
    for step, worker in enumerate(ORDER):
        if not workers[worker].over:
            seen.append([rows.tolist() for rows in workers[worker].turn().rows])
        if step % 3 == 2:
            seen.append(read_tables(driver))
            driver.remove_rows(2, np.arange(0, 50, 3))
            begun = driver.begin_changes(clock)
            seen += [begun.known, read_changes(driver), read_tables(driver)]
            clock = begun.clock
    wants = np.arange(0), np.arange(0, 99, 7), np.arange(50)
    for reply in (driver.center(clock, wants), driver.center(), driver.whole_center(SERVED[:1], wants)[0]):
        seen += [[ids.tolist() for ids in reply.moved], [rows.tolist() for rows in reply.rows], reply.center.tolist()]
    for left in workers:
        while not left.over:
            left.turn()
    return [*seen, driver.whole_center(SERVED[:1])[1].tolist(), *read_tables(driver)]


@pytest.mark.parametrize(
    ("rule", "dense"),
    [
        pytest.param(make("downpour", window=2), 5, marks=pytest.mark.slow),
        pytest.param(make("asgd"), 5, marks=pytest.mark.slow),
        (make("downpour", window=1), 0),
        (make("ringmaster", window=2, threshold=1, patience=None), 5),
    ],
    ids=str,
)
def test_a_job_with_shards_reads_what_it_reads_from_one_server(rule: Rule, dense: int) -> None:
    model = some_model(dense)
    with started(model, 0, rule) as one:
        expected = observed(one, model)
    for driver in (SpreadDriverClient, Carried):
        with started(model, 3, rule) as many:
            published, many.driver = many.driver, driver(many.address, PATIENT)
            published.close()
            assert observed(many, model) == expected


def test_the_status_has_the_sum_of_the_counts_of_all_shards() -> None:
    model = some_model()
    with started(model, 3, make("downpour", window=1)) as server:
        assert isinstance(server, DividedServer)
        worker = turns(server, model, 0, some_batches(model, 10, 0))
        while not worker.over:
            worker.turn()
        server.driver.remove_rows(2, np.arange(50))
        server.driver.table(0, SERVED[0])  # all shards have removed the rows
        counts = np.sum([present(shard.dispatcher.center).living[0].counts for shard in server.shards], axis=0)
        assert (counts[1:] > 0).all()
        until(lambda: server.driver.ping().tables.tolist() == [counts.tolist()])


def test_touched_rows_are_published_to_their_shards() -> None:
    model, read = some_model(), list[Any]()
    for shards in (0, 3):
        with started(model, shards, make("downpour"), publish=False) as server:
            rng = np.random.default_rng(5)
            for number, (first, second) in ((1, (1 << 39, 1 << 40)), (2, (25, 50))):
                blocks = [np.unique(rng.integers(*span, 9)) for span in ((0, first), (first, second))]
                rows = [rng.normal(size=(len(ids), 2)).astype(np.float32) for ids in blocks]
                server.driver.publish_touched(number, SERVED[number], zip(blocks, rows, strict=True))
            server.publish()
            worker = turns(server, model, 0, some_batches(model, 4, 0))
            while not worker.over:
                worker.turn()
            read.append(read_tables(server.driver))
    assert read[0] == read[1]


def test_an_interrupted_publication_of_rows_starts_over() -> None:
    model = some_model()
    with started(model, 2, make("downpour"), publish=False) as server:
        with pytest.raises(RemoteProtocolError, match=r"rows of table 'whole' must be published before the center"):
            server.driver.publish(model.dense)
        server.driver.publish_rows([(SERVED[0], model.rows[0] + 1)])
        server.publish()
        np.testing.assert_array_equal(server.driver.table(0, SERVED[0]), model.rows[0].astype(np.float32))


def test_a_nan_in_a_row_refuses_the_commit_at_all_shards() -> None:
    model = some_model()
    with started(model, 3, make("downpour", window=1)) as server:
        worker = turns(server, model, 0, some_batches(model, 4, 0))
        before = read_tables(server.driver)
        moved = [rows.copy() for rows in worker.record.moved]
        moved[0][-1] = np.nan
        row = worker.record.touched[0][-1]
        with pytest.raises(NonFiniteError, match=f"nan in column 2 of row {row} of table 'whole'"):
            worker.client.commit(replace(worker.record, moved=tuple(moved)))
        worker.client.close()
        assert read_tables(server.driver) == before


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda driver: driver.remove_rows(1, np.arange(3)), ConfigurationError, "whose touches are counted"),
        (lambda driver: driver.remove_rows(3, np.arange(3)), RemoteProtocolError, "one of 3 tables"),
        (lambda driver: driver.remove_rows(2, np.array([1, 50])), RemoteProtocolError, "`ids` must be rows of table"),
        (lambda driver: driver.center(0, (np.arange(3),) * 3), RemoteProtocolError, "touched rows alone"),
        (lambda driver: driver.center(wants=(np.arange(0),)), RemoteProtocolError, "for each of 3 tables"),
    ],
)
def test_invalid_requests_of_the_driver_are_refused(ask: Any, error: type[Exception], text: str) -> None:
    """The error is raised before a ticket is issued, so the shards go on."""
    model = some_model()
    with started(model, 3, make("downpour", window=1)) as server:
        with pytest.raises(error, match=text):
            ask(server.driver)
        worker = turns(server, model, 0, some_batches(model, 2, 0))
        while not worker.over:
            worker.turn()
        assert server.driver.center().clock == 2


@pytest.mark.parametrize("kind", ["part", "ask", "read", "remove", "publish"])
def test_a_shard_refuses_the_rows_of_another_one(kind: str) -> None:
    cut, model, no_ids = Cut(0, 2), some_model(), np.empty(0, np.int64)
    strange, none = cut.own(50, 1), (no_ids, no_ids)
    message: dict[str, Message] = {
        "part": SendPart(
            1, 0, 0, 0, (model.dense[:0],), touched=(no_ids, *none), moved=(NO_FLOATS,) * 3, wants=(strange[:1], *none)
        ),
        "ask": AskRows((strange[:1], *none)),
        "read": DividedInspect(wants=(no_ids, strange, no_ids), request=1),
        "remove": DividedRemoval(2, strange, request=1),
        "publish": PublishRows(1, 0, np.zeros(2 * len(strange), np.float32), strange),
    }
    with DividedServer(make("downpour"), model.dense, shards=2, tables=model) as server:
        host, port = server.shards[0].address
        with contextlib.closing(Client(Address(host, port, KEY), PATIENT)) as client:
            client.request(Greet(0, 0, 0, 1, 1), Ack)
            with pytest.raises(RemoteProtocolError, match="the rows that shard 0 of 2 receives must be its own"):
                client.request(message[kind], (Ack, RowsPublished))


def test_rows_of_the_size_of_a_slice_are_not_overwritten_by_other_parts() -> None:
    """Vectors are received into pooled memory, which is reused after the reply; rows are used later."""
    shape = TableShape("whole", 8, 2, 8)
    model = ToyTables(np.zeros(16, np.float32), (shape,), (np.zeros((8, 2)),))
    with DividedServer(make("downpour"), model.dense, shards=1, workers=1, tables=model) as server:
        (shard,) = server.shards
        with contextlib.closing(Client(Address(*shard.address, KEY), PATIENT)) as client:
            client.request(Greet(0, 0, 0, 1, 1), Ack)
            for number in (1, 2):
                values = np.full(16, number, np.float32)
                part = SendPart(
                    number, 0, 0, 0, (values,), touched=(np.arange(8),), moved=(values,), wants=(np.arange(0),)
                )
                client.request(part, PartStored)
        parts = present(shard.dispatcher)._shard._parts  # type: ignore[attr-defined]  # noqa: SLF001 - what it holds
        assert [part.moved[0].tolist() for part in parts.values()] == [[1.0] * 16, [2.0] * 16]


def test_a_shard_has_no_more_than_its_own_rows() -> None:
    cut = Cut(0, 4)
    tables = [OwnedTable(TableShape("wide", 1000, 8, 10), cut.own(1000, shard)) for shard in range(4)]
    assert sum(table.array.shape[0] for table in tables) == 1000
    assert max(table.array.shape[0] for table in tables) < 300
