"""MLA: momentum look-ahead for asynchronous exchanges of long windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Chunk, Context, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.rules.fedopt import average
from distkeras.ps.validate import check_field, require_number


@dataclass(frozen=True)
class MLA(Rule):
    r"""Momentum look-ahead: the center stands where the momentum of the movements so far leads next.

    .. math:: m \leftarrow \gamma m + (1 - \gamma) \Delta, \qquad
              \tilde\theta \leftarrow \tilde\theta + \eta (\Delta + \gamma m)

    with the new m. The paper first prints a step with the old m, which sends the look-ahead
    :math:`\theta + \eta\gamma m`, and then this form, Eq 7, whose center *is* that look-ahead. One implementation of a
    later paper (arXiv 2606.00271) takes Eq 7's step and sends :math:`\tilde\theta + \eta\gamma m` as well, two
    look-aheads: ``reach=1`` is that reading. What is sent is :math:`\tilde\theta + \text{reach}\cdot\eta\gamma m`.

    m is an average, with the weight :math:`1 - \gamma`, where DiLoCo's is a sum: under a constant movement a step here
    is :math:`\eta(1 + \gamma)` of it, there :math:`\alpha / (1 - \beta)`. So neither rates nor momenta can be
    exchanged. Any worker optimizer.

    Args:
        window: lambda. Default 50.
        server_rate: eta, the outer learning rate, above 0. Default 0.7.
        momentum: gamma, in [0, 1). Default 0.9.
        reach: how far beyond the center the workers begin, at least 0. Default 0: at the center.

    Reference: Ajanthan et al. 2025 (OpenReview 4O8nzTkHPI), Eq 7.
    """

    name = "mla"
    info = RuleInfo(
        title="MLA",
        paper="Ajanthan et al. 2025",
        equations="Eq 7",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex="""\
@inproceedings{ajanthan2025,
  author    = {Ajanthan, Thalaiyasingam and others},
  title     = {Momentum Look-Ahead for Asynchronous Distributed Low-Communication Training},
  booktitle = {OpenReview 4O8nzTkHPI},
  year      = {2025},
}""",
    )

    window: int | str | None = 50
    server_rate: float = 0.7
    momentum: float = 0.9
    reach: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "server_rate", require_number)
        check_field(self, "momentum", require_number, inclusive=True, below=1)
        check_field(self, "reach", require_number, inclusive=True)

    @property
    def traits(self) -> Traits:
        return Traits(grows=True, view=self.reach > 0, model_vectors=("momentum",))

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        delta, (momentum,), scratch = chunk.payload[0], chunk.model, chunk.scratch
        average(momentum, delta, self.momentum, scratch)
        delta += np.multiply(momentum, self.momentum, out=scratch)
        delta *= self.server_rate
        np.add(chunk.center, delta, out=chunk.out)
        return None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (self.reach * self.server_rate * self.momentum,)

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        (ahead,) = scalars
        np.multiply(chunk.model[0], ahead, out=chunk.scratch)
        np.add(chunk.center, chunk.scratch, out=chunk.out)
