"""SSGDm with local momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import ORMO, Chunk, RuleInfo, Scalars, Traits
from distkeras.ps.rules.shifted_momentum import ShiftedMomentum


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
    info = RuleInfo(
        title="SSGDm (local)", paper="Shi et al. 2024", equations="Alg 4", sends="uᵏ", family="gradient", bibtex=ORMO
    )

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, synchronous=True)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.subtract(chunk.center, chunk.payload[0], out=chunk.out)
