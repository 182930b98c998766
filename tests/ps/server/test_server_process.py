"""A server in a process of its own: its start, its events, slow stores, and many workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.ps.running_server import KEY, Running, WorkerThread
from support.ps.served_job import batches_in
from support.ps.toy_model import Connected, toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import AuthenticationError, ConfigurationError, DeadlineError, LeaseLostError, ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.protocol.messages import CenterReply, Pull
from distkeras.ps.rules import Rule, make
from distkeras.ps.server import process as process_module
from distkeras.ps.server.process import ServerProcess, StartRequest, serve, spawn_server
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.start_report import Loading, NotStarted, StartReport
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.processes import accompany
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker


def fork_and_pause() -> int:
    """Fork a child that keeps all of the driver's descriptors open, as multiprocessing does; return its process id."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


class TestProcess:
    def test_a_server_process_serves_and_frees_its_port(self) -> None:
        with ServerProcess(ServerSettings(make("agn", window=3), workers=1)) as process:
            driver = DriverClient(process.address, PATIENT)
            driver.publish(np.zeros(4, np.float32))
            assert driver.center().center.tolist() == [0, 0, 0, 0]
            driver.close()
            where = (process.address.host, process.address.port)
        assert not process.alive()
        with socket.create_server(where):
            pass

    @pytest.mark.parametrize("dead", [False, True])
    def test_a_process_that_was_spawned_ahead_is_used_if_it_lives(self, dead: bool) -> None:
        ahead = spawn_server()
        if dead:
            ahead.kill()
            assert ahead.wait(patience(10))
        with ServerProcess(ServerSettings(make("agn", window=3), workers=1), ahead=ahead) as process:
            assert (process.pid == ahead.pid) is not dead
            DriverClient(process.address, PATIENT).close()
        assert not process.alive()
        ahead.close()

    @pytest.mark.parametrize(
        ("forked", "descriptors"),
        [(False, True), (True, True), (True, False)],
        ids=["alone", "with a forked child", "with a forked child, on a system without descriptors of processes"],
    )
    def test_a_server_process_dies_with_its_driver(
        self, forked: bool, descriptors: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not descriptors:
            monkeypatch.setattr("distkeras.ps.world.processes._process_descriptor", lambda _: None)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # A driver that is killed before it can close anything.
            try:
                process = ServerProcess(ServerSettings(make("downpour"), workers=1))
                process.start()
                grandchild = fork_and_pause() if forked else 0
                os.write(writer, f"{process.pid} {process.address.port} {grandchild}\n".encode())
                signal.pause()
            finally:
                os._exit(1)  # Even after an error, the fork does not continue as a second copy of the tests.
        os.close(writer)
        with os.fdopen(reader) as lines:
            pid, port, grandchild = map(int, lines.readline().split())
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with contextlib.suppress(ProcessLookupError):  # It has ended already.
                pidfd = os.pidfd_open(pid)
                readable, _, _ = select.select([pidfd], [], [], patience(10))
                os.close(pidfd)
                assert readable
            with socket.create_server(("127.0.0.1", port)):
                pass
        finally:
            if grandchild:
                os.kill(grandchild, signal.SIGKILL)

    @pytest.mark.parametrize("saving", [False, True], ids=["", "with a checkpoint"])
    def test_a_closed_server_process_ends_by_itself_although_the_driver_has_forked(
        self, saving: bool, tmp_path: Path
    ) -> None:
        checkpoint = Checkpoint(str(tmp_path)) if saving else None
        with ServerProcess(ServerSettings(make("downpour"), workers=1, checkpoint=checkpoint)) as process:
            child = fork_and_pause()
        try:
            assert process.exit_code == 0  # It was not killed at the deadline.
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    @pytest.mark.slow
    def test_a_server_process_outlives_a_forked_child_that_closes_its_copy(self) -> None:
        with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
            child = os.fork()
            if child == 0:
                process.close()
                os._exit(0)
            os.waitpid(child, 0)
            driver = DriverClient(process.address, PATIENT)
            driver.publish(np.zeros(4, np.float32))
            driver.close()
            assert process.alive()

    @pytest.mark.parametrize(
        "path",
        [None, pytest.param("", marks=pytest.mark.slow), ":"],
        ids=["", "empty path", "path with an empty entry"],
    )
    def test_a_server_process_imports_nothing_from_the_current_directory(
        self, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("numpy", "json", "distkeras"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('from the current directory')")
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        monkeypatch.chdir(tmp_path)
        with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
            assert process.alive()

    def test_the_key_is_neither_in_the_arguments_nor_in_the_environment_of_the_process(self) -> None:
        with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
            for name in ("cmdline", "environ"):
                shown = Path(f"/proc/{process.pid}/{name}").read_bytes()
                assert process.address.key.hex().encode() not in shown
            assert process.address.key.hex() not in repr(process.address)

    def test_a_taken_port_is_an_error_at_once(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="in use"):
            ServerProcess(ServerSettings(make("downpour"), workers=1, port=taken.getsockname()[1])).start()

    def test_a_gradient_rule_without_a_learning_rate_is_an_error_at_once(self) -> None:
        with pytest.raises(ConfigurationError, match="`learning_rate` must be given"):
            ServerSettings(make("asgd"), workers=1)


def request(folder: Path) -> StartRequest:
    checkpoint = Checkpoint(str(folder), every=1)
    return StartRequest(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=checkpoint), KEY)


def test_a_server_that_has_started_sends_no_further_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process reads them any longer: once the pipe is full, the checkpointer would wait forever."""
    monkeypatch.setattr(process_module, "_LOADING_SECONDS", -1.0)
    sent: list[StartReport] = []

    def until_saved(server: ParameterServer) -> int:
        driver = DriverClient(Address(*server.address, KEY), PATIENT)
        driver.publish(np.zeros(3, np.float32))
        until(lambda: list(tmp_path.glob("snapshot-*.dks")))
        driver.close()
        snapshots = server._snapshots  # noqa: SLF001 - a running server reads by it, as for the state of an optimizer
        assert snapshots is not None
        assert snapshots.latest() is not None
        return 0

    assert serve(lambda: request(tmp_path), sent.append, until_saved, accompany) == 0
    loading = [isinstance(report, Loading) for report in sent]
    assert loading == [True] * (len(loading) - 1) + [False]
    assert len(loading) > 1


def test_a_server_whose_driver_is_dead_writes_nothing(tmp_path: Path) -> None:
    """Another driver may have started meanwhile, and a claim of this server would be as high as that driver's."""

    def require_driver_alive() -> None:
        raise ServerLostError("the driver must live. Received: its end")

    sent: list[StartReport] = []
    dead = require_driver_alive
    assert serve(lambda: request(tmp_path), sent.append, lambda server: 0, accompany, require_driver=dead) == 2
    assert [report.error for report in sent if isinstance(report, NotStarted)] == [
        "the driver must live. Received: its end"
    ]
    assert len(sent) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_withdrawn_if_the_driver_has_died_meanwhile(tmp_path: Path) -> None:
    def require_driver_alive() -> None:
        if list(tmp_path.glob("owner-*.dks")):
            raise ServerLostError("the driver must live. Received: its end")

    dead = require_driver_alive
    assert serve(lambda: request(tmp_path), lambda report: None, lambda server: 0, accompany, require_driver=dead) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_server_process_reports_its_log_and_events_to_the_driver(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.stderr.write('no record\\n')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events = Events()
    with ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT), events=events) as process:
        driver = DriverClient(process.address)
        driver.publish(np.zeros(3, np.float32))
        stranger = DriverClient(Address(process.address.host, process.address.port, KEY))
        with pytest.raises(AuthenticationError):
            stranger.center()
        clients = [WorkerClient(process.address, worker=0, attempt=attempt, size=3) for attempt in (4, 5)]
        clients[0].join()
        clients[0].close()
        clients[1].join()
        clients[1].close()
        driver.close()
    reported = {event.kind: event for event in events.all()}
    assert set(reported) == {"refused", "takeover"}
    assert {event.source for event in reported.values()} == {"server"}
    assert (reported["takeover"].worker, reported["takeover"].attempt) == (0, 5)
    assert "127.0.0.1" in reported["refused"].text
    records = {record.name: record for record in caplog.records}
    assert records["distkeras.ps.server.admission"].levelno == logging.WARNING
    assert records["distkeras.ps.server.dispatcher"].getMessage() == reported["takeover"].text
    assert "no record" in records["distkeras.ps.server.process"].getMessage()


def test_a_filter_that_raises_does_not_stop_the_reader_of_the_servers_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the pipe of the server's log were not read, it would fill up and block the server."""

    def refuse(record: logging.LogRecord) -> bool:
        raise ZeroDivisionError("a filter of the user's")

    events = Events()
    with ServerProcess(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT), events=events) as process:
        monkeypatch.setattr(logging.getLogger("distkeras.ps.server.dispatcher"), "filters", [refuse])
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(3, np.float32))
        for attempt in (4, 5, 6):
            client = WorkerClient(process.address, worker=0, attempt=attempt, size=3, deadlines=PATIENT)
            client.join()
            client.close()
        driver.close()
    assert [event.kind for event in events.all()] == ["takeover", "takeover"]
    assert capsys.readouterr().err.count("Traceback") == 2


def test_an_attempt_that_has_lost_its_lease_is_fenced(caplog: pytest.LogCaptureFixture) -> None:
    with Running(make("downpour"), size=3) as running:
        old, new = running.client(attempt=1, size=3), running.client(attempt=2, size=3)
        old.join()
        old.close()
        new.join()
        with pytest.raises(LeaseLostError):
            running.driver.request(Pull(0, 1, 1), CenterReply)
        (record,) = [vars(record) for record in caplog.records if getattr(record, "event", None) == "fenced"]
        assert (record["worker"], record["attempt"]) == (0, 1)
        new.close()


def test_the_worker_table_contains_silent_workers_and_reports_waiting_workers_as_active() -> None:
    """Worker 0 waits in a round for worker 1, which has not committed; worker 2 has not joined; worker 3 has left."""
    rule = make("averaging", window=1)
    with Running(rule, workers=4, size=3) as running:
        present(running.server.center).scheduler.gather = False
        waiting, welcome, begin = toy_client(running.address, rule, [1.0], worker=0, size=3, deadlines=PATIENT)
        silent, finished = running.client(worker=1, attempt=6, size=3), running.client(worker=3, size=3)
        for client in (silent, finished):
            client.join()
            client.pull()
        finished.leave()
        thread = threading.Thread(target=run_worker, args=(waiting, welcome, begin), daemon=True)
        thread.start()
        while running.driver.observe(0, 1.0).clock < 1:
            pass
        roll = {int(row[0]): row for row in running.driver.list_workers()}
        assert set(roll) == {0, 1}
        assert roll[0][3] == 0.0
        assert roll[1][1:3].tolist() == [6, 0]
        assert roll[1][3] > 0.0
        silent.leave()
        thread.join(patience(10))
        for client in (waiting, silent, finished):
            client.close()


PIECES = 50


def server(folder: Path, *, resume: bool) -> ServerProcess:
    checkpoint = Checkpoint(str(folder))
    return ServerProcess(
        ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=checkpoint), resume=resume
    )


class SlowFile:
    """A FIFO in place of a file: its content arrives in pieces with pauses, and completely only if ``whole``."""

    def __init__(self, path: Path, *, whole: bool) -> None:
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        size = -(-len(content) // PIECES)
        pieces = [content[first : first + size] for first in range(0, len(content), size)]
        self._path, self._pieces, self._whole = path, pieces if whole else pieces[:3], whole
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        with self._path.open("wb", buffering=0) as pipe:
            for piece in self._pieces:
                pipe.write(piece)
                time.sleep(brief(0.2))
            if not self._whole:
                self._over.wait(patience(60))

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join(patience(60))


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with server(tmp_path, resume=False) as first:
        driver = DriverClient(first.address, PATIENT)
        driver.publish(np.arange(1000, dtype=np.float32))
        until(lambda: list(tmp_path.glob("snapshot-*.dks")))
        driver.close()
    monkeypatch.setattr(process_module, "_START", brief(5))  # This is shorter than reading all pieces takes.
    return max(tmp_path.glob("snapshot-*.dks"))


@pytest.mark.slow
def test_the_deadline_of_a_start_is_extended_while_it_makes_progress(tmp_path: Path, snapshot: Path) -> None:
    with SlowFile(snapshot, whole=True), server(tmp_path, resume=True) as second:
        driver = DriverClient(second.address, PATIENT)
        assert driver.center().center.tolist() == list(range(1000))
        driver.close()


@pytest.mark.slow
def test_a_start_without_progress_misses_its_deadline(tmp_path: Path, snapshot: Path) -> None:
    with SlowFile(snapshot, whole=False), pytest.raises(DeadlineError, match="for the parameter server to start"):
        server(tmp_path, resume=True).start()


WORKERS, SIZE, STEPS = 300, 257, 6
VALUES = [np.ones(1)] * STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", [make("downpour", window=1), make("averaging", window=2)], ids=str)
def test_three_hundred_concurrent_workers_count_each_mini_batch_once(rule: Rule) -> None:
    """Each mini-batch counts once, whether the workers commit independently or in rounds."""
    begin_together = threading.Barrier(WORKERS)

    def connect(worker: int) -> Connected:
        begin_together.wait(patience(60))
        return toy_client(process.address, rule, VALUES, worker=worker, size=SIZE, deadlines=PATIENT)

    with ServerProcess(ServerSettings(rule, workers=WORKERS, deadlines=PATIENT)) as process:
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32))
        workers = [WorkerThread(functools.partial(connect, worker)) for worker in range(WORKERS)]
        assert [worker.ended(120) for worker in workers] == [None] * WORKERS
        records = driver.drain(count=WORKERS * STEPS + 1)
        commits = records.commits.view(COMMIT)
        for worker in range(WORKERS):
            own = commits[commits["worker"] == worker]
            assert batches_in(own) == [(0, batch) for batch in range(STEPS)]
        driver.close()
