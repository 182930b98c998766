"""Outer optimizers: the server takes the mean of a round or a buffer, or movements of many steps, as its own step."""

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
    Vector,
    WorkerState,
)
from distkeras.ps.validate import checked, choice, count, flag, fraction, not_negative, positive, require_number


@dataclass(frozen=True)
class FedOpt(Rule):
    r"""Adaptive federated optimization: FedAdam, FedYogi, FedAdagrad and FedAMSGrad, in synchronous rounds.

    With D the mean of a round's movements :math:`\Delta` over its contributions:

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) D, \qquad
              \tilde\theta \leftarrow \tilde\theta + \eta \frac{m}{\sqrt v + \varepsilon}

    * "adam": :math:`v \leftarrow \beta_2 v + (1 - \beta_2) D^2`
    * "yogi": :math:`v \leftarrow v - (1 - \beta_2) D^2 \operatorname{sign}(v - D^2)`
    * "adagrad": :math:`v \leftarrow v + D^2`
    * "amsgrad": v as in "adam", and :math:`\hat v \leftarrow \max(\hat v, v)` in its place under the root

    There is no bias correction, as in the paper. All vectors begin at zero, where the paper lets v begin at
    :math:`\varepsilon^2` or more. The algorithm applies m to all forms; ``beta_1=0`` gives the FedAdagrad that has
    none. Shards are weighted equally, and a shorter window counts as one contribution. Any worker optimizer.

    A round moves a weight by about :math:`\eta`, so this needs some tens of rounds. With the defaults and the default
    window, two workers that train a small network on Fashion-MNIST with SGD are 6 points of accuracy behind sequential
    SGD after 6 epochs, about 3 points after 12 to 15, and 1.5 points after 20. For fewer epochs, choose a numeric
    window: in an emulation of that job with five rounds an epoch, 6 epochs end within 1 point. The paper has no
    default for :math:`\eta`, which it tunes for each task.

    Args:
        window: lambda. Default None: one round an epoch.
        form: what v is. Default "adam".
        server_rate: eta, the server's learning rate, above 0. Default 0.01.
        beta_1: decay of m, in [0, 1). Default 0.9.
        beta_2: decay of v, in [0, 1); not used by "adagrad". Default 0.99.
        epsilon: the degree of adaptivity, above 0; outside the root. Default 1e-3.

    Reference: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2; AMSGrad: Reddi, Kale, Kumar 2018.
    """

    name = "fedopt"
    info = RuleInfo(
        title="FedOpt",
        paper="Reddi et al. 2021",
        equations="Alg 2",
        bibtex="""\
@inproceedings{reddi2021,
  author    = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and others},
  title     = {Adaptive Federated Optimization},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
}""",
    )

    window: int | None = None
    form: str = choice("adam", "adam", "yogi", "adagrad", "amsgrad")
    server_rate: float = positive(0.01)
    beta_1: float = fraction(0.9)
    beta_2: float = fraction(0.99)
    epsilon: float = positive(1e-3)

    @property
    def traits(self) -> Traits:
        largest = ("largest_second_moment",) if self.form == "amsgrad" else ()
        return Traits(synchronous=True, model_vectors=("momentum", "second_moment", *largest))

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        mean, (momentum, second, *largest), scratch = chunk.payload[0], chunk.model, chunk.scratch
        mean /= contributions
        average(momentum, mean, self.beta_1, scratch)
        np.multiply(mean, mean, out=mean)
        if self.form == "adagrad":
            second += mean
        elif self.form == "yogi":
            sign = np.sign(np.subtract(second, mean, out=scratch), out=scratch)
            mean *= 1 - self.beta_2
            second -= np.multiply(sign, mean, out=scratch)
        else:
            average(second, mean, self.beta_2, scratch)
        for maximum in largest:
            second = np.maximum(maximum, second, out=maximum)
        adaptive_step(momentum, second, self.server_rate, self.epsilon, out=scratch)
        np.add(chunk.center, scratch, out=chunk.out)


def average(mean: Vector, value: Vector, decay: float, scratch: Vector) -> None:
    """Set ``mean`` to its moving average with ``value``, in place: decay * mean + (1 - decay) * value."""
    mean *= decay
    mean += np.multiply(value, 1 - decay, out=scratch)


def adaptive_step(momentum: Vector, second: Vector, rate: float, epsilon: float, *, out: Vector) -> None:
    """Write :math:`rate * momentum / (sqrt(second) + epsilon)` into ``out``."""
    np.sqrt(second, out=out)
    out += epsilon
    np.divide(momentum, out, out=out)
    out *= rate


@dataclass(frozen=True)
class FedBuff(Rule):
    r"""Buffered asynchronous aggregation: the center moves at every M-th commit, by the mean of M movements.

    With B the buffer's sum and h the number of movements in it, c the clock, and ite the clock that the worker was last
    sent the center at:

    .. math:: \text{age} = \max\left(0, \left\lceil \frac{c - h - ite}{M} \right\rceil\right), \qquad
              B \leftarrow B + (1 + \text{age})^{-a} \Delta, \quad h \leftarrow h + 1

    .. math:: h = M: \quad D = B / M, \quad m \leftarrow \beta m + D, \quad
              \tilde\theta \leftarrow \tilde\theta + \eta_g m, \quad B \leftarrow 0, \ h \leftarrow 0

    With ``nesterov`` the step is :math:`\eta_g (D + \beta m)`, with the new m. While h < M, the center does not move.
    Staleness is counted in versions of the server's model, so commits within one buffer do not count. A worker may
    contribute twice to one buffer, unlike the clients in the paper, because a fixed worker would have to wait.

    When the last worker has left, a partly filled buffer is drained: the same step, with D = B / M, so that every
    movement has the same weight. A center that is read before does not contain the buffer.

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
        bibtex="""\
@inproceedings{nguyen2022,
  author    = {Nguyen, John and Malik, Kshitiz and Zhan, Hongyuan and Yousefpour, Ashkan and others},
  title     = {Federated Learning with Buffered Asynchronous Aggregation},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year      = {2022},
}""",
    )

    window: int | str | None = 10
    buffer: int | None = count(None)
    server_rate: float = positive(1.0)
    exponent: float = not_negative(0.5)
    momentum: float = fraction(0.0)
    nesterov: bool = flag(False)

    @property
    def traits(self) -> Traits:
        vectors = ("buffer", "momentum") if self.momentum else ("buffer",)
        return Traits(grows=True, model_vectors=vectors)

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

    def buffered(self, counters: dict[str, int]) -> int:
        return counters.get("count", 0)

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
    """Return the number of versions of the center between the one that a worker was sent and the present one.

    Args:
        context: of the worker's commit.
        count: movements in the buffer before this one, h.
        size: movements in one step, M.
    """
    return max(0, -((context.sent_clock + count - context.clock) // size))


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
    read before does not contain the buffer. Any worker optimizer.

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
        bibtex="""\
@inproceedings{wang2024,
  author    = {Wang, Yujia and Wang, Shiqiang and Lu, Songtao and Chen, Jinghui},
  title     = {{FADAS}: Towards Federated Adaptive Asynchronous Optimization},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
}""",
    )
    traits = Traits(grows=True, model_vectors=("buffer", "momentum", "second_moment", "largest_second_moment"))

    window: int | str | None = 10
    buffer: int | None = count(None)
    server_rate: float = positive(1e-3)
    beta_1: float = fraction(0.9)
    beta_2: float = fraction(0.99)
    epsilon: float = positive(1e-8)
    delay_threshold: int | None = count(1)

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

    def buffered(self, counters: dict[str, int]) -> int:
        return counters.get("count", 0)

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
