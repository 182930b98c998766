"""A stranger that occupies the port of an absent server."""

from __future__ import annotations

import contextlib

from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.framing import KEY_BYTES, Connection
from distkeras.ps.transport.client import Channel
from simulation.network import VirtualStream
from simulation.scheduler import Process
from simulation.world import Surroundings, VirtualWorld


class Impostor:
    """A process that listens and, by chance, is silent, disconnects, sends garbage, or serves another job.

    Args:
        surroundings: surroundings of the run.
        address: the free address of the server.
    """

    def __init__(self, surroundings: Surroundings, address: tuple[str, int]) -> None:
        self._scheduler = surroundings.scheduler
        self.process = Process("impostor", address[0])
        self._world = VirtualWorld(surroundings, self.process, "impostor")
        self._listener = surroundings.network.listen(self.process, *address)
        self._scheduler.start(self.process, self._accept, "accept")

    def _accept(self) -> None:
        while True:
            stream, _, port = self._listener.accept()
            self._scheduler.start(self.process, lambda stream=stream: self._meet(stream), f"meets {port}")  # type: ignore[misc]  # it cannot infer the lambda

    def _meet(self, stream: VirtualStream) -> None:
        manner = int(4 * self._scheduler.random.random())
        with contextlib.suppress(DistkerasError, OSError):
            if manner == 0:
                self._scheduler.wait(None, 1000.0)
            elif manner == 1:
                stream.write([memoryview(b"220 mail at your service\r\n" * 20)], 10.0)
            elif manner == 2:
                connection = Connection(server=True, key=bytes(KEY_BYTES), token=self._world.token)
                Channel(stream, connection, frame=10.0, world=self._world).handshake(10.0)
        stream.close()
