"""Requests over one of the driver's connections to a server that has just restarted and has no center yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience

from distkeras.ps.errors import DeadlineError
from distkeras.ps.rules import make
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient

KEY = bytes(range(32))
REQUESTS: dict[str, Callable[[DriverClient], Any]] = {
    "center": lambda driver: driver.center().center.tolist(),
    "drain": lambda driver: driver.drain().total,
    "list_workers": lambda driver: driver.list_workers().tolist(),
    "finish": lambda driver: driver.finish("enough"),
}
ANSWERS = {"center": [0.0, 0.0], "drain": 0, "list_workers": [], "finish": None}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_about_the_center_waits_until_the_center_is_published(name: str) -> None:
    settings = ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)
    answers: list[Any] = []
    with ParameterServer(settings, KEY) as server:
        address = Address(*server.address, KEY)
        requesting, publishing = (DriverClient(address, PATIENT) for _ in range(2))

        def send_request() -> None:
            try:
                answers.append(REQUESTS[name](requesting))
            except Exception as error:  # noqa: BLE001 - compared with the expected answer
                answers.append(error)

        requesting.ping()
        thread = threading.Thread(target=send_request, daemon=True)
        thread.start()
        publishing.publish(np.zeros(2, np.float32))
        thread.join(patience(20))
        requesting.close()
        publishing.close()
    assert answers == [ANSWERS[name]]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_wait_for_a_published_center_has_a_deadline(name: str) -> None:
    settings = ServerSettings(make("downpour"), workers=1, deadlines=replace(PATIENT, publish=0.05))
    with ParameterServer(settings, KEY) as server:
        client = DriverClient(Address(*server.address, KEY), PATIENT)
        with pytest.raises(DeadlineError, match="the driver to publish the center"):
            REQUESTS[name](client)
        client.close()
