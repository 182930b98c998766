"""DANA-Zero: a momentum for each worker, and the sum of them to look ahead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import DANA, Chunk, Context, RuleInfo, Scalars, Traits, Vector
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class DanaZero(NagASGD):
    r"""Distributed Nesterov: each worker is sent where the momenta of all would carry the center.

    .. math:: v^k_{new} = \gamma v^k + g, \quad v^0 \leftarrow v^0 - v^k + v^k_{new}, \quad
              \tilde\theta \leftarrow \tilde\theta - \eta v^k_{new}, \quad
              \hat\theta = \tilde\theta - \eta\gamma v^0

    :math:`v^0 = \sum_k v^k` is kept as a running sum, so that a commit costs the same for any n. Eq 11 is printed with
    the previous momenta, Algorithm 4 with the updated ones, which are taken. When a worker leaves for good, its
    momentum leaves the sum. With one worker it is Nesterov's method.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 4, Eq 10-11, Appendix A.2.
    """

    name = "dana_zero"
    info = RuleInfo(
        title="DANA-Zero",
        paper="Hakimi et al. 2019",
        equations="Alg 4, Eq 10-11",
        sends="g",
        family="gradient",
        bibtex=DANA,
    )

    @property
    def traits(self) -> Traits:
        return Traits(
            gradient=True,
            fixed_workers=True,
            view=True,
            model_vectors=("velocity_sum",),
            worker_vectors=("velocity",),
        )

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        (total,), (velocity,) = chunk.model, chunk.worker
        total -= velocity
        velocity *= self.momentum
        velocity += chunk.payload[0]
        total += velocity
        step = np.multiply(velocity, learning_rate, out=chunk.scratch)
        np.subtract(chunk.center, step, out=chunk.out)
        return None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate * self.momentum,)

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        (reach,) = scalars
        ahead = np.multiply(chunk.model[0], reach, out=chunk.scratch)
        np.subtract(chunk.center, ahead, out=chunk.out)

    def leave(self, model: tuple[Vector, ...], worker: tuple[Vector, ...]) -> None:
        np.subtract(model[0], worker[0], out=model[0])
