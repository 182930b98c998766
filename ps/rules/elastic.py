"""Elastic averaging: asynchronous, synchronous, and with momentum in the local steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.base import (
    THESIS,
    Chunk,
    Replica,
    Rule,
    RuleInfo,
    Scalars,
    Traits,
    Vector,
    WorkerState,
    sum_of_squares,
)
from distkeras.ps.validate import choice, fraction, invalid, not_negative, positive


@dataclass(frozen=True)
class AEASGD(Rule):
    r"""Asynchronous elastic averaging SGD: workers explore, and an elastic force pulls them to the center.

    After lambda local steps the worker pulls the *fresh* center and both move toward each other:

    .. math:: E = \eta\rho(\theta^k - \tilde\theta), \qquad \theta^k \leftarrow \theta^k - E, \qquad
              \tilde\theta \leftarrow \tilde\theta + E

    The worker keeps its own :math:`\theta^k` and never copies the center. It takes E off before it sends E. Stable
    for :math:`\eta\rho < 1`.

    Args:
        window: lambda. Default 10.
        rho: elasticity. Default 5.
        learning_rate: eta of the elastic move. None: the worker optimizer's, read at each exchange.

    Reference: Hermans 2017, Algorithm 9, Eq 2.15-2.16 (Zhang, Choromanska, LeCun 2015).
    """

    name = "aeasgd"
    info = RuleInfo(
        title="AEASGD", equations="Alg 9, Eq 2.15-2.16", sends="E = ηρ(θᵏ − θ̃ fresh)", family="elastic", **THESIS
    )

    window: int | str | None = 10
    rho: float = not_negative(5.0)
    learning_rate: float | None = positive(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate is not None and self.learning_rate * self.rho >= 1:
            raise invalid("rho", self.rho, f"below 1 / learning_rate = {1 / self.learning_rate:g}")

    @property
    def traits(self) -> Traits:
        return Traits(pull_first=True, keeps_replica=True, history=("position",))

    def continue_from(
        self, replica: Replica, state: WorkerState, history: Sequence[Vector], learning_rate: float
    ) -> None:
        super().continue_from(replica, state, history, learning_rate)
        replica.load(state.vectors["position"])

    def moving_rate(self, replica: Replica) -> float:
        """Return the moving rate, alpha = eta * rho; raise ConfigurationError if it is 1 or more."""
        alpha = self.rho * (replica.learning_rate if self.learning_rate is None else self.learning_rate)
        if alpha >= 1:
            raise invalid(
                "rho",
                self.rho,
                f"below 1 / learning rate, or the elastic move overshoots (learning rate * rho = {alpha:g})",
            )
        return alpha

    def elastic_exchange(self, replica: Replica, state: WorkerState, center: Vector) -> None:
        elastic = state.payload[0]
        position = state.vectors.setdefault("position", np.empty_like(center))
        replica.read(position)
        np.subtract(position, center, out=elastic)
        elastic *= self.moving_rate(replica)
        position -= elastic
        replica.load(position)
        state.sent = center


@dataclass(frozen=True)
class EASGD(AEASGD):
    r"""Synchronous elastic averaging SGD.

    After lambda local steps, with the center of the *previous* exchange:

    .. math:: E^k = \eta\rho(\theta^k - \tilde\theta_{pulled}), \qquad \theta^k \leftarrow \theta^k - E^k, \qquad
              \tilde\theta \leftarrow \tilde\theta + \sum_k E^k

    then all workers wait for each other and take the new center as the next reference; each keeps its own
    :math:`\theta^k`. Stable for :math:`n\eta\rho \lesssim 1`; the hard limit is :math:`(n+1)\eta\rho < 2`.
    (Algorithm 4 takes the elastic term at the moved worker, Eq 2.4 at the old one; they differ by
    :math:`\eta^2\rho g`. Algorithm 4 holds for every lambda and is what runs here.)

    Early stopping ends a window before it is full, right after a local gradient at :math:`\theta^k`, when

    * "2.9": :math:`\|\eta g\| \le \|\eta\rho(\theta^k - \tilde\theta)\|`
    * "2.10": :math:`\|\eta g\| - \|\eta\rho(\theta^k - \tilde\theta)\| < \eta`

    Args:
        window: lambda. Default 10.
        rho: elasticity. Default 5, as the thesis quotes it.
        learning_rate: eta of the elastic move. None: the worker optimizer's.
        early_stopping: None, "2.9" or "2.10"; both need plain SGD at the workers, since eta g is read from the step.

    Reference: Hermans 2017, Algorithm 4, Eq 2.4-2.10 (Zhang, Choromanska, LeCun 2015).
    """

    name = "easgd"
    info = RuleInfo(
        title="EASGD", equations="Alg 4, Eq 2.4-2.10", sends="E = ηρ(θᵏ − θ̃ pulled)", family="elastic", **THESIS
    )

    early_stopping: str | None = choice(None, None, "2.9", "2.10")

    @property
    def traits(self) -> Traits:
        early = self.early_stopping is not None
        return Traits(synchronous=True, keeps_replica=True, plain_sgd=early, history=("position",))

    def steps_until_due(self, state: WorkerState) -> int:
        return 1 if self.early_stopping else super().steps_until_due(state)

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        if self.early_stopping is None:
            return replica.train(batches)
        before = state.vectors.setdefault("before", np.empty_like(state.sent))
        step = state.vectors.setdefault("step", np.empty_like(state.sent))
        replica.read(before)
        eta = replica.learning_rate
        rows = replica.train(batches)
        replica.read(step)
        step -= before
        before -= state.sent
        gradient_norm = math.sqrt(sum_of_squares(step))  # plain SGD: the step is -eta g
        elastic_norm = self.moving_rate(replica) * math.sqrt(sum_of_squares(before))
        if self.early_stopping == "2.9":
            state.due_early = gradient_norm <= elastic_norm
        else:
            state.due_early = gradient_norm - elastic_norm < eta
        return rows

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        # Algorithm 4 is the elastic exchange with the pulled center, not with the fresh one as in AEASGD.
        self.elastic_exchange(replica, state, state.sent)

    def receive(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        state.sent = sent

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.add(chunk.center, chunk.payload[0], out=chunk.out)


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    r"""Elastic averaging with momentum, asynchronous: AEASGD with Nesterov's momentum in the local steps.

    .. math:: v \leftarrow \delta v - \eta g(\theta^k + \delta v), \qquad \theta^k \leftarrow \theta^k + v

    The elastic move shifts :math:`\theta^k` and does not change :math:`v`. The rule computes the momentum, from raw
    gradients at the look-ahead point: an optimizer with built-in Nesterov momentum holds :math:`\theta^k + \delta v`
    in its variables, and an elastic move computed from that would be off by :math:`\eta\rho\delta v`. The worker
    optimizer must therefore be plain SGD, and gives the learning rate only. With ``momentum=0`` it is AEASGD.

    Args:
        window: lambda. Default 10.
        rho: elasticity. Default 5.
        learning_rate: eta of the elastic move. None: the worker optimizer's.
        momentum: delta, in [0, 1). Default 0.9.

    Reference: Zhang, Choromanska, LeCun 2015, Section 2 (EAMSGD); not in Hermans 2017 but for AEASGD's exchange.
    """

    name = "eamsgd"
    info = RuleInfo(
        title="EAMSGD",
        paper="Zhang et al. 2015",
        equations="Section 2",
        sends="E = ηρ(θᵏ − θ̃ fresh)",
        family="elastic",
        bibtex="""\
@inproceedings{zhang2015,
  author    = {Zhang, Sixin and Choromanska, Anna and LeCun, Yann},
  title     = {Deep Learning with Elastic Averaging {SGD}},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2015},
}""",
    )
    traits = Traits(pull_first=True, keeps_replica=True, plain_sgd=True, history=("position", "velocity"))

    momentum: float = fraction(0.9)

    def start(self, replica: Replica, sent: Vector) -> WorkerState:
        state = super().start(replica, sent)
        state.vectors["position"] = sent.copy()
        state.vectors["velocity"] = np.zeros_like(sent)
        state.vectors["gradient"] = np.empty_like(sent)
        state.vectors["ahead"] = np.empty_like(sent)
        return state

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        position, velocity = state.vectors["position"], state.vectors["velocity"]
        gradient, ahead = state.vectors["gradient"], state.vectors["ahead"]
        rows = []
        for batch in batches:
            velocity *= self.momentum
            np.add(position, velocity, out=ahead)
            replica.load(ahead)
            eta = replica.learning_rate  # read before the gradient advances the optimizer's step
            rows.append(replica.gradient(batch, gradient))
            gradient *= eta
            velocity -= gradient
            position += velocity
        replica.load(position)
        return np.stack(rows)
