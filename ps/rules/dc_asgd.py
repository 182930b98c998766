"""DC-ASGD: gradients compensated for their delay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import DELAY_COMPENSATION, Chunk, RuleInfo, Scalars, Traits
from distkeras.ps.validate import flag, fraction, not_negative


@dataclass(frozen=True)
class DCASGD(ASGD):
    r"""ASGD with delay compensation: a first-order correction of the gradient for how far the center has moved.

    .. math:: \hat g = g + \lambda\, g \odot g \odot (\tilde\theta - \tilde\theta^k_{sent}), \qquad
              \tilde\theta \leftarrow \tilde\theta - \eta\hat g

    The adaptive variant divides, element-wise, by the root of a running mean of squared gradients over all workers,
    which is updated with the arriving gradient first:

    .. math:: MS \leftarrow m\,MS + (1 - m)\, g \odot g, \qquad \lambda = \lambda_0 / \sqrt{MS + \epsilon}

    With ``momentum`` > 0, each worker has a heavy-ball momentum over its compensated gradients at the server.

    The scan of the paper has lost its digits; the formula follows Hakimi et al. 2019, Eq 17, and the defaults are those
    of the published experiments on CIFAR-10.

    Args:
        adaptive: DC-ASGD-a rather than DC-ASGD-c. Default False.
        compensation: lambda (0.04 is the paper's for "c", 2 for "a"), at least 0. Default None: that.
        decay: m of the running mean, in [0, 1). Default 0.95.
        epsilon: inside the root, at least 0. Default 1e-7.
        momentum: gamma, in [0, 1). Default 0.
        weight_decay: see `ASGD`.

    Reference: Zheng et al. 2017, Algorithms 1-2 and Section 6; Hakimi et al. 2019, Eq 17, Algorithm 10 (momentum).
    """

    name = "dc_asgd"
    info = RuleInfo(title="DC-ASGD", equations="Alg 1-2, Section 6", sends="g", family="gradient", **DELAY_COMPENSATION)

    adaptive: bool = flag(False)
    compensation: float | None = not_negative(None)
    decay: float = fraction(0.95)
    epsilon: float = not_negative(1e-7)
    momentum: float = fraction(0.0)

    @property
    def traits(self) -> Traits:
        return Traits(
            gradient=True,
            fixed_workers=self.momentum > 0,
            keeps_sent=True,
            reads_sent=True,
            model_vectors=("mean_square",) if self.adaptive else (),
            worker_vectors=("velocity",) if self.momentum else (),
        )

    @property
    def compensation_strength(self) -> float:
        """lambda, or lambda_0."""
        return (2.0 if self.adaptive else 0.04) if self.compensation is None else self.compensation

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        gradient = chunk.payload[0]
        if self.adaptive:
            self._compensate_adaptively(chunk)
        else:
            compensate(chunk, self.compensation_strength)
        if self.momentum:
            (velocity,) = chunk.worker
            velocity *= self.momentum
            velocity += gradient
            gradient[...] = velocity
        gradient *= learning_rate
        np.subtract(chunk.center, gradient, out=chunk.out)
        return None

    def _compensate_adaptively(self, chunk: Chunk) -> None:
        gradient, scratch, (mean_square,) = chunk.payload[0], chunk.scratch, chunk.model
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1 - self.decay
        mean_square *= self.decay
        mean_square += scratch
        # g + lambda_0 g^2 d / root: the root goes in last, where only a vector of its own could hold it otherwise.
        moved = np.subtract(chunk.center, chunk.sent, out=scratch)
        moved *= self.compensation_strength
        moved *= gradient
        moved *= gradient
        root = np.sqrt(mean_square + self.epsilon)
        if not root.dtype.type(self.epsilon):  # where every gradient was 0 so is this one, and 0 is what is divided
            root[root == 0] = 1
        moved /= root
        gradient += moved


def compensate(chunk: Chunk, strength: float) -> None:
    """Adds ``strength * g * g * (center - sent)`` to the gradient in the payload."""
    gradient = chunk.payload[0]
    moved = np.subtract(chunk.center, chunk.sent, out=chunk.scratch)
    moved *= strength
    moved *= gradient
    moved *= gradient
    gradient += moved
