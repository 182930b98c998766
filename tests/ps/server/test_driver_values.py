"""What the driver sets reaches each worker with its next exchange, and a restarted server continues with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT
from support.ps.frames import some_commit
from support.ps.running_server import Running
from support.ps.toy_model import toy_client

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.protocol.loop import Reply
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker

SIZE = 5
RATE = np.array([[0.0, 0.25]])


def set_of(reply: Reply) -> tuple[int, list[list[float]]]:
    return reply.version, reply.values.tolist()


def commit(client: WorkerClient, number: int) -> Reply:
    return client.commit(some_commit(np.ones(SIZE, np.float32), first=number, last=number))


def test_a_reply_carries_what_is_new_to_its_worker() -> None:
    with Running(make("downpour", window=1), size=SIZE) as running:
        first, second = running.client(0, size=SIZE), running.client(1, size=SIZE)
        assert set_of(first.pull()) == (0, [])
        assert running.driver.set_values(RATE) == 0
        assert set_of(commit(first, 0)) == (1, [[0.0, 0.25]])
        assert set_of(commit(first, 1)) == (0, [])
        assert running.driver.set_values(np.array([[4.0, 7.0]])) == 2
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
        running.driver.set_values(RATE)
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
        driver.set_values(RATE)
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
