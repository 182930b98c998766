"""SSGDm with global momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.asgdm import momentum_correction
from distkeras.ps.rules.base import ORMO, Chunk, Context, RuleInfo, Scalars, Traits
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class SSGDm(NagASGD):
    r"""Synchronous SGD with one momentum at the server. At the barriers:

    .. math:: u \leftarrow \beta u + \eta\sum_k g^k, \qquad \tilde\theta \leftarrow \tilde\theta - u

    Algorithm 3 spreads the same step over the arrivals (the first one moves by :math:`\beta u`, each by
    :math:`\eta g`); the center does not move in mid-round here, and no worker could see it if it did. eta is the one of
    a single gradient: n times smaller than SSGD's for the same step. When a schedule changes it, u is scaled by the
    ratio.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 3, Eq 4-6.
    """

    name = "ssgdm"
    info = RuleInfo(
        title="SSGDm (global)",
        paper="Shi et al. 2024",
        equations="Alg 3, Eq 4-6",
        sends="g",
        family="gradient",
        bibtex=ORMO,
    )

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, synchronous=True, model_vectors=("momentum",))

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return context.learning_rate, self.momentum * momentum_correction(context)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        learning_rate, decay = scalars
        total, (momentum,) = chunk.payload[0], chunk.model
        momentum *= decay
        total *= learning_rate
        momentum += total
        np.subtract(chunk.center, momentum, out=chunk.out)
