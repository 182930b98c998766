"""FADAS: the server collects a number of movements, and takes their mean as a step of AMSGrad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Chunk, Context, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.rules.fedbuff import age
from distkeras.ps.rules.fedopt import adaptive_step, average, check_adaptive_step
from distkeras.ps.validate import check_field, require_integer


@dataclass(frozen=True)
class FADAS(Rule):
    r"""Federated adaptive asynchronous optimization: a buffer, an AMSGrad step, and a rate that adapts to delays.

    With B the sum of the h movements in the buffer, and w the largest age among them (see `FedBuff`):

    .. math:: B \leftarrow B + \Delta, \quad h \leftarrow h + 1, \quad w \leftarrow \max(w, \text{age})

    and at h = M, with D = B / M; then B, h and w are 0 again:

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) D, \quad v \leftarrow \beta_2 v + (1 - \beta_2) D^2, \quad
              \hat v \leftarrow \max(\hat v, v)

    .. math:: \tilde\theta \leftarrow \tilde\theta + \eta_t \frac{m}{\sqrt{\hat v} + \varepsilon}, \qquad
              \eta_t = \eta \text{ if } w \le \tau_c, \text{ else } \eta / w

    :math:`\eta / w` is that of the authors' code; a printed :math:`\min(\eta, 1 / w)` would do nothing at the default
    rate. Their code has Adam's bias correction, the algorithm has none, and none is here.

    When the last worker has left, a partly filled buffer is drained: the same step, with D = B / M. A center that is
    looked at before does not contain the buffer. Any worker optimizer.

    Args:
        window: lambda. Default 10.
        buffer: M, movements in one step, at least 1. Default None: the number of workers.
        server_rate: eta, the server's learning rate, above 0. Default 1e-3.
        beta_1: decay of m, in [0, 1). Default 0.9.
        beta_2: decay of v, in [0, 1). Default 0.99.
        epsilon: outside the root, above 0. Default 1e-8.
        delay_threshold: tau_c, the largest age at the full rate, at least 1; None: the rate is constant. Default 1.

    Reference: Wang et al. 2024 (arXiv 2407.18365), Algorithm 1, and the authors' code.
    """

    name = "fadas"
    info = RuleInfo(
        title="FADAS",
        paper="Wang et al. 2024",
        equations="Alg 1",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex="""\
@inproceedings{wang2024,
  author    = {Wang, Yujia and Wang, Shiqiang and Lu, Songtao and Chen, Jinghui},
  title     = {{FADAS}: Towards Federated Adaptive Asynchronous Optimization},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
}""",
    )

    window: int | str | None = 10
    buffer: int | None = None
    server_rate: float = 1e-3
    beta_1: float = 0.9
    beta_2: float = 0.99
    epsilon: float = 1e-8
    delay_threshold: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("buffer", "delay_threshold"):
            if getattr(self, name) is not None:
                check_field(self, name, require_integer)
        check_adaptive_step(self)

    @property
    def traits(self) -> Traits:
        vectors = ("buffer", "momentum", "second_moment", "largest_second_moment")
        return Traits(grows=True, drains=True, model_vectors=vectors)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        size, count = self.buffer or context.workers, counters.get("count", 0)
        counters["worst"] = max(counters.get("worst", 0), age(context, count, size))
        counters["count"] = count + 1
        if count + 1 < size:
            return ()
        return self.begin_drain(context.workers, counters) or ()

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        total = chunk.model[0]
        total += chunk.payload[0]
        if scalars:  # the buffer is full
            self.drain(chunk, scalars)
        else:
            chunk.out[...] = chunk.center
        return None

    def begin_drain(self, workers: int, counters: dict[str, int]) -> Scalars | None:
        count, worst = counters.pop("count", 0), counters.pop("worst", 0)
        if not count:
            return None
        late = self.delay_threshold is not None and worst > self.delay_threshold
        return 1 / (self.buffer or workers), self.server_rate / worst if late else self.server_rate

    def drain(self, chunk: Chunk, scalars: Scalars) -> None:
        share, rate = scalars
        total, momentum, second, largest = chunk.model
        total *= share
        average(momentum, total, self.beta_1, chunk.scratch)
        np.multiply(total, total, out=total)
        average(second, total, self.beta_2, chunk.scratch)
        np.maximum(largest, second, out=largest)
        total.fill(0)
        adaptive_step(momentum, largest, rate, self.epsilon, out=chunk.scratch)
        np.add(chunk.center, chunk.scratch, out=chunk.out)
