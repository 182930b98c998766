"""AGN: accumulated gradient normalization."""

from __future__ import annotations

from dataclasses import dataclass

from distkeras.ps.rules.base import THESIS, Replica, Rule, RuleInfo, Traits, WorkerState


@dataclass(frozen=True)
class AGN(Rule):
    r"""Accumulated gradient normalization: DOWNPOUR whose payload is divided by the steps behind it.

    .. math:: \Delta = \frac{1}{\lambda} (\theta^k_\lambda - \tilde\theta_{sent}), \qquad
              \tilde\theta \leftarrow \tilde\theta + \Delta

    The divisor is the number of steps really taken: the last window of an epoch may be shorter. (Eq 3.1 sums
    lambda + 1 terms, Algorithm 10 lambda; lambda it is.) With ``window=1`` it is DOWNPOUR, bit for bit.
    The dist-keras code base calls this rule ADAG; names here follow the thesis.

    Args:
        window: lambda. The thesis' rule of thumb is (workers + layers) / 2. Default 10.

    Reference: Hermans 2017, Algorithm 10, Eq 3.1.
    """

    name = "agn"
    info = RuleInfo(
        title="AGN",
        paper="Hermans 2017",
        equations="Alg 10, Eq 3.1",
        sends="Δ / λ",
        family="delta",
        bibtex=THESIS,
    )

    window: int | str | None = 10

    @property
    def traits(self) -> Traits:
        return Traits(overlaps=True, rows=True, sums=True)

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        super().fill_payload(replica, state)
        state.payload[0][...] /= state.steps
