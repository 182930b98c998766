"""EAMSGD: AEASGD whose local steps carry Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.aeasgd import AEASGD
from distkeras.ps.rules.base import Replica, RuleInfo, Traits, Vector, WorkerState
from distkeras.ps.validate import check_field, require_number


@dataclass(frozen=True)
class EAMSGD(AEASGD):
    r"""Elastic averaging with momentum, asynchronous: AEASGD with Nesterov's momentum in the local steps.

    .. math:: v \leftarrow \delta v - \eta g(\theta^k + \delta v), \qquad \theta^k \leftarrow \theta^k + v

    The elastic move shifts :math:`\theta^k` and leaves :math:`v` alone. The rule runs the momentum itself, from raw
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

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "momentum", require_number, inclusive=True, below=1)

    @property
    def traits(self) -> Traits:
        return Traits(pull_first=True, keeps_replica=True, plain_sgd=True)

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
            eta = replica.learning_rate  # before the gradient counts as a step of the optimizer's
            rows.append(replica.gradient(batch, gradient))
            gradient *= eta
            velocity -= gradient
            position += velocity
        replica.load(position)
        return np.stack(rows)
