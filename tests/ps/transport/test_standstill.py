"""A suspended server process whose host accepts connections: a worker waits until the driver replaces the server."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until

from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.world import streams
from distkeras.ps.world.streams import Stream
from distkeras.ps.world.world import World

pytestmark = pytest.mark.timeout(120)

#: Elements of a vector that fills the buffers of both hosts.
SIZE = 5_000_000


class CountingWorld(World):
    """The system's world, which also counts connections."""

    dialed = 0

    def connect(self, address: tuple[str, int], timeout: float) -> Stream:
        self.dialed += 1
        return super().connect(address, timeout)


@pytest.fixture
def suspendable() -> Iterator[ServerProcess]:
    """Yield a server that a test may suspend; it is resumed afterwards."""
    with ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process:
        try:
            yield process
        finally:
            os.kill(process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_commit_that_fills_all_buffers_survives_a_suspension_of_the_server(
    suspendable: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the connection: it treats full buffers that the peer does not read like a vanished host."""
    monkeypatch.setattr(streams, "HOST_SILENCE_SECONDS", 1)
    with contextlib.closing(DriverClient(suspendable.address, PATIENT)) as driver:
        driver.publish(np.zeros(SIZE, np.float32))
    world = CountingWorld()
    deadlines = dataclasses.replace(PATIENT, handshake=brief(0.5), reconnect=brief(0.9), standstill=patience(30))
    worker = WorkerClient(suspendable.address, worker=0, attempt=0, size=SIZE, deadlines=deadlines, world=world)
    with contextlib.closing(worker):
        worker.join()
        worker.pull()
        os.kill(suspendable.pid, signal.SIGSTOP)
        replies: list[np.ndarray | None] = []

        def commit() -> None:
            record = CommitRecord(0, 0, 0, False, True, 0.1, 1.0, (np.ones(SIZE, np.float32),))
            replies.append(worker.commit(record).center)

        thread = threading.Thread(target=commit, daemon=True)
        thread.start()
        # Only the first connection was answered; two unanswered handshakes exceed `reconnect`.
        until(lambda: world.dialed > 3)
        worker.deadlines = dataclasses.replace(deadlines, handshake=PATIENT.handshake)
        os.kill(suspendable.pid, signal.SIGCONT)
        thread.join(patience(30))
        (center,) = replies
        np.testing.assert_array_equal(center, np.ones(SIZE))
