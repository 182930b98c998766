"""ASGD, the base of the gradient family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.base import DANA, Chunk, Context, Replica, Rule, RuleInfo, Scalars, Traits, Vector, WorkerState
from distkeras.ps.validate import invalid, not_negative


@dataclass(frozen=True)
class ASGD(Rule):
    r"""Asynchronous SGD: the worker sends a raw gradient, the server takes the step.

    .. math:: \tilde\theta \leftarrow \tilde\theta - \eta\, g^k(\tilde\theta_{sent})

    The learning rate is the server's. One gradient a commit: ``window`` is 1. It equals DOWNPOUR with ``window=1``
    and plain SGD at the workers, up to rounding.

    Args:
        weight_decay: added to the gradient as ``weight_decay`` times the parameters it was computed at (L2). Default 0.

    Reference: Hakimi et al. 2019, Algorithms 1-2; also Shi et al. 2024, Algorithm 1-II, and Zheng et al. 2017, Eq 3.
    """

    name = "asgd"
    info = RuleInfo(title="ASGD", equations="Alg 1-2", sends="g", family="gradient", **DANA)

    weight_decay: float = not_negative(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != 1:
            raise invalid("window", self.window, "1: a gradient rule commits every gradient")

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, overlaps=True, rows=not self.weight_decay)  # which moves every row

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        (batch,) = batches
        gradient = state.payload[0]
        row = replica.gradient(batch, gradient)
        if self.weight_decay:
            gradient += self.weight_decay * state.sent
        return row[np.newaxis]

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        """Nothing: `compute` wrote the gradient."""

    def begin_overlapped_window(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        """The next gradient is taken where the worker was last sent to; it lacks the one that travels."""
        self.receive(replica, state, sent)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate,)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        gradient = chunk.payload[0]
        gradient *= learning_rate
        np.subtract(chunk.center, gradient, out=chunk.out)
        return None
