"""The cluster under DASO: what its nodes hold, how they exchange it, and the time that takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import Vector
from distkeras.ps.simulation.function_replica import Gradient
from distkeras.ps.simulation.timing import Communication, Draw


def merge(local: np.ndarray, total: Vector, members: int, wait: int) -> np.ndarray:
    """Equation 1.

    Args:
        local: parameters now, shape ``(..., size)``.
        total: sum of what the members sent, shape ``(size,)``.
        members: P.
        wait: local steps since then, S; 0 gives the mean of what was sent.
    """
    merged: np.ndarray = (2 * wait * local + total) / (2 * wait + members)
    return merged


def through_bfloat16(values: np.ndarray) -> np.ndarray:
    """``values`` as they come out of a cast to float32, to bfloat16 and back: each to the nearest, ties to even."""
    return values.astype(bfloat16).astype(values.dtype)


@dataclass(frozen=True)
class Exchange:
    """A non-blocking exchange on its way.

    Args:
        batch: after which it was sent.
        wait: how many batches later it is merged.
        total: sum of what the nodes sent, shape ``(size,)``.
        arrival: virtual time at which it is over.
    """

    batch: int
    wait: int
    total: Vector
    arrival: float


class Cluster:
    """The nodes: parameters, momenta, and what time it is on each.

    Args:
        theta0: initial parameters of all nodes, shape ``(size,)``.
        gradient: ``gradient(theta, worker)`` for worker = node * devices + device.
        nodes, devices: P, and G of each node.
        momentum: of the local steps.
        cast: whether blocking exchanges are cast to bfloat16.
        draw: how long a device takes.
        communication: what messages between nodes cost.
    """

    def __init__(
        self,
        theta0: Vector,
        gradient: Gradient,
        nodes: int,
        devices: int,
        *,
        momentum: float,
        cast: bool,
        draw: Draw,
        communication: Communication,
    ) -> None:
        self.theta = np.tile(theta0, (nodes, 1))
        self._velocity = np.zeros_like(self.theta)
        self._times = np.zeros(nodes)
        self._momentum, self._cast = momentum, cast
        self._gradient, self._draw = gradient, draw
        self._workers = [range(node * devices, (node + 1) * devices) for node in range(nodes)]

        def seconds(itemsize: int) -> float:
            return 2 * (nodes - 1) * communication.transfer(-(-theta0.size // nodes) * itemsize)

        self._plain = seconds(theta0.itemsize)
        self._blocking = seconds(np.dtype(bfloat16).itemsize) if cast else self._plain

    @property
    def now(self) -> float:
        """When the last node was through with what it has done so far."""
        return float(self._times.max())

    def step(self, learning_rate: float) -> None:
        """Every node takes its batch: local synchronization, local step."""
        for node, workers in enumerate(self._workers):
            theta, velocity = self.theta[node], self._velocity[node]
            total = np.zeros_like(theta)
            for worker in workers:
                value = self._gradient(theta, worker)
                if value.shape != theta.shape:
                    raise ConfigurationError(f"`gradient` must return shape {theta.shape}. Received: {value.shape}")
                total += value
            velocity *= self._momentum
            velocity += total / len(workers)
            theta -= learning_rate * velocity
            self._times[node] += max([self._draw(worker, 1) for worker in workers])

    def block(self) -> None:
        """A blocking synchronization."""
        payload = through_bfloat16(self.theta) if self._cast else self.theta
        self.theta[:] = payload.mean(axis=0)
        self._times[:] = self.now + self._blocking

    def send(self, batch: int, wait: int) -> Exchange:
        """Begins a non-blocking synchronization."""
        return Exchange(batch, wait, self.theta.sum(axis=0), self.now + self._plain)

    def merge(self, sent: Exchange) -> None:
        """Ends it; nodes that it has not reached yet wait."""
        self.theta[:] = merge(self.theta, sent.total, len(self.theta), sent.wait)
        np.maximum(self._times, sent.arrival, out=self._times)
