"""Delayed Nesterov: movements are applied as they come, and the momentum is renewed once in N of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import ASYNC_LOCAL_SGD, Chunk, Context, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.validate import check_field, require_integer, require_number


@dataclass(frozen=True)
class DelayedNesterov(Rule):
    r"""Asynchronous local SGD whose outer momentum waits for N movements.

    With B the sum of the movements :math:`\Delta` since the momentum was renewed, and p their number:

    .. math:: B \leftarrow B + \Delta, \quad p \leftarrow p + 1; \qquad
              p < N: \ \tilde\theta \leftarrow \tilde\theta + \epsilon (\Delta / N + c \beta m)

    .. math:: p = N: \ m \leftarrow \beta m + B / N, \quad
              \tilde\theta \leftarrow \tilde\theta + \epsilon (\Delta / N + (1 - cN + c) \beta m), \quad
              B \leftarrow 0, \ p \leftarrow 0

    with the new m in the last step. Algorithm 3 leaves brackets out: epsilon multiplies the whole sum. The text says
    that c = 1 spreads the momentum evenly; it is c = 1/N, ``activation=1``. With :math:`c = 0` and rounds held around
    it, N = n is DiLoCo; with another c it is not, unless N is 1.

    B takes movements of any worker as they come, so that a fast one may fill it; the authors take N = n. ``period=1``
    is the naive asynchronous DiLoCo, which is unstable, for comparison. The last partial B never reaches m, but each
    movement is in the center at once. Any worker optimizer.

    Args:
        window: lambda. Default 50.
        server_rate: epsilon, the outer learning rate, above 0. Default 0.7.
        momentum: beta, in [0, 1). Default 0.9.
        period: N, movements from one renewal of m to the next, at least 1. Default None: the number of workers.
        activation: cN, the share of the momentum that is spread over the period, in [0, 1]. Default 0.

    Reference: Liu et al. 2024 (arXiv 2401.09135), Algorithm 3.
    """

    name = "delayed_nesterov"
    info = RuleInfo(
        title="Delayed Nesterov",
        paper="Liu et al. 2024",
        equations="Alg 3",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex=ASYNC_LOCAL_SGD,
    )

    window: int | str | None = 50
    server_rate: float = 0.7
    momentum: float = 0.9
    period: int | None = None
    activation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "server_rate", require_number)
        check_field(self, "momentum", require_number, inclusive=True, below=1)
        if self.period is not None:
            check_field(self, "period", require_integer)
        check_field(self, "activation", require_number, inclusive=True, up_to=1)

    @property
    def traits(self) -> Traits:
        return Traits(grows=True, model_vectors=("momentum", "sum"))

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        period = self.period or context.workers
        count = counters.get("count", 0) + 1
        full = count == period
        counters["count"] = 0 if full else count
        share = self.activation / period
        of_momentum = 1 - self.activation + share if full else share
        return (
            self.server_rate / period,
            self.server_rate * self.momentum * of_momentum,
            1 / period if full else 0.0,
        )

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        of_delta, of_momentum, of_sum = scalars
        delta, (momentum, total) = chunk.payload[0], chunk.model
        total += delta
        if of_sum:  # the N-th movement since the last renewal
            momentum *= self.momentum
            total *= of_sum
            momentum += total
            total.fill(0)
        delta *= of_delta
        if of_momentum:
            delta += np.multiply(momentum, of_momentum, out=chunk.scratch)
        np.add(chunk.center, delta, out=chunk.out)
        return None
