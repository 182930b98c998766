"""One attempt at a partition: the real client and loop around a model that counts its mini-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distkeras.ps import rules
from distkeras.ps.errors import DeadlineError, DistkerasError, JobStoppedError, LeaseLostError, ServerLostError
from distkeras.ps.protocol.messages import CenterReply, Message, Welcome
from distkeras.ps.protocol.requests import Loop
from distkeras.ps.simulation.function_replica import VirtualBatch
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.driver import run_worker
from distkeras.ps.worker.loop import work
from simulate_faults.plan import Layout, Plan
from simulate_faults.watch import Watch
from simulate_faults.world import VirtualWorld

#: As those of a task: Spark tries again, and nobody is told.
_UNREPORTED = (LeaseLostError, ServerLostError, JobStoppedError, DeadlineError)


class WatchedClient(WorkerClient):
    """Writes down what the server says outlives it."""

    watch: Watch
    layout: Layout
    #: Whether anything can: there is a checkpoint.
    outlives: bool

    def request(self, message: Message, expected: Any, timeout: float | None = None) -> Any:
        """See `Client`."""
        answer = super().request(message, expected, timeout)
        if isinstance(answer, CenterReply):
            self.watch.began[self.address.port, self.worker, self.attempt] = answer.clock
        if self.outlives:
            self.watch.promise(self.layout, self.worker, getattr(answer, "durable", 0))
        return answer


class CountingReplica:
    """A model with an element a mini-batch, which each of its steps moves by one.

    Args:
        size: elements.
        element: of a mini-batch.
        compute: takes the time of a step; returns what it adds: 1, or NaN.
    """

    def __init__(self, size: int, element: Callable[[VirtualBatch], int], compute: Callable[[], float]) -> None:
        self.size = size
        self.learning_rate = 1.0
        self._element, self._compute = element, compute
        self._theta = np.zeros(size, np.float32)

    def load(self, vector: np.ndarray) -> None:
        """See `Replica`."""
        self._theta[...] = vector

    def read(self, out: np.ndarray) -> None:
        """See `Replica`."""
        out[...] = self._theta

    def moved(self, since: np.ndarray, out: np.ndarray) -> None:
        """See `Replica`."""
        np.subtract(self._theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        """It has none."""

    def read_moving_statistics(self, out: np.ndarray) -> None:
        """It has none."""

    def train(self, batches: Sequence[VirtualBatch]) -> np.ndarray:
        """See `Replica`."""
        for batch in batches:
            self._theta[self._element(batch)] += self._compute()
        return np.zeros((len(batches), 1))

    def gradient(self, batch: VirtualBatch, out: np.ndarray) -> np.ndarray:
        """See `Replica`."""
        step = self._compute()
        out[...] = 0.0
        out[self._element(batch)] = -step
        return np.zeros(1)


def run_attempt(
    plan: Plan, layout: Layout, watch: Watch, world: VirtualWorld, address: Address, worker: int, attempt: int
) -> None:
    """What a task does with its partition.

    Args:
        plan, watch: of the run.
        layout: of its driver.
        world: the task's.
        address: the server's.
        worker, attempt: numbers of partition and attempt.

    Raises:
        DistkerasError: it failed; Spark may try again.
    """
    rule = rules.make(plan.rule, **plan.hyper_parameters)
    client = WatchedClient(
        address,
        worker=worker,
        attempt=attempt,
        size=watch.size,
        deadlines=plan.deadlines,
        wire_format=plan.wire_format,
        world=world,
    )
    client.watch, client.layout, client.outlives = watch, layout, plan.every > 0

    def begin(welcome: Welcome) -> Loop:
        replica = CountingReplica(
            watch.size,
            lambda batch: layout.element(worker, batch.epoch, batch.index),
            lambda: _step(plan, world, worker),
        )
        return work(
            rule,
            replica,
            _batches(plan, layout.batches[worker], welcome),
            lambda: client.payload(rule.traits.parts),
            overlap=plan.overlap,
            now=world.time,
        )

    try:
        welcome = client.join()
        if not welcome.finished:
            client.fetch_model()
            run_worker(client, welcome, begin)
        watch.let_go.add((layout.number, worker))
    except _UNREPORTED:
        raise
    except DistkerasError as error:
        client.report(error)
        raise
    finally:
        client.close()


def _batches(plan: Plan, count: int, welcome: Welcome) -> Iterator[VirtualBatch]:
    """The mini-batches of a partition that has so many an epoch, from where it stands."""
    for epoch in range(plan.epochs):
        for index in range(count):
            if (epoch, index) >= (welcome.epoch, welcome.batch):
                yield VirtualBatch(index, epoch, index == count - 1)


def _step(plan: Plan, world: VirtualWorld, worker: int) -> float:
    """Takes the time of a step; returns what it adds: 1, or a NaN where a fault says so."""
    draw, poisoned = world.surroundings.scheduler.random.random, world.surroundings.poisoned
    world.sleep(3.0 * plan.deadlines.lease if draw() < plan.long else plan.compute * (0.5 + draw()))
    if worker not in poisoned:
        return 1.0
    poisoned.remove(worker)
    return math.nan
