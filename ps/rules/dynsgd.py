"""DynSGD: payloads shrink with their staleness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import THESIS, Chunk, Context, Rule, RuleInfo, Scalars, Traits


@dataclass(frozen=True)
class DynSGD(Rule):
    r"""DynSGD: DOWNPOUR whose payload is divided by its staleness plus one.

    .. math:: \tilde\theta \leftarrow \tilde\theta + \frac{\Delta}{\tau + 1}

    tau counts the commits by others since this worker was last sent the center (Algorithm 8 notes the clock at the
    pull, and divides by tau + 1; Eq 2.13 prints tau, which would divide by zero).

    Args:
        window: lambda. Default 5.

    Reference: Hermans 2017, Algorithms 7-8, Eq 2.13.
    """

    name = "dynsgd"
    info = RuleInfo(
        title="DynSGD",
        paper="Hermans 2017",
        equations="Alg 7-8, Eq 2.13",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex=THESIS,
    )

    window: int | str | None = 5

    @property
    def traits(self) -> Traits:
        return Traits(grows=True, rows=True, sums=True)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (1.0 / (context.staleness + 1),)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (scale,) = scalars
        delta = chunk.payload[0]
        delta *= scale
        np.add(chunk.center, delta, out=chunk.out)
        return scale * delta.size
