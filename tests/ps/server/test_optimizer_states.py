"""The state of a worker's optimizer at the server: which is kept, which attempt receives it, and what is refused."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.present import present
from support.ps.frames import some_commit
from support.ps.running_server import Running

from distkeras.ps.center import leases
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import LeaseLostError, RemoteProtocolError
from distkeras.ps.protocol.loop import CommitRecord, OptimizerState
from distkeras.ps.protocol.messages import Ack, KeepOptimizer, OptimizerTaken
from distkeras.ps.protocol.tables import most_state_bytes
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.world.world import REAL, World

pytestmark = pytest.mark.timeout(60)

SIZE = 3


def state_of(*numbers: int) -> OptimizerState:
    content = np.array(numbers, np.uint8)
    return OptimizerState("Adam", content, zlib.crc32(content.data))


def record(batch: int, value: float = 1.0) -> CommitRecord:
    return CommitRecord(0, batch, batch, False, True, 0.1, 1.0, (np.full(SIZE, value, np.float32),))


def join_and_commit(client: WorkerClient, commits: int) -> WorkerClient:
    """Join and commit so many mini-batches; return ``client``."""
    client.join()
    client.pull()
    for batch in range(commits):
        client.commit(record(batch))
    return client


@contextlib.contextmanager
def served(commits: int = 1, **options: Any) -> Iterator[tuple[Running, WorkerClient]]:
    """Yield a server, and a client that has committed so many mini-batches."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Running(make("downpour"), size=SIZE, **options))
        yield (
            running,
            join_and_commit(stack.enter_context(contextlib.closing(running.client(attempt=1, size=SIZE))), commits),
        )


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", None) == "optimizer"]


def test_a_successor_receives_the_last_state_of_its_predecessor(caplog: pytest.LogCaptureFixture) -> None:
    with Running(make("downpour"), size=SIZE) as running:
        with contextlib.closing(join_and_commit(running.client(attempt=1, size=SIZE), 2)) as first:
            first.keep_optimizer(state_of(1, 2, 3))
            first.commit(record(2))
            first.keep_optimizer(state_of(4, 5))
            first.commit(record(3))
        with contextlib.closing(running.client(attempt=2, size=SIZE)) as second:
            assert second.join().optimizer == 3
            state = present(second.fetch_optimizer())
            assert (state.layout, state.content.tolist(), state.damaged) == ("Adam", [4, 5], False)
            second.report_optimizer("")
    (event,) = events(caplog)
    assert event.startswith("attempt 2 continues after commit 4 with the optimizer of attempt 1 after commit 3 (")


def test_a_worker_does_not_receive_the_state_of_another_partition() -> None:
    with Running(make("downpour"), size=SIZE) as running:
        one, other = join_and_commit(running.client(0, size=SIZE), 1), running.client(1, size=SIZE)
        with contextlib.closing(one), contextlib.closing(other):
            one.keep_optimizer(state_of(1))
            assert other.join().optimizer == 0
            assert other.fetch_optimizer() is None


def test_a_state_that_a_successor_cannot_load_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with Running(make("downpour"), size=SIZE) as running:
        with contextlib.closing(join_and_commit(running.client(attempt=1, size=SIZE), 1)) as first:
            first.keep_optimizer(state_of(1))
        with contextlib.closing(running.client(attempt=2, size=SIZE)) as second:
            second.join()
            second.fetch_optimizer()
            second.report_optimizer("it is of another model")
    expected = "the optimizer of attempt 2 begins with a new state after commit 1: it is of another model"
    assert events(caplog) == [expected]


def keep(client: WorkerClient, state: OptimizerState, **fields: Any) -> KeepOptimizer:
    given = {"worker": 0, "attempt": client.attempt, "incarnation": 1, "sequence": client.sequence, **fields}
    return KeepOptimizer(state.layout, state.content, state.checksum, **given)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"attempt": 0}, LeaseLostError, "attempt 0 has lost its lease"),
        ({"incarnation": 2}, RemoteProtocolError, "`incarnation` must be 1"),
        ({"sequence": 1}, RemoteProtocolError, "after commit 2"),
        ({"sequence": 3}, RemoteProtocolError, "after commit 2"),
    ],
)
def test_a_late_or_early_state_is_refused(
    fields: dict[str, Any], error: type[Exception], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(make("downpour"), size=SIZE) as running:
        with contextlib.closing(join_and_commit(running.client(attempt=1, size=SIZE), 2)) as client:
            client.keep_optimizer(state_of(7))
            with pytest.raises(error, match=says):
                client.request(keep(client, state_of(8), **fields), Ack)
        assert present(running.server.center).leases[0].optimizer is not None
        kept = present(present(running.server.center).leases[0].optimizer)
        assert (kept.state.content.tolist(), kept.sequence) == ([7], 2)
    kinds = [getattr(record, "event", None) for record in caplog.records]
    assert ("fenced" if error is LeaseLostError else "optimizer") in kinds


def test_a_state_from_an_older_connection_is_refused() -> None:
    with Running(make("downpour"), size=SIZE) as running:
        older = join_and_commit(running.client(attempt=1, size=SIZE), 1)
        newer = running.client(attempt=1, size=SIZE)
        with contextlib.closing(older), contextlib.closing(newer):
            newer.join()
            with pytest.raises(LeaseLostError, match="holds its lease over another connection"):
                older.request(keep(older, state_of(1)), Ack)
            assert newer.fetch_optimizer() is None


def test_a_truncated_state_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (_, client):
        client.keep_optimizer(state_of(1, 2, 3))
        whole = state_of(4, 5, 6)
        client.keep_optimizer(OptimizerState(whole.layout, whole.content[:2], whole.checksum))
        assert present(client.fetch_optimizer()).content.tolist() == [1, 2, 3]
    (event,) = events(caplog)
    assert "is not kept: its 2 bytes have another checksum" in event


def test_a_skipped_commit_discards_the_state() -> None:
    """The state may contain what led to the NaN, so the worker begins with a new one, as without this option."""
    with served(max_skipped=1) as (_, client):
        client.keep_optimizer(state_of(1))
        bad = some_commit(np.full(SIZE, np.nan, np.float32), attempt=1, sequence=2, first=1, last=1)
        assert client.request(bad, Ack).skipped
        assert client.join().optimizer == 0


def test_a_state_of_the_largest_size_arrives_and_a_larger_state_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (_, client):
        largest = state_of(*np.resize(np.arange(251), most_state_bytes(SIZE)))
        client.keep_optimizer(largest)
        client.keep_optimizer(state_of(*largest.content.tolist(), 1))
        np.testing.assert_array_equal(present(client.fetch_optimizer()).content, largest.content)
    assert any("is not kept: at most" in record.getMessage() for record in caplog.records)


def test_a_large_state_is_kept_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MEMORY_BYTES", 2 * 1000)  # Each of the two partitions has a share of 1000.
    with served() as (running, client):
        for count in (1000, 1001):
            state = state_of(*np.resize(np.arange(256), count))
            client.keep_optimizer(state)
            kept = present(present(running.server.center).leases[0].optimizer).state.content
            assert kept.flags.owndata == (count == 1000)
            np.testing.assert_array_equal(present(client.fetch_optimizer()).content, state.content)


def test_a_large_state_is_not_kept_if_the_file_has_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: World, size: int) -> memoryview:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leases, "MEMORY_BYTES", 2 * 1000)
    monkeypatch.setattr(World, "scratch", full)
    with served() as (_, client):
        client.keep_optimizer(state_of(*[1] * 1000))
        client.keep_optimizer(state_of(*[2] * 1001))
        assert present(client.fetch_optimizer()).content.tolist() == [1] * 1000
    (event,) = events(caplog)
    assert "there is no room for its 1001 bytes" in event


def test_a_scratch_file_has_its_size_and_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    array = np.frombuffer(REAL.scratch(70_000), np.uint8)
    array[...] = 3
    assert (array.size, int(array.sum()), list(tmp_path.iterdir())) == (70_000, 210_000, [])


@pytest.mark.parametrize("same", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_snapshot_of_a_killed_server_contains_the_state(
    tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed job has the state, too; a job with another number of workers begins with new states."""
    caplog.set_level(logging.INFO)

    def settings(workers: int) -> ServerSettings:
        checkpoint = Checkpoint(str(tmp_path), every=1)
        return ServerSettings(make("downpour"), workers=workers, deadlines=PATIENT, checkpoint=checkpoint)

    def publish(process: ServerProcess) -> DriverClient:
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")
        return driver

    def client(process: ServerProcess, attempt: int) -> WorkerClient:
        return WorkerClient(process.address, worker=0, attempt=attempt, size=SIZE, deadlines=PATIENT)

    with ServerProcess(settings(2)) as process, contextlib.closing(publish(process)):
        with contextlib.closing(join_and_commit(client(process, 1), 2)) as worker:
            worker.keep_optimizer(state_of(9, 8, 7))
            worker.commit(record(2))
            until_durable(worker, 3)
        process.kill()
        process.restart()
        with contextlib.closing(publish(process)), contextlib.closing(client(process, 2)) as worker:
            assert worker.join().optimizer == 2
            assert present(worker.fetch_optimizer()).content.tolist() == [9, 8, 7]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(ServerProcess(settings(2 if same else 3), resume=True))
        stack.enter_context(contextlib.closing(publish(process)))
        worker = stack.enter_context(contextlib.closing(client(process, 7)))
        assert worker.join().optimizer == (2 if same else 0)
        state = worker.fetch_optimizer()
        assert (None if state is None else state.content.tolist()) == ([9, 8, 7] if same else None)
        if same:
            worker.report_optimizer("")
        else:
            with pytest.raises(RemoteProtocolError):
                worker.request(OptimizerTaken(0, 7, 1, 0), Ack)  # It refers to the state at the previous server.
    texts = [record.getMessage() for record in caplog.records]
    assert any("all optimizers begin with a new state" in text for text in texts) == (not same)


def until_durable(worker: WorkerClient, sequence: int) -> None:
    deadline = REAL.monotonic() + patience(20)
    while worker.join().durable < sequence:
        assert REAL.monotonic() < deadline
