"""Identities of the rules with an outer optimizer, and their handling of missing, skipped and short windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps.toy_model import ToyJob
from support.ps.transcriptions import Problem
from support.ps.virtual_centers import (
    ETA,
    ROUND_ROBIN,
    N,
    assert_close,
    at_barriers,
    center_of,
    centers,
    commit_of,
    joined,
    rounds,
    run,
    schedules,
    send,
)

from distkeras.ps.checkpoint.state import capture
from distkeras.ps.rules import center_rules, make

MOVES = np.array([-0.2, 0.1, 0.4])

fast = examples(20)


def constant_moves(name: str, moves: int, n: int = 1, **hyper: Any) -> tuple[np.ndarray, ToyJob]:
    """Return the steps of the center from 0 under ``moves`` movements of `MOVES` by each worker, and the job."""
    job = ToyJob(make(name, window=1, **hyper), np.zeros(3), [[-MOVES / ETA] * (moves + 1)] * n, eta=ETA)
    positions = [np.zeros(3)]
    for number in range(moves * n):
        positions.append(job.run([number % n]).copy())
    return np.diff(positions[::n] if job.rule.traits.synchronous else positions, axis=0), job


def sequential(window: int, windows: int) -> Any:
    """Return a problem of one worker, and the function from a theta to the movement of a window from there."""
    job = Problem(1, [0] * windows, eta=ETA)

    def move(theta: np.ndarray) -> np.ndarray:
        fast_weights = theta
        for _ in range(window):
            fast_weights = fast_weights - ETA * job.g(0, fast_weights)
        return fast_weights - theta

    return job, move


# DiLoCo


@fast
@given(rounds, st.sampled_from([1, 3]), st.booleans())
def test_diloco_without_momentum_at_a_rate_of_one_is_model_averaging(
    schedule: list[int], window: int, nesterov: bool
) -> None:
    outer = at_barriers("diloco", schedule, window=window, server_rate=1.0, momentum=0.0, nesterov=nesterov)
    assert_close(outer, at_barriers("averaging", schedule, window=window))


def test_diloco_with_one_worker_and_window_one_is_nesterovs_method_in_bengios_form() -> None:
    job, v, iterates = Problem(1, [0] * 12, eta=ETA), np.zeros(5), []
    ahead = job.start
    for _ in range(12):
        g = job.g(0, ahead)
        v = 0.8 * v + g
        ahead = ahead - 0.7 * ETA * (0.8 * v + g)
        iterates.append(ahead)
    assert_close(centers("diloco", [0] * 12, n=1, window=1, server_rate=0.7, momentum=0.8), iterates)


def test_diloco_with_one_worker_and_without_momentum_is_lookahead() -> None:
    (job, move), iterates = sequential(4, 6), []
    slow = job.start
    for _ in range(6):
        slow = slow + 0.6 * move(slow)
        iterates.append(slow)
    assert_close(centers("diloco", [0] * 6, n=1, window=4, server_rate=0.6, momentum=0.0), iterates)


@fast
@given(rounds)
def test_dilocos_heavy_ball_with_window_one_is_ssgd_with_momentum_at_a_rate_divided_by_the_workers(
    schedule: list[int],
) -> None:
    heavy = at_barriers("diloco", schedule, window=1, server_rate=1.0, momentum=0.8, nesterov=False)
    same = present(Problem(N, schedule, eta=ETA).simulated(make("ssgdm", momentum=0.8), learning_rate=ETA / N).centers)
    assert_close(heavy, same[N - 1 :: N])


def test_dilocos_heavy_ball_is_slowmo_as_printed() -> None:
    job, iterates = Problem(N, ROUND_ROBIN, eta=ETA), []
    x, u, alpha, beta = job.start, np.zeros_like(job.start), 0.9, 0.5
    for _, arrivals in job.rounds():
        ends = []
        for k in arrivals:
            end = x
            for _ in range(3):
                end = end - ETA * job.g(k, end)
            ends.append(end)
        u = beta * u + (x - np.mean(ends, axis=0)) / ETA
        x = x - alpha * ETA * u
        iterates.append(x)
    options = {"window": 3, "server_rate": alpha, "momentum": beta, "nesterov": False}
    assert_close(at_barriers("diloco", ROUND_ROBIN, **options), iterates)


@fast
@given(rounds)
def test_both_forms_of_diloco_agree_without_momentum(schedule: list[int]) -> None:
    options = {"window": 2, "momentum": 0.0}
    assert_close(
        at_barriers("diloco", schedule, nesterov=True, **options),
        at_barriers("diloco", schedule, nesterov=False, **options),
    )


@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_amplifies_a_constant_movement_by_its_momentum(nesterov: bool) -> None:
    steps, _ = constant_moves("diloco", 80, server_rate=0.7, momentum=0.5, nesterov=nesterov)
    assert_close(steps[-1], 0.7 / (1 - 0.5) * MOVES)


def test_dilocos_step_as_a_function_of_the_old_momentum_and_the_pseudo_gradient() -> None:
    alpha, beta, m = 0.7, 0.9, np.zeros(3)
    steps, _ = constant_moves("diloco", 6, server_rate=alpha, momentum=beta)
    for step in steps:
        g = -MOVES
        assert_close(step, -alpha * (beta**2 * m + (1 + beta) * g))
        m = beta * m + g


# FedOpt


@pytest.mark.parametrize("form", ["adam", "yogi", "adagrad", "amsgrad"])
def test_the_first_step_of_fedopt_without_memory_has_the_size_of_its_rate(form: str) -> None:
    steps, _ = constant_moves("fedopt", 1, form=form, server_rate=0.3, beta_1=0.0, beta_2=0.0, epsilon=0.01)
    assert_close(steps[0], 0.3 * MOVES / (np.abs(MOVES) + 0.01))


@fast
@given(rounds, st.sampled_from(["adam", "yogi", "adagrad", "amsgrad"]))
def test_fedopt_with_a_huge_epsilon_is_model_averaging(schedule: list[int], form: str) -> None:
    adaptive = at_barriers("fedopt", schedule, window=2, form=form, beta_1=0.0, server_rate=1e13, epsilon=1e13)
    np.testing.assert_allclose(adaptive, at_barriers("averaging", schedule, window=2), rtol=1e-9)


def test_the_first_round_of_adam_yogi_and_amsgrad_is_the_same() -> None:
    first = [at_barriers("fedopt", [0, 1, 2], window=2, form=form) for form in ("adam", "yogi", "amsgrad")]
    assert_close(first[1], first[0])
    assert_close(first[2], first[0])


def test_amsgrad_is_adam_under_a_constant_mean() -> None:
    adam, amsgrad = (constant_moves("fedopt", 30, form=form)[0] for form in ("adam", "amsgrad"))
    np.testing.assert_array_equal(adam, amsgrad)


def test_adagrads_steps_under_a_constant_mean_shrink_with_the_square_root_of_their_number() -> None:
    steps, _ = constant_moves("fedopt", 9, form="adagrad", beta_1=0.0, server_rate=0.3, epsilon=0.01)
    for number, step in enumerate(steps, 1):
        assert_close(step, 0.3 * MOVES / (np.sqrt(number) * np.abs(MOVES) + 0.01))


def test_yogis_second_moment_moves_only_by_a_share_of_the_squared_mean() -> None:
    means = [1.0, 0.2, 1.5, 0.0, 0.5]
    job = ToyJob(make("fedopt", window=1, form="yogi", beta_2=0.75), [0.0], [[-mean / ETA for mean in means]], eta=ETA)
    signs, before = set(), 0.0
    for mean in means:
        job.run([0])
        after = float(job.center.model[1][0])
        signs.add(np.sign(after - before))
        assert_close(abs(after - before), 0.25 * mean**2)
        before = after
    assert signs == {-1, 0, 1}


# Delayed Nesterov


def test_delayed_nesterov_with_one_worker_and_a_period_of_one_is_diloco() -> None:
    schedule = [0] * 12
    assert_close(
        centers("delayed_nesterov", schedule, n=1, window=2, period=1), centers("diloco", schedule, n=1, window=2)
    )


@fast
@given(schedules, st.sampled_from([1, 2, 5]))
def test_delayed_nesterov_without_momentum_at_the_rate_of_its_period_is_downpour(
    schedule: list[int], period: int
) -> None:
    options = {"window": 2, "momentum": 0.0, "server_rate": float(period), "period": period}
    assert_close(centers("delayed_nesterov", schedule, **options), centers("downpour", schedule, window=2))


@fast
@given(rounds)
def test_delayed_nesterov_in_rounds_is_diloco(schedule: list[int]) -> None:
    delayed = at_barriers("delayed_nesterov", schedule, window=2, barrier=True)
    assert_close(delayed, at_barriers("diloco", schedule, window=2))


@pytest.mark.parametrize("activation", [0.5, 1.0])
def test_delayed_nesterov_in_rounds_is_not_diloco_if_its_momentum_is_spread(activation: float) -> None:
    delayed = at_barriers("delayed_nesterov", ROUND_ROBIN, window=2, barrier=True, activation=activation)
    assert np.abs(delayed - at_barriers("diloco", ROUND_ROBIN, window=2)).max() > 1e-3


@fast
@given(schedules, st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_movement_of_the_center_over_a_period_of_delayed_nesterov(
    schedule: list[int], period: int, activation: float
) -> None:
    epsilon, beta, c = 0.7, 0.9, activation / period
    options = {"window": 1, "server_rate": epsilon, "momentum": beta, "period": period, "activation": activation}
    job = ToyJob(make("delayed_nesterov", **options), np.zeros(3), [np.ones((21, 3))] * N, eta=ETA)
    before, old = np.zeros(3), np.zeros(3)
    mean = np.full(3, -ETA)
    for first in range(0, len(schedule) - period + 1, period):
        job.run(schedule[first : first + period])
        new = beta * old + mean
        spread = (period - 1) * c * beta * old + (1 - c * period + c) * beta * new
        assert_close(job.theta - before, epsilon * (mean + spread))
        assert_close(job.center.model[0], new)
        before, old = job.theta.copy(), new


def test_the_momentum_of_naive_asynchronous_diloco_is_a_geometric_sum_after_equal_movements() -> None:
    beta = 0.9
    _, job = constant_moves("delayed_nesterov", 4, period=1, momentum=beta)
    assert_close(job.center.model[0], (1 + beta + beta**2 + beta**3) * MOVES)
    job.run([0])
    assert_close(job.center.model[0], beta * (1 + beta + beta**2 + beta**3) * MOVES + MOVES)


# MLA


@fast
@given(schedules, st.sampled_from([1, 3]))
def test_mlas_center_is_the_look_ahead_of_the_first_form_in_the_paper(schedule: list[int], window: int) -> None:
    eta, gamma, job, ahead = 0.7, 0.9, Problem(N, schedule, eta=ETA), []
    theta, m, sent = job.start, np.zeros_like(job.start), [job.start] * N
    for k in schedule:
        end = sent[k]
        for _ in range(window):
            end = end - ETA * job.g(k, end)
        delta = end - sent[k]
        theta = theta + eta * gamma * m + eta * delta
        m = gamma * m + (1 - gamma) * delta
        sent[k] = theta + eta * gamma * m
        ahead.append(sent[k])
    assert_close(centers("mla", schedule, window=window), ahead)


@fast
@given(schedules)
def test_mla_without_momentum_is_downpour_for_every_reach(schedule: list[int]) -> None:
    downpour = centers("downpour", schedule, window=2)
    for reach in (0.0, 2.0):
        assert_close(centers("mla", schedule, window=2, momentum=0.0, server_rate=1.0, reach=reach), downpour)


def test_mla_with_a_reach_is_not_mla_without() -> None:
    once, twice = (centers("mla", ROUND_ROBIN, window=2, reach=reach) for reach in (0.0, 1.0))
    assert np.abs(once - twice).max() > 1e-3


def test_mla_with_one_worker_and_window_one_is_bengios_form_with_a_smaller_momentum_term() -> None:
    eta, gamma, job, v, iterates = 0.7, 0.8, Problem(1, [0] * 12, eta=ETA), np.zeros(5), []
    ahead = job.start
    for _ in range(12):
        g = job.g(0, ahead)
        v = gamma * v + g
        ahead = ahead - eta * ETA * ((1 - gamma) * gamma * v + g)
        iterates.append(ahead)
    assert_close(centers("mla", [0] * 12, n=1, window=1, server_rate=eta, momentum=gamma), iterates)


def test_mlas_step_under_a_constant_movement() -> None:
    steps, _ = constant_moves("mla", 80, server_rate=0.7, momentum=0.5)
    assert_close(steps[-1], 0.7 * (1 + 0.5) * MOVES)


# Delay-adaptive


@fast
@given(schedules, st.sampled_from([1, 2]))
def test_delay_adaptive_with_a_threshold_that_no_staleness_reaches_is_downpour_to_the_bit(
    schedule: list[int], window: int
) -> None:
    adaptive = centers("delay_adaptive", schedule, window=window, threshold=len(schedule))
    np.testing.assert_array_equal(adaptive, centers("downpour", schedule, window=window))
    if window == 1:
        assert_close(adaptive, centers("asgd", schedule))


def test_delay_adaptive_is_downpour_while_workers_take_turns() -> None:
    np.testing.assert_array_equal(centers("delay_adaptive", ROUND_ROBIN), centers("downpour", ROUND_ROBIN))


def test_delay_adaptive_with_one_worker_is_sgd() -> None:
    job, move = sequential(1, 12)
    theta, iterates = job.start, []
    for _ in range(12):
        theta = theta + move(theta)
        iterates.append(theta)
    assert_close(centers("delay_adaptive", [0] * 12, n=1), iterates)


@fast
@given(schedules)
def test_delay_adaptive_divides_by_the_staleness_and_dynsgd_by_the_staleness_plus_one(schedule: list[int]) -> None:
    trace = run("delay_adaptive", schedule, threshold=1)
    assert_close(trace.scale, 1 / np.maximum(1, trace.staleness))
    dynamic = run("dynsgd", schedule, window=1)
    assert_close(dynamic.scale, 1 / (dynamic.staleness + 1))


# Missing, skipped and short windows

ROUNDS = ["diloco", "fedopt"]
ASYNCHRONOUS = ["delayed_nesterov", "mla", "delay_adaptive"]


def center_after_round(
    name: str, values: dict[int, float], *, skipped: tuple[int, ...] = (), left: tuple[int, ...] = ()
) -> Any:
    """Return the center after a round of four workers, some of which have a skipped commit or leave."""
    center = center_of(name, workers=4, hyper={"window": 1})
    for worker in range(4):
        joined(center, worker)
    for worker, value in values.items():
        send(center, commit_of(worker, value=value))
    for worker in skipped:
        center.skip(commit_of(worker))
    for worker in left:
        center.leave(worker, 0)
    return center


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_takes_the_mean_of_its_contributions(name: str) -> None:
    complete = center_after_round(name, {0: 3.0, 1: 3.0, 2: 3.0, 3: 3.0})
    assert complete.round.total is None
    for center in (
        center_after_round(name, {0: 2.0, 2: 4.0}, skipped=(1,), left=(3,)),
        center_after_round(name, {0: 2.0, 2: 4.0}, left=(1, 3)),
        center_after_round(name, {0: 2.0, 2: 4.0}, skipped=(1, 3)),
    ):
        np.testing.assert_allclose(center.current.array, complete.current.array, rtol=1e-6)
        for actual, expected in zip(center.model, complete.model, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_without_a_contribution_changes_nothing(name: str) -> None:
    center = center_after_round(name, {0: 2.0, 1: 2.0, 2: 1.0, 3: 1.0})
    before = [vector.copy() for vector in (center.current.array, *center.model)]
    for worker in range(4):
        center.release(worker, 0)
    for worker in range(4):
        center.skip(commit_of(worker, sequence=2, first=1, last=1))
    assert all(center.scheduler.ready(worker) for worker in range(4))  # the round has ended
    for old, new in zip(before, (center.current.array, *center.model), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_skipped_commit_changes_no_state_of_the_rule(name: str) -> None:
    center = center_of(name, workers=2, hyper={"window": 1})
    for worker in range(2):
        joined(center, worker)
    send(center, commit_of(0))
    before = capture(center)
    center.skip(commit_of(1))
    after = capture(center)
    assert [after.header[key] for key in ("clock", "counters")] == [before.header[key] for key in ("clock", "counters")]
    for key, array in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[key], array)


@pytest.mark.parametrize("name", [*ROUNDS, *ASYNCHRONOUS])
def test_a_window_ends_with_its_epoch_and_is_not_scaled_down(name: str) -> None:
    # Two epochs of three mini-batches and windows of two: the center is that of full windows of these lengths.
    job = ToyJob(make(name, window=2), [1.0], [[1.0] * 3], epochs=2)
    job.run([0] * 4)
    assert job.center.log.commits()["steps"].tolist() == [2, 1, 2, 1]
    values = [2.0, 1.0, 2.0, 1.0]  # the same movements in one step each
    assert_close(job.theta, ToyJob(make(name, window=1), [1.0], [values]).run([0] * 4))


def test_the_outer_rules_keep_no_vectors_at_their_workers() -> None:
    for name in (*ROUNDS, *ASYNCHRONOUS):
        rule = center_rules()[name]()
        assert rule.traits.worker_vectors == ()
        assert (rule.traits.keeps_sent, rule.reduces, rule.traits.overlaps) == (False, False, False)
