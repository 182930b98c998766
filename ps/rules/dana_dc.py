"""DANA-DC: DANA-Zero with delay compensation."""

from __future__ import annotations

from dataclasses import dataclass

from distkeras.ps.rules.base import DANA, Chunk, RuleInfo, Scalars, Traits
from distkeras.ps.rules.dana_zero import DanaZero
from distkeras.ps.rules.dc_asgd import compensate
from distkeras.ps.validate import check_field, require_number


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
    info = RuleInfo(
        title="DANA-DC", paper="Hakimi et al. 2019", equations="Alg 7", sends="g", family="gradient", bibtex=DANA
    )

    compensation: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "compensation", require_number, inclusive=True)

    @property
    def traits(self) -> Traits:
        return Traits(
            gradient=True,
            fixed_workers=True,
            view=True,
            keeps_sent=True,
            reads_sent=True,
            model_vectors=("velocity_sum",),
            worker_vectors=("velocity",),
        )

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        compensate(chunk, self.compensation)
        return super().apply(chunk, scalars)
