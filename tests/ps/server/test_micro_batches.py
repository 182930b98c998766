"""A server that serves all micro-batches of a stream and is killed; what the driver sets reaches each worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.ps.frames import some_commit
from support.ps.running_server import Running
from support.ps.toy_model import toy_client

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import DifferentJobError, LeaseLostError
from distkeras.ps.protocol.driver_messages import MicroBatchBegun
from distkeras.ps.protocol.loop import Reply
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker
from distkeras.results import JobRecords
from distkeras.training.supervisor import Supervisor

SIZE = 5
RULE = make("downpour", window=2)
#: Whole numbers: their sums are exact in float32. Each worker makes three commits.
VALUES = [1.0] * 6


class Stream:
    """The driver of a stream: a server process, and the current micro-batch."""

    def __init__(self, folder: Path) -> None:
        settings = ServerSettings(RULE, workers=2, deadlines=PATIENT, checkpoint=Checkpoint(str(folder), every=1000))
        self.process = ServerProcess(settings, resume=True, job={"stream": True})
        self.present: tuple[str, int] | None = None
        self.server: Supervisor

    def publish(self, driver: DriverClient) -> None:
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")
        if self.present is not None:
            driver.begin_micro_batch(*self.present)

    def begin(self, number: int, stream: str = "clicks") -> MicroBatchBegun:
        self.present = stream, number
        return self.server.ask(lambda driver: driver.begin_micro_batch(stream, number))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.exited(patience(10))

    def center(self) -> float:
        """Return minus the value of each element of the center, which is the number of values that count."""
        vector = self.server.ask(lambda driver: driver.center()).center
        (value,) = set(vector.tolist())
        return -float(value)


@contextmanager
def streaming(folder: Path) -> Iterator[Stream]:
    stream = Stream(folder)
    with stream.process, Supervisor(stream.process, stream.publish) as stream.server:
        yield stream


def train(address: Address, worker: int, number: int, values: list[float] = VALUES, **options: Any) -> None:
    given: dict[str, Any] = {"attempt": 10 * number, "size": SIZE, "eta": 1.0, "deadlines": PATIENT} | options
    client, welcome, begin = toy_client(address, RULE, values, worker=worker, micro_batch=number, **given)
    run_worker(client, welcome, begin)
    client.close()


def train_both(stream: Stream, number: int) -> None:
    for worker in range(2):
        train(stream.process.address, worker, number)


@pytest.mark.slow
def test_the_commits_of_every_ended_micro_batch_are_in_a_snapshot(tmp_path: Path) -> None:
    with streaming(tmp_path) as stream:
        for number in range(3):
            assert stream.begin(number).began
            train_both(stream, number)
            stream.kill()  # Nothing was saved after the last worker left.
            begun = stream.begin(number)
            assert (begun.began, begun.complete) == (False, True)
            assert stream.center() == 12.0 * (number + 1)
    with streaming(tmp_path) as gap, pytest.raises(DifferentJobError, match="micro-batch 3 must come next"):
        gap.begin(4)
    with streaming(tmp_path) as other, pytest.raises(DifferentJobError, match="Received: stream 'sales'"):
        other.begin(3, "sales")
    with streaming(tmp_path) as again:
        assert again.begin(2).complete  # Spark sends the micro-batch again.
        assert again.begin(3).began
        train_both(again, 3)
        assert again.center() == 48.0


def test_a_server_that_dies_within_a_micro_batch_restarts_that_micro_batch(tmp_path: Path) -> None:
    """The snapshot is of the previous micro-batch: workers wait until the driver has begun theirs again."""
    with streaming(tmp_path) as stream:
        stream.begin(0)
        train_both(stream, 0)
        stream.begin(1)
        options: dict[str, Any] = {"attempt": 10, "size": SIZE, "eta": 1.0, "deadlines": PATIENT, "micro_batch": 1}
        client, welcome, begin = toy_client(stream.process.address, RULE, VALUES, worker=0, **options)
        assert (welcome.sequence, welcome.epoch, welcome.batch) == (3, 0, 0)
        loop = begin(welcome)
        client.pull()
        stream.kill()
        thread = threading.Thread(target=run_worker, args=(client, welcome, begin), daemon=True)
        thread.start()
        stream.server.restart()
        train(stream.process.address, 1, 1)
        thread.join(patience(30))
        assert not thread.is_alive()
        loop.close()
        client.close()
        assert stream.center() == 24.0
        assert stream.begin(1).complete


def test_a_damaged_log_does_not_hide_records_of_the_current_micro_batch(tmp_path: Path) -> None:
    """A server that restarts without the previous micro-batch's records counts those of the current one from 0."""
    with streaming(tmp_path) as stream:
        stream.begin(0)
        train_both(stream, 0)
        assert stream.begin(1).records == 6
        stream.kill()  # A dead server writes no other log and removes none.
        for log in tmp_path.rglob("log*.dks"):
            *content, last = log.read_bytes()
            log.write_bytes(bytes([*content, last ^ 1]))
        stream.server.restart()
        train_both(stream, 1)
        records = stream.server.ask(lambda driver: JobRecords.drain_micro_batch(driver, "clicks", 1))
        assert (records.missing, records.start, len(records.commits_array)) == (12, 0, 6)


def test_a_late_attempt_is_refused_and_an_early_one_waits() -> None:
    with Running(RULE, size=SIZE) as running:
        running.driver.begin_micro_batch("clicks", 0)
        late = running.client(0, 5, SIZE, micro_batch=0)
        late.join()
        late.pull()
        for worker in range(2):
            train(running.address, worker, 0, attempt=6 + worker) if worker else late.leave()
        early: list[Any] = []
        client = running.client(0, 9, SIZE, micro_batch=1)
        waiting = threading.Thread(target=lambda: early.append(client.join()), daemon=True)
        waiting.start()
        running.driver.begin_micro_batch("clicks", 1)
        waiting.join(patience(30))
        assert not early[0].finished
        with pytest.raises(LeaseLostError):
            late.pull()
        with pytest.raises(LeaseLostError, match="micro-batch 0 has ended"):
            late.rejoin()
        late.close()
        client.close()


RATE = np.array([[0.0, 0.25]])


def set_of(reply: Reply) -> tuple[int, list[list[float]]]:
    return reply.version, reply.values.tolist()


def commit(client: WorkerClient, number: int) -> Reply:
    return client.commit(some_commit(np.ones(SIZE, np.float32), first=number, last=number))


def test_a_reply_carries_what_is_new_to_its_worker() -> None:
    with Running(make("downpour", window=1), size=SIZE) as running:
        first, second = running.client(0, size=SIZE), running.client(1, size=SIZE)
        assert set_of(first.pull()) == (0, [])
        assert running.driver.set_values(RATE, 1) == 0
        assert set_of(commit(first, 0)) == (1, [[0.0, 0.25]])
        assert set_of(commit(first, 1)) == (0, [])
        assert running.driver.set_values(np.array([[4.0, 7.0]]), 2) == 2
        assert set_of(commit(first, 2)) == (2, [[0.0, 0.25], [4.0, 7.0]])
        assert set_of(second.pull()) == set_of(first.pull()) == (2, [[0.0, 0.25], [4.0, 7.0]])
        assert set_of(commit(second, 0)) == (0, [])
        first.close()
        second.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["downpour", "aeasgd", "ssgd", "adag"])
def test_a_worker_steps_with_the_rate_that_was_set(name: str, overlap: bool) -> None:
    """A worker of which the rate is set after each exchange takes the steps of the same rates, set by hand."""
    hyper = {"ssgd": {}, "aeasgd": {"window": 1, "rho": 0.5}}.get(name, {"window": 1})
    rule = make(name, **hyper)
    if overlap and (rule.traits.pull_first or rule.traits.synchronous):
        pytest.skip("the rule does not overlap")
    with Running(rule, workers=1, size=SIZE, eta=1.0) as running:
        client, welcome, begin = toy_client(
            running.address, rule, [1.0] * 4, worker=0, size=SIZE, eta=1.0, deadlines=PATIENT, overlap=overlap
        )
        running.driver.set_values(RATE, 1)
        run_worker(client, welcome, begin)
        client.close()
        moved = float(running.driver.center().center[0])
        with Running(rule, workers=1, size=SIZE, eta=0.25) as other:
            client, welcome, begin = toy_client(
                other.address, rule, [1.0] * 4, worker=0, size=SIZE, eta=0.25, deadlines=PATIENT, overlap=overlap
            )
            run_worker(client, welcome, begin)
            expected = float(other.driver.center().center[0])
    assert moved == pytest.approx(expected, rel=1e-6) != 0.0


def test_a_restarted_server_continues_with_what_was_acknowledged(tmp_path: Path) -> None:
    settings = ServerSettings(
        make("downpour", window=1), workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(tmp_path), every=1000)
    )
    with ServerProcess(settings) as process:
        process.start()
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")
        driver.set_values(RATE, 1)
        driver.close()
        process.kill()
        process.restart()
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")
        reply = driver.center()
        assert (reply.version, reply.values.tolist()) == (1, [[0.0, 0.25]])
        client = WorkerClient(process.address, worker=0, attempt=0, size=SIZE, deadlines=PATIENT)
        assert set_of(client.pull()) == (1, [[0.0, 0.25]])
        client.close()
        driver.goodbye()
        driver.close()
