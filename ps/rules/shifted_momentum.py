"""Shifted momentum: each worker keeps a momentum and sends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import ORMO, Chunk, Context, Replica, RuleInfo, Scalars, Traits, Vector, WorkerState
from distkeras.ps.validate import check_field, require_number


@dataclass(frozen=True)
class ShiftedMomentum(ASGD):
    r"""Local momentum: the worker sends its momentum, learning rate included, and the server subtracts it.

    .. math:: u^k \leftarrow \beta u^k + \eta g, \qquad \tilde\theta \leftarrow \tilde\theta - u^k

    Inferred from the paper's remark that it is OrMo's counterpart with local momentum. eta is the one that the server
    sent with the parameters; when it changes, :math:`u^k` is scaled by the ratio first. Equal to Multi-ASGD while eta
    is constant. A worker that starts again starts with no momentum.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Remark 2.
    """

    name = "shifted_momentum"
    info = RuleInfo(
        title="shifted momentum",
        paper="Shi et al. 2024",
        equations="Remark 2",
        sends="uᵏ",
        family="gradient",
        bibtex=ORMO,
    )

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "momentum", require_number, inclusive=True, below=1)

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, overlaps=True)  # a worker's momentum moves every row

    def start(self, replica: Replica, sent: Vector) -> WorkerState:
        state = super().start(replica, sent)
        state.vectors["momentum"] = np.zeros_like(sent)
        return state

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        rows = super().compute(replica, state, batches)
        gradient, momentum = state.payload[0], state.vectors["momentum"]
        eta, previous = state.learning_rate, state.previous_learning_rate
        momentum *= self.momentum * (eta / previous if previous else 1.0)
        gradient *= eta
        momentum += gradient
        gradient[...] = momentum
        return rows

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return ()

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        np.subtract(chunk.center, chunk.payload[0], out=chunk.out)
        return None
