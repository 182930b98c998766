"""Synchronous SGD, without and with momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import ORMO, Chunk, Context, RuleInfo, Scalars, Traits
from distkeras.ps.rules.momentum import NagASGD, ShiftedMomentum, momentum_correction


@dataclass(frozen=True)
class SSGD(ASGD):
    r"""Synchronous SGD: one step a round, with the mean of the workers' gradients.

    .. math:: \tilde\theta \leftarrow \tilde\theta - \frac{\eta}{n}\sum_k g^k

    Equal, at the barriers, to n single steps with eta / n. The mean divides by the round's contributions.

    Args:
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 1-I, Remark 1; Hermans 2017, Section 1.3.
    """

    name = "ssgd"
    info = RuleInfo(title="SSGD", equations="Alg 1-I, Remark 1", sends="g", family="gradient", **ORMO)
    traits = Traits(gradient=True, synchronous=True)

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate,)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        (learning_rate,) = scalars
        total = chunk.payload[0]
        total *= learning_rate / contributions
        np.subtract(chunk.center, total, out=chunk.out)


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
    info = RuleInfo(title="SSGDm (global)", equations="Alg 3, Eq 4-6", sends="g", family="gradient", **ORMO)
    traits = Traits(gradient=True, synchronous=True, model_vectors=("momentum",))

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return context.learning_rate, self.momentum * momentum_correction(context)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        learning_rate, decay = scalars
        total, (momentum,) = chunk.payload[0], chunk.model
        momentum *= decay
        total *= learning_rate
        momentum += total
        np.subtract(chunk.center, momentum, out=chunk.out)


@dataclass(frozen=True)
class SSGDmLocal(ShiftedMomentum):
    r"""Synchronous SGD with a momentum at each worker. At the barriers it equals `SSGDm`.

    .. math:: u^k \leftarrow \beta u^k + \eta g, \qquad \tilde\theta \leftarrow \tilde\theta - \sum_k u^k

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 4.
    """

    name = "ssgdm_local"
    info = RuleInfo(title="SSGDm (local)", equations="Alg 4", sends="uᵏ", family="gradient", **ORMO)
    traits = Traits(gradient=True, synchronous=True)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.subtract(chunk.center, chunk.payload[0], out=chunk.out)
