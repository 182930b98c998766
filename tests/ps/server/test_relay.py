"""Somebody between worker and server who changes what passes: without TLS, tags find it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.patience import brief, patience
from support.running_server import KEY, Running

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import ServerLostError
from distkeras.ps.protocol.commit_record import CommitRecord
from distkeras.ps.protocol.sealing import LONG
from distkeras.ps.rules import make
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.worker_client import WorkerClient

pytestmark = pytest.mark.timeout(60)

ONES = np.full(8, 1.0, np.float32).tobytes()
FORGED = np.full(8, -1000.0, np.float32).tobytes()
#: Larger than a read of the relay, so that it always finds what it looks for.
SHORT, LONGER = LONG // 8, 2 * LONG


class Relay:
    """Passes everything on, both ways; changes the first ``changes`` vectors of ones on their way to the server."""

    def __init__(self, where: tuple[str, int], changes: int) -> None:
        self._where = where
        self.left = changes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1], KEY)
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._where, timeout=patience(20))
                self._socks += [near, far]
                for source, sink, forge in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=(source, sink, forge), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, forge: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if forge and self.left and ONES in data:
                    self.left -= 1
                    data = data.replace(ONES, FORGED)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for sock in self._socks:
            sock.close()


@contextlib.contextmanager
def attacked(size: int, changes: int, *, vectors: bool = False) -> Iterator[tuple[Running, Relay, WorkerClient]]:
    with Running(make("downpour"), workers=1, size=size, authenticate_vectors=vectors) as running:
        relay = Relay(running.server.address, changes)
        client = WorkerClient(relay.address, worker=0, attempt=0, size=size, deadlines=running.deadlines)
        with contextlib.closing(relay), contextlib.closing(client):
            client.join()
            client.pull()
            yield running, relay, client


def ones(size: int) -> CommitRecord:
    return CommitRecord(0, 0, 0, False, True, 0.1, 1.0, (np.ones(size, np.float32),))


@pytest.mark.parametrize(("size", "vectors"), [(SHORT, False), (LONGER, True)])
def test_a_changed_commit_is_refused_and_sent_again(size: int, vectors: bool) -> None:
    with attacked(size, changes=1, vectors=vectors) as (running, relay, client):
        reply = client.commit(ones(size))
        assert relay.left == 0
        np.testing.assert_array_equal(reply.center, np.ones(size, np.float32))
        records = running.driver.drain().commits.view(COMMIT)
        assert records["sequence"].tolist() == [1]
        (refusal,) = running.server.admission.refusals
        assert "as its sender sealed it" in refusal.reason


def test_one_who_changes_every_commit_ends_the_task_and_not_the_center() -> None:
    with attacked(SHORT, changes=10**9) as (running, _, client):
        client.deadlines = dataclasses.replace(client.deadlines, reconnect=brief(0.5))
        with pytest.raises(ServerLostError):
            client.commit(ones(SHORT))
        assert running.driver.center().clock == 0
        assert running.server.fault is None
