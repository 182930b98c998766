"""Admission control: which pending connection is evicted to make room, and what is recorded of refusals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.server.admission import AdmissionControl, PendingConnection

pytestmark = pytest.mark.timeout(60)


def arrive_long_ago(admission: AdmissionControl, address: str, number: int, evicted: list[Any]) -> None:
    for index in range(number):
        connections: list[PendingConnection] = []
        connections.append(admission.arrive(address, hang_up_of(admission, connections, evicted, (address, index))))
        connections[0].arrived -= 10


def hang_up_of(
    admission: AdmissionControl, connections: list[Any], evicted: list[Any], name: str | tuple[str, int]
) -> Callable[..., Any]:
    def leave() -> None:
        evicted.append(name)
        # In a thread of its own, as a session leaves.
        threading.Thread(target=admission.leave, args=connections).start()

    return leave


def test_the_oldest_connection_of_the_most_crowded_address_is_evicted_first() -> None:
    evicted: list[Any] = []
    admission = AdmissionControl(pending_max=4)
    arrive_long_ago(admission, "honest", 1, evicted)
    arrive_long_ago(admission, "crowd", 3, evicted)
    admission.arrive("other", lambda: None)
    admission.arrive("another", lambda: None)
    assert evicted == [("crowd", 0), ("crowd", 1)]


def test_no_connection_is_evicted_within_a_tenth_of_a_second() -> None:
    evicted: list[Any] = []
    admission = AdmissionControl(pending_max=1)
    connections: list[PendingConnection] = []
    connections.append(admission.arrive("a", hang_up_of(admission, connections, evicted, "a")))
    admission.arrive("b", lambda: None)
    assert evicted == ["a"]
    assert connections[0].evicted is not None
    assert connections[0].evicted - connections[0].arrived >= 0.1


def test_a_refused_address_is_recorded_once_and_the_list_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    admission = AdmissionControl(addresses_max=3)
    with caplog.at_level(logging.WARNING, "distkeras.ps.server.admission"):
        for number in range(10):
            for _ in range(5):
                admission.refuse(admission.arrive(f"10.0.0.{number}", lambda: None), RemoteProtocolError("noise"))
    assert admission.refused == 50
    assert [refusal.address for refusal in admission.refusals] == [
        "10.0.0.0",
        "10.0.0.1",
        "10.0.0.2",
        "further addresses",
    ]
    assert len(caplog.records) == 4
    assert admission.refusals[0].reason == "noise"


def test_an_evicted_connection_is_not_admitted() -> None:
    admission = AdmissionControl()
    connection = admission.arrive("a", lambda: None)
    admission.evict_oldest()
    with pytest.raises(RemoteProtocolError, match="to make room for newer ones"):
        admission.admit(connection)
