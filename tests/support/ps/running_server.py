"""A real server in the test's own process, its driver's connection, workers in threads, and sockets below channels."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np

from distkeras.ps.rules import Rule
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address, Channel
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker
from distkeras.ps.world.streams import TcpStream
from distkeras.ps.world.world import REAL, World
from support.patience import PATIENT
from support.ps.toy_model import toy_client

KEY = bytes(range(32))
SIZE = 140_001  # Several chunks, and not a multiple of one.


class Running:
    """A running server that has received a center of ``size`` elements (zeros, unless ``start`` is given).

    ``moving_statistics`` are an array, or a number of zeros; ``tables`` are `ToyTables`, and ``start`` is then their
    dense vector.
    """

    def __init__(  # noqa: PLR0913 - keywords, of which a test gives few
        self,
        rule: Rule,
        *,
        workers: int = 2,
        size: int = SIZE,
        deadlines: Deadlines = PATIENT,
        start: Any = None,
        eta: Any = 0.1,
        moving_statistics: Any = 0,
        max_skipped: int = 0,
        layouts: Any = (),
        staleness_bound: int | None = None,
        world: World = REAL,
        tables: Any = None,
        publish: bool = True,
        groups: Any = None,
    ) -> None:
        self.rule = rule
        self.deadlines = deadlines
        settings = ServerSettings(
            rule,
            workers=workers,
            learning_rate=eta if rule.traits.gradient else None,
            staleness_bound=staleness_bound,
            max_skipped=max_skipped,
            deadlines=deadlines,
            tables=() if tables is None else tables.shapes,
            relays=groups,
        )
        self.server = ParameterServer(settings, KEY, world=world)
        self.address = Address(*self.server.address, KEY)
        self.server.start()
        self.driver = DriverClient(self.address, deadlines)
        vector = np.zeros(size, np.float32) if start is None else np.asarray(start, np.float32)
        statistics = (
            np.zeros(moving_statistics, np.float32) if isinstance(moving_statistics, int) else moving_statistics
        )
        rows = [] if tables is None else list(zip(tables.shapes, tables.rows, strict=True))
        self._publication = (vector, statistics, b"the model", layouts, rows)
        if publish:
            self.publish()

    def publish(self) -> None:
        self.driver.publish(*self._publication)

    def client(self, worker: int = 0, attempt: int = 0, size: int = SIZE, **options: Any) -> WorkerClient:
        options.setdefault("deadlines", self.deadlines)
        return WorkerClient(self.address, worker=worker, attempt=attempt, size=size, **options)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.driver.close()
        self.server.close()


def running_worker(
    running: Running, worker: int, values: list[np.ndarray], attempt: int = 0
) -> tuple[threading.Thread, list[Any]]:
    """Start a worker in a thread of its own; return the thread, and the list that receives its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            client, welcome, begin = toy_client(
                running.address,
                running.rule,
                values,
                worker=worker,
                attempt=attempt,
                size=SIZE,
                deadlines=running.deadlines,
            )
            run_worker(client, welcome, begin)
            client.close()
        except Exception as error:  # noqa: BLE001 - the caller inspects it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def socket_of(channel: Channel) -> socket.socket:
    """Return the socket of ``channel``."""
    assert isinstance(channel.stream, TcpStream)
    return channel.stream.sock
