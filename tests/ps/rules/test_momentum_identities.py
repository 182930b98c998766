"""Identities between the gradient rules, and between them and sequential methods, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps.toy_model import ToyJob
from support.ps.transcriptions import Problem

from distkeras.ps.rules import make
from distkeras.ps.rules.schedules import Cosine, Schedule, StepDecay
from distkeras.ps.simulation.simulate import simulate

N, ETA, GAMMA = 3, 0.05, 0.8
ROUND_ROBIN = [*range(N)] * 8

schedules = st.lists(st.integers(0, N - 1), min_size=1, max_size=20)
rounds = st.lists(st.permutations(range(N)), min_size=1, max_size=6).map(lambda orders: np.ravel(orders).tolist())
fast = examples(20)


def centers(
    name: str, schedule: list[int], *, n: int = N, simulation: dict[str, Any] | None = None, **hyper: Any
) -> np.ndarray:
    return present(Problem(n, schedule, eta=ETA).simulated(make(name, **hyper), **(simulation or {})).centers)


def assert_close(
    actual: np.ndarray | float | list[np.ndarray], expected: np.ndarray | float | list[np.ndarray]
) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)


def sequential(step: Callable[..., Any], steps: int = 20) -> np.ndarray:
    """Return the iterates of a one-worker method: ``step(job, theta, v)`` returns the next theta and v."""
    job = Problem(1, [0] * steps, eta=ETA)
    theta, v, iterates = job.start, np.zeros_like(job.start), []
    for _ in range(steps):
        theta, v = step(job, theta, v)
        iterates.append(theta)
    return np.array(iterates)


def sgd(job: Problem, theta: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return theta - ETA * job.g(0, theta), v


def heavy_ball(job: Problem, theta: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    v = GAMMA * v + job.g(0, theta)
    return theta - ETA * v, v


def nesterov(job: Problem, theta: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    v = GAMMA * v + job.g(0, theta - ETA * GAMMA * v)
    return theta - ETA * v, v


def bengio(job: Problem, ahead: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    g = job.g(0, ahead)
    v = GAMMA * v + g
    return ahead - ETA * (GAMMA * v + g), v


def single_worker(name: str, **hyper: Any) -> np.ndarray:
    return centers(name, [0] * 20, n=1, **hyper)


# One worker


@pytest.mark.parametrize(
    ("name", "hyper", "method"),
    [
        ("asgd", {}, sgd),
        ("ssgd", {}, sgd),
        ("dc_asgd", {"compensation": 3.0}, sgd),
        ("dc_asgd", {"adaptive": True}, sgd),
        ("dc_asgd", {"compensation": 3.0, "momentum": GAMMA}, heavy_ball),
        ("asgdm", {"momentum": GAMMA}, heavy_ball),
        ("nag_asgd", {"momentum": GAMMA}, heavy_ball),
        ("lwp", {"momentum": GAMMA}, heavy_ball),  # the expected lag of a single worker is 0
        ("multi_asgd", {"momentum": GAMMA}, heavy_ball),
        ("shifted_momentum", {"momentum": GAMMA}, heavy_ball),
        ("ormo", {"momentum": GAMMA}, heavy_ball),
        ("ssgdm", {"momentum": GAMMA}, heavy_ball),
        ("ssgdm_local", {"momentum": GAMMA}, heavy_ball),
        ("dana_zero", {"momentum": GAMMA}, nesterov),
        ("smega2", {"momentum": GAMMA}, nesterov),
        ("dana_slim", {"momentum": GAMMA}, bengio),
    ],
)
def test_a_rule_with_one_worker_is_the_sequential_method(
    name: str, hyper: dict[str, Any], method: Callable[..., Any]
) -> None:
    assert_close(single_worker(name, **hyper), sequential(method))


def test_nag_asgd_with_one_worker_is_not_nesterovs_method() -> None:
    assert np.abs(single_worker("nag_asgd", momentum=GAMMA) - sequential(nesterov)).max() > 1e-3


def test_dana_dc_with_one_worker_is_not_nesterovs_method() -> None:
    # The compensation takes the difference to the look-ahead that was sent, which is not the center.
    assert np.abs(single_worker("dana_dc", momentum=GAMMA, compensation=2.0) - sequential(nesterov)).max() > 1e-3


def test_adag_13_with_one_worker_is_sgd_with_gradients_that_are_one_commit_late() -> None:
    job = Problem(1, [0] * 20, eta=ETA)
    theta, before, iterates = job.start, job.start, []
    for _ in range(20):
        theta, before = theta - ETA * job.g(0, before), theta
        iterates.append(theta)
    assert_close(single_worker("adag", window=1, gamma=1e300, algorithm=13), iterates)


# Several workers, any schedule


@pytest.mark.parametrize(
    "name", ["asgdm", "nag_asgd", "multi_asgd", "shifted_momentum", "dana_zero", "dana_slim", "smega2", "ormo"]
)
@fast
@given(schedules)
def test_a_momentum_rule_without_momentum_is_asgd(name: str, schedule: list[int]) -> None:
    assert_close(centers(name, schedule, momentum=0.0), centers("asgd", schedule))


@fast
@given(schedules)
def test_naive_asgdm_is_nag_asgd(schedule: list[int]) -> None:
    assert_close(centers("asgdm", schedule, momentum=GAMMA), centers("nag_asgd", schedule, momentum=GAMMA))


@pytest.mark.parametrize("eta", [StepDecay(ETA, (3, 9), 0.5), Cosine(ETA, length=25, least=0.01)], ids=str)
@fast
@given(schedules)
def test_naive_asgdm_with_momentum_correction_is_nag_asgd_while_eta_changes(eta: Schedule, schedule: list[int]) -> None:
    options: dict[str, Any] = {"simulation": {"learning_rate": eta}, "momentum": GAMMA}
    assert_close(centers("asgdm", schedule, **options), centers("nag_asgd", schedule, **options))


@fast
@given(schedules)
def test_multi_asgd_is_shifted_momentum(schedule: list[int]) -> None:
    assert_close(centers("multi_asgd", schedule, momentum=GAMMA), centers("shifted_momentum", schedule, momentum=GAMMA))


def test_multi_asgd_with_a_frameworks_nesterov_step_would_be_dana_slim() -> None:
    job = Problem(N, ROUND_ROBIN, eta=ETA)
    theta, v, sent, iterates = job.start, [0.0] * N, [job.start] * N, []
    for k in ROUND_ROBIN:
        g = job.g(k, sent[k])
        v[k] = GAMMA * v[k] + g
        theta = theta - ETA * (g + GAMMA * v[k])
        sent[k] = theta
        iterates.append(theta)
    assert_close(centers("dana_slim", ROUND_ROBIN, momentum=GAMMA), iterates)
    assert np.abs(centers("multi_asgd", ROUND_ROBIN, momentum=GAMMA) - iterates).max() > 1e-3


@fast
@given(schedules)
def test_dana_slims_center_is_what_dana_zero_sends(schedule: list[int]) -> None:
    # DANA-Zero sends its center minus eta gamma times the sum of the momenta.
    slim, zero = (Problem(N, schedule, eta=ETA) for _ in range(2))
    slim.simulated(make("dana_slim", momentum=GAMMA))
    zero.simulated(make("dana_zero", momentum=GAMMA))
    for a, b in zip(slim.points, zero.points, strict=True):
        assert_close(a, b)


def test_dana_slim_is_not_dana_zero_while_eta_changes() -> None:
    slim, zero = (Problem(N, ROUND_ROBIN, eta=ETA) for _ in range(2))
    for job, name in ((slim, "dana_slim"), (zero, "dana_zero")):
        job.simulated(make(name, momentum=GAMMA), learning_rate=StepDecay(ETA, (5,), 0.5))
    assert np.abs(np.array(slim.points[0]) - zero.points[0]).max() > 1e-3


@fast
@given(schedules)
def test_danas_running_sum_is_the_sum_of_the_momenta(schedule: list[int]) -> None:
    data = list(np.random.default_rng(0).normal(size=(N, 30, 4)))
    for name in ("dana_zero", "dana_dc"):
        toy = ToyJob(make(name, momentum=GAMMA), np.ones(4), data)
        toy.run(schedule)
        assert_close(toy.center.model[0], sum(lease.vectors[0] for lease in toy.center.leases.values()))


def test_the_momentum_of_a_worker_that_leaves_does_not_count_in_danas_view() -> None:
    data = list(np.random.default_rng(0).normal(size=(2, 2, 4)))
    data.append(np.ones((6, 4)))
    toy = ToyJob(make("dana_zero", momentum=GAMMA), np.ones(4), data)
    toy.run([0, 1, 2, 1, 0, 2])  # workers 0 and 1 have no data left
    assert_close(np.subtract(*toy.center.model), toy.center.leases[2].vectors[0])
    ahead = 0.1 * GAMMA * toy.center.leases[2].vectors[0]
    assert_close(toy.center.release(2, 0).buffer.array, toy.theta - ahead)


@fast
@given(schedules)
def test_dana_dc_without_compensation_is_dana_zero_to_the_bit(schedule: list[int]) -> None:
    np.testing.assert_array_equal(
        centers("dana_dc", schedule, momentum=GAMMA, compensation=0.0), centers("dana_zero", schedule, momentum=GAMMA)
    )


@pytest.mark.parametrize("adaptive", [False, True])
@fast
@given(schedules)
def test_dc_asgd_without_compensation_is_asgd_and_with_momentum_multi_asgd(adaptive: bool, schedule: list[int]) -> None:
    hyper: dict[str, Any] = {"adaptive": adaptive, "compensation": 0.0}
    assert_close(centers("dc_asgd", schedule, **hyper), centers("asgd", schedule))
    assert_close(centers("dc_asgd", schedule, momentum=GAMMA, **hyper), centers("multi_asgd", schedule, momentum=GAMMA))


@fast
@given(schedules)
def test_adaptive_compensation_without_memory_is_linear_in_the_gradients_magnitude(schedule: list[int]) -> None:
    # m = 0, epsilon = 0: lambda0 g g d / |g| = lambda0 |g| d.
    job = Problem(N, schedule, eta=ETA)
    theta, sent, iterates = job.start, [job.start] * N, []
    for k in schedule:
        g = job.g(k, sent[k])
        theta = theta - ETA * (g + 0.7 * np.abs(g) * (theta - sent[k]))
        sent[k] = theta
        iterates.append(theta)
    assert_close(centers("dc_asgd", schedule, adaptive=True, compensation=0.7, decay=0.0, epsilon=0.0), iterates)


# The parameters that are sent


def sent_center_and_center_after(name: str, schedule: list[int], order: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters sent at the end of ``schedule``, and the center after zero gradients in ``order``."""
    job = Problem(N, [*schedule, *order], eta=ETA)
    points = []

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        points.append(theta.copy())
        return job.g(worker, theta) * (len(points) <= len(schedule))

    options: dict[str, Any] = {"workers": N, "learning_rate": ETA, "schedule": job.schedule}
    trace = simulate(make(name, momentum=GAMMA), job.start, gradient, **options)
    return points[len(schedule) + order.index(schedule[-1])], trace.theta


@pytest.mark.parametrize("name", ["dana_zero", "smega2"])
@fast
@given(schedules, st.permutations(range(N)))
def test_a_rule_sends_the_center_after_a_zero_gradient_of_every_worker(
    name: str, schedule: list[int], order: list[int]
) -> None:
    assert_close(*sent_center_and_center_after(name, schedule, order))


def test_lwp_does_not_send_the_center_after_zero_gradients() -> None:
    sent, reached = sent_center_and_center_after("lwp", ROUND_ROBIN, [0, 1, 2])
    assert np.abs(sent - reached).max() > 1e-3


def arrivals(name: str, **hyper: Any) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, Problem]]:
    """Yield worker, number of its commit, gap, sum of the other workers' gradients, and job of each commit in turns."""
    job = Problem(N, ROUND_ROBIN, eta=ETA)
    trace = job.simulated(make(name, **hyper), measure_gap=True)
    for clock in range(N, len(ROUND_ROBIN)):
        k, number = ROUND_ROBIN[clock], clock // N
        gap = present(trace.centers)[clock - 1] - job.points[k][number]
        # The gap is the root mean square; the normalized gap is divided by the norm of the gradient.
        assert_close(trace.gap[clock], np.sqrt(np.mean(gap**2)))
        assert_close(trace.normalized_gap[clock], trace.gap[clock] / np.linalg.norm(job.gradients[k][number]))
        others = [job.gradients[j][(clock - 1 - j) // N] for j in range(N) if j != k]
        yield k, number, gap, np.sum(others, axis=0), job


def test_the_round_robin_gap_of_asgd_is_one_gradient_of_every_other_worker() -> None:
    for _, _, gap, others, _ in arrivals("asgd"):
        assert_close(gap, -ETA * others)


def test_the_round_robin_gap_of_dana_zero_adds_the_workers_own_momentum() -> None:
    for k, number, gap, others, job in arrivals("dana_zero", momentum=GAMMA):
        own = sum(GAMMA ** (number - 1 - i) * job.gradients[k][i] for i in range(number))
        assert_close(gap, -ETA * others + ETA * GAMMA * own)


def test_smega2_converges_to_steps_of_eta_over_one_minus_gamma_under_a_constant_gradient() -> None:
    trace = simulate(
        make("smega2", momentum=GAMMA),
        np.zeros(2),
        lambda theta, worker: np.array([1.0, -2.0]),
        workers=N,
        learning_rate=ETA,
        schedule=[*range(N)] * 150,
        keep_centers=True,
    )
    before, last = present(trace.centers)[-2:]
    assert_close(last - before, -ETA / (1 - GAMMA) * np.array([1.0, -2.0]))


# OrMo


@fast
@given(rounds)
def test_ormo_under_rounds_is_synchronous_sgd_with_momentum_at_the_barriers(schedule: list[int]) -> None:
    ordered = centers("ormo", schedule, momentum=GAMMA, simulation={"rounds": True})
    assert_close(ordered[N - 1 :: N], centers("ssgdm", schedule, momentum=GAMMA)[N - 1 :: N])


@fast
@given(schedules)
def test_ormos_momentum_and_center_are_sums_over_the_gradients_by_their_age(schedule: list[int]) -> None:
    data = list(np.random.default_rng(0).normal(size=(N, 30, 4)))
    toy, beta = ToyJob(make("ormo", momentum=GAMMA), np.ones(4), data, eta=ETA), GAMMA
    arrived, counts = [], [0] * N
    for clock, worker in enumerate(schedule):
        toy.run([worker])
        bucket = -(
            -(clock - toy.center.log.commits()["staleness"][clock]) // N
        )  # of the clock at which the worker received the center
        arrived.append((bucket, data[worker][counts[worker]]))
        counts[worker] += 1
        head = toy.center.counters["head"]
        assert head == -(-clock // N)
        assert_close(toy.center.model[0], sum(ETA * beta ** (head - bucket) * g for bucket, g in arrived))
        moved = sum(ETA * (1 - beta ** (head - bucket + 1)) / (1 - beta) * g for bucket, g in arrived)
        assert_close(toy.theta, 1 - moved)


# Rounds


@fast
@given(rounds)
def test_ssgd_is_ssgdm_without_momentum_at_the_learning_rate_divided_by_the_workers(schedule: list[int]) -> None:
    # Without momentum, a step of SSGDm is the sum of the workers' steps.
    mean = centers("ssgd", schedule, simulation={"learning_rate": N * ETA})
    single = centers("ssgdm", schedule, momentum=0.0)
    assert_close(mean, single)


@pytest.mark.parametrize("eta", [ETA, StepDecay(ETA, (4, 9), 0.5)], ids=str)
@fast
@given(rounds)
def test_local_momenta_are_one_global_momentum_at_the_barriers(eta: Schedule | float, schedule: list[int]) -> None:
    options: dict[str, Any] = {"momentum": GAMMA, "simulation": {"learning_rate": eta}}
    assert_close(centers("ssgdm_local", schedule, **options), centers("ssgdm", schedule, **options))


@fast
@given(rounds)
def test_the_center_does_not_move_within_a_round(schedule: list[int]) -> None:
    for name in ("ssgd", "ssgdm", "ssgdm_local"):
        history = centers(name, schedule)
        for number, center in enumerate(history):
            previous = history[number - 1] if number else Problem(N, []).start
            assert np.array_equal(center, previous) == (number % N != N - 1)
