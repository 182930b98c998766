"""Tables whose rows travel, over real sockets."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.present import present
from support.ps.frames import some_commit
from support.ps.running_server import Running, Turns, socket_of
from support.ps.toy_tables import TableBatch, TableJob, ToyTables, table_worker

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.center.living_tables import make_table
from distkeras.ps.errors import JobStoppedError, NonFiniteError, RemoteProtocolError, ServerLostError, ShapeError
from distkeras.ps.protocol.driver_messages import Inspect, InspectRows, PublishRows, RowsPublished, TableRows
from distkeras.ps.protocol.framing import _CODES, encode
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.messages import Ack, CenterReply, Commit, Pull
from distkeras.ps.protocol.tables import TableShape, block_rows
from distkeras.ps.rules import Rule, make
from distkeras.ps.server.table_requests import TableRequests, rows_to_inspect
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker

USERS, ITEMS = TableShape("users", 50, 3, 8), TableShape("items", 9, 2, 8)


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def some_model(*shapes: TableShape, dense: int = 4) -> ToyTables:
    rng, shapes = np.random.default_rng(1), shapes or (USERS, ITEMS)
    rows = tuple(rng.normal(size=(shape.rows, shape.width)).astype(np.float32) for shape in shapes)
    return ToyTables(rng.normal(size=dense).astype(np.float32), shapes, rows)


def some_batches(model: ToyTables, count: int, *, epochs: int = 1, seed: int = 1) -> list[TableBatch]:
    rng = np.random.default_rng(seed)
    found = []
    for epoch in range(epochs):
        for index in range(count):
            rows = tuple(rng.integers(0, shape.rows, 4) for shape in model.shapes)
            found.append(TableBatch(epoch, index, index == count - 1, rows, rng.normal(size=4)))
    return found


def started(rule: Rule, model: ToyTables, workers: int = 1, **options: Any) -> Running:
    return Running(rule, workers=workers, start=model.dense, tables=model, deadlines=PATIENT, **options)


def result_of(running: Running, model: ToyTables) -> np.ndarray:
    """Return the dense vector and all tables as one vector, as the driver reads them."""
    tables = [running.driver.table(number, shape).reshape(-1) for number, shape in enumerate(model.shapes)]
    return np.concatenate([running.driver.center().center, *tables])


def dense_result(rule: Rule, model: ToyTables, data: list[list[TableBatch]]) -> np.ndarray:
    """Return the result of the dense exchange, one worker after the other."""
    job = TableJob(rule, model, data, by_rows=False)
    while job.pending:
        job.commit(min(job.pending))
    return job.result()


def turns(running: Running, model: ToyTables, data: list[TableBatch], worker: int = 0) -> Turns:
    return Turns(table_worker(running.address, running.rule, model, data, worker=worker, deadlines=PATIENT))


def train(running: Running, model: ToyTables, data: list[TableBatch], **options: Any) -> None:
    """Train a worker to the end of its data."""
    client, welcome, begin = table_worker(running.address, running.rule, model, data, deadlines=PATIENT, **options)
    run_worker(client, welcome, begin)
    client.close()


@pytest.mark.parametrize("dense", [0, 4])
@pytest.mark.parametrize("name", ["downpour", "agn", "asgd"])
@pytest.mark.parametrize("shared", [False, hasattr(os, "memfd_create")])
def test_a_job_by_rows_gives_the_result_of_the_dense_job(name: str, dense: int, shared: bool) -> None:
    rule, model = make(name) if name == "asgd" else make(name, window=2), some_model(dense=dense)
    data = some_batches(model, 7, epochs=2)
    with started(rule, model) as running:
        options: dict[str, Any] = {"deadlines": PATIENT, "shared_parts": int(shared)}
        client, welcome, begin = table_worker(running.address, rule, model, data, **options)
        assert client.shares_memory == shared
        run_worker(client, welcome, begin)
        client.close()
        np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))


def test_a_job_with_many_tables_gives_the_result_of_the_dense_job() -> None:
    model = some_model(*[TableShape(f"table {number}", 5 + number, 2, 4) for number in range(20)])
    rule, data = make("downpour"), some_batches(model, 3)
    with started(rule, model) as running:
        train(running, model, data, shared_parts=1)
        np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))


def test_a_table_may_have_as_many_elements_as_the_dense_vector() -> None:
    """The rows are received into memory of their own although their size is that of the dense vector."""
    model = some_model(TableShape("users", 4, 2, 4), dense=8)
    rule = make("downpour")
    data = [replace(batch, ids=(ids(0, 1, 2, 3),)) for batch in some_batches(model, 5)]
    with started(rule, model) as running:
        train(running, model, data)
        np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))


def test_the_records_contain_the_bytes_of_the_rows() -> None:
    rule, model = make("downpour"), some_model()
    data = [replace(batch, ids=(ids(1, 1, 2, 3), ids(0, 0, 0, 0))) for batch in some_batches(model, 2)]
    with started(rule, model) as running:
        worker = turns(running, model, data)
        while not worker.over:
            worker.turn()
        # 4 dense elements; 3 users of 3 elements and 1 item of 2; and 8 bytes for each row number.
        size = 4 * 4 + 3 * (8 + 4 * 3) + 1 * (8 + 4 * 2)
        assert running.driver.drain().commits.view(COMMIT)["bytes"].tolist() == [size, size]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_commit_whose_reply_was_lost_is_applied_once(number: int) -> None:
    """The pull that replaces the lost reply returns the rows that the commit requested."""
    rule, model = make("downpour", window=2), some_model()
    data = some_batches(model, 8)
    with started(rule, model) as running:
        worker = turns(running, model, data)
        for _ in range(number - 1):
            worker.turn()
        channel = present(worker.client.channel)
        send = channel.send

        def send_then_cut(message: Any) -> None:
            send(message)
            if isinstance(message, Commit):
                assert running.driver.observe(number - 1, patience(5)).clock == number  # The commit is applied …
                channel.close()  # … and its reply is not read.

        channel.send = send_then_cut
        wants = worker.record.wants
        reply = worker.turn()
        for table, rows, received in zip(present(running.server.center).tables, wants, reply.rows, strict=True):
            np.testing.assert_array_equal(table.gather(rows), received)
        assert running.driver.ping().clock == number
        while not worker.over:
            worker.turn()
        np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))


def test_a_refused_window_is_computed_again_from_its_own_rows() -> None:
    rule, model = make("ringmaster", window=2, threshold=1, patience=None), some_model()
    data = [some_batches(model, 6, seed=1), some_batches(model, 6, seed=2)]
    order = [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0]
    with started(rule, model, workers=2) as running:
        workers = [turns(running, model, batches, number) for number, batches in enumerate(data)]
        refused = [worker for worker in order if not workers[worker].over and workers[worker].turn().refused]
        for worker in workers:
            while not worker.over:
                worker.turn()
        assert len(refused) >= 3
        assert running.driver.ping().clock == 6
        job = TableJob(rule, model, data, by_rows=False)
        for number in order:
            if number in job.pending:
                job.commit(number)
        while job.pending:
            job.commit(min(job.pending))
        np.testing.assert_array_equal(result_of(running, model), job.result())


def test_a_nan_in_a_row_refuses_the_whole_commit() -> None:
    rule, model = make("downpour"), some_model()
    bad = some_batches(model, 1)[0]
    bad = replace(bad, ids=(ids(7, 7, 7, 41), ids(0, 0, 0, 0)), values=np.array([1, 1, 1, np.nan]))
    with started(rule, model) as running:
        worker = turns(running, model, [bad])
        # The dense gradient is NaN, too; a finite one makes the server find the NaN in the rows.
        record = replace(worker.record, parts=(np.ones(4, np.float32),))
        text = (
            r"a commit holds nan in column 0 of row 41 of table 'users' \(3 such elements\), from mini-batches 0-0 of"
        )
        with pytest.raises(NonFiniteError, match=text) as caught:
            worker.client.commit(record)
        assert (caught.value.worker, caught.value.step) == (0, 0)
        worker.client.close()
        tables = present(running.server.center).tables
        np.testing.assert_array_equal(present(running.server.center).current.array, model.dense)
        for table, rows in zip(tables, model.rows, strict=True):
            np.testing.assert_array_equal(table.array, rows)


def test_a_skipped_commit_does_not_change_the_rows() -> None:
    rule, model = make("downpour"), some_model()
    data = some_batches(model, 4)
    bad = data[1].values.copy()
    bad[2] = np.nan
    with_nan = [batch if batch.index != 1 else replace(batch, values=bad) for batch in data]
    with started(rule, model, max_skipped=1) as running:
        with np.errstate(all="ignore"):
            train(running, model, with_nan)
        left = [replace(data[index], index=place, last=index == 3) for place, index in enumerate((0, 2, 3))]
        np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [left]))
        assert running.driver.drain().commits.view(COMMIT)["skipped"].tolist() == [0, 1, 0, 0]


class TestMalformedRows:
    def joined(self, running: Running, model: ToyTables) -> WorkerClient:
        client = running.client(size=4, tables=model.shapes)
        client.join()
        client.pull((ids(), ids()))
        return client

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"touched": (ids(2, 1), ids())}, "in ascending order, each once. Received: 1 behind 2"),
            ({"touched": (ids(1, 1), ids())}, "in ascending order, each once. Received: 1 behind 1"),
            ({"touched": (ids(1, 50), ids())}, r"rows of table 'users' in \[0, 50\). Received: 50"),
            ({"touched": (ids(), ids(-1, 2))}, r"rows of table 'items' in \[0, 9\). Received: -1"),
            ({"touched": (ids(*range(9)), ids())}, "at most 8 rows of table 'users'. Received: 9"),
            ({"touched": (ids(1, 2),)}, "for each of 2 tables. Received: 1"),
            (
                {"touched": (ids(1), ids())},
                r"must move its rows by \[3, 0\] elements, table by table. Received: \[6, 0\]",
            ),
            ({"wants": (ids(3, 3), ids())}, "`wants` must name .* each once. Received: 3 behind 3"),
            ({"wants": (ids(), ids(9))}, r"`wants` must name rows of table 'items' in \[0, 9\). Received: 9"),
        ],
    )
    def test_malformed_rows_in_a_commit_are_refused(self, fields: dict[str, Any], text: str) -> None:
        model = some_model()
        right: dict[str, Any] = {"touched": (ids(1, 2), ids()), "moved": (np.ones(6, np.float32), NO_FLOATS)}
        right |= {"wants": (ids(), ids()), "history": np.zeros((1, 3))}
        with started(make("downpour"), model) as running:
            client = self.joined(running, model)
            with pytest.raises(ShapeError, match=text):
                client.request(some_commit(np.ones(4, np.float32), **(right | fields)), (Ack, CenterReply))
            client.close()
            # The server still answers, and nothing has changed.
            np.testing.assert_array_equal(result_of(running, model), model.vector())

    @pytest.mark.parametrize("wants", [(), (ids(1),), (ids(2, 1), ids()), (ids(), ids(9)), (ids(*range(9)), ids())])
    def test_malformed_rows_in_a_pull_are_refused(self, wants: tuple[np.ndarray, ...]) -> None:
        model = some_model()
        with started(make("downpour"), model) as running:
            client = self.joined(running, model)
            with pytest.raises(ShapeError, match="`wants` must"):
                client.request(Pull(0, 0, 1, wants), CenterReply)
            client.close()
            np.testing.assert_array_equal(result_of(running, model), model.vector())

    def test_malformed_rows_from_a_worker_without_the_lease_do_not_end_the_job(self) -> None:
        model = some_model()
        rule, data = make("downpour"), some_batches(model, 3)
        with started(rule, model) as running:
            client = self.joined(running, model)
            with pytest.raises(Exception, match="attempt 7"):
                client.request(Pull(0, 7, 1, (ids(3, 1),)), CenterReply)
            client.close()
            train(running, model, data, attempt=1)
            np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))

    def test_rows_of_another_dtype_are_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        model = some_model()
        rule, data = make("downpour"), some_batches(model, 3)
        with started(rule, model) as running:
            client = self.joined(running, model)
            channel = present(client.channel)
            frame = b"".join(bytes(piece) for piece in encode(Pull(0, 0, 1, (ids(1), ids())), channel.connection.seal))
            entry = bytes([_CODES[np.dtype("<i8")]]) + (1).to_bytes(8, "big")
            assert entry in frame
            socket_of(channel).sendall(frame.replace(entry, bytes([_CODES[np.dtype("<f8")]]) + entry[1:], 1))
            with pytest.raises(ServerLostError, match="closed the connection instead of answering"):
                client.request(Pull(0, 0, 1, (ids(1), ids())), CenterReply)
            assert "Pull has arrays of dtypes [3, 3]. Received: [(2, 1), (3, 0)]" in caplog.text
            client.close()
            train(running, model, data)
            np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))

    def test_a_worker_with_other_tables_is_refused(self) -> None:
        model = some_model()
        with started(make("downpour"), model) as running:
            client = running.client(size=4, tables=(USERS,))
            with pytest.raises(ShapeError, match="the worker's tables must be"):
                client.join()
            client.close()


def test_the_whole_center_is_of_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker commits between two blocks of rows, and between the last block and the center."""
    rule, model = make("downpour", window=2), some_model()
    table, expected = DriverClient.table, list[np.ndarray]()
    with started(rule, model) as running:
        worker = turns(running, model, some_batches(model, 8))

        def read(self: DriverClient, *arguments: Any) -> np.ndarray:
            worker.turn()
            rows = table(self, *arguments)
            worker.turn()
            if not expected:
                monkeypatch.setattr(DriverClient, "table", table)
                expected.append(result_of(running, model))
            return rows

        monkeypatch.setattr(DriverClient, "table", read)
        reply, vector = running.driver.whole_center(model.shapes)
        assert reply.clock == 2
        np.testing.assert_array_equal(vector, expected[0])
        while not worker.over:
            worker.turn()
        assert not np.array_equal(result_of(running, model), vector)
        _, vector = running.driver.whole_center(model.shapes)
        np.testing.assert_array_equal(vector, result_of(running, model))


def test_the_whole_center_may_contain_many_tables() -> None:
    model = some_model(*(TableShape(f"table {number}", 6, 2, 6) for number in range(9)))
    with started(make("downpour"), model) as running:
        _, vector = running.driver.whole_center(model.shapes)
        np.testing.assert_array_equal(vector, model.vector())


class TestPublication:
    def test_a_center_is_not_published_before_all_rows(self) -> None:
        model = some_model()
        with started(make("downpour"), model, publish=False) as running:
            for published in (0, 1):
                running.driver.publish_rows(list(zip(model.shapes, model.rows, strict=True))[:published])
                text = ["all 50 rows of table 'users'", "all 9 rows of table 'items'"][published]
                with pytest.raises(RemoteProtocolError, match=f"{text} must be published before .* Received: 0"):
                    running.driver.publish(model.dense)
                assert running.server.center is None
                running.driver.close()  # The server has closed the connection.
            running.publish()
            np.testing.assert_array_equal(result_of(running, model), model.vector())

    def test_rows_are_published_and_read_in_several_blocks(self) -> None:
        shape = TableShape("wide", 11, 400_000, 2)
        model = some_model(shape)
        assert 1 < block_rows(shape) < 11
        with started(make("downpour"), model) as running:
            np.testing.assert_array_equal(running.driver.table(0, shape), model.rows[0])

    def test_rows_that_are_published_again_change_nothing(self) -> None:
        rule, model = make("downpour"), some_model()
        data = some_batches(model, 3)
        with started(rule, model) as running:
            train(running, model, data)
            running.publish()
            np.testing.assert_array_equal(result_of(running, model), dense_result(rule, model, [data]))

    def test_an_interrupted_publication_starts_over(self) -> None:
        model = some_model()
        with started(make("downpour"), model, publish=False) as running:
            other = DriverClient(running.address, PATIENT)
            part = model.rows[0][:20].reshape(-1)
            assert other.request(PublishRows(0, 0, part + 1), RowsPublished).rows == 20
            other.close()
            running.publish()
            np.testing.assert_array_equal(result_of(running, model), model.vector())

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (
                PublishRows(2, 0, np.ones(3, np.float32)),
                "`table` must be the number of one of 2 tables. Received: table=2",
            ),
            (PublishRows(-1, 0, np.ones(3, np.float32)), "Received: table=-1"),
            (
                PublishRows(0, 1, np.ones(3, np.float32)),
                "that follow the first 0 of 50. Received: 3 elements from row 1",
            ),
            (PublishRows(0, -1, np.ones(3, np.float32)), "Received: 3 elements from row -1"),
            (PublishRows(0, 0, np.ones(4, np.float32)), "whole ones of 3 elements"),
            (PublishRows(0, 0, np.ones(0, np.float32)), "Received: 0 elements"),
            (PublishRows(0, 0, np.ones(153, np.float32)), "the first 0 of 50. Received: 153 elements"),
        ],
    )
    def test_invalid_published_rows_are_refused(self, message: PublishRows, text: str) -> None:
        model = some_model()
        with started(make("downpour"), model, publish=False) as running:
            with pytest.raises(RemoteProtocolError, match=text):
                running.driver.request(message, RowsPublished)
            running.driver.close()
            running.publish()
            np.testing.assert_array_equal(result_of(running, model), model.vector())

    @pytest.mark.parametrize(
        "message",
        [
            InspectRows(0, 0, 51),
            InspectRows(0, -1, 2),
            InspectRows(0, 3, 0),
            InspectRows(0, 2**62, 2**62),
            InspectRows(1, 9, 1),
            InspectRows(2, 0, 1),
        ],
    )
    def test_a_request_for_rows_that_do_not_exist_is_refused(self, message: InspectRows) -> None:
        model = some_model()
        with started(make("downpour"), model) as running:
            with pytest.raises(RemoteProtocolError, match="Received"):
                running.driver.request(message, TableRows)
            running.driver.close()
            np.testing.assert_array_equal(result_of(running, model), model.vector())

    @pytest.mark.parametrize(
        ("wants", "problem"),
        [
            (([1],), "an array of rows for each of 2 tables. Received: 1"),
            (([], [1]), "1 rows of 'whole'"),
            (([1, 1], []), "2 rows of 'far' from 1 to 1"),
            (([-1], []), "from -1 to -1"),
            (([1, 1 << 50], []), "in [0, 1125899906842624)"),
        ],
    )
    def test_a_request_for_invalid_rows_with_the_center_is_refused(self, wants: Any, problem: str) -> None:
        shapes = TableShape("far", 1 << 50, 2, 4, seed=0), TableShape("whole", 3, 2, 3)
        message = Inspect(wants=tuple(np.array(ids, np.int64) for ids in wants))
        with pytest.raises(RemoteProtocolError, match=re.escape(problem)):
            rows_to_inspect(tuple(map(make_table, shapes)), message)

    def test_a_server_without_tables_refuses_rows(self) -> None:
        with Running(make("downpour"), size=4, deadlines=PATIENT) as running:
            for message in (PublishRows(0, 0, np.ones(3, np.float32)), InspectRows(0, 0, 1)):
                with pytest.raises(RemoteProtocolError, match="one of 0 tables"):
                    running.driver.request(message, (RowsPublished, TableRows))
                running.driver.close()


def test_rows_of_a_reply_are_a_copy() -> None:
    model = some_model()
    with started(make("downpour"), model) as running:
        server, table = running.server.dispatcher, present(running.server.center).tables[0]
        requests = TableRequests(model.shapes, server.changed)
        answer = requests.inspect(lambda: present(running.server.center), InspectRows(0, 1, 3))
        assert isinstance(answer, TableRows)
        np.testing.assert_array_equal(answer.rows, table.array[1:4].reshape(-1))
        assert not np.shares_memory(answer.rows, table.array)


def test_a_commit_with_rows_to_an_ended_job_is_refused() -> None:
    model = some_model()
    with started(make("downpour"), model) as running:
        worker = turns(running, model, some_batches(model, 3))
        running.driver.stop("enough")
        with pytest.raises(JobStoppedError, match="enough"):
            worker.turn()
        worker.client.close()
