"""A real server in the test's own process, with its driver's connection."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.rules import Rule
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.worker.client import WorkerClient

KEY = bytes(range(32))
SIZE = 140_001  # several chunks, and not a multiple of one
QUICK = Deadlines(connect=5, handshake=2, frame=5, publish=5, gather=1, reply=5, lease=5, reconnect=2, close=5)


class Running:
    """A server that serves, and has been sent a center of ``size`` elements (zeros, unless ``start`` is given)."""

    def __init__(
        self,
        rule: Rule,
        *,
        workers: int = 2,
        size: int = SIZE,
        deadlines: Deadlines = QUICK,
        start: Any = None,
        eta: Any = 0.1,
        moving_statistics: int = 0,
        max_skipped: int = 0,
        layouts: Any = (),
        scheduler: Any = lambda: None,
    ) -> None:
        self.rule = rule
        self.deadlines = deadlines

        def center(vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
            eta_here = eta if rule.traits.gradient else None
            options = {"learning_rate": eta_here, "moving_statistics": moving_statistics, "scheduler": scheduler()}
            return Center(rule, vector, workers=workers, **options)

        self.server = ParameterServer(center, key=KEY, deadlines=deadlines, max_skipped=max_skipped)
        self.address = Address(*self.server.address, KEY)
        self.server.start()
        self.driver = DriverClient(self.address, deadlines)
        vector = np.zeros(size, np.float32) if start is None else np.asarray(start, np.float32)
        self.driver.publish(vector, np.zeros(moving_statistics, np.float32), b"the model", layouts)

    def client(self, worker: int = 0, attempt: int = 0, size: int = SIZE, **options: Any) -> WorkerClient:
        options.setdefault("deadlines", self.deadlines)
        return WorkerClient(self.address, worker=worker, attempt=attempt, size=size, **options)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.driver.close()
        self.server.close()
