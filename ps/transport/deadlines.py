"""How long each wait may last."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from distkeras.ps.validate import check_field, require_number


@dataclass(frozen=True)
class Deadlines:
    """How long each wait may last, in seconds.

    Args:
        connect: to reach the server's port.
        handshake: from a connection to its authentication.
        frame: from a frame's first byte to its last.
        publish: a worker's wait for the driver to publish the center.
        gather: a worker's wait for all others to join, where the rule or the scheduler needs them all.
        reply: a worker's wait for a round, a slower worker, or a busy server.
        lease: silence of a connected holder of a partition after which another attempt takes over. A holder that
            lives is never silent that long: it sends heartbeats while it computes.
        silence: of a connected worker between two requests.
        standstill: the server's silence towards its driver after which its process is killed, and started again from
            its checkpoint; without one, it has ``reply`` seconds before the job ends.
        reconnect: a worker's attempts to reach the server again after a lost connection.
        rows: a worker's wait for Spark's next rows, which other stages may have to compute first.
        close: for the server's threads to end.

    Raises:
        ConfigurationError: one is not a finite number above 0.
    """

    connect: float = 20.0
    handshake: float = 10.0
    frame: float = 120.0
    publish: float = 60.0
    gather: float = 60.0
    reply: float = 600.0
    lease: float = 120.0
    silence: float = 24 * 3600.0
    standstill: float = 120.0
    reconnect: float = 30.0
    rows: float = 3600.0
    close: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(self, field.name, require_number)
