"""DASO: nodes of several devices that average parameters among themselves, and the schedule of their exchanges.

This module makes every decision: the phases, the turns of the groups, the effect of a plateau, and the arithmetic.
The workers (`worker.daso`) follow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import BLOCK, Chunk, Replica, Rule, RuleInfo, Scalars, Traits, Vector, WorkerState
from distkeras.ps.validate import check_field, count, flag, fraction, invalid, require_integer

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
class Daso(Rule):
    r"""Distributed asynchronous and selective optimization: P nodes of G devices.

    All devices of a node hold the same parameters :math:`x_p`. In each batch, the node's G gradients are averaged, and
    each device takes the same heavy-ball step with that mean:

    .. math:: v_p \leftarrow \gamma v_p + \bar g_p, \qquad x_p \leftarrow x_p - \eta v_p

    Devices with the same place in their nodes form a group. Synchronization s is between the P members of group s mod
    G, each of which then sends the result to its node. There are two kinds. A blocking one follows every batch of
    warm-up and cool-down: the parameters are cast to bfloat16 and back, and averaged:

    .. math:: x_p \leftarrow \tfrac{1}{P} \sum_i x_i

    A non-blocking one begins every B batches of the cycling phase between the two: :math:`x_t` is sent without a cast,
    training continues, and after S = W further local steps

    .. math:: x_p \leftarrow \frac{2 S x_p + \sum_i x_{i,t}}{2 S + P}

    When the training loss plateaus, B and W are halved, each down to 1; once both are 1, the next plateau resets them
    to their initial values.

    Interpretation of the paper: "B batches before receipt", W and Equation 1's S are two numbers, the distance between
    sends (B) and the wait (W = S). Equation 1's P is the size of the group, not of the cluster. It is applied after the
    S-th step, to the parameters after that step. A member's own parameters are cast like those of the others, and
    averaged in full precision; nothing is cast while cycling. Momenta are never exchanged. A single node does not
    synchronize, because it would average with its own past.

    Choices where the paper gives no rule: the first send follows B batches after the end of warm-up. An exchange keeps
    the W with which it was sent. Only one is in flight at a time: after a halving, a send that is due waits for the
    merge. An exchange in flight at the end of cycling is discarded, because the blocking exchange after the next batch
    has newer parameters. If a merge and a send are due after the same batch, the merge is first.

    With blocking exchanges and no cast, it is synchronous SGD over P G workers, including the momentum. With the cast,
    a step smaller than half a unit in the last place of bfloat16 (at most 2^-8 of the parameter) may be rounded away.

    On Spark, the workers of one host are the devices of a node, and have connections to each other; the server keeps
    the ledger and, from the end of each epoch on, the mean of all workers' parameters as the center. A node averages
    the available gradients: a worker whose rows have ended takes part without a gradient, and a node without any
    gradient takes no local step after that batch. The loss for plateaus is the mean over the epoch's samples.

    Args:
        window: must be None: workers commit at the end of each epoch.
        interval: B at first, at least 1. Default 4, as in the experiments.
        wait: W at first, in [1, interval]. Default: a quarter of `interval`, rounded down, at least 1.
        warm_up, cool_down: epochs at the beginning and the end. The paper names none. Default 1.
        momentum: gamma of the local steps, in [0, 1). Default 0.9. Weight decay belongs to the gradient.
        cast: whether blocking exchanges are cast to bfloat16. Default True.
        threshold: the smallest decrease of the loss that counts, as a share of the lowest loss, in [0, 1). The
            paper names none. Default 0.01.
        patience: epochs in a row without a decrease that make a plateau. Default 5, as for the learning rates of the
            experiments.
        nodes: P on Spark, which must divide the number of workers: worker w belongs to node w // G. Default None: the
            workers of each host are a node, and all hosts must have the same number of workers.

    Raises:
        ConfigurationError: a hyper-parameter out of its range.

    Reference: Coquelin et al. 2022, Section 3, Equation 1.
    """

    name = "daso"
    info = RuleInfo(
        title="DASO",
        paper="Coquelin et al. 2022",
        equations="Section 3, Eq 1",
        sends="g in a node, x between nodes",
        family="peers",
        bibtex=BIBTEX,
    )
    traits = Traits(synchronous=True, keeps_replica=True, plain_sgd=True, peers=True)

    window: int | str | None = None
    interval: int = count(4)
    wait: int | None = None
    warm_up: int = count(1, 0)
    cool_down: int = count(1, 0)
    momentum: float = fraction(0.9)
    cast: bool = flag(True)
    threshold: float = fraction(0.01)
    patience: int = count(5)
    nodes: int | None = count(None)

    def __post_init__(self) -> None:
        if self.window is not None:
            raise invalid("window", self.window, "None: `interval` and `wait` say when nodes exchange")
        super().__post_init__()
        if self.wait is not None:
            check_field(self, "wait", require_integer, 1, self.interval)

    def receive(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        """Keep the parameters of the node; the center is not loaded."""
        state.sent = sent

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        replica.read(state.payload[0])

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.divide(chunk.payload[0], contributions, out=chunk.out)

    @property
    def initial(self) -> tuple[int, int]:
        """B and W at the start of the cycling phase."""
        return self.interval, max(1, self.interval // 4) if self.wait is None else self.wait

    def after_plateau(self, interval: int, wait: int) -> tuple[int, int]:
        """Return the B and W that follow ``interval`` and ``wait`` at a plateau of the loss."""
        if interval == wait == 1:
            return self.initial
        return max(1, interval // 2), max(1, wait // 2)

    def judge(self, lowest: float, stable: int, loss: float) -> tuple[float, int]:
        """Compare an epoch's loss with the lowest one; NaN does not count as a decrease.

        Args:
            lowest: the loss at the last decrease; infinite at first.
            stable: epochs since then, or since the last plateau; `patience` such epochs are a plateau.
            loss: training loss of the epoch.

        Returns:
            ``lowest`` and ``stable`` after that epoch.
        """
        if loss < (lowest if math.isinf(lowest) else lowest - self.threshold * abs(lowest)):
            return loss, 0
        return lowest, stable + 1

    def phase(self, epoch: int, epochs: int) -> str:
        """Return the phase of ``epoch``, counted from 0, of ``epochs``."""
        if epoch < self.warm_up:
            return WARM_UP
        return CYCLING if epoch < epochs - self.cool_down else COOL_DOWN

    def require_job(self, workers: int, epochs: int) -> None:
        if epochs < self.warm_up + self.cool_down:
            least = f"at least those of warm-up and cool-down, {self.warm_up} + {self.cool_down}"
            raise invalid("num_epoch", epochs, least)
        if self.nodes is not None and workers % self.nodes:
            raise ConfigurationError(
                f"`num_workers` must be a multiple of the rule's `nodes`, {self.nodes}. Received: num_workers={workers}"
            )


class Sent(NamedTuple):
    """A non-blocking exchange in flight.

    Args:
        batch: the batch after which it was sent.
        wait: how many batches later it is merged, S.
        group: the group whose members exchange.
    """

    batch: int
    wait: int
    group: int


class Turn(NamedTuple):
    """The exchanges after the local step of one batch, in this order; None: no such exchange.

    Args:
        block: the group that has a blocking exchange.
        merge: the exchange that ends, with Equation 1.
        send: the exchange that begins.
    """

    block: int | None = None
    merge: Sent | None = None
    send: Sent | None = None


class Turns:
    """The schedule of exchanges: the current B and W, the group whose turn it is, and the exchange in flight.

    Args:
        daso: hyper-parameters.
        nodes, devices: P, and G of each node.
    """

    def __init__(self, daso: Daso, nodes: int, devices: int) -> None:
        self._daso, self._nodes, self._devices = daso, nodes, devices
        self._cycle = daso.initial
        self._synchronizations = 0
        self._batches_since_send = 0
        #: The exchange in flight; None: none is.
        self.in_flight: Sent | None = None
        self._lowest, self._stable = math.inf, 0

    def state(self) -> tuple[float, ...]:
        """Return the whole state as numbers, for `restore`."""
        sent = self.in_flight or Sent(-1, 0, 0)
        counts = self._synchronizations, self._batches_since_send, self._stable
        return (*self._cycle, *counts, *sent, self._lowest)

    def restore(self, state: Sequence[float]) -> None:
        """Continue from a result of `state`; raise a ValueError if the numbers are invalid."""
        *counts, lowest = state
        interval, wait, synchronizations, since, stable, *sent = map(int, counts)
        self._cycle, self._synchronizations, self._batches_since_send = (interval, wait), synchronizations, since
        self.in_flight = Sent(*sent) if sent[0] >= 0 else None
        self._stable, self._lowest = stable, float(lowest)

    def after(self, batch: int, phase: str) -> Turn:
        """Return the exchanges after ``batch``, counted from 0 over all epochs; must be called for each, in order."""
        if self._nodes == 1:
            return Turn()
        if phase != CYCLING:
            self.in_flight = None
            return Turn(block=self._next_group())
        self._batches_since_send += 1
        merge = send = None
        sent = self.in_flight
        if sent is not None and batch == sent.batch + sent.wait:
            merge, self.in_flight = sent, None
        interval, wait = self._cycle
        if self._batches_since_send >= interval and self.in_flight is None:
            send = self.in_flight = Sent(batch, wait, self._next_group())
            self._batches_since_send = 0
        return Turn(merge=merge, send=send)

    def _next_group(self) -> int:
        group = self._synchronizations % self._devices
        self._synchronizations += 1
        return group

    def judge(self, phase: str, loss: float) -> None:
        """Process the loss of an epoch in ``phase``; a plateau in the cycling phase changes B and W."""
        if phase != CYCLING:
            return
        self._lowest, self._stable = self._daso.judge(self._lowest, self._stable, loss)
        if self._stable == self._daso.patience:
            self._cycle = self._daso.after_plateau(*self._cycle)
            self._stable = 0


def local_step(
    theta: Vector, velocity: Vector, total: Vector, members: int, learning_rate: float, momentum: float
) -> None:
    """Take the heavy-ball step of a node, in place, with the ``total`` of the gradients of ``members`` devices."""
    for start in range(0, theta.size, BLOCK):  # blocks that fit the cache
        block = slice(start, start + BLOCK)
        moved = velocity[block]
        moved *= momentum
        moved += total[block] / members
        theta[block] -= learning_rate * moved


def merge(local: np.ndarray, total: Vector, members: int, wait: int) -> np.ndarray:
    """Return the merged parameters of Equation 1.

    Args:
        local: present parameters, shape ``(..., size)``.
        total: sum of the parameters that the members sent, shape ``(size,)``.
        members: P.
        wait: local steps since the parameters were sent, S; 0 gives the mean of the sent parameters.
    """
    merged: np.ndarray = (2 * wait * local + total) / (2 * wait + members)
    return merged
