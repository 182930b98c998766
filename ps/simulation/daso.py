"""DASO: nodes of several devices that average parameters among themselves, simulated batch by batch.

Not a rule of `rules`, and never one: there is no parameter server. No node holds a center variable, nothing is
committed, and no clock counts commits; the members of a group exchange parameters with each other, all at once. So
neither half of `rules.base.Rule` has a counterpart, and `simulate.simulate`, whose workers talk to a center, cannot run
it. What is shared is the rest: gradients, schedules, times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import Vector
from distkeras.ps.rules.schedules import Constant, Schedule
from distkeras.ps.simulation.daso_cluster import Cluster, Exchange
from distkeras.ps.simulation.function_replica import Gradient
from distkeras.ps.simulation.timing import Communication, Draw, Timing
from distkeras.ps.validate import check_field, invalid, require_choice, require_integer, require_number

Loss = Callable[[Vector], float]

WARM_UP, CYCLING, COOL_DOWN = "warm_up", "cycling", "cool_down"

BIBTEX = """\
@article{coquelin2022,
  author  = {Coquelin, Daniel and Debus, Charlotte and G{\\"o}tz, Markus and von der Lehr, Fabrice and Kahn, James and
             Siggle, Martin and Streit, Achim},
  title   = {Accelerating Neural Network Training with Distributed Asynchronous and Selective Optimization ({DASO})},
  journal = {Journal of Big Data},
  year    = {2022},
}"""


@dataclass(frozen=True)
class Daso:
    r"""Distributed asynchronous and selective optimization: P nodes of G devices.

    All devices of a node hold the same parameters :math:`x_p`. In each batch, the node's G gradients are averaged, and
    each device takes the same heavy-ball step with that mean:

    .. math:: v_p \leftarrow \gamma v_p + \bar g_p, \qquad x_p \leftarrow x_p - \eta v_p

    Devices with the same place in their nodes form a group. Synchronization s is between the P members of group s mod
    G, each of whom then hands the result to its node. It comes in two kinds:

    * blocking, after every batch of warm-up and cool-down: what is sent is cast to bfloat16 and back, then

      .. math:: x_p \leftarrow \tfrac{1}{P} \sum_i x_i

    * non-blocking, every B batches of the cycling phase between the two: :math:`x_t` is sent as it is, training goes
      on, and after S = W further local steps

      .. math:: x_p \leftarrow \frac{2 S x_p + \sum_i x_{i,t}}{2 S + P}

    When the training loss plateaus, B and W are halved, each down to 1; once both are 1, the next plateau puts them
    back to where they began.

    Resolved: "B batches before receipt", W and Equation 1's S are two numbers, the distance between sends (B) and the
    wait (W = S). Equation 1's P is the group's size, not that of the cluster. It is applied after the S-th step, to the
    parameters that step has left. The own parameters are cast like the others', and averaged in full precision;
    nothing is cast while cycling. Momenta are never exchanged. A single node would average with its own past: it
    synchronizes nothing.

    Decided here, where the paper is silent: the first send comes B batches after warm-up ended. An exchange keeps the W
    that it was sent with. One is on its way at a time: after a halving, a send that is due waits for the merge. What
    is on its way when cycling ends is dropped, for the blocking exchange after the next batch carries newer parameters.
    A merge that is due after the same batch as a send comes first.

    With blocking, no cast, it is synchronous SGD over P G workers, momentum included. With the cast, a step smaller
    than half a unit in the last place of bfloat16 (at most 2^-8 of the parameter) may be rounded away.

    Args:
        interval: B at first, at least 1. Default 4, as in the experiments.
        wait: W at first, in [1, interval]. Default: a quarter of `interval`, rounded down, at least 1.
        warm_up, cool_down: epochs at the beginning and the end. The paper names none. Default 1.
        momentum: gamma of the local steps, in [0, 1). Default 0.9. Weight decay belongs to the gradient.
        cast: whether blocking exchanges are cast to bfloat16. Default True.
        threshold: share of the lowest loss by which a loss must be below it to count as a decrease, in [0, 1). The
            paper names none. Default 0.01.
        patience: epochs in a row without a decrease that make a plateau. Default 5, as for the learning rates of the
            experiments.

    Raises:
        ConfigurationError: a hyper-parameter out of its range.

    Reference: Coquelin et al. 2022, Section 3, Equation 1.
    """

    interval: int = 4
    wait: int | None = None
    warm_up: int = 1
    cool_down: int = 1
    momentum: float = 0.9
    cast: bool = True
    threshold: float = 0.01
    patience: int = 5

    def __post_init__(self) -> None:
        for name, low in (("interval", 1), ("warm_up", 0), ("cool_down", 0), ("patience", 1)):
            check_field(self, name, require_integer, low)
        if self.wait is not None:
            check_field(self, "wait", require_integer, 1, self.interval)
        check_field(self, "momentum", require_number, inclusive=True, below=1)
        require_choice("cast", self.cast, (True, False))
        check_field(self, "threshold", require_number, inclusive=True, below=1)

    @property
    def initial(self) -> tuple[int, int]:
        """B and W at the start of the cycling phase."""
        return self.interval, max(1, self.interval // 4) if self.wait is None else self.wait

    def after_plateau(self, interval: int, wait: int) -> tuple[int, int]:
        """B and W that follow ``interval`` and ``wait`` when the loss has plateaued."""
        if interval == wait == 1:
            return self.initial
        return max(1, interval // 2), max(1, wait // 2)

    def judge(self, lowest: float, stable: int, loss: float) -> tuple[float, int]:
        """Takes in an epoch's loss; NaN is no decrease.

        Args:
            lowest: loss of the last decrease; infinite at first.
            stable: epochs since then, or since the last plateau. It is a plateau when `patience` are reached.
            loss: training loss of the epoch.

        Returns:
            ``lowest`` and ``stable`` after that epoch.
        """
        if loss < (lowest if math.isinf(lowest) else lowest - self.threshold * abs(lowest)):
            return loss, 0
        return lowest, stable + 1

    def phase(self, epoch: int, epochs: int) -> str:
        """The phase of ``epoch``, counted from 0, of ``epochs``."""
        if epoch < self.warm_up:
            return WARM_UP
        return CYCLING if epoch < epochs - self.cool_down else COOL_DOWN


@dataclass(frozen=True)
class DasoTrace:
    """What happened, one entry a batch.

    Args:
        theta: each node's parameters at the end, shape ``(nodes, size)``.
        phase: "warm_up", "cycling" or "cool_down".
        interval: B in force; 1 while blocking.
        wait: W in force; 0 while blocking.
        group: the group that sent after this batch; -1 where none did.
        merged: the batch whose parameters were averaged in after this one (itself, if blocking); -1 where none were.
        time: virtual time at which the last node was through with the batch, waits and exchanges included.
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
    """Runs ``daso`` on virtual nodes; a pure function of its arguments, to the bit.

    A node is through with a batch when the slowest of its devices is; the network inside a node costs nothing. An
    exchange is a ring all-reduce of 2 (P - 1) messages, each of one P-th of the elements (rounded up), and begins when
    the last node is ready. A blocking one holds all nodes until it is over; a non-blocking one holds a node only if it
    is not over when the node comes to merge it. For one seed, devices take the same times for every `daso`.

    Args:
        daso: hyper-parameters. ``Daso(warm_up=epochs, cool_down=0)`` is blocking throughout.
        theta0: initial parameters of all nodes, shape ``(size,)``.
        gradient: ``gradient(theta, worker)`` gives a gradient, shape ``(size,)``, for worker = node * devices + device;
            called for each worker in turn, batch by batch. It must neither change ``theta`` nor keep it.
        nodes, devices: P, and G of each node.
        learning_rate: eta of the local steps, a number or a schedule over the batches.
        epochs: in all, at least as many as warm-up and cool-down take.
        batches: of each device, an epoch.
        loss: ``loss(theta)`` gives the training loss of the nodes' mean parameters; called at the end of each epoch,
            and judged for plateaus in the cycling phase. None: there are no plateaus.
        timing: how long a device takes for a batch. None: one unit.
        communication: what messages between nodes cost. None: nothing.
        seed: of `timing`.
        dtype: float32 or float64, of all vectors; the size of what is sent without a cast.
        keep_thetas: keep all nodes' parameters after each batch.

    Raises:
        ConfigurationError: arguments that cannot work or do not go together.
    """
    theta0 = _initial(theta0, dtype)
    nodes, devices = require_integer("nodes", nodes), require_integer("devices", devices)
    epochs, batches = require_integer("epochs", epochs), require_integer("batches", batches)
    if epochs < daso.warm_up + daso.cool_down:
        raise invalid("epochs", epochs, f"at least those of warm-up and cool-down, {daso.warm_up} + {daso.cool_down}")
    if not isinstance(learning_rate, Schedule):
        learning_rate = Constant(require_number("learning_rate", learning_rate))
    communication = communication or Communication()
    if communication.service:
        raise invalid("service", communication.service, "0 where there is no server")
    cluster = Cluster(
        theta0,
        gradient,
        nodes,
        devices,
        momentum=daso.momentum,
        cast=daso.cast,
        draw=_sampler(timing, nodes * devices, seed),
        communication=communication,
    )
    synchronizer = _Synchronizer(daso, cluster, devices)
    rows, thetas = [], []
    for batch in range(epochs * batches):
        epoch, left = divmod(batch, batches)
        phase = daso.phase(epoch, epochs)
        cycling = phase == CYCLING
        in_force = (synchronizer.interval, synchronizer.wait) if cycling else (1, 0)
        cluster.step(learning_rate(batch))
        group, merged = synchronizer.synchronize(batch, blocking=not cycling)
        value = math.nan
        if loss is not None and left == batches - 1:
            value = float(loss(cluster.theta.mean(axis=0)))
            if cycling:
                synchronizer.judge(value)
        rows.append((phase, *in_force, group, merged, cluster.now, value))
        if keep_thetas:
            thetas.append(cluster.theta.copy())
    columns = ("phase", "interval", "wait", "group", "merged", "time", "loss")
    return DasoTrace(
        theta=cluster.theta,
        thetas=np.array(thetas) if keep_thetas else None,
        **dict(zip(columns, map(np.array, zip(*rows, strict=True)), strict=True)),
    )


class _Synchronizer:
    """Which group synchronizes after which batch: B and W in force, whose turn it is, the exchange on its way."""

    def __init__(self, daso: Daso, cluster: Cluster, devices: int) -> None:
        self.interval, self.wait = daso.initial
        self._daso, self._cluster, self._devices = daso, cluster, devices
        self._synchronizations = 0
        self._batches_since_send = 0
        self._under_way: Exchange | None = None
        self._lowest, self._stable = math.inf, 0

    def synchronize(self, batch: int, *, blocking: bool) -> tuple[int, int]:
        """What follows the local step of ``batch``: the group that sends, and the batch that is averaged in, or -1."""
        if len(self._cluster.theta) == 1:
            return -1, -1
        if blocking:
            self._cluster.block()
            return self._next_group(), batch
        group = merged = -1
        self._batches_since_send += 1
        exchange = self._under_way
        if exchange is not None and batch == exchange.batch + exchange.wait:
            self._cluster.merge(exchange)
            merged, self._under_way = exchange.batch, None
        if self._batches_since_send >= self.interval and self._under_way is None:
            self._under_way = self._cluster.send(batch, self.wait)
            group, self._batches_since_send = self._next_group(), 0
        return group, merged

    def _next_group(self) -> int:
        group = self._synchronizations % self._devices
        self._synchronizations += 1
        return group

    def judge(self, loss: float) -> None:
        """Takes in the loss of an epoch of the cycling phase; a plateau changes B and W."""
        self._lowest, self._stable = self._daso.judge(self._lowest, self._stable, loss)
        if self._stable == self._daso.patience:
            self.interval, self.wait = self._daso.after_plateau(self.interval, self.wait)
            self._stable = 0


def _initial(theta0: Vector, dtype: Any) -> Vector:
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise invalid("dtype", dtype, "float32 or float64")
    theta0 = np.asarray(theta0, dtype)
    if theta0.ndim != 1:
        raise ConfigurationError(f"`theta0` must be one flat vector. Received: shape {theta0.shape}")
    return theta0


def _sampler(timing: Timing | None, workers: int, seed: int) -> Draw:
    if timing is None:
        return lambda worker, steps: float(steps)
    return timing.sampler(workers, np.random.default_rng(seed))
