#!/usr/bin/env python3
"""Feeds the protocol and a running server what nobody should send, and checks that nothing but refusals comes of it.

    fuzz.py --inputs 1000000 --live 100000      # both, some minutes each
    fuzz.py --guided 300                        # seconds, led by coverage; needs the package atheris

Inputs are valid frames of every message type, damaged with knowledge of their structure, besides pure garbage; the same
seed gives the same inputs. The parser may raise its two errors only, allocate no more than its limits, and end. A
server must go on serving: an honest worker trains beside it all, and its center must be the undisturbed one to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import AuthenticationError, RemoteProtocolError
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.framing import MAGIC, VERSION, EndOfStream, Limits, Reader, encode
from distkeras.ps.protocol.handshake import Connection, make_proof
from distkeras.ps.protocol.messages import (
    MESSAGES,
    Abort,
    Answer,
    Challenge,
    Commit,
    Fault,
    Hello,
    Leave,
    Message,
    Observe,
    Proof,
    Pull,
)
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.worker.client import WorkerClient
from distkeras.ps.worker.loop import CommitRequest

KEY = bytes(range(32))
LIMITS = Limits(fields=4096, body=64 * 1024)
HANDSHAKE = (Challenge, Answer, Proof)
#: Numbers at which code goes wrong.
EDGES = (0, 1, 2, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
#: Bytes that a process may grow by while it is fed.
ROOM = 64 << 20
HANG = 60.0  # seconds
#: From how many networks, and hosts in each, a server is attacked.
ADDRESSES = (4, 250)


class Violation(AssertionError):
    """What must not come of any input."""


class Inputs:
    """Makes inputs: frames, damaged frames and garbage.

    Args:
        seed: the same one gives the same inputs.
        size: elements of the vectors of about a tenth of the frames; the others have up to 20.
    """

    def __init__(self, seed: int, size: int = 200) -> None:
        self._rng = np.random.default_rng(seed)
        self._size = size
        self._draws: Iterator[int] = iter(())
        self.corpus = [frame(self.message(kind)) for kind in MESSAGES for _ in range(8)]
        self._damages: list[Callable[[bytearray], bytearray]] = [
            self._flip,
            self._header,
            self._number,
            self._cut,
            self._insert,
            self._erase,
            self._repeat,
            self._splice,
        ]

    def below(self, bound: int) -> int:
        """A random number in [0, bound)."""
        for draw in self._draws:
            return draw % bound
        self._draws = iter(self._rng.integers(0, 2**62, 8192).tolist())  # one by one they would take most of the time
        return self.below(bound)

    def chunk(self, most: int) -> bytes:
        """Up to ``most`` random bytes."""
        return self._rng.bytes(self.below(most + 1))

    def message(self, kind: type[Message]) -> Message:
        """One with random fields of the right types."""
        values: dict[str, object] = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if typing.get_origin(hint) is tuple:
                dtype = typing.get_args(typing.get_args(hint)[0])[1]
                values[name] = tuple(self._array(dtype) for _ in range(self.below(3)))
            elif typing.get_origin(hint) is typing.Annotated:
                dtype = typing.get_args(hint)[1]
                values[name] = self._rng.bytes(32) if kind in HANDSHAKE else self._array(dtype)
                if kind in HANDSHAKE:
                    values[name] = np.frombuffer(typing.cast(bytes, values[name]), np.uint8)
            elif hint is str:
                values[name] = self.chunk(20).decode("latin-1")
            elif hint is bool:
                values[name] = bool(self.below(2))
            elif hint is float:
                values[name] = float(self._rng.normal())
            else:
                values[name] = self.below(2**62) if self.below(3) else self.below(4)
        return kind(**values)

    def _array(self, dtype: np.dtype) -> np.ndarray:
        size = self._size if self.below(10) == 0 else self.below(20)
        return np.frombuffer(self._rng.bytes(size * dtype.itemsize), dtype)

    def any(self) -> bytes:
        """One input."""
        choice = self.below(16)
        if choice == 0:
            return self.chunk(300)
        if choice == 1:
            return struct.pack(">4sBB", MAGIC, VERSION, self.below(len(MESSAGES) + 2)) + self.chunk(300)
        if choice == 2:
            return b"".join(self._pick() for _ in range(1 + self.below(3)))
        damaged = self.damaged(self._pick())
        return self._pick() + damaged if choice == 3 else damaged

    def damaged(self, whole: bytes) -> bytes:
        """``whole`` with one to three damages."""
        data = bytearray(whole)
        for _ in range(1 + self.below(3)):
            data = self._damages[self.below(len(self._damages))](data)
        return bytes(data)

    def pieces(self, data: bytes) -> int:
        """How many bytes of ``data`` come at a time."""
        return (len(data) or 1, 1 + len(data) // 200, 1 + self.below(64))[self.below(3)]

    def _pick(self) -> bytes:
        return self.corpus[self.below(len(self.corpus))]

    def _flip(self, data: bytearray) -> bytearray:
        for _ in range(1 + self.below(8)):
            if data:
                data[self.below(len(data))] ^= 1 << self.below(8)
        return data

    def _header(self, data: bytearray) -> bytearray:
        """One field of the header gets another value."""
        at, length = ((4, 1), (5, 1), (6, 2), (8, 4), (12, 8))[self.below(5)]
        if len(data) >= at + length:
            data[at : at + length] = self._edge(length)
        return data

    def _number(self, data: bytearray) -> bytearray:
        """A number among the fields, a string's length or a table's entry gets another value."""
        length = (4, 8)[self.below(2)]
        if len(data) > 20 + length:
            at = 20 + self.below(min(len(data) - 20 - length, 200))
            data[at : at + length] = self._edge(length)
        return data

    def _edge(self, length: int) -> bytes:
        value = EDGES[self.below(len(EDGES))] if self.below(2) else self.below(300)
        return (value % 256**length).to_bytes(length, "big")

    def _cut(self, data: bytearray) -> bytearray:
        return data[: self.below(len(data) + 1)]

    def _insert(self, data: bytearray) -> bytearray:
        at = self.below(len(data) + 1)
        return data[:at] + self.chunk(20) + data[at:]

    def _erase(self, data: bytearray) -> bytearray:
        at = self.below(len(data) + 1)
        return data[:at] + data[at + self.below(20) :]

    def _repeat(self, data: bytearray) -> bytearray:
        at = self.below(len(data) + 1)
        return data[:at] + data[at : at + self.below(40)] + data[at:]

    def _splice(self, data: bytearray) -> bytearray:
        other = self._pick()
        return data[: self.below(len(data) + 1)] + other[self.below(len(other) + 1) :]


def frame(message: Message) -> bytes:
    """Its bytes."""
    return b"".join(bytes(buffer) for buffer in encode(message))


# ---- the parser


class Target:
    """What is fed: a `Reader`, or either end of a `Connection`, before or after the handshake."""

    KINDS = ("reader", "stranger's server", "stranger's client", "peer's server", "peer's client")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.allocated = 0
        self._genuine = b""
        self.parser: Reader | Connection
        if kind == "reader":
            self.parser = Reader(LIMITS, self._allocate)
        else:
            self.parser = Connection(server=kind.endswith("server"), key=KEY, limits=LIMITS, allocate=self._allocate)
            if kind.startswith("peer"):
                self.parser._authenticate()

    def genuine(self) -> bytes:
        """What a stranger would have to say to be let in."""
        assert isinstance(self.parser, Connection)
        other = Connection(server=not self.parser.server, key=KEY)
        if not self.parser.server:
            proof = Proof(make_proof(KEY, b"server", other.nonce, self.parser.nonce))
            self._genuine = b"".join(map(bytes, other.start())) + frame(proof)
            return self._genuine
        challenge, answers = b"".join(map(bytes, self.parser.start())), b""
        while challenge:
            space = other.space()
            count = min(len(space), len(challenge))
            space[:count], challenge = challenge[:count], challenge[count:]
            answers += b"".join(map(bytes, other.received(count)[1]))
        self._genuine = answers
        return answers

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        self.allocated += size * dtype.itemsize
        if self.allocated > LIMITS.body:
            raise Violation(f"{self.allocated} bytes allocated for one frame")
        return np.empty(size, dtype)

    def feed(self, data: bytes, step: int) -> str:
        """``data``, ``step`` bytes at a time, and the end of the stream; returns what came of it.

        Raises:
            Violation: what must not happen.
        """
        view, at, outcome = memoryview(data), 0, "waits"
        try:
            while at < len(data):
                space = self.parser.space()
                count = min(len(space), step, len(data) - at)
                if count < 1:
                    raise Violation("no space for the next byte")
                space[:count] = view[at : at + count]
                at += count
                event = self.parser.received(count)
                if isinstance(event, tuple):
                    event = event[0]
                if event is not None:
                    outcome, self.allocated = "message", 0
                    self._check(event)
            self.parser.received(0)
        except AuthenticationError:
            outcome = "not authenticated"
        except RemoteProtocolError as error:
            outcome = "cut off" if "its end within one" in error.message else "refused"
        if self.kind.startswith("stranger") and self.parser.authenticated:  # type: ignore[union-attr]
            if not (self._genuine and data.startswith(self._genuine)):
                raise Violation("a stranger was let in")
            outcome += " after the genuine handshake"
        return outcome

    def _check(self, event: Message | EndOfStream) -> None:
        if not isinstance(event, MESSAGES):
            raise Violation(f"{event} within the stream")
        if self.kind.startswith("stranger") and not self._genuine:
            raise Violation(f"{type(event).__name__} from a stranger")
        encode(event)


def parse(count: int, seed: int) -> Counter[str]:
    """Feeds ``count`` inputs to parsers; returns how many had which outcome.

    Raises:
        Violation: what must not come of an input, with the input.
    """
    inputs, outcomes = Inputs(seed), Counter[str]()
    before = 0
    with contextlib.ExitStack() as watch:
        watch.callback(faulthandler.cancel_dump_traceback_later)  # or it ends this process later, whatever it does then
        for number in range(count):
            if number % 1000 == 0:
                faulthandler.dump_traceback_later(HANG, exit=True, file=2)
            if number == min(10_000, count // 2):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            target = Target(Target.KINDS[number % len(Target.KINDS)])
            close = target.kind.startswith("stranger") and inputs.below(2)
            data = inputs.damaged(target.genuine()) if close else inputs.any()
            step = inputs.pieces(data)
            try:
                outcomes[target.feed(data, step)] += 1
            except Exception as error:
                where = f"input {number} of seed {seed} to a {target.kind}, {step} at a time"
                raise Violation(f"{where}: {data!r}") from error
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > ROOM:
        raise Violation(f"the parser's process has grown by {grown} bytes")
    outcomes["bytes of memory more"] = grown
    return outcomes


def guided(seconds: int, seed: int) -> int:
    """The parser again, with inputs that atheris finds by coverage; returns its exit status."""
    import atheris

    def one(data: bytes) -> None:
        if len(data) > 1:
            Target(Target.KINDS[data[0] % len(Target.KINDS)]).feed(data[2:], 1 + data[1])

    with tempfile.TemporaryDirectory() as folder:
        for number, whole in enumerate(Inputs(seed).corpus):
            Path(folder, str(number)).write_bytes(bytes([number % len(Target.KINDS), 255]) + whole)
        child = os.fork()  # atheris ends the process
        if child == 0:
            for holder in (Reader, Connection):
                for name, method in vars(holder).copy().items():
                    if callable(method) and not name.startswith("__"):
                        setattr(holder, name, atheris.instrument_func(method))
            settings = [f"-max_total_time={seconds}", f"-seed={seed + 1}", "-max_len=2048"]
            atheris.Setup([sys.argv[0], *settings, folder], one)
            atheris.Fuzz()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- a running server


class Honest(threading.Thread):
    """A worker whose every commit depends on the center that it was sent; its connection is cut now and then."""

    def __init__(self, address: Address, size: int, steps: int | None = None) -> None:
        super().__init__(daemon=True)
        self._client = WorkerClient(address, worker=0, attempt=0, size=size, deadlines=Deadlines(reconnect=60))
        self._size = size
        self._most = steps
        self.steps = 0
        self.cuts = 0
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self.error = error

    def _train(self) -> None:
        client = self._client
        client.join()
        center = client.pull().center
        wave = np.sin(np.arange(self._size, dtype=np.float32))
        while not self.over.is_set() if self._most is None else self.steps < self._most:
            assert center is not None
            self.steps += 1
            if self._most is None and self.steps % 50 == 0 and client.channel is not None:
                client.channel.hang_up()
                self.cuts += 1
            payload = client.payload(1)
            np.multiply(center, np.float32(-0.1), out=payload[0])
            payload[0][:] += wave / np.float32(self.steps)
            history = np.array([0.0, 1.0, 0.5])
            request = CommitRequest(
                0, self.steps - 1, self.steps - 1, False, True, 0.1, 1.0, payload, messages.NO_FLOATS, history
            )
            center = client.commit(request).center
        client.leave()
        client.close()


class Enemy:
    """Sends inputs to a server: as a stranger, or as a peer that holds the key."""

    def __init__(self, address: Address, seed: int, size: int, limits: Limits) -> None:
        self._address = address
        self._where = (address.host, address.port)
        self._inputs = Inputs(seed, size)
        self._inputs.corpus += self._likely(size)
        self._limits, self._size = limits, size
        self._peer: tuple[socket.socket, Connection] | None = None
        self.outcomes: Counter[str] = Counter()
        self.error: BaseException | None = None

    def _likely(self, size: int) -> list[bytes]:
        """What a worker or driver would send, but for its lease."""
        vector = np.zeros(size, np.float32)
        requests = (
            Commit(0, 77, 1, 1, 0, 0, 0, False, True, 0.1, 1.0, 0.0, (vector,), history=np.zeros(3)),
            Pull(0, 77, 1),
            Leave(0, 77, 1),
            Hello(5, 77, size, 0, "loss"),
            Hello(5, 77, size, 0, "loss", "int8"),
            Commit(0, 77, 1, 1, 0, 0, 0, False, True, 0.1, 1.0, 0.0, (), packed=(np.zeros(size + 4, np.uint8),)),
            messages.Probe(),
            messages.FetchModel(),
            messages.Inspect(),
            messages.Observe(-1, 0.0),
            messages.Drain(0, 3),
        )
        return [frame(request) for request in requests for _ in range(10)]

    def send(self, count: int) -> None:
        """``count`` inputs; the first `Violation` ends it, and is in ``error``."""
        try:
            for number in range(count):
                data = self._inputs.any()
                if number % 2:
                    self._as_stranger(data)
                else:
                    self._as_peer(data)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            self.error = error
        finally:
            self._hang_up()

    def _dial(self) -> socket.socket:
        # From many addresses, and without leaving their ports taken for a minute each.
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
                with contextlib.suppress(OSError):  # it may have hung up
                    sock.shutdown(socket.SHUT_WR)
            heard = drained(sock)
        if len(heard) > 2 * len(frame(Challenge(np.zeros(32, np.uint8)))):
            raise Violation(f"a stranger was sent {heard!r} for {data!r}")
        self.outcomes["stranger: refused"] += 1

    def _as_peer(self, data: bytes) -> None:
        verdict, requests = self._foresee(data)
        if verdict == "entitled":
            self.outcomes["peer: left out, for a peer may end the job"] += 1
            return
        sock, connection = self._peer or self._authenticate()
        try:
            sock.sendall(data)
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

    def _foresee(self, data: bytes) -> tuple[str, int]:
        """What a server must do with ``data`` from a peer, and how many requests there are in it."""
        parser = Connection(server=True, key=KEY, limits=self._limits)
        parser._authenticate()
        requests, at = 0, 0
        while at < len(data):
            space = parser.space()
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
                    return "waits", requests  # until something happens, which it need not
                requests += 1
        try:
            parser.received(0)
        except RemoteProtocolError:
            return "waits", requests
        return "served", requests

    def _authenticate(self) -> tuple[socket.socket, Connection]:
        for _ in range(1000):  # a crowd is in its own way: whoever came first makes room
            sock = self._dial()
            connection = Connection(server=False, key=self._address.key)
            try:
                while not connection.authenticated:
                    event, answer = connection.received(sock.recv_into(connection.space()))
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
    """Whether a peer may end or change the job by this: whoever holds the key is believed."""
    if isinstance(event, Hello):  # another model ends the job
        return event.worker == 0 or (event.size, event.moving_statistics) != (size, 0)
    if isinstance(event, (Abort, Fault)):
        return True
    return isinstance(event, (Commit, Pull, Leave)) and (event.worker, event.attempt) == (0, 0)


def drained(sock: socket.socket) -> bytes:
    """All that comes, to the end of the stream."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            heard += piece
    return heard


def next_event(sock: socket.socket, connection: Connection) -> Message | EndOfStream:
    """The next message."""
    while True:
        event, _ = connection.received(sock.recv_into(connection.space()))
        if event is not None:
            return event


class Log(logging.Handler):
    """What the server says, which its driver hands on; not to be shown, as there is a lot of it."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0
        #: Lines that are no records: an exception that nobody expected.
        self.strange: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.refusals += record.name.endswith(".admission")
        if record.name.endswith(".process") or "Traceback" in text:
            self.strange.append(text)

    def __enter__(self) -> Log:
        said_by = logging.getLogger("distkeras")
        said_by.addHandler(self)
        said_by.propagate = False
        return self

    def __exit__(self, *exc_info: object) -> None:
        said_by = logging.getLogger("distkeras")
        said_by.removeHandler(self)
        said_by.propagate = True


def memory(pid: int, name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of a process, in bytes."""
    with open(f"/proc/{pid}/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name))


def live(count: int, seed: int, *, size: int = 20_000, enemies: int = 3) -> Counter[str]:
    """Sends ``count`` inputs to a server beside an honest worker; returns how many had which outcome.

    Raises:
        Violation: the worker, the server or a connection was harmed.
    """
    deadlines = Deadlines(handshake=5.0, frame=5.0)
    limits = Limits(body=4 * size + (16 << 20))  # what the server allows
    outcomes: Counter[str] = Counter()
    with (
        Log() as log,
        ServerProcess(ServerSettings(make("downpour", window=1), workers=1, deadlines=deadlines)) as process,
    ):
        driver = DriverClient(process.address)
        driver.publish(np.zeros(size, np.float32))
        honest = Honest(process.address, size)
        honest.start()
        driver.observe(0, HANG)
        threads_before, memory_before = len(os.listdir(f"/proc/{process.pid}/task")), memory(process.pid, "VmRSS")
        attacks = [Enemy(process.address, seed + number, size, limits) for number in range(enemies)]
        running = [threading.Thread(target=enemy.send, args=(count // enemies,), daemon=True) for enemy in attacks]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        honest.over.set()
        honest.join(HANG)
        for error in (*(enemy.error for enemy in attacks), honest.error):
            if error is not None:
                raise Violation(f"met {error!r}") from error
        if honest.is_alive():
            raise Violation("the honest worker hangs")
        center = driver.center().center.copy()
        commits = driver.drain(0, honest.steps + 1).commits.view(COMMIT)
        deadline = time.monotonic() + HANG
        # The driver's own thread is one of those; the honest worker's has ended.
        while (threads := len(os.listdir(f"/proc/{process.pid}/task"))) > threads_before:
            if time.monotonic() > deadline:
                raise Violation(f"{threads} threads are left of {threads_before}")
            time.sleep(0.1)
        grown = memory(process.pid, "VmHWM") - memory_before
        driver.close()
        process.close()  # and its last words are here
    if log.strange or log.refusals > 2 * ADDRESSES[0] * ADDRESSES[1]:
        raise Violation(f"the server said {log.refusals} times that it refused somebody, and {log.strange}")
    steps = honest.steps
    if commits["first_batch"].tolist() != list(range(steps)) or set(commits["worker"].tolist()) != {0}:
        raise Violation("the ledger is not exact")
    expected, by_itself = undisturbed(steps, size)
    if not np.array_equal(center, expected):
        raise Violation("the center is not the undisturbed one")
    if grown > by_itself + ROOM:
        raise Violation(f"the server has grown by {grown} bytes, and by {by_itself} where it was not disturbed")
    for enemy in attacks:
        outcomes.update(enemy.outcomes)
    outcomes.update(
        {
            "honest: commits": steps,
            "honest: connections cut": honest.cuts,
            "server: lines of log about refused peers": log.refusals,
            "server: bytes of memory more": grown,
            "server: bytes of memory more where undisturbed": by_itself,
            "server: threads more": threads - threads_before,
        }
    )
    return outcomes


def undisturbed(steps: int, size: int) -> tuple[np.ndarray, int]:
    """The center after as many steps with nobody else about, and the bytes by which the server has grown: records."""
    with ServerProcess(ServerSettings(make("downpour", window=1), workers=1)) as process:
        driver = DriverClient(process.address)
        driver.publish(np.zeros(size, np.float32))
        before = memory(process.pid, "VmRSS")
        alone = Honest(process.address, size, steps)
        alone.run()
        if alone.error is not None:
            raise alone.error
        center, grown = driver.center().center.copy(), memory(process.pid, "VmHWM") - before
        driver.close()
    return center, grown


def main(argv: list[str] | None = None) -> int:
    """Runs what is asked for; returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=0, metavar="N", help="inputs to the parser")
    options.add_argument("--live", type=int, default=0, metavar="N", help="inputs to a running server")
    options.add_argument("--guided", type=int, default=0, metavar="SECONDS", help="of inputs that follow coverage")
    options.add_argument("--seed", type=int, default=0, metavar="S", help="of the inputs (default: %(default)s)")
    chosen = options.parse_args(argv)
    for name, count, run in (("parser", chosen.inputs, parse), ("server", chosen.live, live)):
        if count:
            began = time.monotonic()
            outcomes = run(count, chosen.seed)
            print(f"{name}: {count} inputs of seed {chosen.seed} in {time.monotonic() - began:.0f} s")
            for outcome, number in sorted(outcomes.items()):
                print(f"  {number:>10} {outcome}")
    return guided(chosen.guided, chosen.seed) if chosen.guided else 0


if __name__ == "__main__":
    sys.exit(main())
