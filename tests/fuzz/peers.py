"""Peers of the server: a worker that follows the protocol, and attackers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from typing import Any

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.driver_messages import Abort, Observe
from distkeras.ps.protocol.framing import Connection, EndOfStream, Limits
from distkeras.ps.protocol.loop import NO_FLOATS, CommitRecord
from distkeras.ps.protocol.messages import Challenge, Commit, Fault, Hello, Leave, Message, Pull
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.worker_client import WorkerClient
from fuzz.inputs import Inputs, frame
from fuzz.parser import HANG, KEY, Violation, sealed, shake_hands

#: The number of networks, and of hosts in each, from which a server is attacked.
ADDRESSES = (4, 250)


class HonestWorker(threading.Thread):
    """A worker whose every commit depends on the center that it received; its connection is cut at times."""

    def __init__(self, address: Address, size: int, steps: int | None = None) -> None:
        super().__init__(daemon=True)
        self._client = WorkerClient(address, worker=0, attempt=0, size=size, deadlines=Deadlines(reconnect=60))
        self.size = size
        self._most = steps
        self.steps = 0
        self.cuts = 0
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Train; an error is stored in ``error``."""
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.error = error

    def _train(self) -> None:
        client = self._client
        client.join()
        center = client.pull().center
        wave = np.sin(np.arange(self.size, dtype=np.float32))
        while not self.over.is_set() if self._most is None else self.steps < self._most:
            assert center is not None
            self.steps += 1
            if self._most is None and self.steps % 50 == 0 and client.channel is not None:
                client.channel.hang_up()
                self.cuts += 1
            payload = client.payload(1)
            np.multiply(center, np.float32(-0.1), out=payload[0])
            payload[0][:] += wave / np.float32(self.steps)
            history = np.array([[0.0, 1.0, 0.5]])
            request = CommitRecord(
                0, self.steps - 1, self.steps - 1, False, True, 0.1, 1.0, payload, NO_FLOATS, history
            )
            center = client.commit(request).center
        client.leave()
        client.close()


class Attacker:
    """An attacker that sends inputs to a server, as a stranger or as a peer that has the key."""

    def __init__(self, address: Address, seed: int, size: int, limits: Limits) -> None:
        self._address = address
        self._where = (address.host, address.port)
        self._inputs = Inputs(seed, size)
        self._inputs.corpus += self._plausible_requests(size)
        self._limits, self._size = limits, size
        self._peer: tuple[socket.socket, Connection] | None = None
        self.outcomes: Counter[str] = Counter()
        self.error: BaseException | None = None

    def _plausible_requests(self, size: int) -> list[bytes]:
        """Return requests of a worker or driver that has no lease."""
        vector = np.zeros(size, np.float32)
        sender: dict[str, Any] = {"worker": 0, "attempt": 77, "incarnation": 1, "sequence": 1}
        record: dict[str, Any] = {"epoch": 0, "first": 0, "last": 0, "epoch_end": False, "wants_center": True}
        record |= {"learning_rate": 0.1, "scale": 1.0}
        requests = (
            Commit(**record, parts=(vector,), history=np.zeros((1, 3)), **sender),
            Pull(0, 77, 1),
            Leave(0, 77, 1),
            Hello(5, 77, size, 0, "loss"),
            Hello(5, 77, size, 0, "loss", "int8"),
            Commit(**record, parts=(), packed=(np.zeros(size + 4, np.uint8),), **sender),
            messages.Probe(),
            messages.FetchModel(),
            driver_messages.Inspect(),
            driver_messages.Observe(-1, 0.0),
            driver_messages.Drain(0, 3),
        )
        return [frame(request) for request in requests for _ in range(10)]

    def send(self, count: int) -> None:
        """Send ``count`` inputs; the first `Violation` ends this, and is stored in ``error``."""
        try:
            for number in range(count):
                data = self._inputs.any()
                if number % 2:
                    self._as_stranger(data)
                else:
                    self._as_peer(data)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.error = error
        finally:
            self._hang_up()

    def _dial(self) -> socket.socket:
        # Use many addresses, and do not leave their ports in use for a minute each.
        sock = socket.socket()
        sock.settimeout(HANG)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        number, last = (1 + self._inputs.below(count) for count in ADDRESSES)
        sock.bind((f"127.0.{number}.{last}", 0))
        sock.connect(self._where)
        return sock

    def _as_stranger(self, data: bytes) -> None:
        with self._dial() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                if self._inputs.below(4) == 0:
                    self.outcomes["stranger: hung up at once"] += 1
                    return
                with contextlib.suppress(OSError):  # The server may have closed the connection.
                    sock.shutdown(socket.SHUT_WR)
            response = drained(sock)
        if len(response) > 2 * len(frame(Challenge(np.zeros(32, np.uint8)))):
            raise Violation(f"a stranger was sent {response!r} for {data!r}")
        self.outcomes["stranger: refused"] += 1

    def _as_peer(self, data: bytes) -> None:
        verdict, requests = self._expected_outcome(data)
        if verdict == "entitled":
            self.outcomes["peer: left out, for a peer may end the job"] += 1
            return
        sock, connection = self._peer or self._authenticate()
        try:
            sock.sendall(sealed(data, connection.seal))
            if verdict == "waits":
                self.outcomes["peer: hung up within a frame"] += 1
                self._hang_up()
                return
            for _ in range(requests):
                if isinstance(next_event(sock, connection), EndOfStream):
                    self.outcomes["peer: refused"] += 1
                    self._hang_up()
                    return
                self.outcomes["peer: answered"] += 1
            if verdict == "refused":
                drained(sock)
                self.outcomes["peer: refused"] += 1
                self._hang_up()
        except ConnectionError:
            self.outcomes["peer: refused"] += 1
            self._hang_up()

    def _expected_outcome(self, data: bytes) -> tuple[str, int]:
        """Return what a server must do with ``data`` from a peer, and the number of requests in it."""
        parser = Connection(server=True, key=KEY, limits=self._limits)
        sender = Connection(server=False, key=KEY)
        shake_hands(parser, sender)
        data, requests, at = sealed(data, sender.seal), 0, 0
        while at < len(data):
            space = parser.spaces()[0]
            count = min(len(space), len(data) - at)
            space[:count] = data[at : at + count]
            at += count
            try:
                event, _ = parser.received(count)
            except RemoteProtocolError:
                return "refused", requests
            if event is not None:
                if entitled(event, self._size):
                    return "entitled", requests
                if isinstance(event, Observe) and not event.patience < 1:
                    return "waits", requests  # The server waits for an event that may never happen.
                requests += 1
        try:
            parser.received(0)
        except RemoteProtocolError:
            return "waits", requests
        return "served", requests

    def _authenticate(self) -> tuple[socket.socket, Connection]:
        for _ in range(1000):  # Other pending connections may make the server evict this one.
            sock = self._dial()
            connection = Connection(server=False, key=self._address.key)
            try:
                while not connection.authenticated:
                    event, answer = connection.received(sock.recv_into(connection.spaces()[0]))
                    if isinstance(event, EndOfStream):
                        raise ConnectionError("the server hung up")
                    for part in answer:
                        sock.sendall(part)
            except ConnectionError:
                sock.close()
                continue
            self._peer = (sock, connection)
            self.outcomes["peer: connections"] += 1
            return self._peer
        raise Violation("a peer was not let in")

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer[0].close()
            self._peer = None


def entitled(event: Message | EndOfStream, size: int) -> bool:
    """Return whether a peer may end or change the job by this message: every holder of the key is trusted."""
    if isinstance(event, Hello):  # Another model ends the job.
        return event.worker == 0 or (event.size, event.moving_statistics) != (size, 0)
    if isinstance(event, (Abort, Fault)):
        return True
    return isinstance(event, (Commit, Pull, Leave)) and (event.worker, event.attempt) == (0, 0)


def drained(sock: socket.socket) -> bytes:
    """Return everything that arrives until the end of the stream."""
    response = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            response += piece
    return response


def next_event(sock: socket.socket, connection: Connection) -> Message | EndOfStream:
    """Return the next message."""
    while True:
        event, _ = connection.received(sock.recv_into(connection.spaces()[0]))
        if event is not None:
            return event
