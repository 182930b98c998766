"""DANA: a momentum for each worker, and the sum of them to look ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distkeras.ps.rules.base import DANA, Chunk, Context, Replica, RuleInfo, Scalars, Traits, Vector, WorkerState
from distkeras.ps.rules.dc_asgd import compensate
from distkeras.ps.rules.momentum import LocalMomentum, NagASGD
from distkeras.ps.validate import not_negative


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
    info = RuleInfo(title="DANA-Zero", equations="Alg 4, Eq 10-11", sends="g", family="gradient", **DANA)
    traits = Traits(
        gradient=True,
        fixed_workers=True,
        view=True,
        model_vectors=("velocity_sum",),
        worker_vectors=("velocity",),
    )

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (total,), (velocity,) = chunk.model, chunk.worker
        total -= velocity
        self._step(chunk, velocity, scalars)
        total += velocity
        return None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate * self.momentum,)

    def leave(self, model: tuple[Vector, ...], worker: tuple[Vector, ...]) -> None:
        np.subtract(model[0], worker[0], out=model[0])


@dataclass(frozen=True)
class DanaDC(DanaZero):
    r"""DANA-Zero on a gradient that is compensated for its delay.

    .. math:: \hat g = g + \lambda\, g \odot g \odot (\tilde\theta - \hat\theta^k_{sent})

    then DANA-Zero with :math:`\hat g`. What the worker was sent is the look-ahead :math:`\hat\theta`, not the center;
    so a single worker is not Nesterov's method.

    Args:
        compensation: lambda, at least 0. Default 2.
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 7.
    """

    name = "dana_dc"
    info = RuleInfo(title="DANA-DC", equations="Alg 7", sends="g", family="gradient", **DANA)
    traits = replace(DanaZero.traits, keeps_sent=True, reads_sent=True)

    compensation: float = not_negative(2.0)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        compensate(chunk, self.compensation)
        return super().apply(chunk, scalars)


@dataclass(frozen=True)
class DanaSlim(LocalMomentum):
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
    info = RuleInfo(title="DANA-Slim", equations="Alg 6, Eq 15-16", sends="γvᵏ + g", family="gradient", **DANA)

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        rows = super().compute(replica, state, batches)
        gradient, velocity = state.payload[0], state.vectors["momentum"]
        velocity *= self.momentum
        velocity += gradient
        gradient += self.momentum * velocity
        return rows
