"""LWP: linear weight prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import DANA, Chunk, Context, RuleInfo, Scalars, Traits
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class LWP(NagASGD):
    r"""Linear weight prediction: NAG-ASGD that sends where the momentum would carry the center in tau steps.

    .. math:: \hat\theta = \tilde\theta - \tau\eta v, \qquad \tau = n - 1

    tau is the expected lag, n - 1. There is no factor gamma; with tau = 0 it is NAG-ASGD.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 3, Eq 9.
    """

    name = "lwp"
    info = RuleInfo(
        title="LWP", paper="Hakimi et al. 2019", equations="Alg 3, Eq 9", sends="g", family="gradient", bibtex=DANA
    )

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, fixed_workers=True, view=True, model_vectors=("velocity",))

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return ((context.workers - 1) * context.learning_rate,)

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        (reach,) = scalars
        ahead = np.multiply(chunk.model[0], reach, out=chunk.scratch)
        np.subtract(chunk.center, ahead, out=chunk.out)
