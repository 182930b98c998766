"""An honest worker that trains while others attack the server, and the center that it would reach undisturbed."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.protocol.framing import Connection, EndOfStream
from distkeras.ps.protocol.loop import Compute, PullRequest, Reply
from distkeras.ps.rules import make
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import work
from support.patience import patience
from support.ps.running_server import KEY, Running
from support.ps.toy_model import ToyBatch, ToyReplica

RULE = make("downpour", window=1)
#: How often the honest worker's connection is cut on purpose, after which it must reconnect.
COMMITS_PER_CUT = 7
MIN_STEPS = 20


def gradient(theta: np.ndarray, value: float) -> np.ndarray:
    return theta * np.float32(0.1) + np.float32(value)


class HonestWorker(threading.Thread):
    """A worker that trains with ``size`` parameters until `finish`; its connection is cut at times."""

    def __init__(self, address: Address, size: int, deadlines: Any) -> None:
        super().__init__(daemon=True)
        self.client = WorkerClient(address, worker=0, attempt=0, size=size, deadlines=deadlines)
        self.steps = 0
        self.over = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def _batches(self) -> Iterator[ToyBatch]:
        last = False
        while not last:
            last = self.over.is_set() and self.steps >= MIN_STEPS
            self.steps += 1
            yield ToyBatch(0, self.steps - 1, last, 1.0 / self.steps)

    def run(self) -> None:
        try:
            self.client.join()
            drive(self.client, self._batches(), cut=True)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self.error = error

    def finish(self) -> int:
        """End the training; return the number of steps."""
        self.over.set()
        self.join(patience(60))
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.steps


def drive(client: WorkerClient, batches: Iterator[ToyBatch], *, cut: bool) -> None:
    replica = ToyReplica(client.size, 0.1, gradient, np.float32)
    loop = work(RULE, replica, batches, lambda: client.payload(1))
    request: Any = next(loop)
    reply: Reply | None
    commits = 0
    with contextlib.suppress(StopIteration):
        while True:
            if isinstance(request, Compute):
                reply = None
            elif isinstance(request, PullRequest):
                reply = client.pull()
            else:
                commits += 1
                if cut and commits % COMMITS_PER_CUT == 0 and client.channel is not None:
                    client.channel.hang_up()
                reply = client.commit(request)
            request = loop.send(reply)
    client.leave()
    client.close()


def undisturbed_center(steps: int, size: int, deadlines: Any) -> np.ndarray:
    """Return the center after ``steps`` steps of one worker alone."""
    with Running(RULE, workers=1, size=size) as running:
        client = WorkerClient(running.address, worker=0, attempt=0, size=size, deadlines=deadlines)
        client.join()
        drive(client, (ToyBatch(0, i, i == steps - 1, 1.0 / (i + 1)) for i in range(steps)), cut=False)
        return running.driver.center().center.copy()


def assert_every_step_committed_once(honest: HonestWorker, driver: DriverClient) -> None:
    """Check that every step is committed once, in order, and that the center is bitwise the undisturbed one."""
    steps = honest.finish()
    records = driver.drain(count=steps + 1)
    commits = records.commits.view(COMMIT)
    np.testing.assert_array_equal(commits["first_batch"], np.arange(steps))
    np.testing.assert_array_equal(commits["sequence"], np.arange(1, steps + 1))
    assert set(commits["worker"]) == {0}
    size = honest.client.size
    np.testing.assert_array_equal(driver.center().center, undisturbed_center(steps, size, honest.client.deadlines))


def connect_unauthenticated(address: tuple[str, int], source: str = "127.0.0.1") -> socket.socket:
    """Open a connection without a handshake; closing it does not leave its port in use."""
    sock = socket.socket()
    sock.settimeout(patience(10))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.bind((source, 0))
    sock.connect(address)
    return sock


def read_to_eof(sock: socket.socket) -> bytes:
    """A mini-batch: the row of each table that each sample looks up, and one number for each sample."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(4096):
            received += piece
    return received


def send_unless_closed(sock: socket.socket, noise: bytes) -> None:
    """Send bytes, unless the server has closed the connection already."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(noise)


class AuthenticatedPeer:
    """A peer that proves the key and then sends arbitrary bytes."""

    def __init__(self, address: tuple[str, int], source: str = "127.0.0.1", key: bytes = KEY) -> None:
        self.sock = connect_unauthenticated(address, source)
        self.connection = Connection(server=False, key=key)
        self.answers: list[bytes] = []
        while not self.connection.authenticated:
            count = self.sock.recv_into(self.connection.spaces()[0])
            event, answer = self.connection.received(count)
            if isinstance(event, EndOfStream):
                raise ConnectionError("the server hung up")
            self.answers += [bytes(part) for part in answer]
            send_unless_closed(self.sock, b"".join(answer))

    def __enter__(self) -> AuthenticatedPeer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()
