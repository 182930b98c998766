"""ADAG: payloads are scaled, weight by weight, with how far the center has moved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import (
    BLOCK,
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
from distkeras.ps.validate import choice, flag, positive


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
            reads_sent=True,
            grows=not self.normalize,
            reduction=self.form.endswith("norm") and self.algorithm != 13,
            sums=self.algorithm == 12 and self.form not in ("4.1", "4.1norm"),  # these use each worker's own eta
        )

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
