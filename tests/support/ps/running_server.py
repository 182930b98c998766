"""A real server in the test's own process, its driver's connection, workers in threads, and sockets below channels."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from distkeras.ps.protocol.loop import CommitRecord, PullRequest, Reply
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
from support.patience import PATIENT, patience
from support.ps.toy_model import Connected, Values, toy_client

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
        lends: bool = False,
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
            lends=lends,
        )
        self.server = ParameterServer(settings, KEY, world=world)
        self.address = Address(*self.server.address, KEY)
        self.server.start()
        self.driver = DriverClient(self.address, deadlines)
        vector = np.zeros(size, np.float32) if start is None else np.asarray(start, np.float32)
        statistics = (
            np.zeros(moving_statistics, np.float32) if isinstance(moving_statistics, int) else moving_statistics
        )
        rows = [] if tables is None else tables.whole_rows()
        self._publication = (vector, statistics, b"the model", layouts, rows)
        if publish:
            self.publish()

    def publish(self) -> None:
        self.driver.publish(*self._publication)

    def client(self, worker: int = 0, attempt: int = 0, size: int = SIZE, **options: Any) -> WorkerClient:
        options.setdefault("deadlines", self.deadlines)
        return WorkerClient(self.address, worker=worker, attempt=attempt, size=size, **options)

    def train(self, worker: int, values: Values, *, size: int = SIZE, **options: Any) -> WorkerThread:
        """Start a worker in a thread; ``options`` are those of `toy_client`."""
        options = {"deadlines": self.deadlines} | options
        return WorkerThread(lambda: toy_client(self.address, self.rule, values, worker=worker, size=size, **options))

    def turns(self, worker: int, values: Values, *, size: int = SIZE, **options: Any) -> Turns:
        """Return a worker that takes turns; ``options`` are those of `toy_client`."""
        options = {"deadlines": self.deadlines} | options
        return Turns(toy_client(self.address, self.rule, values, worker=worker, size=size, **options))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.driver.close()
        self.server.close()


class WorkerThread(threading.Thread):
    """A worker in a thread, which has started.

    Args:
        connect: what `toy_client` returns, called in the thread.
    """

    def __init__(self, connect: Callable[[], Connected]) -> None:
        super().__init__(daemon=True)
        self._connect = connect
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            client, welcome, begin = self._connect()
            with contextlib.closing(client):
                run_worker(client, welcome, begin)
        except Exception as error:  # noqa: BLE001 - `ended` returns it
            self._error = error

    def ended(self, timeout: float = 60) -> Exception | None:
        """Wait for the worker's end; return its error."""
        self.join(patience(timeout))
        assert not self.is_alive()
        return self._error


class Turns:
    """A worker that performs one exchange at a time; it has pulled and computed its first window.

    Attributes:
        record: what the next turn commits.
        over: whether the worker has left.
    """

    record: CommitRecord

    def __init__(self, connected: Connected) -> None:
        self.client, welcome, begin = connected
        self._loop, self.over = begin(welcome), False
        self._answer(None)

    def _answer(self, reply: Reply | None) -> None:
        """Run the worker up to its next commit or its end."""
        try:
            request = self._loop.send(reply)
            while not isinstance(request, CommitRecord):
                request = self._loop.send(self.client.pull(request.wants) if isinstance(request, PullRequest) else None)
            self.record = request
        except StopIteration:
            self.over = True
            self.client.leave()
            self.client.close()

    def turn(self) -> Reply:
        """Commit, and compute the next window."""
        reply = self.client.commit(self.record)
        self._answer(reply)
        return reply


def socket_of(channel: Channel) -> socket.socket:
    """Return the socket of ``channel``."""
    assert isinstance(channel.stream, TcpStream)
    return channel.stream.sock
