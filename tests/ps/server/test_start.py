"""What a server's process tells its driver while it begins, and that it does not begin for a driver that is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, until
from support.ps.running_server import KEY

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ServerLostError
from distkeras.ps.rules import make
from distkeras.ps.server import start
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.start import StartReport, StartRequest, serve
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient


def request(folder: Path) -> StartRequest:
    checkpoint = Checkpoint(str(folder), every=1)
    return StartRequest(ServerSettings(make("downpour"), workers=1, deadlines=PATIENT, checkpoint=checkpoint), KEY)


def test_it_tells_nothing_more_once_it_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process reads it any more: when the pipe is full, the checkpointer would wait forever."""
    monkeypatch.setattr(start, "_LOADING_SECONDS", -1.0)
    told: list[StartReport] = []

    def until_saved(server: ParameterServer) -> int:
        driver = DriverClient(Address(*server.address, KEY), PATIENT)
        driver.publish(np.zeros(3, np.float32))
        until(lambda: list(tmp_path.glob("snapshot-*.dks")))
        driver.close()
        return 0

    assert serve(lambda: request(tmp_path), told.append, until_saved) == 0
    loading = [report.loading for report in told]
    assert loading == [True] * (len(loading) - 1) + [False]
    assert len(loading) > 1


def test_the_snapshots_of_a_driver_that_is_gone_are_left_alone(tmp_path: Path) -> None:
    """Another one may have come meanwhile, whose claim would be as high."""

    def gone() -> None:
        raise ServerLostError("the driver must live. Received: its end")

    told: list[StartReport] = []
    assert serve(lambda: request(tmp_path), told.append, lambda server: 0, require_driver=gone) == 2
    assert [report.error for report in told] == ["the driver must live. Received: its end"]
    assert list(tmp_path.iterdir()) == []


def test_a_claim_of_a_driver_that_is_gone_by_then_is_withdrawn(tmp_path: Path) -> None:
    def gone() -> None:
        if list(tmp_path.glob("owner-*.dks")):
            raise ServerLostError("the driver must live. Received: its end")

    assert serve(lambda: request(tmp_path), lambda report: None, lambda server: 0, require_driver=gone) == 2
    assert list(tmp_path.iterdir()) == []
