"""Implicit momentum: exact if the mean is exact, and within its own error bars if the mean is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.present import present

from distkeras.analysis.implicit_momentum import implicit_momentum, measured_momentum
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Memoryless
from distkeras.ps.simulation.virtual_job import Trace

CURVES = np.linspace(0.5, 2.0, 20)
START = np.ones(20)


def slope(theta: np.ndarray) -> np.ndarray:
    return CURVES * theta


def noisy(noise: float, draw: np.random.Generator) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda theta, worker: slope(theta) + noise * draw.normal(size=theta.size)


def runs(workers: int, *, count: int = 3, eta: float = 0.1, noise: float = 0.0, **options: Any) -> list[Trace]:
    options = {"keep_centers": True} | options
    if "schedule" not in options:
        options = {"timing": Memoryless(), "steps": 24} | options
    traces = []
    for seed in range(count):
        draw = np.random.default_rng((9, seed))
        traces.append(
            simulate("asgd", START, noisy(noise, draw), workers=workers, learning_rate=eta, seed=seed, **options)
        )
    return traces


def test_the_formula_gives_the_known_values() -> None:
    assert [implicit_momentum(n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    with pytest.raises(ConfigurationError, match="`workers`"):
        implicit_momentum(0)


def test_the_momentum_of_one_worker_is_exactly_zero() -> None:
    # delta[t+1] = -eta g[t] does not depend on earlier steps: mu = 0 and b = 1.
    found = measured_momentum(runs(1), START, slope, 0.1)
    assert (found.value, found.step) == pytest.approx((0, 1), abs=1e-10)
    assert found.runs == 3


def test_the_fit_of_identical_runs_is_that_of_one_run() -> None:
    # Under round robin, step t+1 of two workers is the gradient at the center before the last: no exact (mu, b) exists,
    # and the fit of the mean is that of the single path, which plain least squares also computes.
    traces = runs(2, schedule=[0, 1] * 10)
    centers = np.vstack([START, present(traces[0].centers)])
    steps = np.diff(centers, axis=0)
    design = np.stack([steps[:-1].ravel(), -0.1 * slope(centers[1:-1]).ravel()], axis=1)
    expected = np.linalg.lstsq(design, steps[1:].ravel(), rcond=None)[0]
    found = measured_momentum(traces, START, slope, 0.1)
    assert (found.value, found.step) == pytest.approx(tuple(expected), rel=1e-8)
    assert found.error < 1e-8


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["exact gradients", "noisy gradients"])
def test_memoryless_workers_have_the_momentum_of_the_formula(workers: int, noise: float) -> None:
    """The bound is four standard errors, which a random draw exceeds once in about 15,000.

    The 120 runs of 24 * 20 numbers have a fixed seed. The error must be small enough to distinguish n from its
    neighbors.
    """
    found = measured_momentum(runs(workers, count=120, noise=noise, eta=0.1), START, slope, 0.1)
    assert abs(found.value - implicit_momentum(workers)) < 4 * found.error
    assert abs(found.step - 1 / workers) < 4 * found.step_error
    assert 0 < 4 * found.error < implicit_momentum(workers + 2) - implicit_momentum(workers)


def test_noise_does_not_bias_the_momentum_to_zero() -> None:
    """Least squares on the means of few noisy runs is biased; products of different runs are not."""
    count, workers, noise = 120, 4, 1.5
    traces = runs(workers, count=count, noise=noise, steps=20)
    centers = np.stack([np.vstack([START, present(trace.centers)]) for trace in traces]).mean(axis=0)
    steps = np.diff(centers, axis=0)
    design = np.stack([steps[:-1].ravel(), -0.1 * slope(centers[1:-1]).ravel()], axis=1)
    naive = np.linalg.lstsq(design, steps[1:].ravel(), rcond=None)[0][0]
    found = measured_momentum(traces, START, slope, 0.1)
    assert abs(found.value - 0.75) < 4 * found.error
    assert naive < 0.75 - 4 * found.error


def test_errors_shrink_like_one_over_the_square_root_of_the_runs() -> None:
    few, many = (measured_momentum(runs(4, count=count), START, slope, 0.1).error for count in (60, 240))
    assert many == pytest.approx(few / 2, rel=0.3)


def test_the_jackknife_error_equals_that_of_refits() -> None:
    traces = runs(3, count=6)
    refits = [measured_momentum(traces[:i] + traces[i + 1 :], START, slope, 0.1) for i in range(6)]
    found = measured_momentum(traces, START, slope, 0.1)
    for name, error in (("value", found.error), ("step", found.step_error)):
        values = np.array([getattr(refit, name) for refit in refits])
        assert error == pytest.approx(np.sqrt(5 / 6 * np.square(values - values.mean()).sum()), rel=1e-8)


def test_runs_that_do_not_determine_a_momentum_are_refused() -> None:
    traces = runs(2, count=3)
    with pytest.raises(ConfigurationError, match="at least 3"):
        measured_momentum(traces[:2], START, slope, 0.1)
    with pytest.raises(ConfigurationError, match=r"\[4, 24\]"):
        measured_momentum([*traces[:2], *runs(2, count=1, steps=4)], START, slope, 0.1)
    with pytest.raises(ConfigurationError, match="keep_centers"):
        measured_momentum(runs(2, keep_centers=False), START, slope, 0.1)
    with pytest.raises(ConfigurationError, match="any momentum"):
        measured_momentum(runs(2), START, np.zeros_like, 0.1)
    constant = [
        simulate("asgd", START, lambda theta, worker: np.ones(20), workers=2, learning_rate=0.1, schedule=[0, 1, 0],
                 keep_centers=True)
        for _ in range(3)
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="any momentum"):
        measured_momentum(constant, START, np.ones_like, 0.1)
