"""Naive ASGDm: one momentum at the server, with the learning rate inside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import ORMO, Chunk, Context, RuleInfo, Scalars
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class ASGDm(NagASGD):
    r"""ASGD with a momentum that holds the learning rate; equal to NAG-ASGD while eta is constant.

    .. math:: u \leftarrow \beta u + \eta g, \qquad \tilde\theta \leftarrow \tilde\theta - u

    When a schedule changes eta, u is first scaled by the ratio of the new to the old one (momentum correction), which
    the pseudo-code, written for a constant eta, leaves out.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 5.
    """

    name = "asgdm"
    info = RuleInfo(
        title="naive ASGDm", paper="Shi et al. 2024", equations="Alg 5", sends="g", family="gradient", bibtex=ORMO
    )

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return context.learning_rate, self.momentum * momentum_correction(context)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        learning_rate, decay = scalars
        gradient = chunk.payload[0]
        (momentum,) = chunk.model
        momentum *= decay
        gradient *= learning_rate
        momentum += gradient
        np.subtract(chunk.center, momentum, out=chunk.out)
        return None


def momentum_correction(context: Context) -> float:
    """What a momentum that holds the learning rate is scaled by when a schedule changes that rate."""
    previous = context.previous_learning_rate
    return context.learning_rate / previous if previous else 1.0
