"""The cluster under DASO: what its nodes hold, how they exchange it, and the time that takes."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import Vector, total_of
from distkeras.ps.rules.daso import Sent, local_step, merge, through_bfloat16
from distkeras.ps.simulation.function_replica import Gradient
from distkeras.ps.simulation.timing import Communication, Draw


class Cluster:
    """The nodes: parameters, momenta, and what time it is on each.

    Args:
        theta0: initial parameters of all nodes, shape ``(size,)``.
        gradient: ``gradient(theta, worker)`` for worker = node * devices + device.
        nodes, devices: P, and G of each node.
        cast: whether blocking exchanges are cast to bfloat16.
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
        #: Of the non-blocking exchange on its way: the sum of what the nodes sent, and when it is over.
        self._total, self._arrival = theta0, 0.0
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
            gradients = []
            for worker in workers:
                value = self._gradient(theta, worker)
                if value.shape != theta.shape:
                    raise ConfigurationError(f"`gradient` must return shape {theta.shape}. Received: {value.shape}")
                gradients.append(value)
            local_step(theta, velocity, total_of(gradients), len(workers), learning_rate, self._momentum)
            self._times[node] += max([self._draw(worker, 1) for worker in workers])

    def block(self) -> None:
        """A blocking synchronization."""
        payload = through_bfloat16(self.theta) if self._cast else self.theta
        self.theta[:] = total_of([*payload]) / len(payload)
        self._times[:] = self.now + self._blocking

    def send(self) -> None:
        """Begins a non-blocking synchronization, the only one on its way."""
        self._total, self._arrival = total_of([*self.theta]), self.now + self._plain

    def merge(self, sent: Sent) -> None:
        """Ends it; nodes that it has not reached yet wait."""
        self.theta[:] = merge(self.theta, self._total, len(self.theta), sent.wait)
        np.maximum(self._times, self._arrival, out=self._times)
