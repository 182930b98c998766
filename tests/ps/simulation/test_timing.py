"""Execution times of virtual workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.simulation.timing import Communication, Gamma, Memoryless, SlowWorkers

ALL = [Gamma(), Gamma(heterogeneous=True), SlowWorkers(), Memoryless()]


def times(timing: Gamma | Memoryless | SlowWorkers, workers: int, each: int, seed: int = 0) -> np.ndarray:
    """Return the times of single steps, of shape (workers, each)."""
    draw = timing.sampler(workers, np.random.default_rng(seed))
    return np.array([[draw(worker, 1) for _ in range(each)] for worker in range(workers)])


def share(hits: np.ndarray) -> tuple[float, float]:
    """Return a share and its standard error."""
    return hits.mean(), np.sqrt(hits.mean() * (1 - hits.mean()) / hits.size)


def test_homogeneous_times_rarely_exceed_the_mean_by_a_quarter() -> None:
    # .94 % of the tasks: a gamma distribution with V = .1 around the mean, which is drawn once for the run.
    drawn = times(Gamma(), 1, 60_000)
    hits, error = share(drawn > 1.25 * drawn.mean())
    assert abs(hits - 0.0094) < 4 * error
    assert drawn.std() / drawn.mean() == pytest.approx(0.1, rel=0.02)


def test_heterogeneous_times_often_exceed_the_mean_by_a_quarter() -> None:
    # 27.8 % of the tasks of many machines with individual means.
    drawn = times(Gamma(heterogeneous=True), 40_000, 1)
    hits, error = share(drawn > 1.25 * 128)
    assert abs(hits - 0.278) < 4 * error
    assert drawn.mean() == pytest.approx(128, rel=0.02)


def test_a_homogeneous_run_draws_its_mean_once() -> None:
    within, between = times(Gamma(), 2, 4000), [times(Gamma(), 1, 200, seed).mean() for seed in range(200)]
    assert within[0].mean() == pytest.approx(within[1].mean(), rel=0.01)
    assert np.std(between) / np.mean(between) == pytest.approx(0.1, rel=0.2)


def test_a_heterogeneous_machine_keeps_its_mean() -> None:
    drawn = times(Gamma(heterogeneous=True), 50, 100)
    assert (drawn.std(axis=1) / drawn.mean(axis=1)).mean() == pytest.approx(0.1, rel=0.1)
    assert drawn.mean(axis=1).std() > 30


def test_memoryless_times_are_exponential() -> None:
    drawn = times(Memoryless(mean=3.0), 1, 20_000)
    assert drawn.mean() == pytest.approx(3.0, rel=0.04)
    assert drawn.std() == pytest.approx(3.0, rel=0.04)
    assert (drawn > 3.0).mean() == pytest.approx(np.exp(-1), rel=0.04)


@pytest.mark.parametrize(
    ("workers", "share_of", "slow"), [(16, 1 / 16, 1), (64, 1 / 16, 4), (8, 1 / 16, 1), (4, 0.0, 0), (4, 1.0, 4)]
)
def test_slow_workers_take_ten_times_as_long(workers: int, share_of: float, slow: int) -> None:
    means = times(SlowWorkers(mean=1.0, share=share_of), workers, 100).mean(axis=1)
    np.testing.assert_allclose(means, np.where(np.arange(workers) < slow, 10.0, 1.0), rtol=0.05)


@pytest.mark.parametrize("timing", ALL, ids=str)
def test_a_window_takes_the_sum_of_its_steps(timing: Gamma | Memoryless | SlowWorkers) -> None:
    singles, windows = (timing.sampler(3, np.random.default_rng(1)) for _ in range(2))
    for worker in (0, 2, 1):
        expected = sum(singles(worker, 1) for _ in range(5))
        assert windows(worker, 5) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("timing", ALL, ids=str)
def test_a_seed_gives_the_same_times(timing: Gamma | Memoryless | SlowWorkers) -> None:
    np.testing.assert_array_equal(times(timing, 3, 5, seed=4), times(timing, 3, 5, seed=4))
    assert not np.array_equal(times(timing, 3, 5, seed=4), times(timing, 3, 5, seed=5))


def test_a_transfer_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    assert Communication().transfer(10**9) == 0
    assert Communication(latency=0.5, bandwidth=100.0).transfer(50) == 1.0


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *[(type(timing), {"mean": mean}) for timing in ALL for mean in (0, -1.0, float("nan"), "1")],
        (Gamma, {"v_task": 0}),
        (Gamma, {"v_machine": -0.1}),
        (Gamma, {"heterogeneous": "no"}),
        (SlowWorkers, {"share": -0.1}),
        (SlowWorkers, {"share": 1.1}),
        (SlowWorkers, {"factor": 0.0}),
        (SlowWorkers, {"variation": 0.0}),
        (Communication, {"latency": -1.0}),
        (Communication, {"bandwidth": 0.0}),
        (Communication, {"bandwidth": float("nan")}),
        (Communication, {"bandwidth": "fast"}),
        (Communication, {"service": float("inf")}),
    ],
)
def test_bad_arguments_are_refused(kind: type[Any], bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigurationError, match=f"`{name}` must be .* Received: {name}="):
        kind(**bad)
