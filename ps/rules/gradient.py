"""Rules whose workers send gradients: with and without compensation for delays, momenta, look-ahead and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distkeras.ps.rules.base import (
    DANA,
    DELAY_COMPENSATION,
    ORMO,
    READS_SENT,
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
from distkeras.ps.validate import flag, fraction, invalid, not_negative


@dataclass(frozen=True)
class ASGD(Rule):
    r"""Asynchronous SGD: the worker sends a raw gradient, the server takes the step.

    .. math:: \tilde\theta \leftarrow \tilde\theta - \eta\, g^k(\tilde\theta_{sent})

    The learning rate is the server's. One gradient a commit: ``window`` is 1. It equals DOWNPOUR with ``window=1``
    and plain SGD at the workers, up to rounding.

    Args:
        weight_decay: added to the gradient as ``weight_decay`` times the parameters it was computed at (L2). Default 0.

    Reference: Hakimi et al. 2019, Algorithms 1-2; also Shi et al. 2024, Algorithm 1-II, and Zheng et al. 2017, Eq 3.
    """

    name = "asgd"
    info = RuleInfo(title="ASGD", equations="Alg 1-2", sends="g", family="gradient", **DANA)

    weight_decay: float = not_negative(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != 1:
            raise invalid("window", self.window, "1: a gradient rule commits every gradient")

    @property
    def traits(self) -> Traits:
        return Traits(gradient=True, overlaps=True, rows=not self.weight_decay)  # weight decay moves every row

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        (batch,) = batches
        gradient = state.payload[0]
        row = replica.gradient(batch, gradient)
        if self.weight_decay:
            gradient += self.weight_decay * state.sent
        return row[np.newaxis]

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        """Do nothing: `compute` has written the gradient."""

    def begin_overlapped_window(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        """Compute the next gradient at ``sent``, which does not contain the gradient in flight."""
        self.receive(replica, state, sent)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate,)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        gradient = chunk.payload[0]
        gradient *= learning_rate
        np.subtract(chunk.center, gradient, out=chunk.out)
        return None


@dataclass(frozen=True)
class DCASGD(ASGD):
    r"""ASGD with delay compensation: a first-order correction of the gradient for how far the center has moved.

    .. math:: \hat g = g + \lambda\, g \odot g \odot (\tilde\theta - \tilde\theta^k_{sent}), \qquad
              \tilde\theta \leftarrow \tilde\theta - \eta\hat g

    The adaptive variant divides, element-wise, by the root of a running mean of squared gradients over all workers,
    which is updated with the arriving gradient first:

    .. math:: MS \leftarrow m\,MS + (1 - m)\, g \odot g, \qquad \lambda = \lambda_0 / \sqrt{MS + \epsilon}

    With ``momentum`` > 0, each worker has a heavy-ball momentum over its compensated gradients at the server.

    The scan of the paper has lost its digits; the formula follows Hakimi et al. 2019, Eq 17, and the defaults are those
    of the published experiments on CIFAR-10.

    Args:
        adaptive: DC-ASGD-a rather than DC-ASGD-c. Default False.
        compensation: lambda (0.04 is the paper's for "c", 2 for "a"), at least 0. Default None: that.
        decay: m of the running mean, in [0, 1). Default 0.95.
        epsilon: inside the root, at least 0. Default 1e-7.
        momentum: gamma, in [0, 1). Default 0.
        weight_decay: see `ASGD`.

    Reference: Zheng et al. 2017, Algorithms 1-2 and Section 6; Hakimi et al. 2019, Eq 17, Algorithm 10 (momentum).
    """

    name = "dc_asgd"
    info = RuleInfo(title="DC-ASGD", equations="Alg 1-2, Section 6", sends="g", family="gradient", **DELAY_COMPENSATION)

    adaptive: bool = flag(False)
    compensation: float | None = not_negative(None)
    decay: float = fraction(0.95)
    epsilon: float = not_negative(1e-7)
    momentum: float = fraction(0.0)

    @property
    def traits(self) -> Traits:
        return Traits(
            gradient=True,
            fixed_workers=self.momentum > 0,
            keeps_sent=True,
            model_vectors=("mean_square",) if self.adaptive else (),
            worker_vectors=("velocity",) if self.momentum else (),
        )

    def reason_against_encoding(self, *, coarse: bool) -> str | None:
        return READS_SENT

    @property
    def compensation_strength(self) -> float:
        """lambda, or lambda_0."""
        return (2.0 if self.adaptive else 0.04) if self.compensation is None else self.compensation

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        gradient = chunk.payload[0]
        if self.adaptive:
            self._compensate_adaptively(chunk)
        else:
            compensate(chunk, self.compensation_strength)
        if self.momentum:
            (velocity,) = chunk.worker
            velocity *= self.momentum
            velocity += gradient
            gradient[...] = velocity
        gradient *= learning_rate
        np.subtract(chunk.center, gradient, out=chunk.out)
        return None

    def _compensate_adaptively(self, chunk: Chunk) -> None:
        gradient, scratch, (mean_square,) = chunk.payload[0], chunk.scratch, chunk.model
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1 - self.decay
        mean_square *= self.decay
        mean_square += scratch
        # g + lambda_0 g^2 d / root; the root is computed last, because the scratch memory is in use until then.
        moved = np.subtract(chunk.center, chunk.sent, out=scratch)
        moved *= self.compensation_strength
        moved *= gradient
        moved *= gradient
        root = np.sqrt(mean_square + self.epsilon)
        if not root.dtype.type(self.epsilon):  # a root of 0 means that all gradients were 0: avoid 0 / 0
            root[root == 0] = 1
        moved /= root
        gradient += moved


def compensate(chunk: Chunk, strength: float) -> None:
    """Add ``strength * g * g * (center - sent)`` to the gradient g in the payload."""
    gradient = chunk.payload[0]
    moved = np.subtract(chunk.center, chunk.sent, out=chunk.scratch)
    moved *= strength
    moved *= gradient
    moved *= gradient
    gradient += moved


@dataclass(frozen=True)
class NagASGD(ASGD):
    r"""One momentum vector at the server, over the gradients of all workers.

    .. math:: v \leftarrow \gamma v + g, \qquad \tilde\theta \leftarrow \tilde\theta - \eta v

    The paper's text calls it Nesterov's; its pseudo-code has no look-ahead and is the heavy ball, which is what runs
    here. With one worker it is the heavy ball.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 8.
    """

    name = "nag_asgd"
    info = RuleInfo(title="NAG-ASGD", equations="Alg 8", sends="g", family="gradient", **DANA)
    traits = Traits(gradient=True, model_vectors=("velocity",))

    momentum: float = fraction(0.9)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        return self._step(chunk, chunk.model[0], scalars)

    def _step(self, chunk: Chunk, velocity: Vector, scalars: Scalars) -> float | None:
        (learning_rate,) = scalars
        velocity *= self.momentum
        velocity += chunk.payload[0]
        step = np.multiply(velocity, learning_rate, out=chunk.scratch)
        np.subtract(chunk.center, step, out=chunk.out)
        return None

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        (reach,) = scalars
        ahead = np.multiply(chunk.model[0], reach, out=chunk.scratch)
        np.subtract(chunk.center, ahead, out=chunk.out)


@dataclass(frozen=True)
class ASGDm(NagASGD):
    r"""ASGD with a momentum that holds the learning rate; equal to NAG-ASGD while eta is constant.

    .. math:: u \leftarrow \beta u + \eta g, \qquad \tilde\theta \leftarrow \tilde\theta - u

    When a schedule changes eta, u is first scaled by the ratio of the new to the old one (momentum correction), which
    the pseudo-code, written for a constant eta, leaves out.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 5.
    """

    name = "asgdm"
    info = RuleInfo(title="naive ASGDm", equations="Alg 5", sends="g", family="gradient", **ORMO)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return context.learning_rate, self.momentum * momentum_correction(context)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        learning_rate, decay = scalars
        gradient = chunk.payload[0]
        (momentum,) = chunk.model
        momentum *= decay
        gradient *= learning_rate
        momentum += gradient
        np.subtract(chunk.center, momentum, out=chunk.out)
        return None


def momentum_correction(at: Context | WorkerState) -> float:
    """Return the factor for a momentum that contains the learning rate, when a schedule changes the rate."""
    return at.learning_rate / at.previous_learning_rate if at.previous_learning_rate else 1.0


@dataclass(frozen=True)
class MultiASGD(NagASGD):
    r"""A momentum vector for each worker, over its own gradients.

    .. math:: v^k \leftarrow \gamma v^k + g, \qquad \tilde\theta \leftarrow \tilde\theta - \eta v^k

    Heavy ball, as the pseudo-code has it: with a framework's Nesterov step instead it would become DANA-Slim.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 9.
    """

    name = "multi_asgd"
    info = RuleInfo(title="Multi-ASGD", equations="Alg 9", sends="g", family="gradient", **DANA)
    traits = Traits(gradient=True, fixed_workers=True, worker_vectors=("velocity",))

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        return self._step(chunk, chunk.worker[0], scalars)


@dataclass(frozen=True)
class LWP(NagASGD):
    r"""Linear weight prediction: NAG-ASGD that sends the point to which the momentum moves the center in tau steps.

    .. math:: \hat\theta = \tilde\theta - \tau\eta v, \qquad \tau = n - 1

    tau is the expected lag, n - 1. There is no factor gamma; with tau = 0 it is NAG-ASGD.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 3, Eq 9.
    """

    name = "lwp"
    info = RuleInfo(title="LWP", equations="Alg 3, Eq 9", sends="g", family="gradient", **DANA)
    traits = Traits(gradient=True, fixed_workers=True, view=True, model_vectors=("velocity",))

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return ((context.workers - 1) * context.learning_rate,)


@dataclass(frozen=True)
class LocalMomentum(ASGD):
    """Base of the rules whose workers keep the momentum, over their own gradients."""

    momentum: float = fraction(0.9)

    # A worker's momentum moves every row.
    traits = Traits(gradient=True, overlaps=True, history=("momentum",))

    def start(self, replica: Replica, sent: Vector) -> WorkerState:
        state = super().start(replica, sent)
        state.vectors["momentum"] = np.zeros_like(sent)
        return state


@dataclass(frozen=True)
class ShiftedMomentum(LocalMomentum):
    r"""Local momentum: the worker sends its momentum, learning rate included, and the server subtracts it.

    .. math:: u^k \leftarrow \beta u^k + \eta g, \qquad \tilde\theta \leftarrow \tilde\theta - u^k

    Inferred from the paper's remark that it is OrMo's counterpart with local momentum. eta is the one that the server
    sent with the parameters; when it changes, :math:`u^k` is scaled by the ratio first. Equal to Multi-ASGD while eta
    is constant. The next attempt at a partition continues from the latest momentum that a worker has sent.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Remark 2.
    """

    name = "shifted_momentum"
    info = RuleInfo(title="shifted momentum", equations="Remark 2", sends="uᵏ", family="gradient", **ORMO)

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        rows = super().compute(replica, state, batches)
        gradient, momentum = state.payload[0], state.vectors["momentum"]
        momentum *= self.momentum * momentum_correction(state)
        gradient *= state.learning_rate
        momentum += gradient
        gradient[...] = momentum
        return rows

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return ()

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        np.subtract(chunk.center, chunk.payload[0], out=chunk.out)
        return None


@dataclass(frozen=True)
class OrMo(NagASGD):
    r"""Ordered momentum: a late gradient is added to the momentum with the weight of a gradient on time.

    Gradients belong to buckets of n, by the clock *ite* of the parameters they were computed at; b is the head bucket.
    At clock t, if no worker waits (always, when asynchronous) and :math:`\lceil t/n \rceil > b`:

    .. math:: \tilde\theta \leftarrow \tilde\theta - \beta u, \quad u \leftarrow \beta u, \quad b \leftarrow b + 1

    and then, with :math:`e = b - \lceil ite / n \rceil`:

    .. math:: u \leftarrow u + \eta\beta^e g, \qquad
              \tilde\theta \leftarrow \tilde\theta - \eta \frac{1 - \beta^{e+1}}{1 - \beta}\, g

    When a schedule changes eta, u is scaled by the ratio first. With beta = 0 it is ASGD; under rounds and a constant
    eta, it is SSGD with momentum. With a schedule these two differ: here each commit uses the eta of its own clock, in
    SSGD all commits of a round use the eta of the first one.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 2.
    """

    name = "ormo"
    info = RuleInfo(title="OrMo", equations="Alg 2", sends="g", family="gradient", **ORMO)
    traits = Traits(gradient=True, fixed_workers=True, model_vectors=("momentum",))

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        n, beta = context.workers, self.momentum
        head = counters.get("head", 0)
        shift = context.waiting == 0 and -(-context.clock // n) > head
        head += shift
        counters["head"] = head
        late = head - -(-context.sent_clock // n)
        eta = context.learning_rate
        return momentum_correction(context), float(shift), eta * beta**late, eta * (1 - beta ** (late + 1)) / (1 - beta)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        correction, shift, of_momentum, of_center = scalars
        gradient, (momentum,), scratch = chunk.payload[0], chunk.model, chunk.scratch
        if correction != 1:
            momentum *= correction
        np.multiply(gradient, of_center, out=scratch)
        if shift:
            momentum *= self.momentum
            scratch += momentum
        gradient *= of_momentum
        momentum += gradient
        np.subtract(chunk.center, scratch, out=chunk.out)
        return None


@dataclass(frozen=True)
class SMEGA2(NagASGD):
    r"""A single momentum, renewed once in n commits, and Nesterov's look-ahead over the next n.

    With M the momentum, S the sum of the gradients since its renewal and c their number:

    .. math:: \tilde\theta \leftarrow \tilde\theta - \eta (g + \gamma M), \quad S \leftarrow S + g, \quad
              c \leftarrow (c + 1) \bmod n; \quad c = 0: M \leftarrow \gamma M + S / n,\ S \leftarrow 0

    .. math:: \hat\theta = \tilde\theta - \eta\gamma \left[ (n + c(\gamma - 1)) M + \tfrac{c}{n} S \right]

    The view is exactly the point to which n further commits of zero gradients would move the center. With one worker it
    is Nesterov's method. The five papers only describe the rule; this formula is derived from that property.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Cohen, Hakimi, Schuster 2022.
    """

    name = "smega2"
    info = RuleInfo(
        title="SMEGA²",
        paper="Cohen et al. 2022",
        equations="as cited by Shi et al. 2024",
        sends="g",
        family="gradient",
        bibtex="""\
@inproceedings{cohen2022,
  author    = {Cohen, Refael and Hakimi, Ido and Schuster, Assaf},
  title     = {{SMEGA2}: Distributed Asynchronous Deep Neural Network Training with a Single Momentum Buffer},
  booktitle = {International Conference on Parallel Processing},
  year      = {2022},
}""",
    )
    traits = Traits(gradient=True, fixed_workers=True, view=True, model_vectors=("momentum", "sum"))

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        counters["count"] = (counters.get("count", 0) + 1) % context.workers
        return context.learning_rate, 0.0 if counters["count"] else 1.0 / context.workers

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        learning_rate, share = scalars
        gradient, (momentum, total) = chunk.payload[0], chunk.model
        total += gradient
        step = np.multiply(momentum, self.momentum, out=chunk.scratch)
        step += gradient
        step *= learning_rate
        np.subtract(chunk.center, step, out=chunk.out)
        if share:  # the n-th gradient since the last renewal
            momentum *= self.momentum
            total *= share
            momentum += total
            total.fill(0)
        return None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        count, reach = counters.get("count", 0), context.learning_rate * self.momentum
        return reach * (context.workers + count * (self.momentum - 1)), reach * count / context.workers

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        of_momentum, of_sum = scalars
        momentum, total = chunk.model
        # The second product uses the output as scratch memory, because the output is not an input here.
        ahead = np.multiply(momentum, of_momentum, out=chunk.scratch)
        np.multiply(total, of_sum, out=chunk.out)
        ahead += chunk.out
        np.subtract(chunk.center, ahead, out=chunk.out)


@dataclass(frozen=True)
class DanaZero(NagASGD):
    r"""Distributed Nesterov: each worker is sent the point to which the momenta of all workers would move the center.

    .. math:: v^k_{new} = \gamma v^k + g, \quad v^0 \leftarrow v^0 - v^k + v^k_{new}, \quad
              \tilde\theta \leftarrow \tilde\theta - \eta v^k_{new}, \quad
              \hat\theta = \tilde\theta - \eta\gamma v^0

    :math:`v^0 = \sum_k v^k` is kept as a running sum, so that a commit costs the same for any n. Eq 11 is printed with
    the previous momenta, Algorithm 4 with the updated ones, which are used here. The momentum of a worker that has left
    does not count: the sum of those momenta is kept next to :math:`v^0`, and subtracted from it in the view. With one
    worker it is Nesterov's method.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 4, Eq 10-11, Appendix A.2.
    """

    name = "dana_zero"
    info = RuleInfo(title="DANA-Zero", equations="Alg 4, Eq 10-11", sends="g", family="gradient", **DANA)
    traits = Traits(
        gradient=True,
        fixed_workers=True,
        view=True,
        model_vectors=("velocity_sum", "left"),
        worker_vectors=("velocity",),
    )

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        total, (velocity,) = chunk.model[0], chunk.worker
        total -= velocity
        self._step(chunk, velocity, scalars)
        total += velocity
        return None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return context.learning_rate * self.momentum, counters.get("left", 0)

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        reach, left = scalars
        total = np.subtract(chunk.model[0], chunk.model[1], out=chunk.scratch) if left else chunk.model[0]
        ahead = np.multiply(total, reach, out=chunk.scratch)
        np.subtract(chunk.center, ahead, out=chunk.out)

    def leave(self, model: tuple[Vector, ...], worker: tuple[Vector, ...], counters: dict[str, int]) -> None:
        counters["left"] = counters.get("left", 0) + 1
        model[1][...] += worker[0]

    def return_all(self, model: tuple[Vector, ...], counters: dict[str, int]) -> None:
        counters.pop("left", None)
        model[1].fill(0)


@dataclass(frozen=True)
class DanaDC(DanaZero):
    r"""DANA-Zero on a gradient that is compensated for its delay.

    .. math:: \hat g = g + \lambda\, g \odot g \odot (\tilde\theta - \hat\theta^k_{sent})

    then DANA-Zero with :math:`\hat g`. The worker was sent the look-ahead :math:`\hat\theta`, not the center; so a
    single worker is not Nesterov's method.

    Args:
        compensation: lambda, at least 0. Default 2.
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 7.
    """

    name = "dana_dc"
    info = RuleInfo(title="DANA-DC", equations="Alg 7", sends="g", family="gradient", **DANA)
    traits = replace(DanaZero.traits, keeps_sent=True)

    compensation: float = not_negative(2.0)

    def reason_against_encoding(self, *, coarse: bool) -> str | None:
        return READS_SENT

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        compensate(chunk, self.compensation)
        return super().apply(chunk, scalars)


@dataclass(frozen=True)
class DanaSlim(LocalMomentum):
    r"""DANA in Bengio's frame: the worker keeps its momentum and sends one step ahead; the server is ASGD's.

    .. math:: v^k \leftarrow \gamma v^k + g, \qquad \Theta \leftarrow \Theta - \eta (\gamma v^k + g)

    :math:`\Theta = \tilde\theta - \eta\gamma\sum_k v^k` is the look-ahead itself, and so is the trained model. (A
    footnote of the paper says that :math:`v^k` is sent; Algorithm 6 sends :math:`\gamma v^k + g`.) Equal to DANA-Zero
    while eta is constant; with one worker, Nesterov's method in Bengio's form.

    Args:
        momentum: gamma, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Hakimi et al. 2019, Algorithm 6 with Algorithm 2, Eq 15-16.
    """

    name = "dana_slim"
    info = RuleInfo(title="DANA-Slim", equations="Alg 6, Eq 15-16", sends="γvᵏ + g", family="gradient", **DANA)

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        rows = super().compute(replica, state, batches)
        gradient, velocity = state.payload[0], state.vectors["momentum"]
        velocity *= self.momentum
        velocity += gradient
        gradient += self.momentum * velocity
        return rows


@dataclass(frozen=True)
class SSGD(ASGD):
    r"""Synchronous SGD: one step a round, with the mean of the workers' gradients.

    .. math:: \tilde\theta \leftarrow \tilde\theta - \frac{\eta}{n}\sum_k g^k

    Equal, at the barriers, to n single steps with eta / n. The mean divides by the round's contributions.

    Args:
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 1-I, Remark 1; Hermans 2017, Section 1.3.
    """

    name = "ssgd"
    info = RuleInfo(title="SSGD", equations="Alg 1-I, Remark 1", sends="g", family="gradient", **ORMO)
    traits = Traits(gradient=True, synchronous=True)

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (context.learning_rate,)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        (learning_rate,) = scalars
        total = chunk.payload[0]
        total *= learning_rate / contributions
        np.subtract(chunk.center, total, out=chunk.out)


@dataclass(frozen=True)
class SSGDm(NagASGD):
    r"""Synchronous SGD with one momentum at the server. At the barriers:

    .. math:: u \leftarrow \beta u + \eta\sum_k g^k, \qquad \tilde\theta \leftarrow \tilde\theta - u

    Algorithm 3 spreads the same step over the arrivals (the first one moves by :math:`\beta u`, each by
    :math:`\eta g`); the center does not move in mid-round here, and no worker could see it if it did. eta is the one of
    a single gradient: n times smaller than SSGD's for the same step. When a schedule changes it, u is scaled by the
    ratio.

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 3, Eq 4-6.
    """

    name = "ssgdm"
    info = RuleInfo(title="SSGDm (global)", equations="Alg 3, Eq 4-6", sends="g", family="gradient", **ORMO)
    traits = Traits(gradient=True, synchronous=True, model_vectors=("momentum",))

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        return context.learning_rate, self.momentum * momentum_correction(context)

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        learning_rate, decay = scalars
        total, (momentum,) = chunk.payload[0], chunk.model
        momentum *= decay
        total *= learning_rate
        momentum += total
        np.subtract(chunk.center, momentum, out=chunk.out)


@dataclass(frozen=True)
class SSGDmLocal(ShiftedMomentum):
    r"""Synchronous SGD with a momentum at each worker. At the barriers it equals `SSGDm`.

    .. math:: u^k \leftarrow \beta u^k + \eta g, \qquad \tilde\theta \leftarrow \tilde\theta - \sum_k u^k

    Args:
        momentum: beta, in [0, 1). Default 0.9.
        weight_decay: see `ASGD`.

    Reference: Shi et al. 2024, Algorithm 4.
    """

    name = "ssgdm_local"
    info = RuleInfo(title="SSGDm (local)", equations="Alg 4", sends="uᵏ", family="gradient", **ORMO)
    traits = Traits(gradient=True, synchronous=True, history=("momentum",))

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        np.subtract(chunk.center, chunk.payload[0], out=chunk.out)
