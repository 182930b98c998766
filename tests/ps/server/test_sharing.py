"""Workers that share memory with their server: the same numbers as over the connection, also after deaths."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import brief, patience, until
from support.ps.clocks import counting_pieces
from support.ps.relay import Relay
from support.ps.running_server import KEY, Running
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import ServerLostError
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.rules import center_rules, make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address, make_certificate, server_context
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker
from distkeras.ps.world.world import REAL, World

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files"),
]

SIZE = 3001
#: The import path of this process, for a child process.
PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))


@pytest.fixture
def pieces() -> Callable[[int], int]:
    """Return a function that counts a process's mapped pieces of shared memory that this test has added."""
    return counting_pieces()


def trained(rule: str, *, shared: bool, **options: Any) -> tuple[bytes, bytes]:
    """Return the center after some commits of one worker, and their records."""
    values = [np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) for seed in range(7)]
    hyper_parameters = {"window": 2} if make(rule).window not in (1, "auto") else {}
    with Running(make(rule, **hyper_parameters), workers=1, size=SIZE) as running:
        client, welcome, begin = toy_client(
            running.address,
            running.rule,
            values,
            worker=0,
            size=SIZE,
            shared=shared,
            deadlines=running.deadlines,
            **options,
        )
        assert client.shares_memory == shared
        run_worker(client, welcome, begin)
        client.close()
        records = running.driver.drain().commits.view(COMMIT)
        names = [name for name in COMMIT.names or () if name not in ("timestamp", "wait")]
        assert records.size
        return running.driver.center().center.tobytes(), repr(records[names].tolist()).encode()


@pytest.mark.parametrize("rule", center_rules())
def test_every_rule_gives_the_same_result_with_and_without_shared_memory(rule: str) -> None:
    assert trained(rule, shared=True) == trained(rule, shared=False)


@pytest.mark.parametrize(
    "options",
    [{"wire_format": "bfloat16"}, {"wire_format": "int8"}, {"overlap": True}, {"wire_format": "int8", "overlap": True}],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_wire_format_gives_the_same_result_with_and_without_shared_memory(options: dict[str, Any]) -> None:
    assert trained("downpour", shared=True, **options) == trained("downpour", shared=False, **options)


def record(parts: tuple[np.ndarray, ...], first: int) -> CommitRecord:
    return CommitRecord(0, first, first, False, True, 0.1, 1.0, parts)


def commit(client: WorkerClient, number: int) -> np.ndarray:
    """Commit ones; return the center of the reply."""
    parts = client.payload(1)
    parts[0].fill(1.0)
    center = client.commit(record(parts, number)).center
    assert center is not None
    return center


def test_an_encrypted_connection_shares_memory_too() -> None:
    certificate = make_certificate()
    settings = ServerSettings(make("downpour"), workers=1)
    with ParameterServer(settings, KEY, context=server_context(certificate)) as server:
        address = Address(*server.address, KEY, certificate.certificate)
        driver = DriverClient(address)
        driver.publish(np.zeros(SIZE, np.float32))
        client = WorkerClient(address, worker=0, attempt=0, size=SIZE, shared_parts=1)
        with contextlib.closing(client), contextlib.closing(driver):
            client.join()
            client.pull()
            assert client.shares_memory
            assert set(commit(client, 0)) == {1.0}


@pytest.mark.slow
def test_a_new_connection_has_shared_memory_of_its_own(pieces: Callable[[int], int]) -> None:
    """A payload that was written for the lost connection and not answered is sent again, and counts once."""
    with (
        Running(make("downpour"), workers=1, size=SIZE) as running,
        contextlib.closing(Relay(running.server.address)) as relay,
    ):
        client = WorkerClient(
            relay.address, worker=0, attempt=0, size=SIZE, shared_parts=1, deadlines=running.deadlines
        )
        with contextlib.closing(client):
            client.join()
            client.pull()
            first = commit(client, 0)
            parts = client.payload(1)
            parts[0].fill(1.0)
            before = parts[0].__array_interface__["data"]
            relay.cut()
            center = client.commit(record(parts, 1)).center
            assert client.shares_memory
            assert set(first) == {1.0}  # The worker still maps the memory of the lost connection.
            assert center is not None
            assert set(center) == {2.0}
            assert client.payload(1)[0].__array_interface__["data"] != before
            assert set(commit(client, 2)) == {3.0}
            assert running.driver.drain().commits.view(COMMIT)["sequence"].tolist() == [1, 2, 3]
            del first, center, parts
            until(lambda: pieces(os.getpid()) == 2)
        del client  # It refers to the last center that it received.
        until(lambda: pieces(os.getpid()) == 0)


@pytest.mark.parametrize("kind", ["another process", "no token", "nothing there", "a name"])
def test_a_worker_that_names_anything_but_its_own_memory_shares_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(make("downpour"), workers=1, size=SIZE) as running, tempfile.TemporaryFile() as file:
        file.write(b"mine" * 50_000)
        file.flush()

        class WorldWithFalsePlace(World):
            def share(self, size: int) -> Any:
                shared: Any = super().share(size)
                if kind == "another process":
                    shared.place = f"{os.getpid()}/{file.fileno()}"
                elif kind == "nothing there":
                    shared.place = f"{os.getpid()}/999999"
                elif kind == "a name":
                    shared.place = "../../../etc/passwd"
                else:
                    self.other = REAL.share(size)
                    shared.place = self.other.place
                return shared

        client = running.client(size=SIZE, shared_parts=1, world=WorldWithFalsePlace())
        with caplog.at_level(logging.INFO, "distkeras"), contextlib.closing(client):
            client.join()
            client.pull()
            assert not client.shares_memory
            assert set(commit(client, 0)) == {1.0}
        assert "the vectors of partition 0 travel over its connection" in caplog.text
        file.seek(0)
        assert file.read() == b"mine" * 50_000


def test_a_worker_that_cannot_share_memory_logs_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class WorldWithoutMemory(World):
        def share(self, size: int) -> Any:
            raise OSError(12, "no room")

    with Running(make("downpour"), workers=1, size=SIZE) as running:
        client = running.client(size=SIZE, shared_parts=1, world=WorldWithoutMemory())
        with caplog.at_level(logging.INFO, "distkeras"), contextlib.closing(client):
            client.join()
            client.pull()
            assert not client.shares_memory
            assert set(commit(client, 0)) == {1.0}
        assert "cannot share memory: [Errno 12] no room" in caplog.text


#: A worker that is killed while it writes a payload ("half"), or once its commit is sent ("sent").
DYING = """
import os, signal, sys
import numpy as np
from distkeras.ps.protocol.messages import CommitRecord
from distkeras.ps.transport.client import Address, Channel
from distkeras.ps.transport.worker_client import WorkerClient
port, size, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
address = Address("127.0.0.1", port, bytes.fromhex(sys.argv[4]))
client = WorkerClient(address, worker=0, attempt=0, size=size, shared_parts=1)
client.join()
client.pull()
assert client.shares_memory
for number in range(2):
    parts = client.payload(1)
    parts[0].fill(1.0)
    if number and when == "half":
        parts[0][: size // 2] = -1000.0
        os.kill(os.getpid(), signal.SIGKILL)
    if number:
        send = client.channel.send
        client.channel.send = lambda message: (send(message), os.kill(os.getpid(), signal.SIGKILL))
    client.commit(CommitRecord(0, number, number, False, True, 0.1, 1.0, parts))
"""


@pytest.mark.parametrize(("when", "applied"), [("half", {1}), pytest.param("sent", {2}, marks=pytest.mark.slow)])
def test_the_successor_of_a_killed_worker_continues_exactly(
    when: str, applied: set[int], pieces: Callable[[int], int]
) -> None:
    with Running(make("downpour"), workers=1, size=SIZE) as running:
        port = str(running.server.address[1])
        command = [sys.executable, "-c", DYING, port, str(SIZE), when, KEY.hex()]
        died = subprocess.run(command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, timeout=patience(60), check=False)
        assert died.returncode == -signal.SIGKILL
        until(lambda: running.driver.observe(-1, 0.0).clock in applied)
        client = running.client(attempt=1, size=SIZE, shared_parts=1)
        with contextlib.closing(client):
            (count,) = applied
            assert client.join().sequence == count
            center = client.pull().center
            assert center is not None
            assert set(center) == {float(count)}
            assert client.shares_memory
            assert set(commit(client, count)) == {count + 1.0}
            del center
        del client  # It refers to the last center that it received.
        until(lambda: pieces(os.getpid()) == 0)


def test_a_killed_server_leaves_no_shared_memory_behind(pieces: Callable[[int], int]) -> None:
    deadlines = Deadlines(reconnect=brief(0.5))
    with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
        driver = DriverClient(process.address)
        driver.publish(np.zeros(SIZE, np.float32))
        driver.close()
        client = WorkerClient(process.address, worker=0, attempt=0, size=SIZE, shared_parts=1, deadlines=deadlines)
        client.join()
        client.pull()
        assert pieces(process.pid) == 1
        assert pieces(os.getpid()) == 1
        assert set(commit(client, 0)) == {1.0}
        os.kill(process.pid, signal.SIGKILL)
        problem = ""
        try:
            commit(client, 1)
        except ServerLostError as error:  # Its traceback refers to the payload.
            problem = error.message
        assert "must be reached within" in problem
        client.close()
        del client  # It refers to the last center that it received.
        until(lambda: pieces(os.getpid()) == 0)
