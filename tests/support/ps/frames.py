"""Messages as bytes, bytes into a parser, and the comparison of messages, for tests of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from distkeras.ps.protocol.framing import Connection
from distkeras.ps.protocol.messages import Commit, Message


class Parser(Protocol):
    """A `Reader` or a `Connection`."""

    def spaces(self) -> list[memoryview]: ...
    def received(self, count: int) -> Any: ...


def some_commit(*parts: np.ndarray, **fields: Any) -> Commit:
    """Return the first commit of worker 0, of one mini-batch unless ``fields`` change that."""
    first: dict[str, Any] = {
        "worker": 0,
        "attempt": 0,
        "incarnation": 1,
        "sequence": 1,
        "epoch": 0,
        "first": 0,
        "last": 0,
    }
    record = {"epoch_end": False, "wants_center": True, "learning_rate": 0.1, "scale": 1.0, "parts": parts}
    return Commit(**{**first, **record, **fields})


def joined(buffers: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)


def feed(parser: Parser, data: bytes, step: int | None = None) -> list[Any]:
    """Feed ``data`` to a parser, ``step`` bytes at a time; return its results other than None."""
    events = []
    while data:
        space = parser.spaces()[0]
        count = min(len(space), len(data), step or len(data))
        space[:count], data = data[:count], data[count:]
        event = parser.received(count)
        if event is not None:
            events.append(event)
    return events


def deliver(to: Connection, buffers: Sequence[bytes | memoryview]) -> tuple[list[Any], list[bytes | memoryview]]:
    """Deliver bytes to one end of a connection; return its messages, and the buffers that it wants to send."""
    events, answers = [], []
    for event, answer in feed(to, joined(buffers)):
        answers += answer
        if event is not None:
            events.append(event)
    return events, answers


def shake_hands(client: Connection, server: Connection) -> None:
    """Perform the handshake of two ends in memory."""
    _, answer = deliver(client, server.start())
    _, proof = deliver(server, answer)
    deliver(client, proof)


def same_message(a: Message, b: Message) -> bool:
    """Return whether type, numbers (a NaN equals a NaN) and arrays are the same."""
    if type(a) is not type(b):
        return False
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, np.ndarray):
            if value.dtype != other.dtype or not np.array_equal(value, other, equal_nan=value.dtype.kind == "f"):
                return False
        elif isinstance(value, tuple):
            if len(value) != len(other) or not all(map(np.array_equal, value, other)):
                return False
        elif value != other and not (value != value and other != other):
            return False
    return True
