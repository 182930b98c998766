"""Delay-adaptive asynchronous SGD: movements that are staler than a threshold shrink with their staleness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Chunk, Context, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.validate import check_field, require_integer


@dataclass(frozen=True)
class DelayAdaptive(Rule):
    r"""DOWNPOUR whose movements count in full up to a staleness of T, and in inverse proportion to it beyond.

    .. math:: \tilde\theta \leftarrow \tilde\theta + \frac{T}{\max(T, \tau)} \Delta

    Theorem 8 allows any step up to :math:`\min(\eta, 1 / (4 L \tau))` beyond the number of workers n, also none at all
    (`Ringmaster`). With :math:`\eta = 1 / (4 L n)` that is :math:`\eta n / \tau`: hence T = n. The same scaling is in
    Mishchenko et al. 2022. T = 1 gives :math:`1 / \max(1, \tau)`, which is not DynSGD's :math:`1 / (\tau + 1)`. Any
    worker optimizer.

    Args:
        window: lambda. Default 1.
        threshold: T, the largest staleness that counts in full, at least 1. Default None: the number of workers.

    Reference: Koloskova, Stich, Jaggi 2022 (arXiv 2206.08307), Theorem 8; Mishchenko et al. 2022 (arXiv 2206.07638).
    """

    name = "delay_adaptive"
    info = RuleInfo(
        title="Delay-adaptive ASGD",
        paper="Koloskova et al. 2022",
        equations="Thm 8",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex="""\
@inproceedings{koloskova2022,
  author    = {Koloskova, Anastasia and Stich, Sebastian U. and Jaggi, Martin},
  title     = {Sharper Convergence Guarantees for Asynchronous {SGD} for Distributed and Federated Learning},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022},
}""",
    )

    window: int | str | None = 1
    threshold: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_field(self, "threshold", require_integer)

    @property
    def traits(self) -> Traits:
        return Traits(grows=True, rows=True, sums=True)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        threshold = self.threshold or context.workers
        return (threshold / max(threshold, context.staleness),)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        return scaled_add(chunk, scalars[0])


def scaled_add(chunk: Chunk, scale: float) -> float | None:
    """Writes the center plus ``scale`` times the payload. Returns what `Rule.apply` returns."""
    delta = chunk.payload[0]
    if scale != 1:
        delta *= scale
    np.add(chunk.center, delta, out=chunk.out)
    return scale * delta.size
