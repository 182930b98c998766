"""EASGD: synchronous elastic averaging, with early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.aeasgd import AEASGD
from distkeras.ps.rules.base import (
    THESIS,
    Chunk,
    Replica,
    RuleInfo,
    Scalars,
    Traits,
    Vector,
    WorkerState,
    sum_of_squares,
)
from distkeras.ps.validate import require_choice


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
        title="EASGD",
        paper="Hermans 2017",
        equations="Alg 4, Eq 2.4-2.10",
        sends="E = ηρ(θᵏ − θ̃ pulled)",
        family="elastic",
        bibtex=THESIS,
    )

    early_stopping: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("early_stopping", self.early_stopping, (None, "2.9", "2.10"))

    @property
    def traits(self) -> Traits:
        return Traits(synchronous=True, keeps_replica=True, plain_sgd=self.early_stopping is not None)

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
        # Algorithm 4's exchange is the elastic one with the pulled center where AEASGD takes the fresh one.
        self.elastic_exchange(replica, state, state.sent)

    def receive(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        state.sent = sent

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.add(chunk.center, chunk.payload[0], out=chunk.out)
