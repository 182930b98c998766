"""What a server's process reports to its driver during startup; it does not start for a dead driver."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, until
from support.ps.running_server import KEY

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ServerLostError
from distkeras.ps.rules import make
from distkeras.ps.server import process
from distkeras.ps.server.process import StartReport, StartRequest, serve
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient


def request(folder: Path) -> StartRequest:
    checkpoint = Checkpoint(str(folder), every=1)
    return StartRequest(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=checkpoint), KEY)


def test_a_server_that_has_started_sends_no_further_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process reads them any longer: once the pipe is full, the checkpointer would wait forever."""
    monkeypatch.setattr(process, "_LOADING_SECONDS", -1.0)
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

    assert serve(lambda: request(tmp_path), sent.append, until_saved) == 0
    loading = [report.loading for report in sent]
    assert loading == [True] * (len(loading) - 1) + [False]
    assert len(loading) > 1


def test_a_server_whose_driver_is_dead_writes_nothing(tmp_path: Path) -> None:
    """Another driver may have started meanwhile, and a claim of this server would be as high as that driver's."""

    def require_driver_alive() -> None:
        raise ServerLostError("the driver must live. Received: its end")

    sent: list[StartReport] = []
    assert serve(lambda: request(tmp_path), sent.append, lambda server: 0, require_driver=require_driver_alive) == 2
    assert [report.error for report in sent] == ["the driver must live. Received: its end"]
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_withdrawn_if_the_driver_has_died_meanwhile(tmp_path: Path) -> None:
    def require_driver_alive() -> None:
        if list(tmp_path.glob("owner-*.dks")):
            raise ServerLostError("the driver must live. Received: its end")

    assert (
        serve(lambda: request(tmp_path), lambda report: None, lambda server: 0, require_driver=require_driver_alive)
        == 2
    )
    assert list(tmp_path.iterdir()) == []
