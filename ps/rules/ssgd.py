"""SSGD: synchronous mini-batch parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import ORMO, Chunk, Context, RuleInfo, Scalars, Traits


@dataclass(frozen=True)
class SSGD(ASGD):
    r"""Synchronous SGD: one step a round, with the mean of the workers' gradients.

    .. math:: \tilde\theta \leftarrow \tilde\theta - \frac{\eta}{n}\sum_k g^k

    Equal, at the barriers, to n single steps with eta / n. The mean divides by the round's contributions.

    Args:
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 1-I, Remark 1; Hermans 2017, Section 1.3.
    """

    name = "ssgd"
    info = RuleInfo(
        title="SSGD", paper="Shi et al. 2024", equations="Alg 1-I, Remark 1", sends="g", family="gradient", bibtex=ORMO
    )

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, synchronous=True)

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate,)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        (learning_rate,) = scalars
        total = chunk.payload[0]
        total *= learning_rate / contributions
        np.subtract(chunk.center, total, out=chunk.out)
