"""A server whose machine has no free memory for a while."""

from __future__ import annotations

import resource
import sys

import numpy as np
import psutil
import pytest
from support.patience import PATIENT

from distkeras.ps.errors import ServerLostError
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.training.supervisor import Supervisor

SIZE = 30_000_000
#: Bytes that are enough for a connection's thread and too few for a vector.
ROOM = 64 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the test sets limits of another process")
def test_a_center_that_the_server_has_no_memory_for_is_sent_again() -> None:
    start = np.zeros(SIZE, np.float32)
    failed: list[ServerLostError] = []

    def publish(driver: DriverClient) -> None:
        try:
            driver.publish(start)
        except ServerLostError as error:
            failed.append(error)
            resource.prlimit(process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            raise

    with ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)) as process:
        mapped = psutil.Process(process.pid).memory_info().vms
        resource.prlimit(process.pid, resource.RLIMIT_AS, (mapped + ROOM, resource.RLIM_INFINITY))
        with Supervisor(process, publish) as server:
            assert len(failed) == 1
            assert server.ask(lambda driver: driver.center().center.size) == SIZE
            assert server.restarts == 0
