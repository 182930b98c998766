"""The driver's handle of a server in the cluster: a suspended server is replaced, and its requests are refused."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from pyspark.sql import SparkSession
from support.patience import PATIENT, brief, until
from support.present import present
from support.ps.clocks import LateWorld

from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.checkpoint.ownership import Name, owner_of
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.protocol.framing import encode
from distkeras.ps.rules import make
from distkeras.ps.server.process import StartRequest
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.training import cluster_server
from distkeras.training.cluster_server import ClusterServer
from distkeras.training.server_task import ServerTask

pytestmark = pytest.mark.timeout(120)
START = np.arange(7, dtype=np.float32)
TOKEN = "0000000a"
#: Number of failures after which Spark gives up a task on the tests' master.
FAILURES = 2


def task(folder: Path) -> ServerTask:
    deadlines = replace(PATIENT, handshake=brief(1))
    settings = ServerSettings(
        make("downpour"), workers=1, deadlines=deadlines, checkpoint=Checkpoint(str(folder), every=1)
    )
    request = StartRequest(settings, bytes(32), None, StartMode(fresh=True, same_attempts=False), {}, TOKEN)
    return ServerTask(request, b"".join(encode(publication(START))))


@contextmanager
def stopped_server(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ClusterServer, Events]]:
    """Yield a server whose process was suspended for the whole deadline, by a clock that is ahead for it alone."""
    events, world = Events(), LateWorld()
    monkeypatch.setattr(cluster_server, "time", world)
    with ClusterServer(spark.range(1), task(folder), events) as server:
        claim = present(owner_of(str(folder))).claim
        pid = Store(str(folder)).load(str(Name("owner", claim)))[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        world.ahead = PATIENT.standstill
        try:
            yield server, events
        finally:
            with contextlib.suppress(ProcessLookupError):  # Spark may have ended its task
                os.kill(pid, signal.SIGKILL)


def center(driver: DriverClient) -> list[float]:
    return driver.center().center.tolist()


@pytest.mark.slow
def test_a_server_that_is_suspended_during_a_request_is_restarted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_server(spark, tmp_path, monkeypatch) as (server, events):
        assert server.ask(center) == START.tolist()
        assert server.restarts == 1
        assert present(owner_of(str(tmp_path))).claim.incarnation > 1
        until(lambda: server.watch() or "restart" in kinds(events))
    assert kinds(events).count("standstill") == 1


@pytest.mark.slow
def test_a_server_that_is_suspended_between_requests_is_restarted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_server(spark, tmp_path, monkeypatch) as (server, _):
        until(lambda: server.watch() or server.restarts)
        assert server.ask(center) == START.tolist()
        assert server.restarts == 1


@pytest.mark.slow
def test_a_server_that_dies_more_often_than_spark_retries_a_task_is_restarted(
    spark: SparkSession, tmp_path: Path
) -> None:
    events = Events()
    with ClusterServer(spark.range(1), task(tmp_path), events) as server:
        last = 0

        def killed() -> bool:
            nonlocal last
            owner = owner_of(str(tmp_path))
            server.watch()
            if owner is None or owner.announced is None or owner.claim.incarnation <= last:
                return False
            last = owner.claim.incarnation
            os.kill(Store(str(tmp_path)).load(str(Name("owner", owner.claim)))[0]["pid"], signal.SIGKILL)
            return True

        for _ in range(FAILURES + 1):
            until(killed)
        assert server.ask(center) == START.tolist()
        assert server.restarts == 1
        # The first event reports the start, the second one the recovery.
        until(lambda: server.watch() or kinds(events).count("restart") == 2)


def test_a_server_that_spark_has_given_up_ends_the_job_of_an_ended_session(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_server, "is_stopped", lambda session: True)  # the tests' session must not end
    with ClusterServer(spark.range(1), task(tmp_path), Events()) as server:
        present(server._action).cancel(60.0)  # noqa: SLF001 - the end of a session does the same
        with pytest.raises(ServerLostError, match="Spark has given up"):
            server.watch()
        assert server.restarts == 0


@pytest.mark.slow
def test_a_server_of_an_ended_job_does_not_start(spark: SparkSession, tmp_path: Path) -> None:
    snapshots = SnapshotDirectory(str(tmp_path), token=TOKEN)
    snapshots.take_over()
    snapshots.announce({"host": "127.0.0.1", "port": 1, "report": "", "state": "ended"})
    with (
        pytest.raises(ServerLostError, match="task has ended before its job"),
        ClusterServer(spark.range(1), task(tmp_path), Events()),
    ):
        pass


def test_a_server_that_waits_for_its_shards_is_not_replaced(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, replaced = LateWorld(), list[int]()
    monkeypatch.setattr(cluster_server, "time", world)
    server = ClusterServer(spark.range(1), task(tmp_path), Events())
    monkeypatch.setattr(server, "_replace", lambda incarnation, error: replaced.append(incarnation))

    def found(incarnation: int, *, starting: bool) -> None:
        row = {"place": "", "error": "no server is announced", "incarnation": incarnation, "starting": starting}
        action = SimpleNamespace(ended=lambda: True, rows=lambda: [row])
        monkeypatch.setattr(server, "_search", action)
        monkeypatch.setattr(server, "_searched_at", world.monotonic())
        server._check_server()  # noqa: SLF001 - `watch` calls it, of a server that Spark runs

    world.ahead = PATIENT.publish + PATIENT.standstill + 1
    found(1, starting=True)
    assert replaced == []
    found(2, starting=False)
    world.ahead = PATIENT.rows + 1
    found(3, starting=True)
    assert replaced == [2, 3]


def kinds(events: Events) -> list[str]:
    return [event.kind for event in events.all()]


@pytest.mark.slow
def test_a_server_that_is_suspended_while_executors_look_for_it_is_not_taken_for_a_wrong_network(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = ClusterServer._require_reached  # noqa: SLF001 - the check is to be disturbed

    def suspended(self: ClusterServer) -> None:
        claim = present(owner_of(str(tmp_path))).claim
        pid = Store(str(tmp_path)).load(str(Name("owner", claim)))[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            reach(self)
        finally:
            os.kill(pid, signal.SIGCONT)

    monkeypatch.setattr(ClusterServer, "_require_reached", suspended)
    made = task(tmp_path)
    deadlines = replace(made.request.settings.deadlines, connect=brief(0.5), handshake=brief(0.5))
    settings = replace(made.request.settings, deadlines=deadlines)
    made = replace(made, request=replace(made.request, settings=settings))
    with ClusterServer(spark.range(1), made, Events()) as server:
        assert server.ask(center) == START.tolist()
        assert server.restarts == 0
