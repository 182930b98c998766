"""Deadlines, pauses between attempts, and waits of a channel, each of which ends at its deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.patience import PATIENT, brief, patience

from distkeras.ps.errors import ConfigurationError, DeadlineError, SnapshotError
from distkeras.ps.protocol.framing import Connection
from distkeras.ps.protocol.messages import Occupancy, Probe
from distkeras.ps.transport.client import Channel
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.world import streams
from distkeras.ps.world.streams import TcpStream, connect
from distkeras.ps.world.world import World

KEY = bytes(32)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Channel, Channel]]:
    """Yield a server's and a client's channel after the handshake; the kernel ends each call after a short time."""
    monkeypatch.setattr(streams, "_LONGEST_CALL", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname(), timeout=patience(10))
        accepted, _ = listener.accept()
    server = Channel(TcpStream(accepted), Connection(server=True, key=KEY), frame=PATIENT.frame)
    client = Channel(TcpStream(dialed), Connection(server=False, key=KEY), frame=PATIENT.frame)
    peer = threading.Thread(target=server.handshake, args=(patience(10),))
    peer.start()
    client.handshake(patience(10))
    peer.join(patience(10))
    yield server, client
    for end in (server, client):
        end.close()


def test_a_wait_continues_over_several_calls(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = ends
    repeated = threading.Semaphore(0)
    plain_pipe = streams._Plain  # noqa: SLF001 - only the kernel's limit shows that a call was repeated
    limit = plain_pipe._limit  # noqa: SLF001 - see above

    def counted(plain: Any, option: int, timeout: float) -> None:
        if option == socket.SO_RCVTIMEO:
            repeated.release()
        limit(plain, option, timeout)

    monkeypatch.setattr(plain_pipe, "_limit", counted)

    def answer() -> None:
        for _ in range(4):
            assert repeated.acquire(timeout=patience(10))
        server.send(Occupancy(True))

    peer = threading.Thread(target=answer)
    peer.start()
    answered = client.receive(patience(10), "an answer")
    assert isinstance(answered, Occupancy)
    assert answered.occupied
    peer.join(patience(10))


def test_a_look_for_another_server_does_not_delay_the_answer(ends: tuple[Channel, Channel]) -> None:
    server, client = ends
    looking, go_on = threading.Event(), threading.Event()

    def look() -> bool:
        looking.set()
        return go_on.wait(patience(60))

    client.watch(look, 0.01)
    peer = threading.Thread(target=lambda: looking.wait(patience(10)) and server.send(Occupancy(True)))
    peer.start()
    assert isinstance(client.receive(patience(30), "an answer"), Occupancy)
    assert not go_on.is_set()
    go_on.set()
    with pytest.raises(ConnectionResetError, match="another server has taken its place"):
        client.receive(patience(30), "an answer")
    peer.join(patience(10))


def test_a_look_that_fails_ends_the_wait(ends: tuple[Channel, Channel]) -> None:
    _, client = ends

    def look() -> bool:
        raise SnapshotError("the store has an unknown file")

    client.watch(look, 0.01)
    with pytest.raises(SnapshotError, match="unknown file"):
        client.receive(patience(30), "an answer")


def test_a_wait_ends_at_its_deadline(ends: tuple[Channel, Channel]) -> None:
    server, client = ends
    with pytest.raises(DeadlineError, match="an answer"):
        client.receive(brief(0.1), "an answer")
    client.send(Probe())
    assert isinstance(server.receive(patience(10), "a question"), Probe)


def test_a_host_that_accepts_no_data_is_a_connection_error_and_not_a_missed_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's own timeout ends the write, not one of the client's deadlines."""
    monkeypatch.setattr(streams, "HOST_SILENCE_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = connect(listener.getsockname(), patience(10))
        far, _ = listener.accept()

    def fill_buffers() -> None:  # The peer never reads.
        while True:
            near.write([memoryview(bytes(1 << 20))], patience(5))

    with contextlib.closing(near), contextlib.closing(far), pytest.raises(ConnectionResetError, match="for 1 s"):
        fill_buffers()


class Clock(World):
    """A manual clock, which advances only while a thread sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


def test_pauses_double_up_to_the_longest_and_are_drawn_from_their_upper_half() -> None:
    clock = Clock()
    backoff = Backoff(first=1.0, longest=5.0, world=clock)
    assert all(backoff.pause() for _ in range(6))
    for pause, nominal in zip(clock.pauses, [1.0, 2.0, 4.0, 5.0, 5.0, 5.0], strict=True):
        assert nominal / 2 <= pause <= nominal


def test_there_is_no_pause_beyond_the_deadline() -> None:
    clock = Clock()
    backoff = Backoff(first=1.0, longest=8.0, timeout=20.0, world=clock)
    while backoff.pause():
        pass
    assert 12.0 < clock.seconds <= 20.0  # The next pause could be 8 s.
    assert not backoff.pause()


def test_two_processes_do_not_retry_at_the_same_moment() -> None:
    clocks = [Clock(), Clock()]
    for clock in clocks:
        assert Backoff(longest=1.0, world=clock).pause()
    assert clocks[0].pauses != clocks[1].pauses


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "5", True, None])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Deadlines)])
def test_a_deadline_must_be_a_finite_number_above_zero(name: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^`{name}` must be a finite number above 0"):
        Deadlines(**{name: bad})
