r"""The momentum that asynchrony implies, in theory and measured.

With n memoryless workers (each is equally likely to commit next), plain asynchronous SGD moves its center, on average,
like SGD with momentum:

.. math:: E\,\delta_{t+1} = \mu\, E\,\delta_t - \tfrac{\eta}{n} E\,g(\tilde\theta_t), \qquad
          \delta_{t+1} = \tilde\theta_{t+1} - \tilde\theta_t, \qquad \mu = 1 - \tfrac1n

Reference:
    Hermans: On Scalable Deep Learning and Parallelizing Gradient Descent, 2017, Eq 1.1 and 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.simulation.virtual_job import Trace
from distkeras.ps.validate import require_number


@dataclass(frozen=True)
class MomentumEstimate:
    """A measured implicit momentum.

    Args:
        value: mu.
        error: its standard error.
        step: coefficient of -eta g, which the theory puts at 1/n.
        step_error: its standard error.
        runs: runs that it was measured on.
    """

    value: float
    error: float
    step: float
    step_error: float
    runs: int


def implicit_momentum(workers: int) -> float:
    """Return 1 - 1/n, for ``workers`` memoryless workers under plain asynchronous SGD (Eq 2.1)."""
    if type(workers) is not int or workers < 1:
        raise ConfigurationError(f"`workers` must be a positive integer. Received: workers={workers!r}")
    return 1 - 1 / workers


def measured_momentum(
    traces: Sequence[Trace],
    theta0: np.ndarray,
    gradient: Callable[[np.ndarray], np.ndarray],
    learning_rate: float,
) -> MomentumEstimate:
    r"""Estimate mu from how the center moved in several runs.

    Fits :math:`\bar\delta_{t+1} = \mu\bar\delta_t + b\,(-\eta\bar g_t)` by least squares over all times t and all
    parameters at once, where the bar is the mean over the runs. The relation holds for these means only: a single run's
    step is the gradient of the worker that came, and says nothing about the next. The means of R runs still carry
    noise, which would pull mu towards 0 by about noise / (R signal); so the normal equations are built from products of
    *different* runs only,

    .. math:: \sum_{r\ne s} X_r^\top X_s\, (\mu, b)^\top = \sum_{r\ne s} X_r^\top y_s, \qquad
              X_r = (\delta_t,\ -\eta g(\tilde\theta_t))_r, \quad y_r = (\delta_{t+1})_r,

    whose expectation is that of noiseless means: independent runs have independent noise. Standard errors are the
    jackknife's over runs.

    Mean steps must change with time for this to say anything: start away from the optimum, and leave out commits
    that come long after the approach to it, which add noise alone.

    Args:
        traces: runs of one rule, each with ``keep_centers=True``, a seed of its own, equally many commits (at least 2).
            At least 3 runs; some hundred for an error of a few percent.
        theta0: where they all began, shape ``(size,)``.
        gradient: the expected gradient at a center, or an unbiased estimate of it.
        learning_rate: eta, constant.

    Raises:
        ConfigurationError: too few runs or commits, traces without centers or of unequal length, or steps that never
            change, to which any mu would fit.
    """
    require_number("learning_rate", learning_rate)
    if len(traces) < 3 or len({len(trace.worker) for trace in traces}) != 1 or len(traces[0].worker) < 2:
        raise ConfigurationError(
            "`traces` must be at least 3, of one number of commits, at least 2. "
            f"Received: {len(traces)} with {sorted({len(trace.worker) for trace in traces})} commits"
        )
    products, targets = [], []  # of each run: shapes (2, times * size) and (times * size,)
    for trace in traces:
        if trace.centers is None:
            raise ConfigurationError("`traces` must come from keep_centers=True. Received: one without centers")
        centers = np.vstack([np.asarray(theta0, float)[np.newaxis], trace.centers])
        steps = np.diff(centers, axis=0)
        pulls = np.stack([gradient(center) for center in centers[1:-1]])
        products.append(np.stack([steps[:-1].ravel(), -learning_rate * pulls.ravel()]))
        targets.append(steps[1:].ravel())
    x, y = np.stack(products), np.stack(targets)
    whole_x, whole_y = x.sum(axis=0), y.sum(axis=0)
    own_xx = np.einsum("rit,rjt->rij", x, x)
    own_xy = np.einsum("rit,rt->ri", x, y)
    # Products of all pairs of different runs, and, for the jackknife, of those pairs that run r is no part of.
    cross_xx = np.einsum("it,rjt->rij", whole_x, x) - own_xx
    cross_xy = np.einsum("rit,t->ri", x, whole_y) + np.einsum("it,rt->ri", whole_x, y) - 2 * own_xy
    all_xx, all_xy = cross_xx.sum(axis=0), cross_xy.sum(axis=0) / 2
    fit = _solve(all_xx, all_xy)
    without = np.stack([_solve(all_xx - xx - xx.T, all_xy - xy) for xx, xy in zip(cross_xx, cross_xy, strict=True)])
    runs = len(traces)
    errors = np.sqrt((runs - 1) / runs * np.square(without - without.mean(axis=0)).sum(axis=0))
    return MomentumEstimate(float(fit[0]), float(errors[0]), float(fit[1]), float(errors[1]), runs)


def _solve(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    scale = np.sqrt(np.abs(np.diag(xx)))  # steps and gradients may be of very different sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = xx / np.outer(scale, scale)
    if not np.isfinite(scaled).all() or abs(np.linalg.det(scaled)) < 1e-10:
        raise ConfigurationError(
            "`traces` must have mean steps that change with time, and not as the gradient does. Received: steps to "
            "which any momentum would fit"
        )
    return np.linalg.solve(scaled, xy / scale) / scale
