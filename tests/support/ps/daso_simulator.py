"""DASO batch by batch on virtual nodes, with schedule and arithmetic of `rules.daso`: the reference for its jobs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.rules.base import Vector, total_of
from distkeras.ps.rules.daso import CYCLING, Daso, Turn, Turns, local_step, merge
from distkeras.ps.rules.schedules import Constant, Schedule


def through_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return ``values`` cast to bfloat16 and back, each rounded to the nearest, ties to even."""
    return values.astype(bfloat16).astype(values.dtype)


class _Cluster:
    """The parameters of the nodes, shape ``(nodes, size)``, and their exchanges."""

    def __init__(self, daso: Daso, theta0: Vector, gradient: Callable[..., Vector], nodes: int, devices: int) -> None:
        self._daso, self._gradient, self._devices = daso, gradient, devices
        self.theta = np.tile(theta0, (nodes, 1))
        self._velocity = np.zeros_like(self.theta)
        #: The sum of the non-blocking exchange in flight.
        self._total = theta0

    def step(self, learning_rate: float) -> None:
        for node, (theta, velocity) in enumerate(zip(self.theta, self._velocity, strict=True)):
            workers = range(node * self._devices, (node + 1) * self._devices)
            gradients = [np.asarray(self._gradient(theta, worker), theta.dtype) for worker in workers]
            local_step(theta, velocity, total_of(gradients), len(workers), learning_rate, self._daso.momentum)

    def exchange(self, batch: int, turn: Turn) -> tuple[int, int]:
        """Return the group that sends after ``batch``, and the batch that is merged then, or -1."""
        nodes = len(self.theta)
        if turn.block is not None:
            payload = through_bfloat16(self.theta) if self._daso.cast else self.theta
            self.theta[:] = total_of([*payload]) / nodes
            return turn.block, batch
        if turn.merge is not None:
            self.theta[:] = merge(self.theta, self._total, nodes, turn.merge.wait)
        if turn.send is not None:
            self._total = total_of([*self.theta])
        return -1 if turn.send is None else turn.send.group, -1 if turn.merge is None else turn.merge.batch


@dataclass(frozen=True)
class DasoTrace:
    """The course of a simulation, with one entry for each batch.

    Args:
        theta: each node's parameters at the end, shape ``(nodes, size)``.
        phase: "warm_up", "cycling" or "cool_down".
        interval: the current B; 1 while blocking.
        wait: the current W; 0 while blocking.
        group: the group that sent after this batch; -1: none.
        merged: the batch whose parameters were merged after this one (the same one, if blocking); -1: none.
        loss: of the nodes' mean parameters, at the last batch of each epoch; NaN elsewhere.
        thetas: the nodes' parameters after each batch, shape ``(batches, nodes, size)``.
    """

    theta: np.ndarray
    phase: np.ndarray
    interval: np.ndarray
    wait: np.ndarray
    group: np.ndarray
    merged: np.ndarray
    loss: np.ndarray
    thetas: np.ndarray

    @property
    def mean(self) -> Vector:
        """The nodes' mean parameters at the end, shape ``(size,)``."""
        mean: Vector = self.theta.mean(axis=0)
        return mean


def simulate_daso(  # noqa: PLR0913 - what defines a simulation, each with its name
    daso: Daso,
    theta0: Vector,
    gradient: Callable[[Vector, int], Vector],
    *,
    nodes: int,
    devices: int,
    learning_rate: float | Schedule,
    epochs: int,
    batches: int,
    loss: Callable[[Vector], float] | None = None,
    dtype: Any = np.float64,
) -> DasoTrace:
    """Run ``daso`` on virtual nodes of so many devices.

    ``gradient(theta, worker)`` is called for worker = node * devices + device in turn, batch by batch; ``loss`` with
    the nodes' mean parameters at the end of each epoch. Without a loss there are no plateaus.
    """
    rate = learning_rate if isinstance(learning_rate, Schedule) else Constant(learning_rate)
    cluster = _Cluster(daso, np.asarray(theta0, dtype), gradient, nodes, devices)
    turns = Turns(daso, nodes, devices)
    rows, thetas = [], []
    for batch in range(epochs * batches):
        epoch, batch_of_epoch = divmod(batch, batches)
        phase = daso.phase(epoch, epochs)
        in_force = map(int, turns.state()[:2]) if phase == CYCLING else (1, 0)
        cluster.step(rate(batch))
        exchanged = cluster.exchange(batch, turns.after(batch, phase))
        epoch_loss = math.nan
        if loss is not None and batch_of_epoch == batches - 1:
            epoch_loss = float(loss(cluster.theta.mean(axis=0)))
            turns.judge(phase, epoch_loss)
        rows.append((phase, *in_force, *exchanged, epoch_loss))
        thetas.append(cluster.theta.copy())
    phases, intervals, waits, groups, merged, losses = map(np.array, zip(*rows, strict=True))
    return DasoTrace(cluster.theta, phases, intervals, waits, groups, merged, losses, np.array(thetas))
