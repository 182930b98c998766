"""Asynchrony under every rule: the distribution of staleness, implicit momentum, and bounds on staleness."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.present import present

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma, Memoryless, SlowWorkers
from distkeras.ps.simulation.virtual_job import Trace

TIMINGS = [Gamma(), Gamma(heterogeneous=True), SlowWorkers(), Memoryless()]
ASYNCHRONOUS = [name for name, kind in center_rules().items() if not kind().traits.synchronous]


def run(
    rule: Rule | str, workers: int, *, gradient: Callable[..., Any] = lambda theta, worker: theta, **options: Any
) -> Trace:
    options.setdefault("learning_rate", 0.01)
    return simulate(rule, np.ones(1), gradient, workers=workers, **options)


def last_pulls(trace: Trace, workers: int) -> list[int]:
    """Return the clock at which each worker last received the center: after its last commit, or at the start."""
    return [int(max(np.flatnonzero(trace.worker == worker), default=-1)) + 1 for worker in range(workers)]


@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_the_mean_staleness_tends_to_the_number_of_workers_minus_one(timing: Gamma | Memoryless | SlowWorkers) -> None:
    workers, commits = 8, 3000
    trace = run("downpour", workers, timing=timing, steps=commits)
    pulls = last_pulls(trace, workers)
    assert trace.staleness.sum() == sum(pulls) - commits  # exact; `late` is the distance of the last pulls to the end
    late = sum(commits - pull for pull in pulls)
    assert trace.staleness.mean() == pytest.approx(workers - 1 - late / commits, rel=1e-12)
    assert late / commits < 0.1 * (workers - 1)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_sum_of_staleness_is_the_sum_of_the_last_pulls_minus_the_commits(name: str) -> None:
    trace = run(make(name), 4, timing=SlowWorkers(share=0.25, factor=3.0), steps=60)
    pulls = last_pulls(trace, 4)
    for worker, clock, _ in trace.refused:  # a refused worker receives the center, too
        pulls[worker] = max(pulls[worker], clock)
    assert trace.staleness.sum() + trace.refused[:, 2].sum() == sum(pulls) - 60


def test_the_round_robin_staleness_is_the_workers_minus_one_after_the_first_round() -> None:
    trace = run("asgd", 5, schedule=[*range(5)] * 4)
    assert trace.staleness.tolist() == [0, 1, 2, 3, 4] + [4] * 15


def mean_and_error(values: np.ndarray, blocks: int = 40) -> tuple[float, float]:
    """Return the mean and its standard error, from means of consecutive blocks because neighbors are correlated."""
    means = values[: len(values) // blocks * blocks].reshape(blocks, -1).mean(axis=1)
    return means.mean(), means.std(ddof=1) / np.sqrt(blocks)


def test_the_staleness_of_memoryless_workers_is_geometric() -> None:
    workers = 6
    trace = run(make("dynsgd", window=1), workers, timing=Memoryless(), steps=4_000, seed=3)
    staleness = trace.staleness[200:]  # the first commits depend on the common start
    for tau in range(12):
        mean, error = mean_and_error((staleness == tau).astype(float))
        assert abs(mean - (1 - 1 / workers) ** tau / workers) < 4 * error
    mean, error = mean_and_error(staleness.astype(float))
    assert abs(mean - (workers - 1)) < 4 * error
    # DynSGD's scale is 1 / (tau + 1); its mean is ln n / (n - 1), which is not 1 / (E tau + 1).
    np.testing.assert_allclose(trace.scale, 1 / (trace.staleness + 1), rtol=1e-15)
    mean, error = mean_and_error(trace.scale[200:])
    assert abs(mean - np.log(workers) / (workers - 1)) < 4 * error
    assert abs(mean - 1 / workers) > 10 * error


@pytest.mark.parametrize(("workers", "commits"), [(2, 7), (3, 5)])
def test_memoryless_workers_are_an_implicit_momentum(workers: int, commits: int) -> None:
    # On a quadratic, E step[t+1] = (1 - 1/n) E step[t] - eta/n E g(theta[t+1]) holds exactly. With memoryless workers,
    # each order of commits is equally likely, so that the mean over all orders is the expectation.
    curves, eta = np.array([0.5, 1.0, 3.0]), 0.1
    start = np.array([1.0, -2.0, 0.5])
    paths = [
        present(
            simulate(
                "asgd",
                start,
                lambda theta, worker: curves * theta + 1,
                workers=workers,
                learning_rate=eta,
                schedule=order,
                keep_centers=True,
            ).centers
        )
        for order in itertools.product(range(workers), repeat=commits)
    ]
    theta = np.vstack([start, np.mean(paths, axis=0)])
    steps, gradients = np.diff(theta, axis=0), curves * theta + 1
    expected = (1 - 1 / workers) * steps[:-1] - eta / workers * gradients[1:-1]
    np.testing.assert_allclose(steps[1:], expected, rtol=1e-12)


class TestStaleSynchronous:
    WORKERS = 5

    def leads(self, trace: Trace) -> Iterator[int]:
        """Yield, after each commit, the lead of its worker over the slowest worker, in commits."""
        completed = np.zeros(self.WORKERS, int)
        for worker in trace.worker:
            completed[worker] += 1
            yield completed[worker] - completed.min()

    @pytest.mark.parametrize("bound", [0, 1, 3])
    @pytest.mark.parametrize("timing", [Gamma(heterogeneous=True), SlowWorkers(share=0.2), Memoryless()], ids=str)
    def test_a_worker_leads_by_at_most_the_bound_and_one(
        self, timing: Gamma | Memoryless | SlowWorkers, bound: int
    ) -> None:
        trace = run("asgd", self.WORKERS, timing=timing, steps=300, staleness_bound=bound)
        assert max(self.leads(trace)) == bound + 1

    def test_an_unbounded_lead_is_asgd(self) -> None:
        options: dict[str, Any] = {"timing": Gamma(heterogeneous=True), "steps": 300, "seed": 1}
        bounded = run("asgd", self.WORKERS, staleness_bound=10**9, **options)
        free = run("asgd", self.WORKERS, **options)
        np.testing.assert_array_equal(bounded.worker, free.worker)
        np.testing.assert_array_equal(bounded.theta, free.theta)

    def test_a_bound_of_0_gives_the_order_of_rounds(self) -> None:
        trace = run("asgd", self.WORKERS, timing=Gamma(), steps=100, staleness_bound=0)
        for first in range(0, 100, self.WORKERS):
            assert sorted(trace.worker[first : first + self.WORKERS]) == list(range(self.WORKERS))

    def test_a_worker_that_must_wait_may_not_commit(self) -> None:
        with pytest.raises(ConfigurationError, match=r"worker 0 at place 2, which waits for \[1, 2, 3, 4\]"):
            run("asgd", self.WORKERS, schedule=[0, 0, 0], staleness_bound=1)
