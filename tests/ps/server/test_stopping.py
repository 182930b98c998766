"""A job that ends early: each worker learns of it from its next reply, commits what it has computed, and leaves."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.ps.running_server import Running
from support.ps.toy_model import Gradient, toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.rules import Rule, make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker
from distkeras.training.supervisor import Supervisor

SIZE = 11
ENDLESS = [1.0] * 100_000


class Workers:
    """Workers in threads of their own, each with more data than it will ever train on."""

    def __init__(
        self, address: Address, rule: Rule, numbers: list[int], *, gradient: Gradient | None = None, attempt: int = 0
    ) -> None:
        self.clients: list[WorkerClient] = []
        self.errors: list[Exception] = []
        self.threads = [
            threading.Thread(target=self.run, args=(address, rule, number, gradient, attempt), daemon=True)
            for number in numbers
        ]
        for thread in self.threads:
            thread.start()

    def run(self, address: Address, rule: Rule, number: int, gradient: Gradient | None, attempt: int) -> None:
        try:
            client, welcome, begin = toy_client(
                address, rule, ENDLESS, worker=number, attempt=attempt, size=SIZE, gradient=gradient, deadlines=PATIENT
            )
            self.clients.append(client)
            run_worker(client, welcome, begin)
            client.close()
        except Exception as error:  # noqa: BLE001 - `join` asserts that there is none
            self.errors.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(patience(20))
            assert not thread.is_alive()
        assert self.errors == []
        assert all(client.stopping for client in self.clients)


def assert_prefixes(driver: DriverClient, workers: int) -> np.ndarray:
    """Check that each worker's commits cover its first mini-batches without gap or repetition; return all commits."""
    commits = driver.drain(count=10**6).commits.view(COMMIT)
    for worker in range(workers):
        own = commits[commits["worker"] == worker]
        ranges = [b for row in own for b in range(row["first_batch"], row["last_batch"] + 1)]
        assert ranges == list(range(len(ranges)))
    return commits


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["downpour", "aeasgd", "averaging", "ssgd", "dana_zero"])
def test_workers_leave_after_their_current_commit(name: str) -> None:
    rule = make(name) if make(name).traits.gradient else make(name, window=2)
    with Running(rule, workers=2, size=SIZE, deadlines=PATIENT) as running:
        workers = Workers(running.address, rule, [0, 1])
        while running.driver.observe(20, 1.0).clock <= 20:
            pass
        running.driver.finish("enough")
        workers.join()
        status = running.driver.observe(-1, 0.0)
        assert (status.joined, status.finished) == (2, 2)
        commits = assert_prefixes(running.driver, 2)
        assert len(commits) == status.clock < 50_000
        late = running.client(worker=0, attempt=7, size=SIZE)
        welcome = late.join()  # A task that Spark retries ends at once.
        assert welcome.finished
        assert welcome.stopping
        late.close()


@pytest.mark.timeout(60)
def test_workers_that_wait_for_others_to_join_end() -> None:
    """Two of three workers have a slot, and the deadline for the third to join is far away."""
    rule = make("averaging", window=2)
    with Running(rule, workers=3, size=SIZE, deadlines=PATIENT) as running:
        workers = Workers(running.address, rule, [0, 1])
        while running.driver.observe(-1, 0.0).joined < 2:
            pass
        running.driver.finish("enough")
        workers.join()
        Workers(running.address, rule, [2]).join()
        assert running.driver.observe(-1, 0.0).finished == 3
        assert len(running.driver.drain().commits) == 0


@pytest.mark.timeout(60)
def test_a_round_ends_when_the_successor_of_a_dead_worker_leaves() -> None:
    """Worker 0 waits in a round; worker 1 dies, and its successor leaves at once, which ends the round."""
    rule = make("ssgd")
    with Running(rule, workers=2, size=SIZE, deadlines=PATIENT) as running:
        dying, welcome, _ = toy_client(running.address, rule, ENDLESS, worker=1, size=SIZE, deadlines=PATIENT)
        workers = Workers(running.address, rule, [0])
        assert not welcome.finished
        dying.pull()
        while running.driver.observe(0, 1.0).clock < 1:
            pass
        running.driver.finish("enough")
        dying.close()
        successor = Workers(running.address, rule, [1], attempt=3)
        successor.join()
        workers.join()
        commits = assert_prefixes(running.driver, 2)
        assert commits["worker"].tolist() == [0]
        np.testing.assert_allclose(running.driver.center().center, -0.1)  # This is the mean over the only contribution.


@pytest.mark.timeout(60)
def test_workers_under_bounded_staleness_end() -> None:
    rule = make("downpour")
    with Running(rule, workers=2, size=SIZE, deadlines=PATIENT, staleness_bound=0) as running:
        workers = Workers(running.address, rule, [0, 1])
        while running.driver.observe(10, 1.0).clock <= 10:
            pass
        running.driver.finish("enough")
        workers.join()
        assert_prefixes(running.driver, 2)


@pytest.mark.timeout(60)
def test_the_early_end_is_sent_to_a_restarted_server_too(tmp_path: Path) -> None:
    rule = make("downpour")
    with ServerProcess(
        ServerSettings(rule, workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(tmp_path), every=1))
    ) as process:
        start = np.zeros(SIZE, np.float32)
        with Supervisor(process, lambda driver: driver.publish(start)) as server:
            server.end_early("enough")
            os.kill(process.pid, signal.SIGKILL)
            assert process.exited(patience(10))
            server.ask(lambda driver: driver.center())
            assert server.restarts == 1
            workers = Workers(process.address, rule, [0])
            workers.join()
            assert server.ask(lambda driver: driver.observe(-1, 0.0)).finished == 1
