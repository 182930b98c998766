"""DASO: a transcription of all devices, numbers computed by hand, identities, phases, arguments."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps.daso_runs import ETA, FLAT, assert_close, blocking, cycling, run_daso, run_without_gradients
from support.ps.daso_simulator import simulate_daso, through_bfloat16
from support.ps.daso_transcription import bfloat16
from support.ps.daso_transcription import daso as transcribed
from support.ps.transcriptions import Problem

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.ps.rules.daso import Daso, merge
from distkeras.ps.rules.schedules import Constant, StepDecay, WarmUp

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


@examples(60)
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
        assert_close(trace.thetas, expected[:, :, device])
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
    )
    # -.1, -.3; -.2, -.6: sent, sum -.8; steps to -.3, -.9; Equation 1: (2 (-.3) - .8) / 4, (2 (-.9) - .8) / 4.
    expected = [[-0.1, -0.3], [-0.2, -0.6], [-0.35, -0.65], [-0.45, -0.95]]
    assert_close(trace.thetas[..., 0], expected)


# Identities


@pytest.mark.parametrize(("nodes", "devices"), [(1, 3), (3, 1), (3, 2), (4, 4)])
def test_73_blocking_daso_is_synchronous_sgd_over_all_devices(nodes: int, devices: int) -> None:
    n = nodes * devices
    trace = run_daso(blocking(2, momentum=0.0), nodes=nodes, devices=devices, epochs=2, batches=5)
    ssgd = Problem(n, [*range(n)] * 10, eta=ETA, seed=7).simulated(make("ssgd"))
    for node in range(nodes):
        assert_close(trace.thetas[:, node], present(ssgd.centers)[n - 1 :: n])


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
        assert_close(trace.thetas[:, node], centers)


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
    )
    before, after = trace.thetas[-2:, :, 0]
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


def test_the_phases_take_their_epochs_and_groups_take_turns_through_all_of_them() -> None:
    trace = run_without_gradients(Daso(interval=2, warm_up=2, cool_down=1), devices=3, epochs=6, batches=2)
    assert trace.phase.tolist() == ["warm_up"] * 4 + ["cycling"] * 6 + ["cool_down"] * 2
    assert trace.interval.tolist() == [1] * 4 + [2] * 6 + [1] * 2
    assert trace.wait.tolist() == [0] * 4 + [1] * 6 + [0] * 2
    assert trace.group.tolist() == [0, 1, 2, 0, -1, 1, -1, 2, -1, 0, 1, 2]
    # The blocking exchange after mini-batch 10 replaces the exchange that was sent after mini-batch 9.
    assert trace.merged.tolist() == [0, 1, 2, 3, -1, -1, 5, -1, 7, -1, 10, 11]


def test_nodes_are_equal_after_each_blocking_exchange_and_differ_while_cycling() -> None:
    trace = run_daso(Daso(warm_up=1, cool_down=1))
    apart = np.ptp(trace.thetas, axis=1).max(axis=1) > 0
    assert apart.tolist() == (trace.phase == "cycling").tolist()


def test_after_a_halving_a_send_waits_for_the_exchange_in_flight() -> None:
    # An exchange is sent after mini-batch 3 and merged after 7; with a plateau after 3, B = W = 2, and the next send
    # would be due after 5.
    losses = iter([1.0, 0.9, 0.8, 0.8, *[0.1 / 2**epoch for epoch in range(10)]])
    trace = run_without_gradients(cycling(interval=4, wait=4, patience=1), epochs=12, loss=lambda theta: next(losses))
    assert trace.interval.tolist() == [4] * 4 + [2] * 8
    assert np.flatnonzero(trace.group >= 0).tolist() == [3, 7, 9, 11]
    assert np.flatnonzero(trace.merged >= 0).tolist() == [7, 9, 11]
    assert trace.merged[[7, 9, 11]].tolist() == [3, 7, 9]


def test_a_single_node_exchanges_nothing() -> None:
    trace = run_daso(Daso(), nodes=1, devices=3)
    assert (trace.group == -1).all()
    assert (trace.merged == -1).all()
    np.testing.assert_array_equal(trace.thetas, run_daso(cycling(), nodes=1, devices=3).thetas)


# Plateaus


def epochs_of_plateaus(losses: list[float], **hyper: Any) -> list[int]:
    """Return the epochs at the end of which B changed."""
    remaining = iter(losses)
    trace = run_without_gradients(cycling(interval=4, **hyper), epochs=len(losses), loss=lambda theta: next(remaining))
    return np.flatnonzero(np.diff(trace.interval)).tolist()


@pytest.mark.parametrize(
    ("losses", "hyper", "plateaus"),
    [
        ([9, 8, 7, 6, 5, 4], {"patience": 1}, []),
        ([9, 9, 8, 8, 7, 7, 0], {"patience": 1}, [1, 3, 5]),
        ([9, 9, 9, 8, 8, 8, 0], {"patience": 2}, [2, 5]),
        ([9, 9, 8, 8, 7, 7, 0], {"patience": 2}, []),
        ([9, 9, 9, 9, 9, 9, 9, 0], {"patience": 3}, [3, 6]),  # counted from zero after each plateau
        ([9] * 6 + [0], {}, [5]),  # the default patience is 5
        ([100, 99.1, 98.2, 0], {"patience": 1}, [1]),  # 98.2 is more than 1 % below 100, unlike 99.1
        ([100, 99, 0], {"patience": 1}, [1]),  # a decrease of exactly 1 % is too small
        ([100, 91, 89, 0], {"patience": 1, "threshold": 0.1}, [1]),
        ([100, 99.99, 99.98, 0], {"patience": 1, "threshold": 0.0}, []),
        ([5, 9, 8, 7, 0], {"patience": 1}, [1, 2, 3]),  # compared with the lowest loss, not the previous one
        ([-1, -1.005, -1.02, -9], {"patience": 1}, [1]),
        ([9, float("nan"), 8, 0], {"patience": 1}, [1]),
    ],
)
def test_a_plateau_is_patience_epochs_without_a_decrease_by_the_threshold(
    losses: list[float], hyper: dict[str, Any], plateaus: list[int]
) -> None:
    assert epochs_of_plateaus(losses, **hyper) == plateaus


def test_plateaus_count_in_the_cycling_phase_only_and_the_loss_is_that_of_the_mean() -> None:
    thetas = []

    def loss(theta: np.ndarray) -> float:
        thetas.append(theta.copy())
        return 1.0

    daso = Daso(interval=4, warm_up=3, cool_down=2, patience=1)
    trace = run_daso(daso, epochs=8, batches=2, loss=loss)
    assert trace.interval[trace.phase == "cycling"].tolist() == [4, 4, 4, 4, 2, 2]
    assert_close(thetas, trace.thetas[1::2].mean(axis=1))
    assert np.isnan(trace.loss[::2]).all()
    assert trace.loss[1::2].tolist() == [1.0] * 8
    assert np.isnan(run_daso(daso, epochs=8).loss).all()


def test_every_device_takes_every_batch_in_turn_at_its_node() -> None:
    start, calls = np.ones(2), []

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        calls.append((worker, theta.copy()))
        return np.full(2, float(worker // 2))

    simulate_daso(cycling(), start, gradient, nodes=2, devices=2, learning_rate=0.5, epochs=1, batches=2)
    assert [worker for worker, _ in calls] == [0, 1, 2, 3] * 2
    assert [theta[0] for _, theta in calls] == [1] * 4 + [1, 1, 0.5, 0.5]


def test_learning_rate_schedules_count_mini_batches() -> None:
    constant = run_daso(Daso(), learning_rate=Constant(ETA))
    np.testing.assert_array_equal(constant.thetas, run_daso(Daso()).thetas)
    trace = run_without_gradients(
        cycling(momentum=0.0),
        epochs=2,
        batches=2,
        learning_rate=WarmUp(0.4, length=4, divisor=4.0),
        gradient=lambda theta, worker: np.ones(1),
    )
    assert_close(1 - trace.thetas[:, 0, 0], np.cumsum([0.1, 0.175, 0.25, 0.325]))


# Refusals


@pytest.mark.parametrize(
    ("hyper", "text"),
    [
        ({"interval": 0}, "`interval` must be a positive integer. Received: interval=0"),
        ({"interval": 2.0}, "`interval` must be a positive integer. Received: interval=2.0"),
        ({"wait": 0}, "`wait` must be an integer from 1 to 4. Received: wait=0"),
        ({"wait": 5}, "`wait` must be an integer from 1 to 4. Received: wait=5"),
        ({"wait": True}, "`wait` must be an integer from 1 to 4. Received: wait=True"),
        ({"warm_up": -1}, "`warm_up` must be an integer of at least 0. Received: warm_up=-1"),
        ({"cool_down": 0.5}, "`cool_down` must be an integer of at least 0. Received: cool_down=0.5"),
        ({"momentum": 1.0}, "`momentum` must be a finite number of at least 0 and below 1. Received: momentum=1.0"),
        ({"momentum": -0.1}, "`momentum` must be a finite number of at least 0 and below 1. Received: momentum=-0.1"),
        ({"cast": "bf16"}, "`cast` must be True or False. Received: cast='bf16'"),
        ({"threshold": 1.0}, "`threshold` must be a finite number of at least 0 and below 1. Received: threshold=1.0"),
        (
            {"threshold": -0.1},
            "`threshold` must be a finite number of at least 0 and below 1. Received: threshold=-0.1",
        ),
        ({"patience": 0}, "`patience` must be a positive integer. Received: patience=0"),
    ],
)
def test_bad_hyper_parameters_are_refused(hyper: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Daso(**hyper)
    assert str(caught.value) == text
