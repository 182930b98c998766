"""Jobs of DASO with toy replicas: a real server, and members in threads that exchange over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distkeras.ps.protocol.messages import Loop, Welcome
from distkeras.ps.rules.daso import Daso
from distkeras.ps.transport.members import MemberLinks, Membership
from distkeras.ps.worker.daso import MemberReplica
from distkeras.ps.worker.loop import run_worker, work
from support.ps.running_server import KEY, Running
from support.ps.toy_model import ToyBatch, ToyReplica, batches


class RecordingReplica(ToyReplica):
    """Notes the parameters after each step; ``gradient(theta, value)`` is that of the batch's value."""

    def __init__(self, size: int, eta: float, gradient: Callable[[np.ndarray, Any], np.ndarray]) -> None:
        super().__init__(size, eta, gradient, np.float32)
        self.thetas: list[np.ndarray] = []
        self.losses: Callable[[ToyBatch], float] = lambda batch: 0.0

    def load(self, vector: np.ndarray) -> None:
        super().load(vector)
        self.thetas.append(vector.copy())

    def gradient(self, batch: ToyBatch, out: np.ndarray) -> np.ndarray:
        super().gradient(batch, out)
        return np.array([self.losses(batch)])


class Member(threading.Thread):
    """One worker, and its error if it fails."""

    def __init__(
        self,
        running: Running,
        daso: Daso,
        replica: RecordingReplica,
        values: Sequence[Any],
        *,
        worker: int,
        epochs: int,
    ) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self.replica = replica
        self.node = ""
        self.client = running.client(worker, size=replica.size)
        self.links = MemberLinks(
            "127.0.0.1", KEY, worker=worker, attempt=0, size=replica.size, deadlines=running.deadlines
        )
        self._daso, self._values, self._epochs = daso, values, epochs

    def run(self) -> None:
        try:
            run_worker(self.client, self.client.join(), self._begin)
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error
        finally:
            self.links.close()
            self.client.close()

    def _begin(self, welcome: Welcome) -> Loop:
        members = self.client.announce(*self.links.address, self.node, len(self._values))
        self.links.connect(Membership.of(members, self.client.worker))
        return work(
            self._daso,
            MemberReplica(self._daso, self.replica, self.links, self._epochs),
            batches(self._values, epochs=self._epochs),
            lambda: self.client.payload(1),
        )


def run_members(running: Running, members: Sequence[Member], timeout: float = 60.0) -> None:
    """Run them to their end."""
    for member in members:
        member.start()
    for member in members:
        member.join(timeout)
        assert not member.is_alive()
