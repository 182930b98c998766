"""DiLoCo: the mean of the workers' movements is a step of an outer optimizer with momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Chunk, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.validate import check_field, require_choice, require_number


@dataclass(frozen=True)
class DiLoCo(Rule):
    r"""Distributed low-communication training: synchronous rounds whose mean movement an outer optimizer takes.

    With D the mean of a round's movements :math:`\Delta` over its contributions, and the new m:

    .. math:: m \leftarrow \beta m + D, \qquad
              \tilde\theta \leftarrow \tilde\theta + \alpha (D + \beta m) \ \text{(Nesterov)} \quad\text{or}\quad
              \tilde\theta \leftarrow \tilde\theta + \alpha m \ \text{(heavy ball)}

    The papers subtract the pseudo-gradient :math:`-\Delta`. The first step has m = D: there is no dampening. Shards are
    weighted equally, and a shorter window counts as one contribution. With :math:`\alpha = 1` and :math:`\beta = 0` it
    is model averaging.

    The heavy ball is SlowMo (``server_rate=1, momentum=0.5, nesterov=False``; Wang et al. 2020), which is also FedAvgM,
    while the worker's learning rate is constant: SlowMo divides m by that rate, and m here is not corrected when it
    changes. With one worker it is SNOO, and with :math:`\beta = 0` also Lookahead.

    Any worker optimizer, AdamW in the paper; its state stays at the worker.

    Args:
        window: lambda; 50 to 500 in the papers. Default 50.
        server_rate: alpha, the outer learning rate, above 0. Default 0.7.
        momentum: beta, in [0, 1). Default 0.9.
        nesterov: Nesterov's form; False: heavy ball. Default True.

    Reference: Douillard et al. 2023 (arXiv 2311.08105), Algorithm 1; Liu et al. 2024 (arXiv 2401.09135), Eq 4.
    """

    name = "diloco"
    info = RuleInfo(
        title="DiLoCo",
        paper="Douillard et al. 2023",
        equations="Alg 1",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex="""\
@article{douillard2023,
  author  = {Douillard, Arthur and Feng, Qixuan and Rusu, Andrei A. and Chhaparia, Rachita and others},
  title   = {{DiLoCo}: Distributed Low-Communication Training of Language Models},
  journal = {arXiv preprint arXiv:2311.08105},
  year    = {2023},
}""",
    )

    window: int | None = 50
    server_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "server_rate", require_number)
        check_field(self, "momentum", require_number, inclusive=True, below=1)
        require_choice("nesterov", self.nesterov, (True, False))

    @property
    def traits(self) -> Traits:
        return Traits(synchronous=True, model_vectors=("momentum",))

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        mean, (momentum,) = chunk.payload[0], chunk.model
        mean /= contributions
        momentum *= self.momentum
        momentum += mean
        if self.nesterov:
            mean += np.multiply(momentum, self.momentum, out=chunk.scratch)
            mean *= self.server_rate
        else:
            np.multiply(momentum, self.server_rate, out=mean)
        np.add(chunk.center, mean, out=chunk.out)
