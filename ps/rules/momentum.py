"""One or n momenta over the gradients of all workers: at the server, sent ahead, in order, or at the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.asgd import ASGD
from distkeras.ps.rules.base import DANA, ORMO, Chunk, Context, Replica, RuleInfo, Scalars, Traits, Vector, WorkerState
from distkeras.ps.validate import fraction


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
    """What a momentum that holds the learning rate is scaled by when a schedule changes that rate."""
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
    r"""Linear weight prediction: NAG-ASGD that sends where the momentum would carry the center in tau steps.

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

    traits = Traits(gradient=True, overlaps=True)  # a worker's momentum moves every row

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
    is constant. A worker that starts again starts with no momentum.

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
    r"""Ordered momentum: a late gradient enters the momentum with the weight it would have by now.

    Gradients belong to buckets of n, by the clock *ite* of the parameters they were computed at; b is the head bucket.
    At clock t, if no worker waits (always, when asynchronous) and :math:`\lceil t/n \rceil > b`:

    .. math:: \tilde\theta \leftarrow \tilde\theta - \beta u, \quad u \leftarrow \beta u, \quad b \leftarrow b + 1

    and then, with :math:`e = b - \lceil ite / n \rceil`:

    .. math:: u \leftarrow u + \eta\beta^e g, \qquad
              \tilde\theta \leftarrow \tilde\theta - \eta \frac{1 - \beta^{e+1}}{1 - \beta}\, g

    When a schedule changes eta, u is scaled by the ratio first. With beta = 0 it is ASGD; under rounds and a constant
    eta, SSGD with momentum. With a schedule those two differ: here each arrival takes the eta of its own clock, there
    all arrivals of a round that of its first.

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

    what is sent is exactly where n further commits of zero gradients would take the center. With one worker it is
    Nesterov's method. The five papers only describe it; this is the reading of the cited work by that property.

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
        # Two products and one scratch: the second goes through the output, which holds no input here.
        ahead = np.multiply(momentum, of_momentum, out=chunk.scratch)
        np.multiply(total, of_sum, out=chunk.out)
        ahead += chunk.out
        np.subtract(chunk.center, ahead, out=chunk.out)
