"""OrMo: ordered momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.asgdm import momentum_correction
from distkeras.ps.rules.base import ORMO, Chunk, Context, RuleInfo, Scalars, Traits
from distkeras.ps.rules.nag_asgd import NagASGD


@dataclass(frozen=True)
class OrMo(NagASGD):
    r"""Ordered momentum: a late gradient enters the momentum with the weight it would have by now.

    Gradients belong to buckets of n, by the clock *ite* of the parameters they were computed at; b is the head bucket.
    At clock t, if no worker waits (always, when asynchronous) and :math:`\lceil t/n \rceil > b`:

    .. math:: \tilde\theta \leftarrow \tilde\theta - \beta u, \quad u \leftarrow \beta u, \quad b \leftarrow b + 1

    and then, with :math:`e = b - \lceil ite / n \rceil`:

    .. math:: u \leftarrow u + \eta\beta^e g, \qquad
              \tilde\theta \leftarrow \tilde\theta - \eta \frac{1 - \beta^{e+1}}{1 - \beta}\, g

    When a schedule changes eta, u is scaled by the ratio first. With beta = 0 it is ASGD; under rounds and a constant
    eta, SSGD with momentum. With a schedule those two differ: here each arrival takes the eta of its own clock, there
    all arrivals of a round that of its first.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 2.
    """

    name = "ormo"
    info = RuleInfo(title="OrMo", paper="Shi et al. 2024", equations="Alg 2", sends="g", family="gradient", bibtex=ORMO)

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, fixed_workers=True, model_vectors=("momentum",))

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        n, beta = context.workers, self.momentum
        head = counters.get("head", 0)
        shift = context.waiting == 0 and -(-context.clock // n) > head
        head += shift
        counters["head"] = head
        late = head - -(-context.sent_clock // n)
        eta = context.learning_rate
        return momentum_correction(context), float(shift), eta * beta**late, eta * (1 - beta ** (late + 1)) / (1 - beta)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        correction, shift, of_momentum, of_center = scalars
        gradient, (momentum,), scratch = chunk.payload[0], chunk.model, chunk.scratch
        if correction != 1:
            momentum *= correction
        np.multiply(gradient, of_center, out=scratch)
        if shift:
            momentum *= self.momentum
            scratch += momentum
        gradient *= of_momentum
        momentum += gradient
        np.subtract(chunk.center, scratch, out=chunk.out)
        return None
