"""Outer optimizers: the server applies movements of many local steps with its own momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import (
    ASYNC_LOCAL_SGD,
    THESIS,
    Chunk,
    Context,
    Replica,
    Rule,
    RuleInfo,
    Scalars,
    Traits,
    WorkerState,
)
from distkeras.ps.rules.federated import average
from distkeras.ps.validate import checked, count, flag, fraction, not_negative, positive, require_number


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
    info = RuleInfo(title="Model averaging", equations="Alg 3, Eq 2.2-2.3", sends="θᵏ", family="averaging", **THESIS)
    traits = Traits(synchronous=True)

    window: int | str | None = None

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        replica.read(state.payload[0])

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.divide(chunk.payload[0], contributions, out=chunk.out)


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
        bibtex="""\
@article{douillard2023,
  author  = {Douillard, Arthur and Feng, Qixuan and Rusu, Andrei A. and Chhaparia, Rachita and others},
  title   = {{DiLoCo}: Distributed Low-Communication Training of Language Models},
  journal = {arXiv preprint arXiv:2311.08105},
  year    = {2023},
}""",
    )
    traits = Traits(synchronous=True, model_vectors=("momentum",))

    window: int | None = 50
    server_rate: float = positive(0.7)
    momentum: float = fraction(0.9)
    nesterov: bool = flag(True)

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


@dataclass(frozen=True)
class DelayedNesterov(Rule):
    r"""Asynchronous local SGD whose outer momentum waits for N movements.

    With B the sum of the movements :math:`\Delta` since the momentum was renewed, and p their number:

    .. math:: B \leftarrow B + \Delta, \quad p \leftarrow p + 1; \qquad
              p < N: \ \tilde\theta \leftarrow \tilde\theta + \epsilon (\Delta / N + c \beta m)

    .. math:: p = N: \ m \leftarrow \beta m + B / N, \quad
              \tilde\theta \leftarrow \tilde\theta + \epsilon (\Delta / N + (1 - cN + c) \beta m), \quad
              B \leftarrow 0, \ p \leftarrow 0

    with the new m in the last step. Algorithm 3 leaves brackets out: epsilon multiplies the whole sum. The text says
    that c = 1 spreads the momentum evenly; it is c = 1/N, ``activation=1``. With :math:`c = 0` and rounds held around
    it, N = n is DiLoCo; with another c it is not, unless N is 1.

    B takes movements of any worker as they come, so that a fast one may fill it; the authors take N = n. ``period=1``
    is the naive asynchronous DiLoCo, which is unstable, for comparison. The last partial B never reaches m, but each
    movement is in the center at once. Any worker optimizer.

    Args:
        window: lambda. Default 50.
        server_rate: epsilon, the outer learning rate, above 0. Default 0.7.
        momentum: beta, in [0, 1). Default 0.9.
        period: N, movements from one renewal of m to the next, at least 1. Default None: the number of workers.
        activation: cN, the share of the momentum that is spread over the period, in [0, 1]. Default 0.

    Reference: Liu et al. 2024 (arXiv 2401.09135), Algorithm 3.
    """

    name = "delayed_nesterov"
    info = RuleInfo(title="Delayed Nesterov", equations="Alg 3", **ASYNC_LOCAL_SGD)
    traits = Traits(grows=True, model_vectors=("momentum", "sum"))

    window: int | str | None = 50
    server_rate: float = positive(0.7)
    momentum: float = fraction(0.9)
    period: int | None = count(None)
    activation: float = checked(0.0, require_number, inclusive=True, up_to=1)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        period = self.period or context.workers
        count = counters.get("count", 0) + 1
        full = count == period
        counters["count"] = 0 if full else count
        share = self.activation / period
        of_momentum = 1 - self.activation + share if full else share
        return (
            self.server_rate / period,
            self.server_rate * self.momentum * of_momentum,
            1 / period if full else 0.0,
        )

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        of_delta, of_momentum, of_sum = scalars
        delta, (momentum, total) = chunk.payload[0], chunk.model
        total += delta
        if of_sum:  # the N-th movement since the last renewal
            momentum *= self.momentum
            total *= of_sum
            momentum += total
            total.fill(0)
        delta *= of_delta
        if of_momentum:
            delta += np.multiply(momentum, of_momentum, out=chunk.scratch)
        np.add(chunk.center, delta, out=chunk.out)
        return None


@dataclass(frozen=True)
class MLA(Rule):
    r"""Momentum look-ahead: the center is the point to which the momentum of the movements leads next.

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
        bibtex="""\
@inproceedings{ajanthan2025,
  author    = {Ajanthan, Thalaiyasingam and others},
  title     = {Momentum Look-Ahead for Asynchronous Distributed Low-Communication Training},
  booktitle = {OpenReview 4O8nzTkHPI},
  year      = {2025},
}""",
    )

    window: int | str | None = 50
    server_rate: float = positive(0.7)
    momentum: float = fraction(0.9)
    reach: float = not_negative(0.0)

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
