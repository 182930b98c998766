"""Zealous DOWNPOUR: a worker that finds the server's queue occupied adds another gradient instead of waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.base import THESIS, Replica, Rule, RuleInfo, Traits, WorkerState
from distkeras.ps.validate import require_choice


@dataclass(frozen=True)
class ZealousDownpour(Rule):
    r"""DOWNPOUR that commits when the server is free, and at the latest after lambda gradients.

    After each mini-batch the worker asks whether the server is incorporating commits of others. If it is not, or this
    was the window's last step, it commits what it has and is sent the center; else it adds another gradient:

    .. math:: \Delta \leftarrow \Delta - \eta\, g(\theta^k), \qquad \tilde\theta \leftarrow \tilde\theta + \Delta

    As printed, :math:`\theta^k` stays where it was pulled while :math:`\Delta` grows: all gradients of a window are
    taken at one point, on different mini-batches. Section 3.1 says of the same algorithm that it explores;
    ``explore=True`` therefore moves :math:`\theta^k` along, which is accumulated DOWNPOUR with windows that may end
    early. A server that is always free makes both DOWNPOUR with a window of 1.

    The literal form takes eta from the worker optimizer, which must be plain SGD; exploring goes with any optimizer.

    Args:
        window: lambda, the most gradients in one commit; the thesis names no value. Default 5.
        explore: move the worker while it accumulates. Default False.

    Reference: Hermans 2017, Section 2.3.1, Algorithm 6 (after Louppe and Geurts 2010).
    """

    name = "zealous_downpour"
    info = RuleInfo(
        title="Zealous DOWNPOUR",
        paper="Hermans 2017",
        equations="Alg 6",
        sends="Δ = −η Σ g at θ̃ sent; θᵏ − θ̃ sent (explore)",
        family="delta",
        bibtex=THESIS,
    )

    window: int | None = 5
    explore: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("explore", self.explore, (True, False))

    @property
    def traits(self) -> Traits:
        return Traits(plain_sgd=not self.explore, probes=True)

    def steps_until_due(self, state: WorkerState) -> int:
        return 1

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        if self.explore:
            return replica.train(batches)
        (batch,) = batches
        accumulated = state.payload[0]
        first = state.steps == 0
        step = accumulated if first else state.vectors.setdefault("step", np.empty_like(accumulated))
        eta = replica.learning_rate  # before the gradient counts as a step of the optimizer's
        row = replica.gradient(batch, step)
        step *= -eta
        if not first:
            accumulated += step
        return row[np.newaxis]

    def due(self, state: WorkerState) -> bool:
        return not state.occupied or super().due(state)

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        if self.explore:
            super().fill_payload(replica, state)
