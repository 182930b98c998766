"""AEASGD: asynchronous elastic averaging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import THESIS, Replica, Rule, RuleInfo, Traits, Vector, WorkerState
from distkeras.ps.validate import check_field, invalid, require_number


@dataclass(frozen=True)
class AEASGD(Rule):
    r"""Asynchronous elastic averaging SGD: workers explore and are tied to the center by a spring.

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
        title="AEASGD",
        paper="Hermans 2017",
        equations="Alg 9, Eq 2.15-2.16",
        sends="E = ηρ(θᵏ − θ̃ fresh)",
        family="elastic",
        bibtex=THESIS,
    )

    window: int | str | None = 10
    rho: float = 5.0
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "rho", require_number, inclusive=True)
        if self.learning_rate is not None:
            check_field(self, "learning_rate", require_number)
            if self.learning_rate * self.rho >= 1:
                raise invalid("rho", self.rho, f"below 1 / learning_rate = {1 / self.learning_rate:g}")

    @property
    def traits(self) -> Traits:
        return Traits(pull_first=True, keeps_replica=True)

    def moving_rate(self, replica: Replica) -> float:
        """The moving rate of the elastic exchange, alpha = eta * rho."""
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
