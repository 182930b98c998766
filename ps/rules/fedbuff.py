"""FedBuff: the server collects a number of movements, and takes their mean as one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Chunk, Context, Rule, RuleInfo, Scalars, Traits
from distkeras.ps.validate import check_field, require_choice, require_integer, require_number


@dataclass(frozen=True)
class FedBuff(Rule):
    r"""Buffered asynchronous aggregation: the center moves at every M-th commit, by the mean of M movements.

    With B the buffer's sum and h the number of movements in it, c the clock, and ite the clock that the worker was last
    sent the center at:

    .. math:: \text{age} = \max\left(0, \left\lceil \frac{c - h - ite}{M} \right\rceil\right), \qquad
              B \leftarrow B + (1 + \text{age})^{-a} \Delta, \quad h \leftarrow h + 1

    .. math:: h = M: \quad D = B / M, \quad m \leftarrow \beta m + D, \quad
              \tilde\theta \leftarrow \tilde\theta + \eta_g m, \quad B \leftarrow 0, \ h \leftarrow 0

    With ``nesterov`` the step is :math:`\eta_g (D + \beta m)`, with the new m. Otherwise the center stands. Staleness
    is counted in versions of the server's model: within one buffer the center has not moved. A worker may contribute
    twice to one buffer, which the paper's clients may not: the workers here are fixed and would wait.

    When the last worker has left, a partly filled buffer is drained: the same step, with D = B / M, so that every
    movement weighs the same. A center that is looked at before does not contain the buffer.

    With momentum and ``nesterov`` it is the buffer of Liu et al. 2024 (arXiv 2401.09135). ``buffer=1, exponent=0`` is
    DOWNPOUR, and with ``exponent=1`` DynSGD. Any worker optimizer.

    Args:
        window: lambda. Default 10.
        buffer: M, movements in one step, at least 1. Default None: the number of workers.
        server_rate: eta_g, the server's learning rate, above 0. Default 1.
        exponent: a, how fast movements lose weight with their age, at least 0. Default 0.5.
        momentum: beta, in [0, 1). Default 0: none.
        nesterov: Nesterov's form of the momentum. Default False.

    Reference: Nguyen et al. 2022 (arXiv 2106.06639), Algorithm 1.
    """

    name = "fedbuff"
    info = RuleInfo(
        title="FedBuff",
        paper="Nguyen et al. 2022",
        equations="Alg 1",
        sends="Δ = θᵏ − θ̃ sent",
        family="delta",
        bibtex="""\
@inproceedings{nguyen2022,
  author    = {Nguyen, John and Malik, Kshitiz and Zhan, Hongyuan and Yousefpour, Ashkan and others},
  title     = {Federated Learning with Buffered Asynchronous Aggregation},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year      = {2022},
}""",
    )

    window: int | str | None = 10
    buffer: int | None = None
    server_rate: float = 1.0
    exponent: float = 0.5
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer is not None:
            check_field(self, "buffer", require_integer)
        check_field(self, "server_rate", require_number)
        check_field(self, "exponent", require_number, inclusive=True)
        check_field(self, "momentum", require_number, inclusive=True, below=1)
        require_choice("nesterov", self.nesterov, (True, False))

    @property
    def traits(self) -> Traits:
        vectors = ("buffer", "momentum") if self.momentum else ("buffer",)
        return Traits(grows=True, drains=True, model_vectors=vectors)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        size, count = self.buffer or context.workers, counters.get("count", 0)
        scale = (1 + age(context, count, size)) ** -float(self.exponent)
        full = count + 1 == size
        counters["count"] = 0 if full else count + 1
        return scale, 1 / size if full else 0.0

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        scale, share = scalars
        delta, total = chunk.payload[0], chunk.model[0]
        if scale != 1:
            delta *= scale
        total += delta
        if share:  # the buffer is full
            self.drain(chunk, (share,))
        else:
            chunk.out[...] = chunk.center
        return scale * delta.size

    def begin_drain(self, workers: int, counters: dict[str, int]) -> Scalars | None:
        return (1 / (self.buffer or workers),) if counters.pop("count", 0) else None

    def drain(self, chunk: Chunk, scalars: Scalars) -> None:
        (share,) = scalars
        total, *rest = chunk.model
        step = chunk.scratch
        np.multiply(total, share, out=step)
        for momentum in rest:
            momentum *= self.momentum
            momentum += step
            if self.nesterov:
                step += np.multiply(momentum, self.momentum, out=total)
            else:
                step[...] = momentum
        if self.server_rate != 1:
            step *= self.server_rate
        np.add(chunk.center, step, out=chunk.out)
        total.fill(0)


def age(context: Context, count: int, size: int) -> int:
    """Versions of the center between the one that a worker was sent and the present one.

    Args:
        context: of the worker's commit.
        count: movements in the buffer before it, h.
        size: movements that make a step, M.
    """
    return max(0, -((context.sent_clock + count - context.clock) // size))
