"""DOWNPOUR, whose workers push their movement; its variants normalize, scale, refuse or accumulate; and ADAG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.rules.base import (
    BLOCK,
    READS_SENT,
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
    sum_of_squares,
)
from distkeras.ps.validate import choice, count, flag, invalid, positive


@dataclass(frozen=True)
class Downpour(Rule):
    r"""DOWNPOUR, per mini-batch (``window=1``) or accumulated (``window`` > 1).

    Worker, over a window of lambda steps from the center it was last sent:

    .. math:: \theta^k_{i+1} = \theta^k_i - \eta g(\theta^k_i), \qquad \Delta = \theta^k_\lambda - \tilde\theta_{sent}

    Server: :math:`\tilde\theta \leftarrow \tilde\theta + \Delta`; the reply is :math:`\tilde\theta`.

    The paper's worker sends :math:`-\eta g` after every batch; the accumulated form is its worker loop with DynSGD's
    window and a plain add. It diverges easily: the payload grows with the window and with the number of workers.
    Any worker optimizer may take the steps; :math:`\Delta` is the resulting movement.

    Args:
        window: lambda. Default 1.

    Reference: Hermans 2017, Algorithm 5, Eq 1.2-1.3, 2.11-2.12; accumulation as in Algorithm 7.
    """

    name = "downpour"
    info = RuleInfo(title="DOWNPOUR", equations="Alg 5, Eq 2.11-2.12", **THESIS)
    traits = Traits(overlaps=True, grows=True, rows=True, sums=True)


@dataclass(frozen=True)
class AGN(Rule):
    r"""Accumulated gradient normalization: DOWNPOUR whose payload is divided by its number of steps.

    .. math:: \Delta = \frac{1}{\lambda} (\theta^k_\lambda - \tilde\theta_{sent}), \qquad
              \tilde\theta \leftarrow \tilde\theta + \Delta

    The divisor is the number of steps really taken: the last window of an epoch may be shorter. (Eq 3.1 sums lambda + 1
    terms, Algorithm 10 sums lambda terms, as this rule does.) With ``window=1`` it is DOWNPOUR, bit for bit.
    The original dist-keras calls this rule ADAG; the names here follow the thesis.

    Args:
        window: lambda. The thesis' rule of thumb is (workers + layers) / 2. Default 10.

    Reference: Hermans 2017, Algorithm 10, Eq 3.1.
    """

    name = "agn"
    info = RuleInfo(title="AGN", equations="Alg 10, Eq 3.1", sends="Δ / λ", **THESIS)
    traits = Traits(overlaps=True, rows=True, sums=True)

    window: int | str | None = 10

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        super().fill_payload(replica, state)
        state.payload[0][...] /= state.steps

    def share_sent(self, steps: int) -> float:
        return 1 / steps


@dataclass(frozen=True)
class DynSGD(Rule):
    r"""DynSGD: DOWNPOUR whose payload is divided by its staleness plus one.

    .. math:: \tilde\theta \leftarrow \tilde\theta + \frac{\Delta}{\tau + 1}

    tau counts the commits by others since this worker was last sent the center (Algorithm 8 notes the clock at the
    pull, and divides by tau + 1; Eq 2.13 prints tau, which would divide by zero).

    Args:
        window: lambda. Default 5.

    Reference: Hermans 2017, Algorithms 7-8, Eq 2.13.
    """

    name = "dynsgd"
    info = RuleInfo(title="DynSGD", equations="Alg 7-8, Eq 2.13", **THESIS)
    traits = Traits(grows=True, rows=True, sums=True)

    window: int | str | None = 5

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (1.0 / (context.staleness + 1),)


@dataclass(frozen=True)
class ZealousDownpour(Rule):
    r"""DOWNPOUR that commits when the server is free, and at the latest after lambda gradients.

    After each mini-batch the worker asks whether the server is applying commits of others. If it is not, or if this was
    the window's last step, the worker commits and is sent the center; else it adds another gradient:

    .. math:: \Delta \leftarrow \Delta - \eta\, g(\theta^k), \qquad \tilde\theta \leftarrow \tilde\theta + \Delta

    As printed, :math:`\theta^k` stays where it was pulled while :math:`\Delta` grows: all gradients of a window are
    taken at one point, on different mini-batches. Section 3.1 states that the same algorithm explores; therefore
    ``explore=True`` also moves :math:`\theta^k`, which is accumulated DOWNPOUR with windows that may end early. If the
    server is never occupied, both are DOWNPOUR with a window of 1.

    The literal form takes eta from the worker optimizer, which must be plain SGD; exploring allows any optimizer.

    Args:
        window: lambda, the most gradients in one commit; the thesis names no value. Default 5.
        explore: move the worker while it accumulates. Default False.

    Reference: Hermans 2017, Section 2.3.1, Algorithm 6 (after Louppe and Geurts 2010).
    """

    name = "zealous_downpour"
    info = RuleInfo(
        title="Zealous DOWNPOUR",
        equations="Alg 6",
        sends="Δ = −η Σ g at θ̃ sent; θᵏ − θ̃ sent (explore)",
        **THESIS,
    )

    window: int | None = 5
    explore: bool = flag(False)

    @property
    def traits(self) -> Traits:
        return Traits(plain_sgd=not self.explore)

    def steps_until_due(self, state: WorkerState) -> int:
        return 1

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        if self.explore:
            return replica.train(batches)
        (batch,) = batches
        accumulated = state.payload[0]
        first = state.steps == 0
        step = accumulated if first else state.vectors.setdefault("step", np.empty_like(accumulated))
        eta = replica.learning_rate  # read before the gradient advances the optimizer's step
        row = replica.gradient(batch, step)
        step *= -eta
        if not first:
            accumulated += step
        return row[np.newaxis]

    def due(self, state: WorkerState) -> bool:
        return not state.occupied or super().due(state)

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        if self.explore:
            super().fill_payload(replica, state)


@dataclass(frozen=True)
class DelayAdaptive(Rule):
    r"""DOWNPOUR whose movements have full weight up to a staleness of T, and a weight of T / staleness above it.

    .. math:: \tilde\theta \leftarrow \tilde\theta + \frac{T}{\max(T, \tau)} \Delta

    Theorem 8 allows any step up to :math:`\min(\eta, 1 / (4 L \tau))` beyond the number of workers n, also none at all
    (`Ringmaster`). With :math:`\eta = 1 / (4 L n)` that is :math:`\eta n / \tau`: hence T = n. The same scaling is in
    Mishchenko et al. 2022. T = 1 gives :math:`1 / \max(1, \tau)`, which is not DynSGD's :math:`1 / (\tau + 1)`. Any
    worker optimizer.

    Args:
        window: lambda. Default 1.
        threshold: T, the largest staleness with full weight, at least 1. Default None: the number of workers.

    Reference: Koloskova, Stich, Jaggi 2022 (arXiv 2206.08307), Theorem 8; Mishchenko et al. 2022 (arXiv 2206.07638).
    """

    name = "delay_adaptive"
    info = RuleInfo(
        title="Delay-adaptive ASGD",
        paper="Koloskova et al. 2022",
        equations="Thm 8",
        bibtex="""\
@inproceedings{koloskova2022,
  author    = {Koloskova, Anastasia and Stich, Sebastian U. and Jaggi, Martin},
  title     = {Sharper Convergence Guarantees for Asynchronous {SGD} for Distributed and Federated Learning},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022},
}""",
    )
    traits = Traits(grows=True, rows=True, sums=True)

    threshold: int | None = count(None)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        threshold = self.threshold or context.workers
        return (threshold / max(threshold, context.staleness),)


@dataclass(frozen=True)
class Ringmaster(Rule):
    r"""DOWNPOUR that refuses movements whose staleness reaches R; their worker computes the same window again.

    .. math:: \tau < R: \ \tilde\theta \leftarrow \tilde\theta + \Delta, \qquad \tau \ge R: \ \text{refused}

    After P refusals of one window in a row its movement is applied, scaled:
    :math:`\tilde\theta \leftarrow \tilde\theta + (R / \tau) \Delta`. With P = 0 that is `DelayAdaptive`; with P = None
    a movement is refused as long as it is too stale, as in the paper. There every worker samples from all of the data.
    Here each has a partition, so with P = None a worker that is always too slow would be refused until the others have
    no data left, and then train alone on its own data.

    A refused commit changes nothing at the server, and the ledger counts its mini-batches once, when they are applied.
    The worker pulls the center and computes the same mini-batches again; the state and the step counter of its
    optimizer are not reset. Algorithm 5 of the paper stops a computation at the moment when its delay reaches R;
    Algorithm 4, which is implemented here, refuses it when it arrives. Both apply exactly the movements with a delay
    below R. Theory gives no value for R; 2n accepts all workers that are less than twice as slow as the mean. Any
    worker optimizer.

    Args:
        window: lambda, a number: the rows of one window are kept for the next attempt. Default 1.
        threshold: R, the staleness that is refused, at least 1. Default None: twice the number of workers.
        patience: P, refusals of one window in a row, at least 0; None: no limit. Default 1.

    Reference: Maranjyan, Tyurin, Richtárik 2025 (arXiv 2501.16168), Algorithm 4, and the authors' code.
    """

    name = "ringmaster"
    info = RuleInfo(
        title="Ringmaster ASGD",
        paper="Maranjyan et al. 2025",
        equations="Alg 4",
        bibtex="""\
@inproceedings{maranjyan2025,
  author    = {Maranjyan, Artavazd and Tyurin, Alexander and Richt{\\'a}rik, Peter},
  title     = {Ringmaster {ASGD}: The First Asynchronous {SGD} with Optimal Time Complexity},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}""",
    )
    traits = Traits(grows=True, rows=True)

    threshold: int | None = count(None)
    patience: int | None = count(1, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None:
            raise invalid("window", self.window, "a number: a refused window's rows are kept for the next try")

    def _limit(self, context: Context) -> int:
        return self.threshold or 2 * context.workers

    def refuses(self, context: Context, refusals: int) -> bool:
        stale = context.staleness >= self._limit(context)
        return stale and (self.patience is None or refusals < self.patience)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        limit = self._limit(context)
        return (limit / max(limit, context.staleness),)


@dataclass(frozen=True)
class ADAG(Rule):
    r"""Asynchronous distributed adaptive gradients.

    With :math:`d = \tilde\theta_t - \tilde\theta_{t-\tau}`, the movement of the center since it was sent to the worker:

    .. math:: \tilde\theta \leftarrow \tilde\theta + s(d) \odot \Delta

    * "4.1": :math:`s_i = 1 / (d_i^2 / \eta + 1)`
    * "4.7": :math:`s_i = 1 / (d_i^2 / \gamma + 1)`
    * "4.10": :math:`s_i = 1 / ((d_i / \gamma)^2 + 1)`, which is "4.7" with :math:`\gamma^2`
    * "4.1norm", "4.7norm": one scalar, with :math:`\|d\|^2` for :math:`d_i^2`

    The thesis writes a norm in an element-wise product and describes a factor per weight; the square is therefore
    element-wise, and the literal norm, which shrinks with the number of weights, is a variant. If eta or gamma is 0, as
    at the end of a schedule, s is the limit: 1 for an element that has not moved, else 0.
    :math:`\Delta` is AGN's payload (ADAG on top of AGN, Eq 4.8) or the plain accumulated movement.

    Three placements of the same formula:

    * 11: the worker also sends :math:`\tilde\theta_{t-\tau}`, so a payload has two vectors;
    * 12: the server keeps the vector that it sent to each worker (same result as 11);
    * 13: the worker pulls :math:`\tilde\theta_t`, scales, sends :math:`s \odot \Delta`, and continues from that pull.
      So its next window does not contain its own last commit: a single worker is SGD with a delay of one commit.

    Args:
        window: lambda. Default 10.
        form: which equation gives s. Default "4.7".
        gamma: scale of "4.7" and "4.10" (the thesis writes gamma), above 0. Default 1e-4; lower if it diverges.
        algorithm: 11, 12 or 13. Default 12.
        normalize: divide the payload by its steps (AGN). Default True.

    Reference: Hermans 2017, Algorithms 11-13, Eq 4.1, 4.7-4.10.
    """

    name = "adag"
    info = RuleInfo(
        title="ADAG",
        equations="Alg 11-13, Eq 4.1, 4.7-4.10",
        sends="Δ / λ (12); with θ̃ sent (11); s ⊙ Δ / λ (13)",
        **THESIS,
    )

    window: int | str | None = 10
    form: str = choice("4.7", "4.1", "4.7", "4.10", "4.1norm", "4.7norm")
    gamma: float = positive(1e-4)
    algorithm: int = choice(12, 11, 12, 13)
    normalize: bool = flag(True)

    @property
    def traits(self) -> Traits:
        return Traits(
            parts=2 if self.algorithm == 11 else 1,
            pull_first=self.algorithm == 13,
            keeps_sent=self.algorithm == 12,
            grows=not self.normalize,
            sums=self.algorithm == 12 and self.form not in ("4.1", "4.1norm"),  # these use each worker's own eta
        )

    @property
    def reduces(self) -> bool:
        return self.form.endswith("norm") and self.algorithm != 13

    @property
    def scales_elements(self) -> bool:
        return not self.form.endswith("norm") and self.algorithm != 13

    def reason_against_encoding(self, *, coarse: bool) -> str | None:
        return READS_SENT

    def divisor(self, learning_rate: float) -> tuple[float, float]:
        """Return the divisor of :math:`d^2`, and its root, which fits float32 even if the divisor underflows."""
        if self.form == "4.10":
            return self.gamma**2, self.gamma
        divisor = learning_rate if self.form in ("4.1", "4.1norm") else self.gamma
        return divisor, math.sqrt(divisor)

    def _delta(self, replica: Replica, state: WorkerState) -> Vector:
        delta = state.payload[0]
        replica.moved(state.sent, delta)
        if self.normalize:
            delta /= state.steps
        return delta

    def share_sent(self, steps: int) -> float:
        return 1 / steps if self.normalize else 1.0

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        self._delta(replica, state)
        if self.algorithm == 11:
            state.payload[1][...] = state.sent

    def elastic_exchange(self, replica: Replica, state: WorkerState, center: Vector) -> None:
        delta = self._delta(replica, state)
        divisor, root = self.divisor(replica.learning_rate)
        moved = state.vectors.setdefault("moved", np.empty_like(center))
        np.subtract(center, state.sent, out=moved)
        if self.form.endswith("norm"):
            state.scale = _factor(sum_of_squares(moved), divisor)
            delta *= state.scale
        else:
            total = 0.0
            for start in range(0, moved.size, BLOCK):
                scale = _scale(moved[start : start + BLOCK], divisor, root)
                delta[start : start + BLOCK] *= scale
                total += float(scale.sum(dtype=np.float64))
            state.scale = total / max(1, moved.size)
        self.receive(replica, state, center)

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return self.divisor(context.learning_rate)

    def _center_shift(self, chunk: Chunk) -> Vector:
        origin = chunk.payload[1] if self.algorithm == 11 else chunk.sent
        np.subtract(chunk.center, origin, out=chunk.scratch)
        return chunk.scratch

    def partial(self, chunk: Chunk, scalars: Scalars) -> float:
        return sum_of_squares(self._center_shift(chunk))

    def reduced(self, scalars: Scalars, total: float) -> Scalars:
        return (_factor(total, scalars[0]),)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        delta = chunk.payload[0]
        if self.algorithm == 13:
            return super().apply(chunk, ())  # the worker has scaled it
        if self.form.endswith("norm"):
            (factor,) = scalars
            delta *= factor
            total = factor * delta.size
        else:
            scale = _scale(self._center_shift(chunk), *scalars)
            delta *= scale
            total = float(scale.sum(dtype=np.float64))
        np.add(chunk.center, delta, out=chunk.out)
        return total


def _factor(squares: float, divisor: float) -> float:
    r"""Return :math:`1 / (\|d\|^2 / divisor + 1)` from the sum of squares :math:`\|d\|^2`."""
    if not divisor:  # the limit; the sum may be 0 as well
        return float(squares == 0)
    return 1.0 / (squares / divisor + 1.0)


def _scale(moved: Vector, divisor: float, root: float) -> Vector:
    """Compute :math:`1 / (d^2 / divisor + 1)` element-wise, in place, and return it."""
    with np.errstate(over="ignore"):  # if the square overflows, s is 0
        if divisor >= np.finfo(moved.dtype).tiny:
            np.multiply(moved, moved, out=moved)
            moved /= divisor
        elif moved.dtype.type(root):
            moved /= root
            np.multiply(moved, moved, out=moved)
        else:
            np.equal(moved, 0, out=moved)
            return moved
    moved += 1.0
    np.reciprocal(moved, out=moved)
    return moved
