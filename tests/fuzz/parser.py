"""The parser under test, its handshake, and the tags of invalid frames; it may raise only its two errors."""

from __future__ import annotations

import contextlib
import faulthandler
import resource
import struct
from collections import Counter

import numpy as np

from distkeras.ps.errors import AuthenticationError, RemoteProtocolError
from distkeras.ps.protocol.framing import MAGIC, Connection, EndOfStream, Limits, Nonces, Reader, Seal, encode
from distkeras.ps.protocol.messages import Message, Proof
from distkeras.ps.protocol.registry import MESSAGES
from fuzz.inputs import Inputs, frame

KEY = bytes(range(32))
LIMITS = Limits(fields=4096, body=64 * 1024, arrays=16)
#: Bytes by which a process may grow while it receives inputs.
ROOM = 64 << 20
HANG = 60.0  # In seconds.


class Violation(AssertionError):
    """A behavior that no input may cause."""


def shake_hands(server: Connection, client: Connection) -> None:
    """Perform the handshake of two ends that have the same key."""
    deliver(deliver(deliver(first_words(server), client), server), client)


def first_words(connection: Connection) -> bytes:
    """Return what ``connection`` sends first."""
    return b"".join(map(bytes, connection.start()))


def deliver(data: bytes, connection: Connection) -> bytes:
    """Deliver ``data`` to ``connection``; return the answers of its handshake."""
    answers = b""
    while data:
        space = connection.spaces()[0]
        count = min(len(space), len(data))
        space[:count], data = data[:count], data[count:]
        answers += b"".join(map(bytes, connection.received(count)[1]))
    return answers


class Target:
    """A parser under test: a `Reader`, or either end of a `Connection`, before or after the handshake.

    A peer's frames have tags; the frames of a man in the middle have no valid tags.
    """

    KINDS = ("reader", "stranger's server", "stranger's client", "peer's server", "peer's client", "relay's server")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.allocated = 0
        self._genuine = b""
        self._seal: Seal | None = None
        self.parser: Reader | Connection
        if kind == "reader":
            self.parser = Reader(LIMITS, self._allocate)
        else:
            self.parser = Connection(server=kind.endswith("server"), key=KEY, limits=LIMITS, allocate=self._allocate)
            if not kind.startswith("stranger"):
                other = Connection(server=not self.parser.server, key=KEY)
                shake_hands(*((self.parser, other) if self.parser.server else (other, self.parser)))
                self._seal = other.seal if kind.startswith("peer") else None

    def genuine(self) -> bytes:
        """Return the bytes that would authenticate a stranger."""
        assert isinstance(self.parser, Connection)
        other = Connection(server=not self.parser.server, key=KEY)
        if self.parser.server:
            self._genuine = deliver(first_words(self.parser), other)
        else:
            proof = Proof(Nonces(other.nonce, self.parser.nonce).proof(KEY, b"server"))
            self._genuine = first_words(other) + frame(proof)
        return self._genuine

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        self.allocated += size * dtype.itemsize
        if self.allocated > LIMITS.body:
            raise Violation(f"{self.allocated} bytes allocated for one frame")
        return np.empty(size, dtype)

    def feed(self, data: bytes, step: int) -> str:
        """Feed ``data``, ``step`` bytes at a time, and the end of the stream; return the outcome.

        Raises:
            Violation: the parser misbehaved.
        """
        data = sealed(data, self._seal)
        view, at, outcome = memoryview(data), 0, "waits"
        try:
            while at < len(data):
                space = self.parser.spaces()[0]
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
                    self.check(event)
            self.parser.received(0)
        except AuthenticationError:
            outcome = "not authenticated"
        except RemoteProtocolError as error:
            outcome = "cut off" if "its end within one" in error.message else "refused"
        if self.kind.startswith("stranger") and self.parser.authenticated:  # type: ignore[union-attr]  # strangers use a `Connection`
            if not (self._genuine and data.startswith(self._genuine)):
                raise Violation("a stranger was let in")
            outcome += " after the genuine handshake"
        return outcome

    def check(self, event: Message | EndOfStream) -> None:
        """Check an event of the parser.

        Raises:
            Violation: the parser must not return this event.
        """
        if not isinstance(event, MESSAGES):
            raise Violation(f"{event} within the stream")
        if self.kind.startswith("stranger") and not self._genuine:
            raise Violation(f"{type(event).__name__} from a stranger")
        if self.kind.startswith("relay"):
            raise Violation(f"{type(event).__name__} from who changed it")
        encode(event)


def parse(count: int, seed: int) -> Counter[str]:
    """Feed ``count`` inputs to parsers; return the number of inputs by outcome.

    Raises:
        Violation: an input made a parser misbehave; the message contains the input.
    """
    inputs, outcomes = Inputs(seed), Counter[str]()
    before = 0
    with contextlib.ExitStack() as watch:
        # Otherwise it would end this process during later work.
        watch.callback(faulthandler.cancel_dump_traceback_later)
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


_HEADER = struct.Struct(">4sBBHIQ")
_ENTRY = struct.Struct(">BQ")
_DTYPES = ("u1", "<f4", "<f8")


def sealed(data: bytes, seal: Seal | None) -> bytes:
    """Return ``data`` with a tag in each whole frame at its beginning, and with the rest unchanged.

    Args:
        data: frames without tags, which may be damaged.
        seal: the sender's seal; None: frames have no tags.
    """
    done = b""
    while seal is not None and (arrays := _arrays(data)) is not None:
        *_, code, _, fields, body = _HEADER.unpack_from(data)
        head, end = _HEADER.size + fields, _HEADER.size + fields + body
        done += data[:head] + seal.tag(MESSAGES[code], data[:head], arrays) + data[head:end]
        data = data[end:]
    return done + data


def _arrays(data: bytes) -> list[np.ndarray] | None:
    """Return the arrays of the frame at the beginning of ``data``, or None if there is no whole frame."""
    if len(data) < _HEADER.size:
        return None
    magic, _, code, count, fields, body = _HEADER.unpack_from(data)
    table, at = _HEADER.size + fields - _ENTRY.size * count, _HEADER.size + fields
    if magic != MAGIC or code >= len(MESSAGES) or table < _HEADER.size or len(data) < at + body:
        return None
    arrays = []
    for dtype, size in _ENTRY.iter_unpack(data[table:at]):
        if dtype >= len(_DTYPES) or size > body:
            return None
        nbytes = size * np.dtype(_DTYPES[dtype]).itemsize
        if at + nbytes > len(data):
            return None
        arrays.append(np.frombuffer(data, _DTYPES[dtype], size, at))
        at += nbytes
    return arrays
