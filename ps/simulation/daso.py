"""DASO, simulated batch by batch on virtual nodes.

Nodes exchange with each other, all at once, and without a center, so `simulate.simulate` cannot run it. The schedule of
the exchanges and the arithmetic are those of `rules.daso`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.rules.base import Vector, total_of
from distkeras.ps.rules.daso import Daso, Sent, Turn, Turns, local_step, merge, through_bfloat16
from distkeras.ps.rules.schedules import Constant, Schedule
from distkeras.ps.simulation.simulate import flat_vector
from distkeras.ps.simulation.timing import Communication, Draw, Timing
from distkeras.ps.simulation.virtual_job import Gradient, checked_gradient
from distkeras.ps.validate import invalid, require_integer, require_number

Loss = Callable[[Vector], float]


class _Cluster:
    """The parameters of the nodes, their exchanges, and the virtual time of each node.

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
        #: The sum of the non-blocking exchange in flight, and the time at which it ends.
        self._total, self._arrival = theta0, 0.0
        self._workers = [range(node * devices, (node + 1) * devices) for node in range(nodes)]

        def seconds(itemsize: int) -> float:
            return 2 * (nodes - 1) * communication.transfer(-(-theta0.size // nodes) * itemsize)

        self._plain = seconds(theta0.itemsize)
        self._blocking = seconds(np.dtype(bfloat16).itemsize) if cast else self._plain

    @property
    def now(self) -> float:
        """The time of the latest node."""
        return float(self._times.max())

    def step(self, learning_rate: float) -> None:
        """Take the local step of every node."""
        for node, workers in enumerate(self._workers):
            theta, velocity = self.theta[node], self._velocity[node]
            gradients = [checked_gradient(self._gradient, theta, worker) for worker in workers]
            local_step(theta, velocity, total_of(gradients), len(workers), learning_rate, self._momentum)
            self._times[node] += max([self._draw(worker, 1) for worker in workers])

    def block(self) -> None:
        """Run a blocking exchange."""
        payload = through_bfloat16(self.theta) if self._cast else self.theta
        self.theta[:] = total_of([*payload]) / len(payload)
        self._times[:] = self.now + self._blocking

    def send(self) -> None:
        """Begin a non-blocking exchange; only one may be in flight."""
        self._total, self._arrival = total_of([*self.theta]), self.now + self._plain

    def merge(self, sent: Sent) -> None:
        """Merge the exchange in flight; nodes that need its result earlier wait for it."""
        self.theta[:] = merge(self.theta, self._total, len(self.theta), sent.wait)
        np.maximum(self._times, self._arrival, out=self._times)


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
        time: virtual time at which the last node completed the batch, including waits and exchanges.
        loss: of the nodes' mean parameters, at the last batch of each epoch; NaN elsewhere.
        thetas: the nodes' parameters after each batch, shape ``(batches, nodes, size)``, if kept.
    """

    theta: np.ndarray
    phase: np.ndarray
    interval: np.ndarray
    wait: np.ndarray
    group: np.ndarray
    merged: np.ndarray
    time: np.ndarray
    loss: np.ndarray
    thetas: np.ndarray | None

    @property
    def mean(self) -> Vector:
        """The nodes' mean parameters at the end, shape ``(size,)``."""
        mean: Vector = self.theta.mean(axis=0)
        return mean


def simulate_daso(  # noqa: PLR0913 - what defines a simulation, each with its name
    daso: Daso,
    theta0: Vector,
    gradient: Gradient,
    *,
    nodes: int,
    devices: int,
    learning_rate: float | Schedule,
    epochs: int,
    batches: int,
    loss: Loss | None = None,
    timing: Timing | None = None,
    communication: Communication | None = None,
    seed: int = 0,
    dtype: Any = np.float64,
    keep_thetas: bool = False,
) -> DasoTrace:
    """Run ``daso`` on virtual nodes; a pure function of its arguments, to the bit.

    A node completes a batch when its slowest device does; exchanges within a node take no time. An exchange between
    nodes is a ring all-reduce of 2 (P - 1) messages, each of one P-th of the elements (rounded up), and begins when the
    last node is ready. A blocking exchange stops all nodes until it ends; a non-blocking one stops a node only if the
    node needs its result earlier. For one seed, devices take the same times for every `daso`.

    Args:
        daso: hyper-parameters. ``Daso(warm_up=epochs, cool_down=0)`` is blocking throughout.
        theta0: initial parameters of all nodes, shape ``(size,)``.
        gradient: ``gradient(theta, worker)`` gives a gradient, shape ``(size,)``, for worker = node * devices + device;
            called for each worker in turn, batch by batch. It must neither change ``theta`` nor keep it.
        nodes, devices: P, and G of each node.
        learning_rate: eta of the local steps, a number or a schedule over the batches.
        epochs: their total number, at least that of warm-up and cool-down.
        batches: mini-batches of each device in an epoch.
        loss: ``loss(theta)`` gives the training loss of the nodes' mean parameters; called at the end of each epoch,
            and judged for plateaus in the cycling phase. None: there are no plateaus.
        timing: how long a device takes for a batch. None: one unit.
        communication: the duration of messages between nodes. None: they take no time.
        seed: of `timing`.
        dtype: float32 or float64, of all vectors; messages without a cast have this type too.
        keep_thetas: keep all nodes' parameters after each batch.

    Raises:
        ConfigurationError: an argument is invalid, or arguments do not fit together.
    """
    theta0 = flat_vector(theta0, dtype)
    nodes, devices = require_integer("nodes", nodes), require_integer("devices", devices)
    epochs, batches = require_integer("epochs", epochs), require_integer("batches", batches)
    daso.require_epochs("epochs", epochs)
    if not isinstance(learning_rate, Schedule):
        learning_rate = Constant(require_number("learning_rate", learning_rate))
    communication = communication or Communication()
    if communication.service:
        raise invalid("service", communication.service, "0 where there is no server")
    cluster = _Cluster(
        theta0,
        gradient,
        nodes,
        devices,
        momentum=daso.momentum,
        cast=daso.cast,
        draw=_sampler(timing, nodes * devices, seed),
        communication=communication,
    )
    turns = Turns(daso, nodes, devices)
    rows, thetas = [], []
    for batch in range(epochs * batches):
        epoch, batch_of_epoch = divmod(batch, batches)
        phase = daso.phase(epoch, epochs)
        in_force = turns.in_force(phase)
        cluster.step(learning_rate(batch))
        group, merged = _synchronize(cluster, batch, turns.after(batch, phase))
        epoch_loss = math.nan
        if loss is not None and batch_of_epoch == batches - 1:
            epoch_loss = float(loss(cluster.theta.mean(axis=0)))
            turns.judge(phase, epoch_loss)
        rows.append((phase, *in_force, group, merged, cluster.now, epoch_loss))
        if keep_thetas:
            thetas.append(cluster.theta.copy())
    columns = ("phase", "interval", "wait", "group", "merged", "time", "loss")
    return DasoTrace(
        theta=cluster.theta,
        thetas=np.array(thetas) if keep_thetas else None,
        **dict(zip(columns, map(np.array, zip(*rows, strict=True)), strict=True)),
    )


def _synchronize(cluster: _Cluster, batch: int, turn: Turn) -> tuple[int, int]:
    """Run the exchanges of ``turn``; return the group that sends after ``batch``, and the merged batch, or -1."""
    if turn.block is not None:
        cluster.block()
        return turn.block, batch
    merged = -1
    if turn.merge is not None:
        cluster.merge(turn.merge)
        merged = turn.merge.batch
    if turn.send is None:
        return -1, merged
    cluster.send()
    return turn.send.group, merged


def _sampler(timing: Timing | None, workers: int, seed: int) -> Draw:
    if timing is None:
        return lambda worker, steps: float(steps)
    return timing.sampler(workers, np.random.default_rng(seed))
