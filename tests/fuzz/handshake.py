"""The handshake in memory."""

from __future__ import annotations

from distkeras.ps.protocol.framing import Connection


def shake_hands(server: Connection, client: Connection) -> None:
    """Takes both ends through the handshake; they hold the same key."""
    deliver(deliver(deliver(first_words(server), client), server), client)


def first_words(connection: Connection) -> bytes:
    """What ``connection`` sends unasked."""
    return b"".join(map(bytes, connection.start()))


def deliver(data: bytes, connection: Connection) -> bytes:
    """Hands ``data`` to ``connection``; returns what its handshake answers."""
    answers = b""
    while data:
        space = connection.spaces()[0]
        count = min(len(space), len(data))
        space[:count], data = data[:count], data[count:]
        answers += b"".join(map(bytes, connection.received(count)[1]))
    return answers
