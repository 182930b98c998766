"""The server's log records reach the driver's loggers, and its events reach the driver's table."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.present import present
from support.ps.running_server import KEY, Running
from support.ps.toy_model import toy_client

from distkeras.ps.errors import AuthenticationError, LeaseLostError
from distkeras.ps.events import Events
from distkeras.ps.protocol.messages import CenterReply, Pull
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker

pytestmark = pytest.mark.timeout(60)


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
