"""Several requests in one Spark task, to a server; the tasks run in the test's own process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience
from support.ps.clocks import LateWorld
from support.ps.divided_server import DividedServer
from support.ps.running_server import KEY, Running
from support.ps.toy_tables import ToyTables

from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.checkpoint.ownership import AnnouncedAddress
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import RemoteProtocolError, ServerLostError
from distkeras.ps.protocol import tables
from distkeras.ps.protocol.driver_messages import Inspect, InspectRows, TableRows
from distkeras.ps.protocol.framing import encode
from distkeras.ps.protocol.messages import Fault, Message
from distkeras.ps.protocol.tables import TableShape, initial_rows
from distkeras.ps.rules import make
from distkeras.ps.server.process import StartRequest, build_server
from distkeras.ps.server.start_report import Started, report_to_json
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.shard_task import DividedAmongTasks
from distkeras.ps.transport.client import Address
from distkeras.ps.world.world import REAL
from distkeras.training import remote_requests
from distkeras.training.remote_requests import RemoteClient, RemoteRequest, Search

SHAPE = TableShape("table", 50, 4, 8)
#: Rows per block and blocks per task, with the sizes that `small_blocks` sets.
BLOCK, TASK = 4, 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = BLOCK * SHAPE.width * 4
    monkeypatch.setattr(tables, "_BLOCK_BYTES", nbytes)
    monkeypatch.setattr(remote_requests, "_JOB_BYTES", TASK * nbytes)


def running(*, publish: bool = True, **partial: Any) -> Running:
    rows = np.random.default_rng(1).normal(size=(SHAPE.rows, SHAPE.width)).astype(np.float32)
    shape = TableShape(SHAPE.name, SHAPE.rows, SHAPE.width, SHAPE.most, **partial)
    toy = ToyTables(np.zeros(3, np.float32), (shape,), (rows,))
    return Running(make("downpour"), tables=toy, start=toy.dense, publish=publish)


def divided(shards: int = 3, *, publish: bool = True) -> DividedServer:
    rows = np.random.default_rng(1).normal(size=(SHAPE.rows, SHAPE.width)).astype(np.float32)
    toy = ToyTables(np.arange(3, dtype=np.float32), (SHAPE,), (rows,))
    return DividedServer(make("downpour"), toy.dense, tables=toy, shards=shards, publish=publish)


class OwnProcess(RemoteClient):
    """A remote client whose tasks are function calls; it counts the requests and the answers of each."""

    def __init__(self, address: Address, *, divided: bool = False) -> None:
        super().__init__(cast("Any", SimpleNamespace()), address, PATIENT, divided=divided)
        self.requested = list[int]()
        self.returned = list[int]()

    def _fetch(self, remote_request: RemoteRequest) -> list[tuple[bool, Message]]:
        answers = list(remote_request.fetch())
        self.requested.append(len(remote_request.requests))
        self.returned.append(len(answers))
        return answers


def blocks(address: Address, *starts: int) -> RemoteRequest:
    frames = [b"".join(encode(InspectRows(0, start, BLOCK))) for start in starts]
    return RemoteRequest(address, PATIENT, frames, patience(60))


def test_the_blocks_of_a_table_share_a_task() -> None:
    with running() as server:
        client = OwnProcess(server.address)
        np.testing.assert_array_equal(client.table(0, SHAPE), server.driver.table(0, SHAPE))
        assert client.requested == client.returned == [TASK, TASK, 3]


@pytest.mark.parametrize("shards", [3, 8])
def test_a_divided_center_is_read_as_that_of_one_server(shards: int) -> None:
    """A task asks for several blocks, also for some beyond the rows of a shard."""
    with running() as one, divided(shards) as several:
        client = OwnProcess(several.address, divided=True)
        np.testing.assert_array_equal(client.table(0, SHAPE), one.driver.table(0, SHAPE))
        most = max(len(Cut(3, shards).own(SHAPE.rows, shard)) for shard in range(shards))
        assert sum(client.returned) == max(TASK, -(-most // BLOCK))
        _, vector = client.whole_center([SHAPE])
        np.testing.assert_array_equal(vector, [0, 1, 2, *one.driver.table(0, SHAPE).reshape(-1)])


def test_an_error_of_a_divided_server_is_its_answer() -> None:
    with divided() as server:
        client = OwnProcess(server.address, divided=True)
        read = client.read_blocks([InspectRows(0, start, BLOCK) for start in (0, 99)], 1)
        assert next(read)[0].start == 0
        with pytest.raises(RemoteProtocolError, match=r"rows of table 'table' .* from row 99 on"):
            next(read)
        server.shards[1].close()
        with pytest.raises(ServerLostError, match="an executor cannot reach the parameter server"):
            client.exchange(Inspect(), 0.01)


def test_touched_rows_end_with_a_block_that_is_not_full() -> None:
    ids = np.array([40, 2, 31, 7, 9, 11], np.int64)
    partial: dict[str, Any] = {"seed": 3, "scale": 0.5}
    shape = TableShape(SHAPE.name, SHAPE.rows, SHAPE.width, SHAPE.most, **partial)
    rows = initial_rows(shape, ids) + 1
    with running(publish=False, **partial) as server:
        server.driver.publish_touched(0, shape, [(ids, rows)])
        server.driver.publish(np.zeros(3, np.float32))
        client = OwnProcess(server.address)
        found = list(client.touched(0, shape))
    np.testing.assert_array_equal(np.concatenate([own for own, _ in found]), ids)
    np.testing.assert_array_equal(np.concatenate([own for _, own in found]), rows)
    assert client.requested == [TASK * BLOCK * 4 * SHAPE.width // tables.block_bytes(shape)] == [3]


def test_the_answers_end_before_an_unanswered_request() -> None:
    with running() as server:
        request = blocks(server.address, 0, 4, 8)
        answers = request.fetch()
        for _ in range(2):
            lost, answer = next(answers)
            assert isinstance(answer, TableRows)
            assert not lost
        server.server.close()
        assert list(answers) == []
        impatient = RemoteRequest(request.address, PATIENT, request.requests, 0.01)
        ((lost, answer),) = impatient.fetch()
        assert lost
        assert isinstance(answer, Fault)


def test_unanswered_requests_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is read once and in order, even if a task answers only some of its requests."""
    with running() as server:
        client = OwnProcess(server.address)
        whole = RemoteRequest.fetch
        monkeypatch.setattr(RemoteRequest, "fetch", lambda self: list(whole(self))[:2])
        np.testing.assert_array_equal(client.table(0, SHAPE), server.driver.table(0, SHAPE))
        assert client.returned == [2] * 6 + [1]


def test_an_error_of_the_server_ends_the_answers() -> None:
    with running() as server:
        answers = [answer for _, answer in blocks(server.address, 0, 4, 99, 8).fetch()]
        assert [type(answer) for answer in answers] == [TableRows, TableRows, Fault]
        client = OwnProcess(server.address)
        read = client.read_blocks([InspectRows(0, start, BLOCK) for start in (0, 99, 4)], 1)
        assert next(read)[0].start == 0
        with pytest.raises(RemoteProtocolError, match=r"rows of table 'table' .* Received: 4 from row 99 on"):
            next(read)


def test_an_unreachable_server_is_lost() -> None:
    with running() as server:
        client = OwnProcess(server.address)
        server.server.close()
        with pytest.raises(ServerLostError, match="an executor cannot reach the parameter server"):
            client.exchange(InspectRows(0, 0, BLOCK), 0.01)


def test_a_task_sends_no_request_after_its_deadline() -> None:
    world = LateWorld()
    with running() as server:
        answers = blocks(server.address, 0, 4, 8).fetch(world)
        next(answers)
        next(answers)
        world.ahead = patience(61)
        assert list(answers) == []


def search(folder: Path, **options: Any) -> dict[str, Any]:
    address = AnnouncedAddress("", 0, KEY, uri=str(folder))
    return Search(address, replace(PATIENT, connect=brief(0.1)), 0.01, **options).look()


def test_an_executor_that_does_not_reach_a_shard_names_it(tmp_path: Path) -> None:
    with divided() as server:
        snapshots = SnapshotDirectory(str(tmp_path))
        snapshots.take_over()
        host, port = server.sequencer.address
        snapshots.announce({"host": host, "port": port, "report": report_to_json(Started(host, port))})
        assert search(tmp_path, shards=True)["error"] == ""
        host, port = server.shards[1].address
        server.shards[1].close()
        assert f"no parameter server listens at {host}:{port}" in search(tmp_path, shards=True)["error"]
        assert search(tmp_path)["error"] == ""


def test_a_server_that_waits_for_its_shards_is_starting(tmp_path: Path) -> None:
    settings = ServerSettings(
        make("downpour"), workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(tmp_path)), shards=2
    )
    request = StartRequest(settings, KEY, None, StartMode(fresh=True, same_attempts=False))
    server, _ = build_server(request, listener=REAL.listen("127.0.0.1", 0), attempt=0, kind=DividedAmongTasks(request))
    with server:
        found = search(tmp_path)
        assert (found["starting"], found["place"]) == (True, "")
    assert not search(tmp_path)["starting"]
