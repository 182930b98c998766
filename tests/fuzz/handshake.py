"""The handshake in memory."""

from __future__ import annotations

from distkeras.ps.protocol.framing import Connection


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
