"""A job whose server is a process with snapshots, which a test kills and restarts."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from support.patience import PATIENT, patience, until
from support.ps.running_server import WorkerThread


class ServedJob:
    """A server process, the connection of its driver, and workers in threads.

    Args:
        options: those of `ServerProcess`.
    """

    def __init__(self, settings: ServerSettings, **options: Any) -> None:
        self.workers: list[WorkerThread] = []
        self.process = ServerProcess(settings, **options)
        self.process.start()
        self.connect()

    def publish(self, driver: DriverClient) -> None:
        """Publish the first center."""
        raise NotImplementedError

    def connect(self) -> None:
        """Connect a driver, which publishes."""
        self.driver = DriverClient(self.process.address, PATIENT)
        self.publish(self.driver)

    def at_clock(self, clock: int) -> None:
        """Wait until ``clock`` commits are applied."""
        until(lambda: self.driver.observe(clock - 1, 1.0).clock >= clock)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.exited(patience(10))

    def revive(self) -> None:
        self.driver.close()
        self.process.restart()
        self.connect()

    def join(self) -> None:
        """Wait for all workers, none of which may fail."""
        assert [worker.ended() for worker in self.workers] == [None] * len(self.workers)

    def commits(self) -> np.ndarray:
        return self.driver.drain().commits.view(COMMIT)

    def batches_of(self, worker: int) -> list[tuple[int, int]]:
        """Return the epochs and mini-batches of ``worker`` in the order in which they were committed."""
        commits = self.commits()
        own = commits[commits["worker"] == worker]
        assert own["sequence"].tolist() == list(range(1, len(own) + 1))
        return batches_in(own)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.driver.close()
        self.process.close()


def batches_in(commits: np.ndarray) -> list[tuple[int, int]]:
    """Return the epochs and mini-batches of ``commits``."""
    return [
        (epoch, batch)
        for epoch, first, last in commits[["epoch", "first_batch", "last_batch"]].tolist()
        for batch in range(first, last + 1)
    ]
