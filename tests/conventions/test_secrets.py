"""Tests that the job's key is never shown."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.framing import Connection
from distkeras.ps.protocol.messages import fault_of
from distkeras.ps.rules import make
from distkeras.ps.server.admission import AdmissionControl
from distkeras.ps.settings import WorkerSettings
from distkeras.ps.transport.client import Address, Certificate, Channel
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.world.streams import TcpStream
from distkeras.training.task import Task

KEY = bytes(range(48, 80))  # The key is printable, so that it would be seen as it is.
PRIVATE = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----\n"
ADDRESS = Address("driver", 4321, KEY, "-----BEGIN CERTIFICATE-----\n")


def shows_secret(text: str) -> bool:
    return KEY.hex() in text or KEY.decode() in text or "MIGH" in text or str(list(KEY))[1:-1] in text


@pytest.fixture
def channel() -> Iterator[Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        yield Channel(TcpStream(sock), Connection(server=False, key=KEY), frame=1)


def task() -> Task:
    values: dict[str, Any] = dict.fromkeys(Task.__dataclass_fields__, None)
    settings = WorkerSettings(make("downpour"), workers=2)
    return Task(**values | {"address": ADDRESS, "settings": settings, "metrics": ("loss",)})


def test_no_repr_shows_a_secret(channel: Channel) -> None:
    things = [
        ADDRESS,
        task(),
        Connection(server=True, key=KEY),
        channel,
        channel.connection,
        WorkerClient(ADDRESS, worker=0, attempt=0, size=1),
        DriverClient(ADDRESS),
        Certificate("-----BEGIN CERTIFICATE-----", PRIVATE),
        AdmissionControl(),
    ]
    for thing in things:
        for text in (repr(thing), str(thing), f"{thing}", f"{[thing]}"):
            assert not shows_secret(text), type(thing)
    assert "driver" in repr(task())


def test_the_error_of_a_failed_connection_has_the_address_and_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DistkerasError) as caught:
        DriverClient(Address("127.0.0.1", port, KEY)).center()
    error = caught.value
    assert str(port) in str(error)
    fault = fault_of(error)
    assert not shows_secret("".join(map(repr, (error, str(error), error.__reduce__(), fault, vars(fault)))))


def test_the_check_finds_a_secret() -> None:
    assert shows_secret(repr(KEY))
    assert shows_secret(KEY.hex())
