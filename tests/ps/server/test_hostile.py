"""Garbage, floods, silence and forged messages while an honest worker trains: none of its commits is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.ps.frames import some_commit
from support.ps.hostile_peers import (
    RULE,
    AuthenticatedPeer,
    HonestWorker,
    assert_every_step_committed_once,
    connect_unauthenticated,
    read_to_eof,
    send_unless_closed,
)
from support.ps.running_server import KEY, Running, socket_of

from distkeras.ps.errors import AuthenticationError, RemoteProtocolError, ServerLostError
from distkeras.ps.protocol.driver_messages import Abort, Inspect, Observe, Publish
from distkeras.ps.protocol.framing import MAGIC, VERSION, encode
from distkeras.ps.protocol.messages import Ack, Answer, Commit
from distkeras.ps.protocol.registry import MESSAGES
from distkeras.ps.server.admission import PendingConnection
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address, dial
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient

SIZE = 5_000
HEADER = struct.Struct(">4sBBHIQ")
ANSWER = MESSAGES.index(Answer)
COMMIT = MESSAGES.index(Commit)
WAIT = patience(20)


def joined(buffers: list[Any]) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)


def session_of(running: Running, peer: AuthenticatedPeer) -> Any:
    """Return the server's session of the peer's connection."""
    host, port = peer.sock.getsockname()
    return next(session for session in running.server.sessions if session.name == f"{host}:{port}")


@pytest.fixture
def running() -> Iterator[Running]:
    # No thread that waits in the server reaches its own deadline within a test.
    with Running(RULE, workers=1, size=SIZE, deadlines=dataclasses.replace(PATIENT, reply=10 * WAIT)) as running:
        yield running


@pytest.fixture
def honest(running: Running) -> Iterator[HonestWorker]:
    """Train during the test; afterwards check that no commit is lost and that only the driver's connection is left."""
    worker = HonestWorker(running.address, SIZE, running.deadlines)
    yield worker
    assert_every_step_committed_once(worker, running.driver)
    until(lambda: len(running.server.sessions) == 1)  # Only the driver's session remains.
    assert not running.server.admission.pending


NOISE = {
    "silence": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c4"),
    "zeros": bytes(4096),
    "random": random.Random(0).randbytes(65536),
    "another version": HEADER.pack(MAGIC, VERSION - 1, ANSWER, 2, 18, 64),
    "half a header": HEADER.pack(MAGIC, VERSION, ANSWER, 2, 18, 64)[:11],
    "half a frame": joined(encode(Answer(np.zeros(32, np.uint8), np.zeros(32, np.uint8))))[:-5],
    "a huge body": HEADER.pack(MAGIC, VERSION, ANSWER, 2, 18, 2**64 - 1),
    "huge fields": HEADER.pack(MAGIC, VERSION, ANSWER, 2, 2**32 - 1, 64),
    "a huge nonce": HEADER.pack(MAGIC, VERSION, ANSWER, 2, 18, 64) + struct.pack(">BQBQ", 0, 2**63, 0, 32),
    "many arrays": HEADER.pack(MAGIC, VERSION, ANSWER, 65535, 18, 64),
    "a wrong proof": joined(encode(Answer(np.zeros(32, np.uint8), np.zeros(32, np.uint8)))),
    "a commit": HEADER.pack(MAGIC, VERSION, COMMIT, 3, 150, 4 * SIZE),
    "a stop": joined(encode(Abort("mine"))),
    "a center": joined(encode(Publish(np.zeros(SIZE, np.float32)))),
}


def test_every_noise_of_strangers_is_refused_and_logged_once_per_address(
    running: Running, honest: HonestWorker, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {name: f"127.0.1.{number}" for number, name in enumerate(NOISE, start=1)}
    with caplog.at_level(logging.WARNING, "distkeras.ps"):
        for name, noise in NOISE.items():
            for _ in range(10):
                with connect_unauthenticated(running.server.address, sources[name]) as sock:
                    send_unless_closed(sock, noise)
                    with contextlib.suppress(OSError):  # The server may have closed the connection.
                        sock.shutdown(socket.SHUT_WR)
                    read_to_eof(sock)
    refusals = {refusal.address: refusal.reason for refusal in running.server.admission.refusals}
    assert set(refusals) == set(sources.values())
    assert running.server.admission.refused == 10 * len(NOISE)
    logged = [record.getMessage() for record in caplog.records if record.name == "distkeras.ps.server.admission"]
    assert len(logged) == len(NOISE)
    for name, source in sources.items():
        assert sum(f"from {source} is refused: {refusals[source]}" in line for line in logged) == 1, name
    assert "version must be" in refusals[sources["another version"]]
    assert "does not hold this job's key" in refusals[sources["a wrong proof"]]


def test_a_replayed_handshake_is_refused(running: Running, honest: HonestWorker) -> None:
    with AuthenticatedPeer(running.server.address) as genuine:
        answers = b"".join(genuine.answers)
        with connect_unauthenticated(running.server.address, "127.0.1.1") as sock:
            send_unless_closed(sock, answers)
            received = read_to_eof(sock)
        assert received.endswith(bytes(32))  # The server proves nothing to a peer that has proved nothing.
    assert [refusal.address for refusal in running.server.admission.refusals] == ["127.0.1.1"]


def test_a_slow_loris_must_finish_its_handshake_within_one_deadline(running: Running, honest: HonestWorker) -> None:
    running.server.deadlines = dataclasses.replace(PATIENT, handshake=brief(0.5))
    frame = joined(encode(Answer(np.zeros(32, np.uint8), np.zeros(32, np.uint8))))
    socks = {connect_unauthenticated(running.server.address, "127.0.1.1"): 0 for _ in range(20)}
    deadline = time.monotonic() + WAIT
    left = dict(socks)
    while left:
        assert time.monotonic() < deadline
        readable, _, _ = select.select(list(left), [], [], 0.05)
        for sock in readable:
            with contextlib.suppress(ConnectionError):
                if sock.recv(4096):
                    continue
            del left[sock]
        for sock, sent in left.items():  # One byte at a time, and never the last one.
            send_unless_closed(sock, frame[sent : min(sent + 1, len(frame) - 1)])
            left[sock] = sent + 1
    for sock in socks:
        sock.close()
    reasons = {refusal.address: refusal.reason for refusal in running.server.admission.refusals}
    assert "the handshake until its deadline" in reasons["127.0.1.1"]


@pytest.mark.parametrize("sent", [0, 5, 500])
def test_a_peer_that_falls_silent_within_a_frame_is_dropped_and_its_commit_is_not_applied(
    running: Running, honest: HonestWorker, sent: int
) -> None:
    commit = some_commit(np.ones(SIZE, np.float32))
    with AuthenticatedPeer(running.server.address) as peer:
        session = session_of(running, peer)
        # A host that vanished sends nothing, not even the end of the stream: TCP keepalive detects it.
        assert socket_of(session.channel).getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        session.channel.frame = brief(0.2)
        send_unless_closed(peer.sock, joined(peer.connection.send(commit))[:sent])
        if sent:
            assert read_to_eof(peer.sock) == b""


def test_a_crowd_of_silent_connections_leaves_room_for_the_honest(running: Running, honest: HonestWorker) -> None:
    """Only a lack of room ends these connections: no deadline passes, and the server has far too few slots."""
    running.server.deadlines = dataclasses.replace(PATIENT, handshake=patience(3600))
    admission = running.server.admission
    admission.pending_max = 32

    def threads() -> int:
        return sum(thread.name.startswith("ps-127.0.1.1") for thread in threading.enumerate())

    with contextlib.ExitStack() as stack:
        for _ in range(8 * admission.pending_max):
            stack.enter_context(connect_unauthenticated(running.server.address, "127.0.1.1"))
        client = WorkerClient(running.address, worker=0, attempt=0, size=SIZE, deadlines=running.deadlines)
        assert client.fetch_model() == b"the model"  # The server has therefore accepted the crowd before it.
        client.close()
        assert 0 < len(admission.pending) <= admission.pending_max
        # The thread of an evicted connection ends shortly afterwards.
        until(lambda: 0 < threads() <= admission.pending_max)
    assert [refusal.address for refusal in admission.refusals] == ["127.0.1.1"]


def test_a_flood_of_strangers_from_the_honest_workers_own_address_does_not_stop_it(
    running: Running, honest: HonestWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "distkeras.ps.server.admission"):
        for number in range(2000):
            with connect_unauthenticated(running.server.address) as sock:
                send_unless_closed(sock, NOISE["http"] if number % 2 else b"")
    assert [refusal.address for refusal in running.server.admission.refusals] == ["127.0.0.1"]
    assert len([record for record in caplog.records if record.name == "distkeras.ps.server.admission"]) == 1


def test_a_server_out_of_descriptors_keeps_serving() -> None:
    with ServerProcess(ServerSettings(RULE, workers=1, deadlines=PATIENT)) as process:
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (24, hard))
        where = (process.address.host, process.address.port)
        socks = [connect_unauthenticated(where) for _ in range(60)]
        worker = HonestWorker(process.address, SIZE, PATIENT)
        assert_every_step_committed_once(worker, driver)
        for sock in socks:
            sock.close()
        driver.close()


def test_a_connection_for_which_the_system_has_no_thread_is_dialed_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    without: list[threading.Thread] = []
    start = threading.Thread.start

    def start_all_but_one(thread: threading.Thread) -> None:
        if thread.name.startswith("ps-127.") and not without:
            without.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_all_but_one)
    client = WorkerClient(running.address, worker=0, attempt=0, size=SIZE, deadlines=running.deadlines)
    assert client.fetch_model() == b"the model"
    assert len(without) == 1
    assert "can't start new thread" in running.server.admission.refusals[0].reason
    client.close()


class TestAuthenticatedPeers:
    """A peer that has the key and misbehaves harms only its own connection."""

    @pytest.mark.parametrize("name", ["http", "zeros", "random", "another version", "a wrong proof", "a huge body"])
    def test_noise_ends_its_connection(self, running: Running, honest: HonestWorker, name: str) -> None:
        with AuthenticatedPeer(running.server.address) as peer:
            send_unless_closed(peer.sock, NOISE[name])
            read_to_eof(peer.sock)
        (refusal,) = running.server.admission.refusals
        assert refusal.address == "127.0.0.1"

    def test_a_frame_larger_than_the_job_could_need_is_refused_before_it_is_received(
        self, running: Running, honest: HonestWorker
    ) -> None:
        limit = running.server.dispatcher.limits.body
        assert limit < 4 * SIZE + (17 << 20)
        fields = struct.Struct(">qqqqqqqqqdddqq")
        with AuthenticatedPeer(running.server.address) as peer:
            send_unless_closed(peer.sock, HEADER.pack(MAGIC, VERSION, COMMIT, 3, fields.size, limit + 1))
            assert read_to_eof(peer.sock) == b""

    def test_an_answer_instead_of_a_request_gets_an_error_and_ends_its_connection(
        self, running: Running, honest: HonestWorker
    ) -> None:
        with AuthenticatedPeer(running.server.address) as peer:
            send_unless_closed(peer.sock, joined(peer.connection.send(Ack(1, 2, 3, 4))))
            assert b"must be a request" in read_to_eof(peer.sock)

    @pytest.mark.parametrize("unread", [b"", b"DKPS and more"], ids=["", "with unread bytes"])
    @pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
    def test_an_observer_with_an_invalid_timeout_is_dropped_when_it_disconnects(
        self, running: Running, honest: HonestWorker, unread: bytes, reset: bool
    ) -> None:
        with AuthenticatedPeer(running.server.address) as peer:
            session = session_of(running, peer)
            send_unless_closed(peer.sock, joined(peer.connection.send(Observe(2**62, float("nan")))) + unread)
            if not reset:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        session.thread.join(WAIT)
        assert not session.thread.is_alive()
        assert running.server.fault is None

    def test_a_wrong_commit_without_a_lease_does_not_end_the_job(self, running: Running, honest: HonestWorker) -> None:
        commit = some_commit(np.full(3, np.nan, np.float32), attempt=99)
        with AuthenticatedPeer(running.server.address) as peer:
            send_unless_closed(peer.sock, joined(peer.connection.send(commit)))
            assert b"has lost its lease" in read_to_eof(peer.sock)
        assert running.server.fault is None

    def test_requests_whose_answers_are_not_read_are_dropped_at_the_deadline(
        self, running: Running, honest: HonestWorker
    ) -> None:
        with AuthenticatedPeer(running.server.address) as peer:
            session = session_of(running, peer)
            session.channel.frame = 0.2
            with contextlib.suppress(ConnectionError, TimeoutError):
                peer.sock.settimeout(WAIT)
                while True:  # Both buffers fill up, and then the server closes the connection.
                    peer.sock.sendall(joined(peer.connection.send(Inspect())))
        session.thread.join(WAIT)
        assert not session.thread.is_alive()

    def test_more_peers_than_there_is_room_for_are_refused_until_others_leave(
        self, running: Running, honest: HonestWorker
    ) -> None:
        admission = running.server.admission
        admission.peers_max = 8
        with contextlib.ExitStack() as stack:

            def crowd() -> None:
                for _ in range(9):
                    stack.enter_context(AuthenticatedPeer(running.server.address))

            with pytest.raises(ConnectionError):
                crowd()
        client = WorkerClient(running.address, worker=0, attempt=0, size=SIZE, deadlines=running.deadlines)
        assert client.fetch_model() == b"the model"
        client.close()


class TestDial:
    def test_a_server_that_hangs_up_to_make_room_is_dialed_again(self, running: Running) -> None:
        refused: list[Any] = []
        admit = running.server.admission.admit

        def full(pending: PendingConnection) -> None:
            if len(refused) < 2:
                refused.append(pending)
                raise RemoteProtocolError("full")
            admit(pending)

        running.server.admission.admit = full
        channel = dial(running.server.address, KEY, PATIENT)
        assert len(refused) == 2
        channel.close()

    def test_a_server_that_always_hangs_up_is_dialed_until_the_deadline(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            hanging_up = threading.Thread(target=self._hang_up, args=(listener,), daemon=True)
            hanging_up.start()
            with pytest.raises(
                ServerLostError, match=r"the handshake .* has failed: the server closed the connection during"
            ):
                dial(listener.getsockname(), KEY, dataclasses.replace(PATIENT, connect=brief(0.5)))
            listener.shutdown(socket.SHUT_RDWR)
            hanging_up.join(WAIT)

    @staticmethod
    def _hang_up(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    def test_a_wrong_key_is_not_reported_as_a_lack_of_room(self, running: Running) -> None:
        with pytest.raises(AuthenticationError, match="does not hold this job's key"):
            dial(running.server.address, b"x" * 32, PATIENT)


def test_the_key_is_in_no_log_line_and_no_refusal(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    wrong = bytes(range(100, 132))
    with caplog.at_level(logging.DEBUG, "distkeras"):
        host, port = running.server.address
        deadlines = dataclasses.replace(PATIENT, reconnect=brief(0.2))
        with pytest.raises(AuthenticationError) as caught:
            WorkerClient(Address(host, port, wrong), worker=0, attempt=0, size=SIZE, deadlines=deadlines).join()
    texts = caplog.text + repr(running.server.admission.refusals) + str(caught.value) + repr(caught.value)
    for key in (KEY, wrong):
        assert key.hex() not in texts
        assert repr(key)[2:-1] not in texts
