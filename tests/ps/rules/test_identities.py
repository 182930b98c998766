"""Identities between rules, in float64 on quadratics, under arbitrary schedules; to the bit where they are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps.toy_model import ToyJob

from distkeras.ps.rules import Rule, make

CURVES = np.array([0.5, 1.0, 3.0])
START = [1.0, -2.0, 0.5]
ETA = 0.05


def gradient(theta: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the gradient of a quadratic that is shifted by the mini-batch."""
    return CURVES * theta + value


def data(workers: int, steps: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(workers, steps, 3)))


def job(rule: Rule, workers: int = 3, steps: int = 12, **options: Any) -> ToyJob:
    options.setdefault("gradient", gradient)
    return ToyJob(rule, START, data(workers, steps), eta=ETA, **options)


def sgd(values: np.ndarray, steps: int | None = None, start: list[float] = START) -> np.ndarray:
    theta = np.array(start)
    for value in values[:steps]:
        theta = theta - ETA * gradient(theta, value)
    return theta


schedules = st.lists(st.integers(0, 2), min_size=1, max_size=12)
fast = examples(40)


def run_both(first: Rule, second: Rule, schedule: list[int], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return job(first, **options).run(schedule), job(second, **options).run(schedule)


def assert_close(a: float | np.ndarray, b: list[float] | np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@fast
@given(schedules)
def test_agn_with_window_one_is_downpour_to_the_bit(schedule: list[int]) -> None:
    a, b = run_both(make("agn", window=1), make("downpour"), schedule, dtype=np.float32)
    np.testing.assert_array_equal(a, b)


@fast
@given(schedules)
def test_downpour_is_asgd(schedule: list[int]) -> None:
    assert_close(*run_both(make("downpour"), make("asgd"), schedule))


@fast
@given(schedules, st.sampled_from([1, 2, 5]))
def test_zealous_downpour_at_an_idle_server_is_downpour(schedule: list[int], window: int) -> None:
    assert_close(*run_both(make("zealous_downpour", window=window), make("downpour"), schedule))
    exploring = make("zealous_downpour", window=window, explore=True)
    np.testing.assert_array_equal(*run_both(exploring, make("downpour"), schedule, dtype=np.float32))


@fast
@given(schedules, st.sampled_from([1, 2, 3]))
def test_zealous_downpour_that_explores_at_a_busy_server_is_accumulated_downpour_to_the_bit(
    schedule: list[int], window: int
) -> None:
    exploring = job(make("zealous_downpour", window=window, explore=True), steps=40, occupied=lambda worker: True)
    accumulated = job(make("downpour", window=window), steps=40)
    np.testing.assert_array_equal(exploring.run(schedule), accumulated.run(schedule))


@fast
@given(schedules, st.sampled_from([1, 2, 3]))
def test_zealous_downpour_at_a_busy_server_is_downpour_with_larger_mini_batches(
    schedule: list[int], window: int
) -> None:
    values = data(3, 36)
    batched = [value.reshape(-1, window, 3) for value in values]
    literal = make("zealous_downpour", window=window)
    many = ToyJob(literal, START, values, eta=ETA, gradient=gradient, occupied=lambda worker: True)
    one = ToyJob(
        make("downpour"),
        START,
        batched,
        eta=ETA,
        gradient=lambda theta, group: sum((gradient(theta, v) for v in group), np.zeros(3)),
    )
    assert_close(many.run(schedule), one.run(schedule))


@pytest.mark.parametrize("name", ["downpour", "dynsgd", "agn", "asgd", "adag"])
def test_one_worker_with_window_one_is_sgd(name: str) -> None:
    alone = job(make(name, window=1), workers=1)
    assert_close(alone.run([0] * 12), sgd(data(1, 12)[0]))


@pytest.mark.parametrize("window", [2, 3, 6])
@pytest.mark.parametrize("name", ["downpour", "dynsgd"])
def test_one_worker_with_any_window_is_sgd(name: str, window: int) -> None:
    alone = job(make(name, window=window), workers=1)
    assert_close(alone.run([0] * (12 // window)), sgd(data(1, 12)[0]))


@pytest.mark.parametrize("window", [2, 4])
def test_agn_payload_is_the_accumulated_payload_over_the_window(window: int) -> None:
    start = np.array(START)
    accumulated = job(make("downpour", window=window)).run([1]) - start
    normalized = job(make("agn", window=window)).run([1]) - start
    assert_close(normalized * window, accumulated)


def test_dynsgd_round_robin_is_downpour_with_eta_over_n_after_the_first_round() -> None:
    workers = 3
    values = data(workers, 5)
    dyn = ToyJob(make("dynsgd", window=1), START, values, eta=ETA)
    down = ToyJob(make("downpour"), START, values, eta=ETA / workers)
    first_d, first_p = dyn.run(range(workers)).copy(), down.run(range(workers)).copy()
    later = [*range(workers)] * 4
    assert_close(dyn.run(later) - first_d, down.run(later) - first_p)


@fast
@given(schedules, st.sampled_from(["4.1", "4.7", "4.10", "4.1norm", "4.7norm"]), st.sampled_from([True, False]))
def test_adag_11_is_adag_12_to_the_bit(schedule: list[int], form: str, normalize: bool) -> None:
    options = {"window": 1, "form": form, "normalize": normalize, "gamma": 0.01}
    a, b = run_both(make("adag", algorithm=11, **options), make("adag", algorithm=12, **options), schedule)
    np.testing.assert_array_equal(a, b)


@fast
@given(schedules)
def test_adag_4_7_with_gamma_eta_is_4_1(schedule: list[int]) -> None:
    a, b = run_both(make("adag", window=1, form="4.7", gamma=ETA), make("adag", window=1, form="4.1"), schedule)
    np.testing.assert_array_equal(a, b)


@fast
@given(schedules, st.sampled_from([11, 12, 13]))
def test_adag_4_10_is_4_7_with_gamma_squared(schedule: list[int], algorithm: int) -> None:
    a, b = run_both(
        make("adag", window=1, form="4.10", gamma=0.125, algorithm=algorithm),
        make("adag", window=1, form="4.7", gamma=0.125**2, algorithm=algorithm),
        schedule,
    )
    np.testing.assert_array_equal(a, b)


@fast
@given(schedules)
def test_adag_with_huge_gamma_is_its_base(schedule: list[int]) -> None:
    assert_close(*run_both(make("adag", window=2, gamma=1e300), make("agn", window=2), schedule[:6]))
    assert_close(
        *run_both(make("adag", window=2, gamma=1e300, normalize=False), make("downpour", window=2), schedule[:6])
    )


@fast
@given(schedules)
def test_adag_with_tiny_gamma_applies_only_commits_whose_center_has_not_moved(schedule: list[int]) -> None:
    toy = job(make("adag", window=1, gamma=1e-300))
    for worker in schedule:
        theta_before = toy.theta.copy()
        moved = not np.array_equal(
            present(toy.center.leases[worker].sent).array, theta_before
        )  # the distance d decides, not tau
        toy.run([worker])
        assert np.array_equal(toy.theta, theta_before) == moved


@fast
@given(schedules, st.sampled_from(["4.1", "4.7", "4.7norm"]))
def test_adag_scale_is_in_the_half_open_unit_interval(schedule: list[int], form: str) -> None:
    toy = job(make("adag", window=1, form=form, gamma=0.01))
    toy.run(schedule)
    for staleness, scale in toy.center.log.commits()[["staleness", "scale"]]:
        assert 0 < scale <= 1
        assert (scale == 1) == (staleness == 0)


@fast
@given(schedules)
def test_the_norm_form_is_the_element_wise_form_in_one_dimension(schedule: list[int]) -> None:
    values = [[1.0, 0.5, -2.0] * 4] * 3
    scalar, norm = (ToyJob(make("adag", window=1, form=form, gamma=0.01), [1.0], values) for form in ("4.7", "4.7norm"))
    assert_close(scalar.run(schedule), norm.run(schedule))


@pytest.mark.parametrize("rule", [make("aeasgd", rho=0.0), make("easgd", rho=0.0)])
def test_elastic_rules_without_elasticity_do_not_move_the_center(rule: Rule) -> None:
    toy = job(rule, steps=20)
    toy.run([0, 1, 2])
    np.testing.assert_array_equal(toy.theta, START)
    for replica, values in zip(toy.replicas, data(3, 20), strict=True):
        assert_close(replica.theta, sgd(values))


@fast
@given(schedules, st.sampled_from([1, 2]), st.floats(0.1, 5))
def test_elastic_exchange_conserves_center_plus_workers_async(schedule: list[int], window: int, rho: float) -> None:
    # With gradients that do not depend on theta: center + sum of workers = (n + 1) theta0 - eta * sum of gradients.
    values = data(3, 30)
    toy = ToyJob(make("aeasgd", window=window, rho=rho), START, values, eta=ETA)
    toy.run(schedule)
    computed = [
        window * (schedule.count(worker) + 1) for worker in range(3)
    ]  # each worker has computed its next window
    moved = sum(values[worker][: computed[worker]].sum(axis=0) for worker in range(3))
    total = toy.theta + sum(replica.theta for replica in toy.replicas)
    assert_close(total, 4 * np.array(START) - ETA * moved)


def test_elastic_exchange_conserves_center_plus_workers_sync() -> None:
    values = data(3, 8)
    toy = ToyJob(make("easgd", window=2, rho=2.0), START, values, eta=ETA)
    toy.run([0, 2, 1, 1, 0, 2, 0, 1, 2, 0, 1, 2])
    total = toy.theta + sum(replica.theta for replica in toy.replicas)
    assert_close(total, 4 * np.array(START) - ETA * sum(value.sum(axis=0) for value in values))


def test_sync_easgd_equilibrium_distance_under_a_constant_gradient() -> None:
    # The distance before the exchange tends to window * |g| / ((n + 1) rho).
    n, rho, window = 3, 1.0, 2
    values = [[1.0] * 2000] * n
    toy = ToyJob(make("easgd", window=window, rho=rho), [0.0], values, eta=ETA)
    toy.run([*range(n)] * 900)
    before_exchange = toy.replicas[0].theta / (1 - ETA * rho) - toy.theta * ETA * rho / (1 - ETA * rho)
    np.testing.assert_allclose(abs(before_exchange - toy.theta), [window / ((n + 1) * rho)], rtol=1e-6)


@fast
@given(schedules)
def test_eamsgd_without_momentum_is_aeasgd(schedule: list[int]) -> None:
    assert_close(*run_both(make("eamsgd", window=2, momentum=0.0), make("aeasgd", window=2), schedule[:5]))


def test_aeasgd_takes_its_difference_to_the_current_center_at_the_exchange() -> None:
    # Worker 0 does not move, so that its difference to the center of its last pull would be 0.
    toy = ToyJob(make("aeasgd", window=1, rho=4.0), [0.0], [[0.0] * 2, [1.0] * 5], eta=ETA)
    moved = toy.run([1, 1, 1]).copy()
    assert moved < -0.01
    assert_close(toy.run([0]), moved - ETA * 4.0 * moved)


def test_easgd_differs_from_its_simultaneous_form_by_the_elastic_force_on_one_step() -> None:
    # Algorithm 4 takes the force after the worker's step, Eq 2.4 before it: the difference is eta^2 rho g.
    rho, values = 2.0, data(3, 2)
    one, two = (
        ToyJob(make("easgd", rho=rho, window=1), START, [value[:steps] for value in values], eta=ETA)
        for steps in (1, 2)
    )
    one.run([0, 1, 2])
    two.run([0, 1, 2, 0, 1, 2])
    for worker, g in enumerate(value[1] for value in values):
        old = one.replicas[worker].theta
        simultaneous = old - ETA * g - ETA * rho * (old - one.theta)
        assert_close(two.replicas[worker].theta - simultaneous, ETA**2 * rho * g)


def test_at_a_center_that_does_not_move_the_elastic_force_equals_the_gradient() -> None:
    # Opposite gradients pull two workers apart. Before each exchange: -g = rho (theta - center).
    rho = 4.0
    toy = ToyJob(make("easgd", rho=rho, window=1), [1.0], [[1.0] * 300, [-1.0] * 300], eta=ETA)
    toy.run([0, 1] * 299)
    assert_close(toy.theta, [1.0])
    # Workers have already computed the last step and subtracted its elastic move.
    theta_before = (toy.replicas[0].theta - ETA * rho * toy.theta) / (1 - ETA * rho)
    assert_close(-1.0, rho * (theta_before - toy.theta))


def test_model_averaging_with_window_one_is_synchronous_sgd() -> None:
    values = data(3, 4)
    toy = ToyJob(make("averaging", window=1), START, values, eta=ETA, gradient=gradient)
    theta = np.array(START)
    for step in range(4):
        theta = theta - ETA * np.mean([gradient(theta, values[worker][step]) for worker in range(3)], axis=0)
    assert_close(toy.run([0, 1, 2] * 4), theta)


def test_model_averaging_with_one_worker_is_sgd() -> None:
    toy = job(make("averaging", window=3), workers=1)
    assert_close(toy.run([0] * 4), sgd(data(1, 12)[0]))


@fast
@given(schedules, st.sampled_from(["downpour", "dynsgd", "asgd", "aeasgd"]))
def test_the_sum_of_staleness_is_the_sum_of_the_last_pulled_clocks_minus_the_commits(
    schedule: list[int], name: str
) -> None:
    toy = job(make(name, window=1))
    toy.run(schedule)
    total = toy.center.log.commits()["staleness"].sum()
    assert total == sum(present(lease.released) for lease in toy.center.leases.values()) - len(schedule)
