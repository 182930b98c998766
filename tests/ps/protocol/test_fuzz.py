"""Inputs that hypothesis draws, for both ends of a connection, as `tests/fuzz` draws them a million times.

For every input, in pieces of every size, an end raises only the two protocol errors, allocates no more memory than
the limits allow, and accepts nothing from strangers.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.frames import shake_hands, some_commit

from distkeras.ps.errors import AuthenticationError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import Drain, Publish
from distkeras.ps.protocol.framing import HANDSHAKE_LIMITS, MAGIC, VERSION, Connection, EndOfStream, Limits, encode
from distkeras.ps.protocol.messages import Ack, Answer, Challenge, Fault, Hello, Message, Proof
from distkeras.ps.protocol.registry import MESSAGES

KEY = bytes(range(32))
LIMITS = Limits(fields=4096, body=8192, arrays=16)
EDGES = [0, 1, 2, 255, 2**16 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
THREE = np.ones(3, np.float32)

FRAMES = [
    b"".join(bytes(buffer) for buffer in encode(message))
    for message in (
        Challenge(np.zeros(32, np.uint8)),
        Answer(np.zeros(32, np.uint8), np.zeros(32, np.uint8)),
        Proof(np.zeros(32, np.uint8)),
        Hello(0, 1, 3, 0, "loss\naccuracy", "int8"),
        some_commit(THREE, THREE, last=1, history=np.zeros((2, 3))),
        some_commit(last=1, packed=(np.ones(7, np.uint8),) * 2),
        Publish(THREE, model=np.zeros(5, np.uint8)),
        Ack(1, 2, 3, 4),
        Drain(0, 10),
        Fault(0, "text", column="x", traceback="y"),
    )
]


class EndUnderTest:
    """One end of a connection that receives input from a stranger, or, after the handshake, from a peer."""

    def __init__(self, *, server: bool, known: bool) -> None:
        self.allocated = 0
        self.known = known
        self.connection = Connection(server=server, key=KEY, limits=LIMITS, allocate=self._allocate)
        if known:
            peer = Connection(server=not server, key=KEY)
            shake_hands(*((peer, self.connection) if server else (self.connection, peer)))

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        self.allocated += size * dtype.itemsize
        assert self.allocated <= LIMITS.body
        return np.empty(size, dtype)

    def feed(self, data: bytes, step: int) -> None:
        try:
            while data:
                space = self.connection.spaces()[0]
                count = min(len(space), step, len(data))
                assert count > 0
                assert len(space) <= max(LIMITS.fields, LIMITS.body) if self.known else HANDSHAKE_LIMITS.fields
                space[:count], data = data[:count], data[count:]
                event, _ = self.connection.received(count)
                assert event is None, f"{event} from a stranger, or without a tag"
            event, _ = self.connection.received(0)
            assert event == EndOfStream()
        except (RemoteProtocolError, AuthenticationError):
            pass
        assert self.connection.authenticated == self.known


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw one or two frames with some numbers replaced, and pieces removed, repeated or inserted."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=2))))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                width = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from(EDGES) | st.integers(0, 300)) % 256**width
                data[at : at + width] = number.to_bytes(width, "big")
            case 1:
                del data[at:]
            case 2:
                del data[at : at + draw(st.integers(1, 20))]
            case 3:
                data[at:at] = draw(st.binary(max_size=20))
            case 4:
                data[at:at] = data[at : at + 20]
    return bytes(data)


def with_valid_start() -> Any:
    """Return a strategy for garbage that begins with a valid magic number, version and code."""
    return st.builds(
        lambda code, rest: struct.pack(">4sBB", MAGIC, VERSION, code) + rest,
        st.integers(0, len(MESSAGES)),
        st.binary(max_size=60),
    )


INPUTS = damaged() | with_valid_start() | st.binary(max_size=60)
STEPS = st.sampled_from([10**6, 1, 3, 17])


@pytest.mark.parametrize("known", [False, True], ids=["stranger", "peer"])
@pytest.mark.parametrize("server", [False, True], ids=["client", "server"])
@examples(100)
@given(data=INPUTS, step=STEPS)
def test_garbage_is_refused(server: bool, known: bool, data: bytes, step: int) -> None:
    EndUnderTest(server=server, known=known).feed(data, step)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 123), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_damaged_answer_does_not_authenticate_a_client(damages: list[tuple[int, int]]) -> None:
    server, client = (Connection(server=role, key=KEY) for role in (True, False))
    challenge, answer = b"".join(map(bytes, server.start())), b""
    while challenge:
        count = min(len(client.spaces()[0]), len(challenge))
        client.spaces()[0][:count], challenge = challenge[:count], challenge[count:]
        answer += b"".join(map(bytes, client.received(count)[1]))
    data = bytearray(answer)
    for at, change in damages:
        data[at % len(data)] ^= change
    rest = bytes(data)
    try:
        while rest and not server.authenticated:
            count = min(len(server.spaces()[0]), len(rest))
            server.spaces()[0][:count], rest = rest[:count], rest[count:]
            server.received(count)
    except (RemoteProtocolError, AuthenticationError):
        pass
    assert server.authenticated == (bytes(data) == answer)
