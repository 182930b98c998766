"""A stranger that listens at the server's port while the server is down: clients dial until the server is back."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.patience import brief
from support.ps.relay import Relay
from support.ps.running_server import Running

from distkeras.ps.errors import AuthenticationError, ServerLostError
from distkeras.ps.protocol.framing import Connection
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient

pytestmark = pytest.mark.timeout(60)

SIZE = 3


def another_key(sock: socket.socket) -> None:
    """Answer as a server of another job."""
    sock.sendall(b"".join(map(bytes, Connection(server=True, key=bytes(32)).start())))
    sock.recv(4096)
    sock.sendall(b"".join(map(bytes, Connection(server=True, key=bytes(32)).refusal())))


def another_protocol(sock: socket.socket) -> None:
    """Answer as a server of another protocol that sends first."""
    sock.sendall(b"220 mail.example.com ESMTP ready and willing, as ever\r\n")
    sock.recv(4096)


IMPOSTORS = [another_key, another_protocol]


@pytest.fixture
def running() -> Iterator[Running]:
    with Running(make("downpour"), workers=1, size=SIZE) as running:
        yield running


@pytest.fixture
def relay(running: Running) -> Iterator[Relay]:
    with contextlib.closing(Relay(running.server.address)) as relay:
        yield relay


def record(batch: int) -> CommitRecord:
    return CommitRecord(0, batch, batch, False, True, 0.1, 1.0, (np.ones(SIZE, np.float32),))


@pytest.mark.parametrize("impostor", IMPOSTORS)
@pytest.mark.parametrize("joined", [False, True])
def test_a_worker_dials_until_the_server_is_back(
    running: Running, relay: Relay, impostor: Callable[[socket.socket], None], joined: bool
) -> None:
    worker = WorkerClient(relay.address, worker=0, attempt=0, size=SIZE, deadlines=running.deadlines)
    with contextlib.closing(worker):
        if joined:
            worker.join()
            worker.pull()
            worker.commit(record(0))
        relay.impostors = [impostor] * 3
        relay.cut()
        if not joined:
            worker.join()
            worker.pull()
        worker.commit(record(int(joined)))
        assert relay.impostors == []
        assert running.driver.center().clock == 1 + joined


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_a_driver_that_has_reached_its_server_takes_a_stranger_for_a_lost_server(
    running: Running, relay: Relay, impostor: Callable[[socket.socket], None]
) -> None:
    with contextlib.closing(DriverClient(relay.address, running.deadlines)) as driver:
        driver.center()
        relay.impostors = [impostor]
        relay.cut()
        for _ in range(2):  # The first request may find the cut connection.
            with contextlib.suppress(ServerLostError):
                driver.center()
        assert relay.impostors == []
        assert driver.center().clock == 0


def test_the_error_reports_a_stranger_that_keeps_the_port(running: Running, relay: Relay) -> None:
    relay.impostors = [another_key] * 10**6
    deadlines = dataclasses.replace(running.deadlines, reconnect=brief(0.5))
    worker = WorkerClient(relay.address, worker=0, attempt=0, size=SIZE, deadlines=deadlines)
    with pytest.raises(AuthenticationError, match=r"must be reached within .* does not hold this job's key"):
        worker.join()
    driver = DriverClient(relay.address, deadlines)
    with pytest.raises(AuthenticationError):
        driver.center()
    driver = DriverClient(relay.address, deadlines, met=True)  # The driver has started the server.
    with pytest.raises(ServerLostError, match="has lost its port"):
        driver.center()


def test_a_changed_reply_is_requested_again_over_another_connection(running: Running, relay: Relay) -> None:
    worker = WorkerClient(relay.address, worker=0, attempt=0, size=SIZE, deadlines=running.deadlines)
    with contextlib.closing(worker):
        worker.join()
        worker.pull()
        worker.commit(record(0))
        relay.change, relay.left = (np.full(SIZE, 2, np.float32).tobytes(), bytes(4 * SIZE)), 1
        np.testing.assert_array_equal(worker.commit(record(1)).center, np.full(SIZE, 2))
        assert relay.left == 0
        assert running.driver.center().clock == 2
