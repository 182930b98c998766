"""Multi-ASGD: a momentum for each worker, at the server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import DANA, Chunk, RuleInfo, Scalars, Traits
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class MultiASGD(NagASGD):
    r"""A momentum vector for each worker, over its own gradients.

    .. math:: v^k \leftarrow \gamma v^k + g, \qquad \tilde\theta \leftarrow \tilde\theta - \eta v^k

    Heavy ball, as the pseudo-code has it: with a framework's Nesterov step instead it would become DANA-Slim.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 9.
    """

    name = "multi_asgd"
    info = RuleInfo(
        title="Multi-ASGD", paper="Hakimi et al. 2019", equations="Alg 9", sends="g", family="gradient", bibtex=DANA
    )

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, fixed_workers=True, worker_vectors=("velocity",))

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        (velocity,) = chunk.worker
        velocity *= self.momentum
        velocity += chunk.payload[0]
        step = np.multiply(velocity, learning_rate, out=chunk.scratch)
        np.subtract(chunk.center, step, out=chunk.out)
        return None
