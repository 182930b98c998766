"""DOWNPOUR: workers push their movement, the server adds it."""

from __future__ import annotations

from dataclasses import dataclass

from distkeras.ps.rules.base import THESIS, Rule, RuleInfo, Traits


@dataclass(frozen=True)
class Downpour(Rule):
    r"""DOWNPOUR, per mini-batch (``window=1``) or accumulated (``window`` > 1).

    Worker, over a window of lambda steps from the center it was last sent:

    .. math:: \theta^k_{i+1} = \theta^k_i - \eta g(\theta^k_i), \qquad \Delta = \theta^k_\lambda - \tilde\theta_{sent}

    Server: :math:`\tilde\theta \leftarrow \tilde\theta + \Delta`; the reply is :math:`\tilde\theta`.

    The paper's worker sends :math:`-\eta g` after every batch; the accumulated form is its worker loop with DynSGD's
    window and a plain add. It diverges easily: the payload grows with the window and with the number of workers.
    Any worker optimizer may make the steps; :math:`\Delta` is the movement, regardless of what made it.

    Args:
        window: lambda. Default 1.

    Reference: Hermans 2017, Algorithm 5, Eq 1.2-1.3, 2.11-2.12; accumulation as in Algorithm 7.
    """

    name = "downpour"
    info = RuleInfo(
        title="DOWNPOUR",
        paper="Hermans 2017",
        equations="Alg 5, Eq 2.11-2.12",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex=THESIS,
    )

    @property
    def traits(self) -> Traits:
        return Traits(overlaps=True, grows=True, rows=True, sums=True)
