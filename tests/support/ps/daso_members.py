"""DASO jobs with toy replicas: a real server, and members in threads that exchange over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from queue import Queue
from typing import Any

import numpy as np

from distkeras.ps.errors import DistkerasError, Origin
from distkeras.ps.protocol.loop import Loop, OptimizerState
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules.daso import Daso
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.members import MemberLinks
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.daso import run_member
from distkeras.ps.worker.loop import run_worker
from support.patience import patience
from support.ps.toy_model import ToyBatch, ToyReplica, batches


class RecordingReplica(ToyReplica):
    """A replica that records its parameters after each step; ``gradient(theta, value)`` is a mini-batch's."""

    def __init__(self, size: int, eta: float, gradient: Callable[[np.ndarray, Any], np.ndarray]) -> None:
        super().__init__(size, eta, gradient, np.float32)
        self.thetas: list[np.ndarray] = []
        self.gradient_of = gradient
        self.losses: Callable[[ToyBatch], float] = lambda batch: 0.0

    def load(self, vector: np.ndarray) -> None:
        super().load(vector)
        self.thetas.append(vector.copy())

    def gradient(self, batch: ToyBatch, out: np.ndarray) -> np.ndarray:
        super().gradient(batch, out)
        return np.array([self.losses(batch)])

    def read_optimizer(self) -> OptimizerState | None:
        return None

    def load_optimizer(self, state: OptimizerState | None, example: ToyBatch) -> str | None:
        return None


class Killed(Exception):
    """The simulated death of a member, which closes all its connections."""


class Member(threading.Thread):
    """A worker in a thread; ``error`` is set if it fails.

    Args:
        die: a function that is called before each request with its number, and raises `Killed` to end the worker.
    """

    def __init__(  # noqa: PLR0913 - keywords, of which a test gives few
        self,
        address: Address,
        deadlines: Deadlines,
        daso: Daso,
        replica: RecordingReplica,
        values: Sequence[Any],
        *,
        worker: int,
        epochs: int,
        attempt: int = 0,
        die: Callable[[int, Any], None] = lambda number, request: None,
    ) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self.replica, self.die = replica, die
        self.node = ""
        self.client = WorkerClient(address, worker=worker, attempt=attempt, size=replica.size, deadlines=deadlines)
        self.links = self._make_links()
        self._met = False
        self._daso, self._values, self._epochs = daso, values, epochs

    def _make_links(self) -> MemberLinks:
        client = self.client
        key, deadlines = client.address.key, client.deadlines
        return MemberLinks(
            "127.0.0.1", key, worker=client.worker, attempt=client.attempt, size=client.size, deadlines=deadlines
        )

    def successor(self) -> Member:
        """Return the next attempt at the partition, whose model has the same gradient."""
        client, own = self.client, self.replica
        replica = RecordingReplica(own.size, own.learning_rate, own.gradient_of)
        replica.losses = own.losses
        return Member(
            client.address,
            client.deadlines,
            self._daso,
            replica,
            self._values,
            worker=client.worker,
            epochs=self._epochs,
            attempt=client.attempt + 1,
        )

    def start_and_report(self, ended: Queue[Member]) -> None:
        """Start the thread, which puts this member into ``ended`` when it ends."""
        self._ended = ended
        self.start()

    def run(self) -> None:
        try:
            run_worker(self.client, self.client.join(), self._begin)
        except Exception as error:  # noqa: BLE001 - the test asserts on it
            self.error = error
            if isinstance(error, DistkerasError) and error.origin is Origin.USER:
                self.client.report(error)  # A task does this, too.
        finally:
            self.links.close()
            self.client.close()
            self._ended.put(self)

    def _begin(self, welcome: Welcome) -> Loop:
        start = (welcome.epoch, welcome.batch)
        steps = run_member(
            self._daso,
            self.replica,
            batches(self._values, epochs=self._epochs, start=start),
            lambda: self.client.payload(1),
            welcome=welcome,
            worker=self.client.worker,
            node=self.node,
            epochs=self._epochs,
            meet=self._meet,
        )
        return self._watched(steps)

    def _watched(self, steps: Loop) -> Loop:
        number, reply = 0, None
        with closing(steps):
            while True:
                try:
                    request = steps.send(reply)
                except StopIteration:
                    return
                self.die(number, request)
                reply, number = (yield request), number + 1

    def _meet(self, node: str) -> MemberLinks | None:
        if self._met:
            self.links = self._make_links()
        self._met = True
        return self.links if self.links.meet(self.client, node, len(self._values)) else None


def run_members(members: Sequence[Member], *, replaced: bool = True) -> list[Member]:
    """Run members to their end, and successors of those that are killed; return each partition's last member.

    If ``replaced`` is false, there are no successors.
    """
    last, running = list(members), len(members)
    ended: Queue[Member] = Queue()
    for member in members:
        member.start_and_report(ended)
    while running:
        member = ended.get(timeout=patience(60))
        place = next(number for number, other in enumerate(last) if other is member)
        if replaced and isinstance(member.error, Killed):
            last[place] = member.successor()
            last[place].start_and_report(ended)
        else:
            running -= 1
    return last
