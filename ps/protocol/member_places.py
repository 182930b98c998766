"""The addresses of members: the lines of `Members`, as the server writes and a worker reads them."""

from __future__ import annotations

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.messages import Announce, Members


def line_of(announced: Announce) -> str:
    """Return the line of `Members` of one that has announced itself."""
    return f"{announced.worker} {announced.host} {announced.port}"


def places_of(message: Members, worker: int) -> tuple[tuple[int, str, int], ...]:
    """Return worker, host and port of each member; raise a RemoteProtocolError for ``worker`` if they make no sense."""
    try:
        rows = [line.split(" ") for line in message.places.split("\n")]
        return tuple((int(number), host, int(port)) for number, host, port in rows)
    except ValueError:
        raise RemoteProtocolError(
            f"members must be worker, host and port, a line each. Received: {message.places!r}", worker=worker
        ) from None
