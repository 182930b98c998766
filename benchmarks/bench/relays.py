"""The server's load with groups: the same workers without groups, and in one group or several, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from bench.measure import Case
from bench.processes import ExchangeClient, Fleet, cpu_seconds
from bench.rig import Shapes, WorkerExchange, elements
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient

#: The targets by the number of groups: windows per second of the server's processor time, relative to no groups.
_TARGETS = {1: 4.0, 2: 2.5, 8: 0.8}
#: Windows of each worker in a run.
_WINDOWS = 10


@contextmanager
def loads(section: str, shapes: Shapes, workers: int) -> Iterator[list[Case]]:
    """Yield cases of the server's load from ``workers`` workers, over connections."""
    size = elements(shapes)
    connect: dict[str, Callable[[int], ExchangeClient]] = {}
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for relays in (None, *_TARGETS):
            side = str(relays)
            settings = ServerSettings(make("downpour"), workers=workers, relays=relays)
            servers[side] = server = stack.enter_context(ServerProcess(settings))
            driver = DriverClient(server.address)
            driver.publish(np.zeros(size, np.float32))
            driver.close()
            group = None if relays is None else workers
            connect[side] = partial(WorkerExchange, address=server.address, size=size, group=group)
        fleet = stack.enter_context(Fleet(workers, connect))
        for side in connect:
            fleet.run(side, 0.0, count=1)

        def windows_per_cpu_second(side: str) -> float:
            before = cpu_seconds(servers[side].pid)
            exchanges = fleet.run(side, 0.0, count=_WINDOWS).exchanges
            return exchanges / (cpu_seconds(servers[side].pid) - before)

        def note(side: str) -> str:
            driver = DriverClient(servers[side].address)
            commits = driver.drain().commits.view(COMMIT)
            driver.close()
            sent = np.count_nonzero(commits["bytes"]) / len(commits)
            received = commits["bytes"].sum() / (len(commits) * 4 * size)
            return f"a window takes {sent:.3g} commits and {received:.3g} vectors to the server; naive: without groups"

        yield [
            Case(
                section,
                f"{4e-6 * size:.3g} MB, {workers} workers in {relays} group{'s' * (relays > 1)}",
                "windows/server's processor second",
                partial(windows_per_cpu_second, str(relays)),
                None,
                partial(windows_per_cpu_second, "None"),
                target_naive=target,
                turns=2,
                note=partial(note, str(relays)),
            )
            for relays, target in _TARGETS.items()
        ]
