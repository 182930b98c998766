"""Identities of the rules that buffer commits at the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.toy_model import ToyJob
from support.ps.transcriptions import Problem
from support.ps.virtual_centers import ETA, N, assert_close, at_barriers, centers, rounds, schedules

from distkeras.ps.rules import make
from distkeras.ps.rules.base import Context
from distkeras.ps.rules.outer import age

sizes = st.sampled_from([1, 2, 5])
fast = examples(20)


@fast
@given(schedules, st.sampled_from([1, 3]))
def test_fedbuff_with_a_buffer_of_one_and_no_weights_is_downpour_to_the_bit(schedule: list[int], window: int) -> None:
    buffered = centers("fedbuff", schedule, window=window, buffer=1, exponent=0.0)
    np.testing.assert_array_equal(buffered, centers("downpour", schedule, window=window))


@fast
@given(schedules)
def test_fedbuff_with_a_buffer_of_one_and_an_exponent_of_one_is_dynsgd(schedule: list[int]) -> None:
    buffered = centers("fedbuff", schedule, window=2, buffer=1, exponent=1.0)
    assert_close(buffered, centers("dynsgd", schedule, window=2))


@fast
@given(rounds, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.9]), st.booleans())
def test_fedbuff_in_rounds_is_diloco(schedule: list[int], exponent: float, momentum: float, nesterov: bool) -> None:
    options: dict[str, Any] = {"window": 2, "server_rate": 0.7, "momentum": momentum, "nesterov": nesterov}
    buffered = at_barriers("fedbuff", schedule, barrier=True, exponent=exponent, **options)
    assert_close(buffered, at_barriers("diloco", schedule, **options))


@fast
@given(rounds)
def test_fedbuff_in_rounds_with_its_defaults_is_model_averaging(schedule: list[int]) -> None:
    buffered = at_barriers("fedbuff", schedule, barrier=True, window=2)
    assert_close(buffered, at_barriers("averaging", schedule, window=2))


@fast
@given(schedules, sizes, st.sampled_from([0.0, 0.5]))
def test_a_drained_fedbuff_has_the_weighted_sum_of_all_movements(
    schedule: list[int], size: int, exponent: float
) -> None:
    # Gradients that do not depend on theta: the movement of each commit is known.
    rng = np.random.default_rng(3)
    values = [rng.normal(size=(max(1, schedule.count(worker)), 2)) for worker in range(N)]
    rule = make("fedbuff", window=1, buffer=size, exponent=exponent, server_rate=0.7)
    job = ToyJob(rule, [1.0, -1.0], values, eta=ETA)
    for worker in range(N):
        if worker not in schedule:
            job.run([worker])
    job.run(schedule)
    assert all(lease.finished for lease in job.center.leases.values())
    taken, total = [0] * N, np.zeros(2)
    for row in job.center.log.commits():
        worker = row["worker"]
        total += row["scale"] * -ETA * values[worker][taken[worker]]
        taken[worker] += 1
    assert_close(job.theta, np.array([1.0, -1.0]) + 0.7 / size * total)


@fast
@given(schedules, sizes, st.sampled_from(["fedbuff", "fadas"]))
def test_the_center_moves_only_when_the_buffer_is_full(schedule: list[int], size: int, name: str) -> None:
    actual = centers(name, schedule, window=1, buffer=size)
    before = Problem(N, schedule).start
    for number, center in enumerate(actual, 1):
        assert np.array_equal(center, before) == bool(number % size)
        before = center


@fast
@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 60))
def test_the_age_is_the_number_of_versions_since_the_center_was_sent(size: int, clock: int, staleness: int) -> None:
    staleness = min(staleness, clock)
    context = Context(N, 0, clock, staleness, 1, ETA, ETA)
    assert age(context, clock % size, size) == clock // size - (clock - staleness) // size


@fast
@given(rounds)
def test_fadas_in_rounds_is_fedopts_amsgrad(schedule: list[int]) -> None:
    options = {"window": 2, "server_rate": 0.1, "epsilon": 1e-3}
    buffered = at_barriers("fadas", schedule, barrier=True, **options)
    assert_close(buffered, at_barriers("fedopt", schedule, form="amsgrad", **options))


def test_fadas_with_one_worker_is_amsgrad_without_bias_correction() -> None:
    job, iterates = Problem(1, [0] * 15, eta=ETA), []
    theta, m, v, largest = job.start, *(np.zeros_like(job.start) for _ in range(3))
    for _ in range(15):
        g = ETA * job.g(0, theta)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        largest = np.maximum(largest, v)
        theta = theta - 0.2 * m / (np.sqrt(largest) + 1e-3)
        iterates.append(theta)
    assert_close(centers("fadas", [0] * 15, n=1, window=1, server_rate=0.2, epsilon=1e-3), iterates)


@fast
@given(schedules, sizes)
def test_fadas_with_a_threshold_that_no_age_exceeds_has_a_constant_rate(schedule: list[int], size: int) -> None:
    high, none = (
        centers("fadas", schedule, window=1, buffer=size, server_rate=0.1, delay_threshold=threshold)
        for threshold in (max(1, len(schedule)), None)
    )
    np.testing.assert_array_equal(high, none)


def test_the_largest_age_in_a_buffer_of_fadas_divides_the_rate_of_that_buffer_only() -> None:
    # Movements of -.1 by worker 0 fill one buffer for each version; worker 1 received the first version.
    options: dict[str, Any] = {"window": 1, "buffer": 2, "server_rate": 0.1, "epsilon": 1.0}
    alone, mixed = (ToyJob(make("fadas", **options), [0.0], [[1.0] * 20, [1.0] * 3], eta=0.1) for _ in range(2))
    alone.run([0] * 10)
    before = float(mixed.run([0] * 8)[0])
    full = float(alone.theta[0]) - before
    mixed.run([0, 1])  # ages 0 and 4
    assert_close(float(mixed.theta[0]) - before, full / 4)
    before = float(mixed.theta[0])
    mixed.run([0, 0])
    alone_before = float(alone.theta[0])
    alone.run([0, 0])
    assert_close(float(mixed.theta[0]) - before, float(alone.theta[0]) - alone_before)


@pytest.mark.parametrize(("name", "vectors"), [("fedbuff", 1), ("fadas", 4)])
def test_a_rule_with_a_buffer_has_a_momentum_vector_only_if_it_has_momentum(name: str, vectors: int) -> None:
    assert len(make(name).traits.model_vectors) == vectors
    assert len(make("fedbuff", momentum=0.5).traits.model_vectors) == 2
