"""Tests of slow connections: they are closed at a deadline and do not keep other clients out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.job_server.service import JobService
from support.patience import brief, patience, until

from distkeras.job_server.server import listener
from distkeras.job_server.server.listener import HttpListener

_HALF = b"GET /api/v1/me HTTP/1.1\r\nHost: here\r\n"
_ANSWER = 64 << 20


def connected(port: int, sent: bytes = b"") -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=patience(20))
    peer.sendall(sent)
    return peer


def closed(peer: socket.socket) -> bool:
    """Return whether the server closes the connection before it answers; unread bytes make it reset the connection."""
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


def closed_while_dripping(peer: socket.socket, drop: bytes) -> bool:
    """Send a byte at intervals while the server accepts them; return whether it has closed the connection."""
    deadline = time.monotonic() + patience(30)
    peer.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            peer.sendall(drop)
            if not peer.recv(1):
                return True
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return True
    return False


def answers_at_length(_environment: Any, start: Any) -> list[bytes]:
    start("200 OK", [("Content-Length", str(_ANSWER))])
    return [bytes(_ANSWER)]


@pytest.fixture
def serving(service: JobService) -> Iterator[HttpListener]:
    """Start a server whose every answer is long."""
    http, stop = (
        HttpListener(answers_at_length, service.accounts, "127.0.0.1", 0, upload_max=1 << 20),
        threading.Event(),
    )
    thread = threading.Thread(target=http.run, args=(stop,), daemon=True)
    thread.start()
    yield http
    stop.set()
    thread.join(patience(20))


def test_many_slow_connections_do_not_block_other_clients(service: JobService) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(listener.CONNECTIONS_MAX + 5):
            stack.enter_context(connected(service.port, _HALF))
        for _ in range(3):
            assert service.call("GET", "/me", "ann").status == 200


def test_many_simultaneous_requests_do_not_block_other_clients(service: JobService) -> None:
    """Each answer would fill the server's buffers and then make one of its threads wait for the peer to read."""
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(connected(service.port, b"GET /dashboard HTTP/1.1\r\nHost: here\r\n\r\n" * 300))
        assert service.call("GET", "/me", "ann").status == 200
        until(lambda: not service.connections)
        assert service.call("GET", "/me", "ann").status == 200


def test_above_the_limit_the_connections_that_do_not_read_are_closed(
    serving: HttpListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered after each answer has begun: only then does a connection wait for its peer and may be
    closed.
    """
    # Each connection soon waits for its peer, however much is buffered.
    monkeypatch.setattr(listener, "SLOWEST", _ANSWER)
    monkeypatch.setattr(listener, "BODY_SECONDS", patience(60))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            assert stack.enter_context(connected(serving.port, _HALF + b"\r\n")).recv(1) == b"H"
        monkeypatch.setattr(listener, "CONNECTIONS_MAX", 2)
        until(lambda: serving.connections == 2)


def test_the_address_with_most_connections_loses_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 3)
    with JobService(tmp_path) as service, contextlib.ExitStack() as stack:
        elsewhere = socket.create_connection(("127.0.0.1", service.port), patience(20), ("127.0.0.2", 0))
        stack.enter_context(elsewhere)
        first, *others = [stack.enter_context(connected(service.port, _HALF)) for _ in range(3)]
        assert closed(first)
        for peer in (elsewhere, *others):
            peer.sendall(b"\r\n" if peer is not elsewhere else _HALF + b"\r\n")
            assert peer.recv(8) == b"HTTP/1.1"


def test_single_bytes_do_not_postpone_the_deadline_of_a_header(
    service: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEADER_SECONDS", brief(0.5))
    with connected(service.port, _HALF) as peer, connected(service.port) as silent:
        assert closed_while_dripping(peer, b"x")
        assert closed(silent)


def test_a_body_has_a_deadline(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODY_SECONDS", brief(0.5))
    with connected(service.port, b"POST /api/v1/tokens HTTP/1.1\r\nContent-Length: 5000\r\n\r\n") as peer:
        assert closed_while_dripping(peer, b"x")


def test_an_answer_has_a_deadline(serving: HttpListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODY_SECONDS", brief(0.5))
    monkeypatch.setattr(listener, "SLOWEST", _ANSWER)
    with connected(serving.port, _HALF + b"\r\n") as peer:
        got = len(peer.recv(1))
        until(lambda: not serving.connections)  # The client reads no more.
        with contextlib.suppress(ConnectionResetError):
            while piece := peer.recv(1 << 20):
                got += len(piece)
        assert got < _ANSWER


def test_a_client_that_reads_receives_the_whole_answer(serving: HttpListener) -> None:
    with connected(serving.port, _HALF + b"Connection: close\r\n\r\n") as peer:
        got = 0
        while piece := peer.recv(1 << 20):
            got += len(piece)
        assert got > _ANSWER
