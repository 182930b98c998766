"""SMEGA2: one momentum buffer that looks a whole round of workers ahead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Chunk, Context, RuleInfo, Scalars, Traits
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class SMEGA2(NagASGD):
    r"""A single momentum, renewed once in n commits, and Nesterov's look-ahead over the next n.

    With M the momentum, S the sum of the gradients since its renewal and c their number:

    .. math:: \tilde\theta \leftarrow \tilde\theta - \eta (g + \gamma M), \quad S \leftarrow S + g, \quad
              c \leftarrow (c + 1) \bmod n; \quad c = 0: M \leftarrow \gamma M + S / n,\ S \leftarrow 0

    .. math:: \hat\theta = \tilde\theta - \eta\gamma \left[ (n + c(\gamma - 1)) M + \tfrac{c}{n} S \right]

    what is sent is exactly where n further commits of zero gradients would take the center. With one worker it is
    Nesterov's method. The five papers only describe it; this is the reading of the cited work by that property.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Cohen, Hakimi, Schuster 2022.
    """

    name = "smega2"
    info = RuleInfo(
        title="SMEGA²",
        paper="Cohen et al. 2022",
        equations="as cited by Shi et al. 2024",
        sends="g",
        family="gradient",
        bibtex="""\
@inproceedings{cohen2022,
  author    = {Cohen, Refael and Hakimi, Ido and Schuster, Assaf},
  title     = {{SMEGA2}: Distributed Asynchronous Deep Neural Network Training with a Single Momentum Buffer},
  booktitle = {International Conference on Parallel Processing},
  year      = {2022},
}""",
    )

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, fixed_workers=True, view=True, model_vectors=("momentum", "sum"))

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        counters["count"] = (counters.get("count", 0) + 1) % context.workers
        return context.learning_rate, 0.0 if counters["count"] else 1.0 / context.workers

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        learning_rate, share = scalars
        gradient, (momentum, total) = chunk.payload[0], chunk.model
        total += gradient
        step = np.multiply(momentum, self.momentum, out=chunk.scratch)
        step += gradient
        step *= learning_rate
        np.subtract(chunk.center, step, out=chunk.out)
        if share:  # the n-th gradient since the last renewal
            momentum *= self.momentum
            total *= share
            momentum += total
            total.fill(0)
        return None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        count, reach = counters.get("count", 0), context.learning_rate * self.momentum
        return reach * (context.workers + count * (self.momentum - 1)), reach * count / context.workers

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        of_momentum, of_sum = scalars
        momentum, total = chunk.model
        # Two products and one scratch: the second goes through the output, which holds no input here.
        ahead = np.multiply(momentum, of_momentum, out=chunk.scratch)
        np.multiply(total, of_sum, out=chunk.out)
        ahead += chunk.out
        np.subtract(chunk.center, ahead, out=chunk.out)
