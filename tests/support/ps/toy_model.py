"""A model that is a vector, for tests of rules, center and server without Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.protocol.loop import (
    CollectRequest,
    CommitRecord,
    Compute,
    Loop,
    PostRequest,
    ProbeRequest,
    PullRequest,
    Reply,
    Request,
)
from distkeras.ps.protocol.messages import Commit, Welcome
from distkeras.ps.rules import Rule
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import work

Gradient = Callable[[np.ndarray, Any], np.ndarray]
#: A client that has joined, its welcome, and a function that begins its loop.
Connected = tuple[WorkerClient, Welcome, Callable[[Welcome], Loop]]
#: The values that a worker trains on, one for each mini-batch.
Values = Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class ToyBatch:
    epoch: int
    index: int
    last: bool
    value: Any = None
    size: int = 1
    checksum: int = 0


def batches(values: Values, *, epochs: int = 1, start: tuple[int, int] = (0, 0)) -> Iterator[ToyBatch]:
    """Yield one mini-batch for each value, ``epochs`` times, from ``start`` on."""
    for epoch in range(epochs):
        for index, value in enumerate(values):
            if (epoch, index) >= start:
                yield ToyBatch(epoch, index, index == len(values) - 1, value)


class ToyReplica:
    """Plain SGD on a vector; ``gradient(theta, batch.value)`` returns the gradient (default: the value itself)."""

    def __init__(
        self, size: int, learning_rate: float, gradient: Gradient | None = None, dtype: Any = np.float64
    ) -> None:
        self.theta = np.zeros(size, dtype)
        self.learning_rate = learning_rate
        self._gradient = gradient or (lambda theta, value: np.asarray(value))

    @property
    def size(self) -> int:
        return self.theta.size

    def load(self, vector: np.ndarray) -> None:
        self.theta[...] = vector

    def read(self, out: np.ndarray) -> None:
        out[...] = self.theta

    def moved(self, since: np.ndarray, out: np.ndarray) -> None:
        np.subtract(self.theta, since, out=out)

    def load_moving_statistics(self, vector: np.ndarray) -> None:
        self.moving_statistics = vector.copy()

    def read_moving_statistics(self, out: np.ndarray) -> None:
        out[...] = self.moving_statistics

    def set_values(self, values: np.ndarray) -> None:
        self.learning_rate = dict(values.tolist()).get(0, self.learning_rate)

    def train(self, batches: Sequence[ToyBatch]) -> np.ndarray:
        for batch in batches:
            self.theta -= (self.learning_rate * self._gradient(self.theta, batch.value)).astype(self.theta.dtype)
        return np.zeros((len(batches), 1))

    def gradient(self, batch: ToyBatch, out: np.ndarray) -> np.ndarray:
        out[...] = self._gradient(self.theta, batch.value)
        return np.zeros(1)


class ToyJob:
    """Workers and a center in this process, which perform one commit at a time in the order that a test chooses."""

    def __init__(  # noqa: PLR0913 - keywords, of which a test gives few
        self,
        rule: Rule,
        theta0: Sequence[float] | np.ndarray,
        data: Sequence[Values],
        *,
        eta: Any = 0.1,
        gradient: Gradient | None = None,
        epochs: int = 1,
        dtype: Any = np.float64,
        measure_gap: bool = False,
        block: int = 64 * 1024,
        occupied: Callable[[int], bool] = lambda worker: False,
        overlap: bool = False,
        check_finite: bool = False,
    ) -> None:
        self._occupied = occupied
        start = np.array(theta0, dtype)
        self.rule = rule
        self.center = Center(
            rule,
            start,
            workers=len(data),
            learning_rate=eta if rule.traits.gradient else None,
            measure_gap=measure_gap,
            check_finite=check_finite,
            block=block,
        )
        self.replicas = [ToyReplica(start.size, eta, gradient, dtype) for _ in data]
        self._loops: list[Loop] = []
        self._pending: dict[int, Request] = {}
        self._held: dict[int, CommitRecord] = {}
        self._posted: dict[int, CommitRecord] = {}
        for worker, values in enumerate(data):
            self.center.join(worker, 0)

            def payload() -> tuple[np.ndarray, ...]:
                return tuple(np.empty_like(start) for _ in range(rule.traits.parts))

            loop = work(rule, self.replicas[worker], batches(values, epochs=epochs), payload, overlap=overlap)
            self._loops.append(loop)
            next(loop)
        for worker in range(len(data)):
            self._advance(worker, self._pull(worker))

    @property
    def theta(self) -> np.ndarray:
        return self.center.current.array

    def _pull(self, worker: int) -> Reply:
        released = self.center.release(worker, 0)
        released.buffer.hold()  # A toy replica keeps the vectors that it received.
        return Reply(released.learning_rate, released.buffer.array)

    def _advance(self, worker: int, reply: Reply | None) -> None:
        """Run a worker up to its next exchange or its end."""
        try:
            request = self._loops[worker].send(reply)
            while isinstance(request, (Compute, PostRequest, ProbeRequest)):
                if isinstance(request, PostRequest):
                    self._posted[worker] = request.commit
                probes = isinstance(request, ProbeRequest)
                request = self._loops[worker].send(Reply(occupied=self._occupied(worker)) if probes else None)
            self._pending[worker] = request
        except StopIteration:
            self._pending.pop(worker, None)
            self.center.leave(worker, 0)
            self._release_ready()

    def commit(self, worker: int) -> None:
        """Complete the next exchange of ``worker``; a posted commit is applied when the loop requests its reply."""
        if isinstance(self._pending[worker], PullRequest):
            self._advance(worker, self._pull(worker))
        request = self._pending[worker]
        if isinstance(request, CollectRequest):
            request = self._posted.pop(worker)
        assert isinstance(request, CommitRecord)
        commit = Commit(
            worker=worker, attempt=0, incarnation=1, sequence=self.center.leases[worker].sequence + 1, **vars(request)
        )
        if not self.center.commit(commit, [self.center.pool.adopt(part) for part in request.parts]):
            self._advance(worker, self._pull(worker)._replace(refused=True))
        elif request.wants_center:
            self._held[worker] = request
            self._release_ready()
        else:
            self._advance(worker, Reply())

    def _release_ready(self) -> None:
        for worker in [worker for worker in self._held if self.center.scheduler.ready(worker)]:
            if worker in self._held:
                del self._held[worker]
                self._advance(worker, self._pull(worker))

    def run(self, schedule: Sequence[int]) -> np.ndarray:
        for worker in schedule:
            self.commit(worker)
        return self.theta


def toy_client(  # noqa: PLR0913 - keywords, of which a test gives few
    address: Address,
    rule: Rule,
    values: Values,
    *,
    worker: int,
    attempt: int = 0,
    size: int,
    eta: Any = 0.1,
    gradient: Gradient | None = None,
    epochs: int = 1,
    deadlines: Any = None,
    overlap: bool = False,
    wire_format: str = "float32",
    shared: bool = False,
    micro_batch: int = -1,
    group: Any = None,
) -> Connected:
    """Return a real client, its welcome, and a function that begins with a toy replica, for `run_worker`."""
    options: dict[str, Any] = {"deadlines": deadlines, "wire_format": wire_format, "micro_batch": micro_batch}
    options["group"] = group
    options["shared_parts"] = rule.traits.parts if shared else 0
    client = WorkerClient(address, worker=worker, attempt=attempt, size=size, **options)

    def begin(welcome: Welcome) -> Loop:
        replica = ToyReplica(size, eta, gradient, np.float32)
        source = batches(values, epochs=epochs, start=(welcome.epoch, welcome.batch))
        return work(rule, replica, source, lambda: client.payload(rule.traits.parts), overlap=overlap)

    return client, client.join(), begin
