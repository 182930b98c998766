"""NAG-ASGD: one momentum at the server, heavy ball as printed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import DANA, Chunk, RuleInfo, Scalars, Traits
from distkeras.ps.validate import check_field, require_number


@dataclass(frozen=True)
class NagASGD(ASGD):
    r"""One momentum vector at the server, over the gradients of all workers.

    .. math:: v \leftarrow \gamma v + g, \qquad \tilde\theta \leftarrow \tilde\theta - \eta v

    The paper's text calls it Nesterov's; its pseudo-code has no look-ahead and is the heavy ball, which is what runs
    here. With one worker it is the heavy ball.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 8.
    """

    name = "nag_asgd"
    info = RuleInfo(
        title="NAG-ASGD", paper="Hakimi et al. 2019", equations="Alg 8", sends="g", family="gradient", bibtex=DANA
    )

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "momentum", require_number, inclusive=True, below=1)

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, model_vectors=("velocity",))

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        (velocity,) = chunk.model
        velocity *= self.momentum
        velocity += chunk.payload[0]
        step = np.multiply(velocity, learning_rate, out=chunk.scratch)
        np.subtract(chunk.center, step, out=chunk.out)
        return None
