"""A server in its own process with as many honest workers as a large job has."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.rules import Rule, make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.worker.loop import run_worker

WORKERS, SIZE, STEPS = 300, 257, 6
VALUES = [np.ones(1)] * STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", [make("downpour", window=1), make("averaging", window=2)], ids=str)
def test_three_hundred_concurrent_workers_count_each_mini_batch_once(rule: Rule) -> None:
    """Each mini-batch counts once, whether the workers commit independently or in rounds."""
    errors: list[BaseException] = []
    begin_together = threading.Barrier(WORKERS)

    def work(worker: int) -> None:
        try:
            begin_together.wait(patience(60))
            client, welcome, begin = toy_client(
                process.address, rule, VALUES, worker=worker, size=SIZE, deadlines=PATIENT
            )
            run_worker(client, welcome, begin)
            client.close()
        except BaseException as error:  # noqa: BLE001 - the assertion reports it
            errors.append(error)

    with ServerProcess(ServerSettings(rule, workers=WORKERS, deadlines=PATIENT)) as process:
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32))
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(120))
            assert not thread.is_alive()
        assert errors == []
        records = driver.drain(count=WORKERS * STEPS + 1)
        commits = records.commits.view(COMMIT)
        for worker in range(WORKERS):
            own = commits[commits["worker"] == worker]
            batches = [
                batch for first, last in own[["first_batch", "last_batch"]].tolist() for batch in range(first, last + 1)
            ]
            assert batches == list(range(STEPS))
        driver.close()
