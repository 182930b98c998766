"""DANA-Slim: DANA with the momentum at the workers, and a server that only adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import DANA, Replica, RuleInfo, Traits, Vector, WorkerState
from distkeras.ps.validate import check_field, require_number


@dataclass(frozen=True)
class DanaSlim(ASGD):
    r"""DANA in Bengio's frame: the worker keeps its momentum and sends one step ahead; the server is ASGD's.

    .. math:: v^k \leftarrow \gamma v^k + g, \qquad \Theta \leftarrow \Theta - \eta (\gamma v^k + g)

    :math:`\Theta = \tilde\theta - \eta\gamma\sum_k v^k` is the look-ahead itself, and so is the trained model. (A
    footnote of the paper says that :math:`v^k` is sent; Algorithm 6 sends :math:`\gamma v^k + g`.) Equal to DANA-Zero
    while eta is constant; with one worker, Nesterov's method in Bengio's form.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 6 with Algorithm 2, Eq 15-16.
    """

    name = "dana_slim"
    info = RuleInfo(
        title="DANA-Slim",
        paper="Hakimi et al. 2019",
        equations="Alg 6, Eq 15-16",
        sends="γvᵏ + g",
        family="gradient",
        bibtex=DANA,
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
        state.vectors["velocity"] = np.zeros_like(sent)
        return state

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        rows = super().compute(replica, state, batches)
        gradient, velocity = state.payload[0], state.vectors["velocity"]
        velocity *= self.momentum
        velocity += gradient
        gradient += self.momentum * velocity
        return rows
