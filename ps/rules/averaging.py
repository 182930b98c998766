"""Model averaging, synchronous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import THESIS, Chunk, Replica, Rule, RuleInfo, Scalars, Traits, WorkerState


@dataclass(frozen=True)
class ModelAveraging(Rule):
    r"""Model averaging: after lambda local steps the center becomes the mean of the workers.

    .. math:: \tilde\theta \leftarrow \frac{1}{n}\sum_k \theta^k

    The mean divides by the round's contributions: workers whose data has ended no longer count. Any local optimizer.

    Args:
        window: lambda. Default None: one round an epoch.

    Reference: Hermans 2017, Algorithm 3, Eq 2.2-2.3.
    """

    name = "averaging"
    info = RuleInfo(
        title="Model averaging",
        paper="Hermans 2017",
        equations="Alg 3, Eq 2.2-2.3",
        sends="θᵏ",
        family="averaging",
        bibtex=THESIS,
    )

    window: int | str | None = None

    @property
    def traits(self) -> Traits:
        return Traits(synchronous=True)

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        replica.read(state.payload[0])

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.divide(chunk.payload[0], contributions, out=chunk.out)
