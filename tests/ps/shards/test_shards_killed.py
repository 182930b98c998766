"""Processes of a divided center that are killed: training goes on, and each mini-batch counts once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.patience import PATIENT, brief, patience, until
from support.ps.toy_model import ToyReplica, batches

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import JobStoppedError, NonFiniteError
from distkeras.ps.protocol.loop import CommitRecord, Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker, work

SIZE, STEPS, WORKERS = 2 * 64 * 1024 + 5, 40, 2
#: A power of two, so that sums of whole numbers times it are exact in any order.
RATE = 0.5
RULE = make("downpour", window=2)


def values_of(worker: int) -> list[np.ndarray]:
    rng = np.random.default_rng(worker)
    return [rng.integers(-8, 8, SIZE).astype(np.float32) for _ in range(STEPS)]


def expected() -> np.ndarray:
    """The exact sum of all movements, in any order in which they may be applied."""
    return -RATE * sum(np.sum(values_of(worker), axis=0) for worker in range(WORKERS))


class Worker(threading.Thread):
    """A worker that trains to its end, and waits at mini-batch ``pause`` until `go` is set."""

    def __init__(self, process: ServerProcess, worker: int, pause: int, attempt: int = 0) -> None:
        super().__init__(daemon=True)
        kind: Any = SpreadWorkerClient if process.settings.shards > 1 else WorkerClient
        self.client = kind(process.address, worker=worker, attempt=attempt, size=SIZE, deadlines=PATIENT)
        self.go, self.waits = threading.Event(), threading.Event()
        self._worker, self._pause = worker, pause
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with contextlib.closing(self.client):
                run_worker(self.client, self.client.join(), self._begin)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def _begin(self, welcome: Welcome) -> Loop:
        replica = ToyReplica(SIZE, RATE, None, np.float32)
        return work(RULE, replica, self._batches(welcome), lambda: self.client.payload(1))

    def _batches(self, welcome: Welcome) -> Iterator[Any]:
        for batch in batches(values_of(self._worker), start=(welcome.epoch, welcome.batch)):
            if batch.index == self._pause:
                self.waits.set()
                assert self.go.wait(patience(60))
            yield batch


def children(process: ServerProcess) -> list[psutil.Process]:
    return sorted(psutil.Process(process.pid).children(), key=lambda child: child.create_time())


def started(folder: Path, shards: int, *, resume: bool = False) -> ServerProcess:
    settings = ServerSettings(
        RULE, workers=WORKERS, deadlines=PATIENT, checkpoint=Checkpoint(str(folder), every=5), shards=shards
    )
    process = ServerProcess(settings, resume=resume)
    process.start()
    return process


def driver_of(process: ServerProcess) -> DriverClient:
    kind = SpreadDriverClient if process.settings.shards > 1 else DriverClient
    return kind(process.address, PATIENT)


@pytest.mark.parametrize(
    "victim",
    [
        "sequencer",
        pytest.param("shard 0", marks=pytest.mark.slow),
        pytest.param("shard 1", marks=pytest.mark.slow),
        pytest.param("stopped shard", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_loses_nothing(victim: str, tmp_path: Path) -> None:
    with contextlib.closing(started(tmp_path, 2)) as process:
        driver = driver_of(process)
        start = np.zeros(SIZE, np.float32)
        driver.publish(start, model=b"the model")
        until(lambda: len(children(process)) == 2)
        workers = [Worker(process, worker, pause=20) for worker in range(WORKERS)]
        for worker in workers:
            assert worker.waits.wait(patience(60))
        if victim == "sequencer":
            process.kill()
        else:
            shard = children(process)[int(victim[-1]) if victim[-1].isdigit() else 0]
            os.kill(shard.pid, signal.SIGSTOP if victim == "stopped shard" else signal.SIGKILL)
        for worker in workers:
            worker.go.set()
        assert process.exited(patience(120))
        driver.close()
        process.restart()
        driver = driver_of(process)
        driver.publish(start, model=b"the model")
        for worker in workers:
            worker.join(patience(120))
            assert worker.error is None
            assert not worker.is_alive()
        status = driver.ping()
        assert (status.batches, status.finished) == (STEPS * WORKERS, WORKERS)
        np.testing.assert_array_equal(driver.center().center, expected())
        driver.goodbye()
        driver.close()


def test_the_processes_end_with_their_driver(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    driver = os.fork()
    if driver == 0:  # it is killed before it can close anything
        try:
            process = started(tmp_path, 2)
            driver_of(process).publish(np.zeros(SIZE, np.float32))
            pids = [process.pid, *(child.pid for child in children(process))]
            os.write(writer, f"{' '.join(map(str, pids))}\n".encode())
            signal.pause()
        finally:
            os._exit(1)  # the fork does not continue as a second copy of the tests
    os.close(writer)
    with os.fdopen(reader) as lines:
        pids = [int(pid) for pid in lines.readline().split()]
    assert len(pids) == 3
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.slow
def test_an_error_of_a_shard_ends_the_job_which_is_then_read_there(tmp_path: Path) -> None:
    """The error is found in one slice, and it is not taken for the loss of a process."""
    with contextlib.closing(started(tmp_path, 2)) as process:
        driver = driver_of(process)
        start = np.zeros(SIZE, np.float32)
        start[-1] = np.finfo(np.float32).max
        driver.publish(start, model=b"the model")
        client = SpreadWorkerClient(process.address, worker=0, attempt=0, size=SIZE, deadlines=PATIENT)
        with contextlib.closing(client):
            client.join()
            client.pull()
            step = CommitRecord(0, 0, 0, False, True, 0.1, 1.0, (start,), history=np.zeros((1, 3)))
            with pytest.raises(JobStoppedError, match="non-finite"):
                client.commit(step)
        for _ in range(3):
            until(lambda: len(children(process)) == 2)
            with pytest.raises(NonFiniteError, match="made the center non-finite"):
                driver.observe(-1, brief(2))
        assert process.alive()
        assert driver.drain().total == 1
        driver.close()


@pytest.mark.slow
def test_a_client_that_reads_before_the_publication_waits_for_it(tmp_path: Path) -> None:
    with contextlib.closing(started(tmp_path, 2)) as process:
        reader, driver = driver_of(process), driver_of(process)
        start = np.arange(SIZE, dtype=np.float32)
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(lambda: [reader.center().center, reader.center(0).center])
            until(lambda: reader.channel is not None)
            driver.publish(start, model=b"the model")
            for center in read.result(patience(60)):
                np.testing.assert_array_equal(center, start)
        reader.close()
        driver.close()


@pytest.mark.slow
def test_a_sequencer_that_receives_sigterm_saves_all_commits(tmp_path: Path) -> None:
    """So does a system that ends all processes of a service, the shards included."""
    with contextlib.closing(started(tmp_path, 2)) as process:
        driver = driver_of(process)
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")
        workers = [Worker(process, worker, pause=21) for worker in range(WORKERS)]
        for worker in workers:
            assert worker.waits.wait(patience(60))
        clock = driver.ping().clock
        driver.close()
        for pid in [*(child.pid for child in children(process)), process.pid]:
            os.kill(pid, signal.SIGTERM)
        assert process.exited(patience(60))
        process.restart()
        assert process.resumed is not None
        assert process.resumed.clock == clock


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 3), *(pytest.param(*counts, marks=pytest.mark.slow) for counts in ((1, 3), (2, 1), (3, 2)))],
)
def test_a_checkpoint_is_continued_by_another_number_of_shards(before: int, after: int, tmp_path: Path) -> None:
    start = np.zeros(SIZE, np.float32)
    with contextlib.closing(started(tmp_path, before)) as process:
        driver = driver_of(process)
        driver.publish(start, model=b"the model")
        workers = [Worker(process, worker, pause=20) for worker in range(WORKERS)]
        for worker in workers:
            assert worker.waits.wait(patience(60))
        clock = driver.ping().clock
        driver.goodbye()
        driver.close()
    with contextlib.closing(started(tmp_path, after, resume=True)) as process:
        assert process.resumed is not None
        assert process.resumed.clock == clock
        driver = driver_of(process)
        driver.publish(start, model=b"the model")
        workers = [Worker(process, worker, pause=-1, attempt=1) for worker in range(WORKERS)]
        for worker in workers:
            worker.join(patience(120))
            assert worker.error is None
        np.testing.assert_array_equal(driver.center().center, expected())
        driver.goodbye()
        driver.close()
