"""The task of a server in the cluster, here in a thread: its announcement, its end, and its errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.patience import PATIENT, patience, until

from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.checkpoint.ownership import AnnouncedAddress, find, parsed
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ERRORS, OwnershipLostError, ServerLostError
from distkeras.ps.protocol.framing import encode
from distkeras.ps.rules import make
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.start_report import NotStarted, report_from_json
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Certificate, make_certificate
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.training.server_task import REPORT, ServerTask

KEY = bytes(range(32))
SIZE = 5


def task(
    folder: Path,
    *,
    fresh: bool = True,
    job: dict[str, Any] | None = None,
    token: str = "0000000a",
    certificate: Certificate | None = None,
) -> ServerTask:
    settings = ServerSettings(
        make("downpour", window=1), workers=1, deadlines=PATIENT, checkpoint=Checkpoint(str(folder), every=1)
    )
    mode = StartMode(fresh=fresh, same_attempts=False, epochs=1)
    request = StartRequest(settings, KEY, certificate, mode, job or {}, token)
    return ServerTask(request, b"".join(encode(publication(np.zeros(SIZE, np.float32), model=b"the model"))))


class Running(threading.Thread):
    """A running server task."""

    def __init__(self, task: ServerTask) -> None:
        super().__init__(daemon=True)
        self.task = task
        self.batches: list[pa.RecordBatch] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.batches = list(self.task.run(iter(())))
        except Exception as error:  # noqa: BLE001 - the test reads it
            self.error = error

    def rows(self) -> list[tuple[str, str]]:
        self.join(patience(60))
        assert not self.is_alive()
        return [(row["kind"], row["text"]) for batch in self.batches for row in batch.to_pylist()]


@contextmanager
def driver(folder: Path, certificate: str = "") -> Iterator[DriverClient]:
    client = DriverClient(AnnouncedAddress("", 0, KEY, certificate, str(folder)), PATIENT)
    try:
        yield client
    finally:
        client.close()


def incarnation(folder: Path) -> int:
    """Return the incarnation of the announced server; 0 if there is none."""
    names = filter(None, map(parsed, Store(str(folder)).names()))
    return max((name.claim.incarnation for name in names if name.kind == "server"), default=0)


def test_a_server_answers_at_its_announced_address_until_goodbye(tmp_path: Path) -> None:
    running = Running(task(tmp_path))
    until(lambda: incarnation(tmp_path) == 1)
    with driver(tmp_path) as client:
        assert client.center().center.tolist() == [0.0] * SIZE
        client.goodbye()
        assert running.rows() == []
        assert running.error is None
        with pytest.raises(ServerLostError):
            client.ping()


def test_a_server_does_not_claim_the_checkpoint_after_sparks_driver_has_ended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as spark:
        address = spark.getsockname()
        running = Running(replace(task(tmp_path), driver=address))
        until(lambda: incarnation(tmp_path) == 1)
        with driver(tmp_path) as client:
            client.goodbye()
        assert running.rows() == []
    late = Running(replace(task(tmp_path, fresh=False, token="0000000b"), driver=address))
    assert late.rows() == []
    assert isinstance(late.error, ServerLostError)
    assert "driver has ended" in late.error.message
    assert incarnation(tmp_path) == 1


def test_a_server_encrypts(tmp_path: Path) -> None:
    certificate = make_certificate()
    running = Running(task(tmp_path, certificate=certificate))
    until(lambda: incarnation(tmp_path) == 1)
    with driver(tmp_path, certificate.certificate) as client:
        assert client.center().center.tolist() == [0.0] * SIZE
        client.goodbye()
    running.rows()
    assert running.error is None


def test_a_server_cannot_take_the_folder_from_a_newer_job(tmp_path: Path) -> None:
    """The newer job's server removes the files of the older job; a new attempt of the older one finds none."""
    SnapshotDirectory(str(tmp_path), token="0000000b").take_over()
    running = Running(task(tmp_path, fresh=False))
    until(lambda: incarnation(tmp_path) > 1)
    with driver(tmp_path) as client:
        client.goodbye()
    running.rows()
    for path in tmp_path.glob("*0000000b*"):
        path.unlink()
    report = task(tmp_path, fresh=False, token="0000000b").serve(1)
    assert isinstance(report, NotStarted)
    assert report.code == ERRORS.index(OwnershipLostError)


def test_an_error_that_another_attempt_would_repeat_is_reported(tmp_path: Path) -> None:
    running = Running(task(tmp_path, job={"batch_size": 1}))
    until(lambda: incarnation(tmp_path) == 1)
    with driver(tmp_path) as client:
        client.goodbye()
    running.rows()
    for other, text in (
        (task(tmp_path, token="0000000b"), "must be an empty directory"),
        (task(tmp_path, fresh=False, job={"batch_size": 2}, token="0000000b"), "batch_size"),
    ):
        (report,) = [report_from_json(said) for kind, said in Running(other).rows() if kind == REPORT]
        assert isinstance(report, NotStarted)
        assert text in report.error


def test_no_server_is_found_before_its_announcement(tmp_path: Path) -> None:
    with pytest.raises(ServerLostError, match="there is no server's claim"):
        find(str(tmp_path))
    snapshots = SnapshotDirectory(str(tmp_path), token="0000000a")
    snapshots.take_over()
    with pytest.raises(ServerLostError, match="has not announced its address yet"):
        find(str(tmp_path))
    snapshots.announce({"host": "127.0.0.1", "port": 1})
    assert find(str(tmp_path)) == {"host": "127.0.0.1", "port": 1}
    SnapshotDirectory(str(tmp_path), token="0000000a").take_over()
    with pytest.raises(ServerLostError, match="has not announced its address yet"):
        find(str(tmp_path))
