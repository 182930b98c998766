"""DASO: comparison with a transcription of all devices and with numbers computed by hand, and its identities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.present import present
from support.ps.daso_runs import ETA, FLAT, assert_close, blocking, cycling, run_daso, run_without_gradients
from support.ps.daso_transcription import bfloat16
from support.ps.daso_transcription import daso as transcribed
from support.ps.transcriptions import Problem

from distkeras.ps.rules import make
from distkeras.ps.rules.daso import Daso, merge, through_bfloat16
from distkeras.ps.rules.schedules import StepDecay
from distkeras.ps.simulation.daso import simulate_daso

# Transcription


def plan_of(daso: Daso, losses: list[float], epochs: int, batches: int) -> list[Any]:
    """Return B and W at each mini-batch, None where DASO blocks; computed independently of the product."""
    plan: list[tuple[int, int] | None] = []
    b, w = daso.interval, daso.wait if daso.wait else max(daso.interval // 4, 1)
    first, best, bad = (b, w), None, 0
    for epoch in range(epochs):
        if epoch < daso.warm_up or epoch >= epochs - daso.cool_down:
            plan += [None] * batches
            continue
        plan += [(b, w)] * batches
        if best is None or (best - losses[epoch]) / best > daso.threshold:
            best, bad = losses[epoch], 0
            continue
        bad += 1
        if bad == daso.patience:
            bad, (b, w) = 0, (first if (b, w) == (1, 1) else (max(b // 2, 1), max(w // 2, 1)))
    return plan


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 4),
    devices=st.integers(1, 3),
    interval=st.integers(1, 9),
    wait=st.none() | st.integers(1, 9),
    lengths=st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 2)).filter(any),
    batches=st.integers(1, 4),
    hyper=st.fixed_dictionaries(
        {"momentum": st.sampled_from([0.0, 0.9]), "cast": st.booleans(), "patience": st.integers(1, 2)}
    ),
    losses=st.lists(st.sampled_from([1.0, 0.995, 0.98, 0.5]), min_size=9, max_size=9),
)
@example(
    3, 2, 4, 4, (1, 4, 1), 1, {"momentum": 0.9, "cast": True, "patience": 1}, [1.0] * 9
)  # halved while an exchange is in flight
@example(
    3, 2, 8, None, (1, 5, 2), 4, {"momentum": 0.9, "cast": False, "patience": 1}, [1.0] * 9
)  # halved down to 1, then reset
def test_daso_equals_the_transcription_of_all_devices(
    nodes: int,
    devices: int,
    interval: int,
    wait: int | None,
    lengths: tuple[int, int, int],
    batches: int,
    hyper: dict[str, Any],
    losses: list[float],
) -> None:
    warm_up, _, cool_down = lengths
    epochs = sum(lengths)
    wait = min(wait, interval) if wait else None
    daso = Daso(interval=interval, wait=wait, warm_up=warm_up, cool_down=cool_down, **hyper)
    rate = StepDecay(ETA, boundaries=(3, 7), factor=0.5)
    remaining = iter(losses)
    trace = run_daso(
        daso,
        nodes=nodes,
        devices=devices,
        epochs=epochs,
        batches=batches,
        learning_rate=rate,
        loss=lambda theta: next(remaining),
    )
    plan = plan_of(daso, losses, epochs, batches)
    in_force = list(zip(trace.interval.tolist(), trace.wait.tolist(), strict=True))
    assert in_force == [(1, 0) if now is None else now for now in plan]
    job = Problem(nodes * devices, [], eta=ETA, seed=7)
    expected = np.array(
        list(transcribed(job.start, lambda x, k: job.g(k, x), nodes, devices, rate, daso.momentum, plan, daso.cast))
    )
    for device in range(devices):
        assert_close(present(trace.thetas), expected[:, :, device])
    assert_close(trace.theta, expected[-1, :, 0])
    assert_close(trace.mean, expected[-1, :, 0].mean(axis=0))


def test_two_nodes_equal_numbers_computed_by_hand() -> None:
    # Two nodes with the constant gradients 1 and 3, eta .1, no momentum. B = 2, W = 1.
    trace = simulate_daso(
        cycling(interval=2, momentum=0.0),
        np.zeros(1),
        lambda theta, worker: np.array([1.0 if worker == 0 else 3.0]),
        nodes=2,
        devices=1,
        learning_rate=0.1,
        epochs=1,
        batches=4,
        keep_thetas=True,
    )
    # -.1, -.3; -.2, -.6: sent, sum -.8; steps to -.3, -.9; Equation 1: (2 (-.3) - .8) / 4, (2 (-.9) - .8) / 4.
    expected = [[-0.1, -0.3], [-0.2, -0.6], [-0.35, -0.65], [-0.45, -0.95]]
    assert_close(present(trace.thetas)[..., 0], expected)


# Identities


@pytest.mark.parametrize(("nodes", "devices"), [(1, 3), (3, 1), (3, 2), (4, 4)])
def test_73_blocking_daso_is_synchronous_sgd_over_all_devices(nodes: int, devices: int) -> None:
    n = nodes * devices
    trace = run_daso(blocking(2, momentum=0.0), nodes=nodes, devices=devices, epochs=2, batches=5)
    ssgd = Problem(n, [*range(n)] * 10, eta=ETA, seed=7).simulated(make("ssgd"))
    for node in range(nodes):
        assert_close(present(trace.thetas)[:, node], present(ssgd.centers)[n - 1 :: n])


@pytest.mark.parametrize("rule", ["ssgdm", "ssgdm_local"])
@pytest.mark.parametrize(("nodes", "devices"), [(1, 3), (3, 1), (3, 2)])
def test_74_blocking_daso_is_synchronous_sgd_with_momenta_that_are_not_exchanged(
    rule: str, nodes: int, devices: int
) -> None:
    n = nodes * devices
    trace = run_daso(blocking(2, momentum=0.8), nodes=nodes, devices=devices, epochs=2, batches=8)
    job = Problem(n, [*range(n)] * 16, eta=ETA / n, seed=7)  # these rules sum the workers' steps
    centers = present(job.simulated(make(rule, momentum=0.8)).centers)[n - 1 :: n]
    for node in range(nodes):
        assert_close(present(trace.thetas)[:, node], centers)


@pytest.mark.parametrize("wait", [0, 1, 2, 5])
@pytest.mark.parametrize("members", [2, 3, 16])
def test_75_the_merge_weights_sum_to_one(members: int, wait: int) -> None:
    x = np.array([1.5, -3.0])
    assert_close(merge(x, members * x, members, wait), x)
    # An affine map of all parameters maps the merge in the same way.
    local, total = np.array([1.0, 4.0]), np.array([-2.0, 7.0])
    assert_close(merge(3 * local + 1, 3 * total + members, members, wait), 3 * merge(local, total, members, wait) + 1)


def test_76_merging_without_wait_is_the_mean() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(5, 7))
    assert_close(merge(rng.normal(size=7), states.sum(axis=0), 5, 0), states.mean(axis=0))


@pytest.mark.parametrize(
    ("interval", "wait", "pairs"),
    [
        (4, None, [(4, 1), (2, 1), (1, 1)]),
        (16, None, [(16, 4), (8, 2), (4, 1), (2, 1), (1, 1)]),
        (12, None, [(12, 3), (6, 1), (3, 1), (1, 1)]),
        (7, None, [(7, 1), (3, 1), (1, 1)]),
        (3, None, [(3, 1), (1, 1)]),
        (2, None, [(2, 1), (1, 1)]),
        (1, None, [(1, 1)]),
        (8, 8, [(8, 8), (4, 4), (2, 2), (1, 1)]),
        (8, 1, [(8, 1), (4, 1), (2, 1), (1, 1)]),
        (6, 5, [(6, 5), (3, 2), (1, 1)]),
    ],
)
def test_77_78_intervals_and_waits_halve_to_one_and_begin_again(
    interval: int, wait: int | None, pairs: list[tuple[int, int]]
) -> None:
    trace = run_without_gradients(cycling(interval=interval, wait=wait, patience=1), epochs=2 + 2 * len(pairs), **FLAT)
    expected = [pairs[0], *itertools.islice(itertools.cycle(pairs), 1 + 2 * len(pairs))]
    assert list(zip(trace.interval, trace.wait, strict=True)) == expected


def test_80_the_cast_rounds_to_the_nearest_with_ties_to_even() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        values = (rng.normal(size=5000) * 10.0 ** rng.integers(-30, 30, 5000)).astype(dtype)
        rounded = through_bfloat16(values)
        assert rounded.dtype == dtype
        np.testing.assert_array_equal(rounded, bfloat16(values).astype(dtype))
        assert (np.abs(rounded - values) <= 2.0**-8 * np.abs(values) * (1 + 1e-6)).all()
        np.testing.assert_array_equal(through_bfloat16(rounded), rounded)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20])
    assert through_bfloat16(ties).tolist() == [1, 1 + 2**-6, -1, 1 + 2**-7]


def test_81_blocking_casts_what_is_sent_and_averages_in_full_precision() -> None:
    states = {0: 1 + 2**-7, 1: 1.0, 2: 1.0}  # exact in bfloat16, unlike their mean
    trace = run_without_gradients(
        Daso(warm_up=1, cool_down=0, momentum=0.0),
        nodes=3,
        devices=1,
        epochs=1,
        gradient=lambda theta, worker: np.array([1 - states[worker]]),
    )
    assert_close(trace.theta, np.full((3, 1), 1 + 2**-7 / 3))
    assert trace.theta[0, 0] != through_bfloat16(trace.theta)[0, 0]


def test_81_small_steps_may_be_lost_with_the_cast_only() -> None:
    def small(theta: np.ndarray, worker: int) -> np.ndarray:
        return np.full(1, -(2.0**-10))

    moved = [
        run_without_gradients(Daso(warm_up=20, cast=cast, momentum=0.0, cool_down=0), gradient=small)
        for cast in (False, True)
    ]
    assert [trace.mean[0] for trace in moved] == [1 + 20 * 2**-10, 1.0]
    # Nothing is cast while cycling.
    trace = run_without_gradients(cycling(interval=1, momentum=0.0), gradient=small)
    assert_close(
        trace.mean[0], run_without_gradients(cycling(interval=1, momentum=0.0, cast=False), gradient=small).mean[0]
    )
    assert trace.mean[0] > 1 + 5 * 2**-10


@pytest.mark.parametrize(("interval", "wait"), [(4, 1), (4, 4), (1, 1), (3, 2), (8, 2)])
def test_91_equation_1_weighs_the_own_parameters_by_twice_the_wait(interval: int, wait: int) -> None:
    """Only one node moves, by 1 per mini-batch, so that the parameters of the other nodes show the weights."""
    nodes, end = 3, interval + wait
    trace = run_without_gradients(
        cycling(interval=interval, wait=wait, momentum=0.0),
        nodes=nodes,
        devices=1,
        epochs=end,
        gradient=lambda theta, worker: np.array([-1.0 if worker == 0 else 0.0]),
        keep_thetas=True,
    )
    before, after = present(trace.thetas)[-2:, :, 0]
    assert_close(before, [end, 1, 1])
    assert_close(after[0], (2 * wait * (1 + end) + (nodes + interval)) / (2 * wait + nodes))
    assert_close(after[1:], (2 * wait + nodes + interval) / (2 * wait + nodes))


@pytest.mark.parametrize(
    ("interval", "wait", "sends", "merges"),
    [
        (4, 1, [3, 7, 11, 15], {4: 3, 8: 7, 12: 11, 16: 15}),
        (4, 4, [3, 7, 11, 15], {7: 3, 11: 7, 15: 11}),
        (5, 3, [4, 9, 14], {7: 4, 12: 9, 17: 14}),
        (1, 1, [*range(18)], {batch + 1: batch for batch in range(17)}),
    ],
)
def test_92_sends_come_every_b_batches_and_are_merged_w_later(
    interval: int, wait: int, sends: list[int], merges: dict[int, int]
) -> None:
    trace = run_without_gradients(cycling(interval=interval, wait=wait), devices=3, epochs=18)
    assert np.flatnonzero(trace.group >= 0).tolist() == sends
    assert trace.group[sends].tolist() == [number % 3 for number in range(len(sends))]
    assert {batch: int(sent) for batch, sent in enumerate(trace.merged) if sent >= 0} == merges
