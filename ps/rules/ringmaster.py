"""Ringmaster ASGD: what is too stale is refused, and its mini-batches are taken again from the fresh center."""

from __future__ import annotations

from dataclasses import dataclass

from distkeras.ps.rules.base import Chunk, Context, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.rules.delay_adaptive import scaled_add
from distkeras.ps.validate import check_field, invalid, require_integer


@dataclass(frozen=True)
class Ringmaster(Rule):
    r"""DOWNPOUR that refuses movements whose staleness reaches R; their worker computes the same window again.

    .. math:: \tau < R: \ \tilde\theta \leftarrow \tilde\theta + \Delta, \qquad \tau \ge R: \ \text{refused}

    After P refusals of one window in a row its movement is applied, scaled:
    :math:`\tilde\theta \leftarrow \tilde\theta + (R / \tau) \Delta`. With P = 0 that is `DelayAdaptive`; with P = None
    a movement is refused as long as it is too stale, as in the paper. There every worker draws from all of the data;
    here each has a partition, so that with P = None a worker that is always too slow would wait until the others have
    no data left, and train on its own data alone after them.

    A refused commit changes nothing at the server, and the ledger counts its mini-batches once, when they are applied.
    The worker pulls the center and takes the same mini-batches again; its optimizer's state and step counter go on.
    Algorithm 5 of the paper stops a computation at the moment that its delay reaches R; Algorithm 4, which is here,
    refuses it when it arrives. Both apply exactly the movements with a delay below R. R cannot be known from the
    theory; 2n lets all pass that are not twice as slow as the mean. Any worker optimizer.

    Args:
        window: lambda, a number: the rows of one window are kept for the next try. Default 1.
        threshold: R, the staleness that is refused, at least 1. Default None: twice the number of workers.
        patience: P, refusals of one window in a row, at least 0; None: no limit. Default 1.

    Reference: Maranjyan, Tyurin, Richtárik 2025 (arXiv 2501.16168), Algorithm 4, and the authors' code.
    """

    name = "ringmaster"
    info = RuleInfo(
        title="Ringmaster ASGD",
        paper="Maranjyan et al. 2025",
        equations="Alg 4",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex="""\
@inproceedings{maranjyan2025,
  author    = {Maranjyan, Artavazd and Tyurin, Alexander and Richt{\\'a}rik, Peter},
  title     = {Ringmaster {ASGD}: The First Asynchronous {SGD} with Optimal Time Complexity},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}""",
    )

    window: int | str | None = 1
    threshold: int | None = None
    patience: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None:
            raise invalid("window", self.window, "a number: a refused window's rows are kept for the next try")
        if self.threshold is not None:
            check_field(self, "threshold", require_integer)
        if self.patience is not None:
            check_field(self, "patience", require_integer, 0)

    @property
    def traits(self) -> Traits:
        return Traits(grows=True, refuses=True, rows=True)

    def _limit(self, context: Context) -> int:
        return self.threshold or 2 * context.workers

    def refuses(self, context: Context, refusals: int) -> bool:
        stale = context.staleness >= self._limit(context)
        return stale and (self.patience is None or refusals < self.patience)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        limit = self._limit(context)
        return (limit / max(limit, context.staleness),)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        return scaled_add(chunk, scalars[0])
