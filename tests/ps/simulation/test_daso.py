"""DASO: against a transcription that keeps every device, its identities, its clock, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.daso_transcription import bfloat16
from support.daso_transcription import daso as transcribed
from support.transcriptions import Problem

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.ps.rules.schedules import Constant, StepDecay, WarmUp
from distkeras.ps.simulation.daso import Daso, DasoTrace, simulate_daso
from distkeras.ps.simulation.daso_cluster import merge, through_bfloat16
from distkeras.ps.simulation.timing import Communication, Gamma, Memoryless, SlowWorkers, Timing

ETA = 0.05
#: Loss of every epoch the same: the first counts as a decrease, each further one does not.
FLAT: dict[str, Any] = {"loss": lambda theta: 1.0}


def run(
    daso: Daso, *, nodes: int = 3, devices: int = 2, epochs: int = 4, batches: int = 3, seed: int = 0, **options: Any
) -> DasoTrace:
    """The run of a noisy quadratic."""
    job = Problem(nodes * devices, [], eta=ETA, seed=7)
    options.setdefault("learning_rate", ETA)
    options.setdefault("keep_thetas", True)
    return simulate_daso(
        daso,
        job.start,
        lambda theta, worker: job.g(worker, theta),
        nodes=nodes,
        devices=devices,
        epochs=epochs,
        batches=batches,
        seed=seed,
        **options,
    )


def still(
    daso: Daso,
    *,
    nodes: int = 2,
    devices: int = 2,
    epochs: int = 20,
    batches: int = 1,
    gradient: Callable[..., Any] = lambda theta, worker: np.zeros(1),
    **options: Any,
) -> DasoTrace:
    """A run in which nothing happens to the parameters: for who sends when."""
    options.setdefault("learning_rate", 1.0)
    return simulate_daso(
        daso, np.ones(1), gradient, nodes=nodes, devices=devices, epochs=epochs, batches=batches, **options
    )


def cycling(**hyper: Any) -> Daso:
    """No other phase."""
    return Daso(**{"warm_up": 0, "cool_down": 0, **hyper})


def blocking(epochs: int, **hyper: Any) -> Daso:
    """Blocking throughout, as sequential methods are: no cast."""
    return Daso(**{"warm_up": epochs, "cool_down": 0, "cast": False, **hyper})


def assert_close(actual: list[np.ndarray] | np.ndarray | float, expected: float | np.ndarray | list[Any]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


# transcription


def plan_of(daso: Daso, losses: list[float], epochs: int, batches: int) -> list[Any]:
    """B and W in force at each batch, None where blocking: worked out apart from the product."""
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
@example(3, 2, 4, 4, (1, 4, 1), 1, {"momentum": 0.9, "cast": True, "patience": 1}, [1.0] * 9)  # halved under way
@example(3, 2, 8, None, (1, 5, 2), 4, {"momentum": 0.9, "cast": False, "patience": 1}, [1.0] * 9)  # down, and reset
def test_it_equals_the_transcription_of_all_devices(
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
    daso = Daso(interval, min(wait, interval) if wait else None, warm_up=warm_up, cool_down=cool_down, **hyper)
    rate = StepDecay(ETA, boundaries=(3, 7), factor=0.5)
    told = iter(losses)
    trace = run(
        daso,
        nodes=nodes,
        devices=devices,
        epochs=epochs,
        batches=batches,
        learning_rate=rate,
        loss=lambda theta: next(told),
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


def test_by_hand() -> None:
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
    assert_close(trace.thetas[..., 0], expected)


# identities


@pytest.mark.parametrize(("nodes", "devices"), [(1, 3), (3, 1), (3, 2), (4, 4)])
def test_73_blocking_it_is_synchronous_sgd_over_all_devices(nodes: int, devices: int) -> None:
    n = nodes * devices
    trace = run(blocking(2, momentum=0.0), nodes=nodes, devices=devices, epochs=2, batches=5)
    ssgd = Problem(n, [*range(n)] * 10, eta=ETA, seed=7).simulated(make("ssgd"))
    for node in range(nodes):
        assert_close(trace.thetas[:, node], ssgd.centers[n - 1 :: n])


@pytest.mark.parametrize("rule", ["ssgdm", "ssgdm_local"])
@pytest.mark.parametrize(("nodes", "devices"), [(1, 3), (3, 1), (3, 2)])
def test_74_also_with_momenta_that_nobody_exchanges(rule: str, nodes: int, devices: int) -> None:
    n = nodes * devices
    trace = run(blocking(2, momentum=0.8), nodes=nodes, devices=devices, epochs=2, batches=8)
    job = Problem(n, [*range(n)] * 16, eta=ETA / n, seed=7)  # the rules add the workers' steps up
    centers = job.simulated(make(rule, momentum=0.8)).centers[n - 1 :: n]
    for node in range(nodes):
        assert_close(trace.thetas[:, node], centers)


@pytest.mark.parametrize("wait", [0, 1, 2, 5])
@pytest.mark.parametrize("members", [2, 3, 16])
def test_75_the_merge_weights_sum_to_one(members: int, wait: int) -> None:
    x = np.array([1.5, -3.0])
    assert_close(merge(x, members * x, members, wait), x)
    # The same affine map of all parameters maps the merge.
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
def test_77_78_intervals_and_waits_halve_to_one_and_begin_anew(
    interval: int, wait: int | None, pairs: list[tuple[int, int]]
) -> None:
    trace = still(cycling(interval=interval, wait=wait, patience=1), epochs=2 + 2 * len(pairs), **FLAT)
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
    states = {0: 1 + 2**-7, 1: 1.0, 2: 1.0}  # exact in bfloat16, their mean is not
    trace = still(
        Daso(warm_up=1, cool_down=0, momentum=0.0),
        nodes=3,
        devices=1,
        epochs=1,
        gradient=lambda theta, worker: np.array([1 - states[worker]]),
    )
    assert_close(trace.theta, np.full((3, 1), 1 + 2**-7 / 3))
    assert trace.theta[0, 0] != through_bfloat16(trace.theta)[0, 0]


def test_81_without_the_cast_small_steps_count_and_with_it_they_may_be_lost() -> None:
    def small(theta: np.ndarray, worker: int) -> np.ndarray:
        return np.full(1, -(2.0**-10))

    moved = [still(Daso(warm_up=20, cast=cast, momentum=0.0, cool_down=0), gradient=small) for cast in (False, True)]
    assert [trace.mean[0] for trace in moved] == [1 + 20 * 2**-10, 1.0]
    # Nothing is cast while cycling.
    trace = still(cycling(interval=1, momentum=0.0), gradient=small)
    assert_close(trace.mean[0], still(cycling(interval=1, momentum=0.0, cast=False), gradient=small).mean[0])
    assert trace.mean[0] > 1 + 5 * 2**-10


@pytest.mark.parametrize(("interval", "wait"), [(4, 1), (4, 4), (1, 1), (3, 2), (8, 2)])
def test_91_equation_1_weighs_the_own_parameters_by_twice_the_wait(interval: int, wait: int) -> None:
    """A node alone moves, by 1 a batch: what the other nodes get of it shows the weights."""
    nodes, end = 3, interval + wait
    trace = still(
        cycling(interval=interval, wait=wait, momentum=0.0),
        nodes=nodes,
        devices=1,
        epochs=end,
        gradient=lambda theta, worker: np.array([-1.0 if worker == 0 else 0.0]),
        keep_thetas=True,
    )
    before, after = trace.thetas[-2, :, 0], trace.thetas[-1, :, 0]
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
    trace = still(cycling(interval=interval, wait=wait), devices=3, epochs=18)
    assert np.flatnonzero(trace.group >= 0).tolist() == sends
    assert trace.group[sends].tolist() == [number % 3 for number in range(len(sends))]
    assert {batch: int(sent) for batch, sent in enumerate(trace.merged) if sent >= 0} == merges


# phases


def test_the_phases_take_their_epochs_and_groups_take_turns_through_all_of_them() -> None:
    trace = still(Daso(interval=2, warm_up=2, cool_down=1), devices=3, epochs=6, batches=2)
    assert trace.phase.tolist() == ["warm_up"] * 4 + ["cycling"] * 6 + ["cool_down"] * 2
    assert trace.interval.tolist() == [1] * 4 + [2] * 6 + [1] * 2
    assert trace.wait.tolist() == [0] * 4 + [1] * 6 + [0] * 2
    assert trace.group.tolist() == [0, 1, 2, 0, -1, 1, -1, 2, -1, 0, 1, 2]
    # What batch 9 sent is overtaken by the blocking exchange after batch 10.
    assert trace.merged.tolist() == [0, 1, 2, 3, -1, -1, 5, -1, 7, -1, 10, 11]


def test_nodes_are_equal_after_each_blocking_exchange_and_apart_while_cycling() -> None:
    trace = run(Daso(warm_up=1, cool_down=1))
    apart = np.ptp(trace.thetas, axis=1).max(axis=1) > 0
    assert apart.tolist() == (trace.phase == "cycling").tolist()


def test_after_a_halving_a_send_waits_for_the_one_on_its_way() -> None:
    # Sent after batch 3 to be merged after 7; a plateau after 3 brings B = W = 2, and the next send would be due at 5.
    losses = iter([1.0, 0.9, 0.8, 0.8, *[0.1 / 2**epoch for epoch in range(10)]])
    trace = still(cycling(interval=4, wait=4, patience=1), epochs=12, loss=lambda theta: next(losses))
    assert trace.interval.tolist() == [4] * 4 + [2] * 8
    assert np.flatnonzero(trace.group >= 0).tolist() == [3, 7, 9, 11]
    assert np.flatnonzero(trace.merged >= 0).tolist() == [7, 9, 11]
    assert trace.merged[[7, 9, 11]].tolist() == [3, 7, 9]


def test_a_single_node_synchronizes_nothing() -> None:
    options: dict[str, Any] = {"nodes": 1, "devices": 3, "communication": Communication(latency=100.0)}
    trace = run(Daso(), **options)
    assert (trace.group == -1).all()
    assert (trace.merged == -1).all()
    assert trace.time[-1] == 12
    np.testing.assert_array_equal(trace.thetas, run(cycling(), **options).thetas)


# plateaus


def epochs_of_plateaus(losses: list[float], **hyper: Any) -> list[int]:
    """The epochs at whose end B changed."""
    told = iter(losses)
    trace = still(cycling(interval=4, **hyper), epochs=len(losses), loss=lambda theta: next(told))
    return np.flatnonzero(np.diff(trace.interval)).tolist()


@pytest.mark.parametrize(
    ("losses", "hyper", "plateaus"),
    [
        ([9, 8, 7, 6, 5, 4], {"patience": 1}, []),
        ([9, 9, 8, 8, 7, 7, 0], {"patience": 1}, [1, 3, 5]),
        ([9, 9, 9, 8, 8, 8, 0], {"patience": 2}, [2, 5]),
        ([9, 9, 8, 8, 7, 7, 0], {"patience": 2}, []),
        ([9, 9, 9, 9, 9, 9, 9, 0], {"patience": 3}, [3, 6]),  # counted anew after each
        ([9] * 6 + [0], {}, [5]),  # patience 5
        ([100, 99.1, 98.2, 0], {"patience": 1}, [1]),  # 98.2 is more than 1 % below 100, 99.1 is not
        ([100, 99, 0], {"patience": 1}, [1]),  # exactly 1 % is not more
        ([100, 91, 89, 0], {"patience": 1, "threshold": 0.1}, [1]),
        ([100, 99.99, 99.98, 0], {"patience": 1, "threshold": 0.0}, []),
        ([5, 9, 8, 7, 0], {"patience": 1}, [1, 2, 3]),  # held against the lowest, not the one before
        ([-1, -1.005, -1.02, -9], {"patience": 1}, [1]),
        ([9, float("nan"), 8, 0], {"patience": 1}, [1]),
    ],
)
def test_a_plateau_is_patience_epochs_without_a_decrease_by_the_threshold(
    losses: list[float], hyper: dict[str, Any], plateaus: list[int]
) -> None:
    assert epochs_of_plateaus(losses, **hyper) == plateaus


def test_plateaus_of_the_other_phases_do_not_count_and_the_loss_is_of_the_mean() -> None:
    seen = []

    def loss(theta: np.ndarray) -> float:
        seen.append(theta.copy())
        return 1.0

    daso = Daso(interval=4, warm_up=3, cool_down=2, patience=1)
    trace = run(daso, epochs=8, batches=2, loss=loss)
    assert trace.interval[trace.phase == "cycling"].tolist() == [4, 4, 4, 4, 2, 2]
    assert_close(seen, trace.thetas[1::2].mean(axis=1))
    assert np.isnan(trace.loss[::2]).all()
    assert trace.loss[1::2].tolist() == [1.0] * 8
    assert np.isnan(run(daso, epochs=8).loss).all()


# virtual time


@dataclasses.dataclass(frozen=True)
class Fixed(Timing):
    """Each worker's steps take what is said."""

    seconds: tuple[float, ...] = ()

    def sampler(self, workers: int, rng: np.random.Generator) -> Callable[..., Any]:
        return lambda worker, steps: self.seconds[worker] * steps


#: Two nodes: an exchange is two messages of half the payload, so 2 * 3 seconds.
SLOW = Communication(latency=3.0)


def test_a_blocking_exchange_holds_all_and_a_node_is_as_slow_as_its_slowest_device() -> None:
    trace = still(blocking(3), epochs=3, timing=Fixed(seconds=(1.0, 2.0, 5.0, 4.0)), communication=SLOW)
    assert trace.time.tolist() == [5 + 6, 10 + 12, 15 + 18]


@dataclasses.dataclass(frozen=True)
class TakingTurns(Timing):
    """In one batch the first worker takes 5 and the second 1, in the next the other way round."""

    def sampler(self, workers: int, rng: np.random.Generator) -> Callable[..., Any]:
        seconds = itertools.cycle([5.0, 1.0, 1.0, 5.0])
        return lambda worker, steps: next(seconds)


def test_a_blocking_exchange_makes_the_quick_wait_for_the_slow_each_time() -> None:
    options: dict[str, Any] = {"devices": 1, "epochs": 2, "timing": TakingTurns()}
    assert still(blocking(2), communication=SLOW, **options).time.tolist() == [5 + 6, 11 + 5 + 6]
    assert still(cycling(), **options).time.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("interval", "wait", "times"),
    [
        # Sent at 2, there at 8: a wait of 6 batches hides it, one of 1 does not.
        (2, 1, [1, 2, 8, 9, 15, 16, 22, 23]),
        (2, 2, [1, 2, 3, 8, 9, 14, 15, 20]),
        (6, 6, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_non_blocking_exchange_is_waited_for_only_if_it_comes_late(
    interval: int, wait: int, times: list[int]
) -> None:
    trace = still(cycling(interval=interval, wait=wait), epochs=8, communication=SLOW)
    assert trace.time.tolist() == times


def test_nodes_run_apart_until_they_merge() -> None:
    # Node 0 takes 1 a batch, node 1 takes 2. Sent at 4 by the last, there at 10: node 0 waits for it, and so does 1.
    options: dict[str, Any] = {"devices": 1, "timing": Fixed(seconds=(1.0, 2.0)), "communication": SLOW}
    assert still(cycling(interval=2), epochs=4, **options).time.tolist() == [2, 4, 10, 12]
    # Nobody waits for the slower node who has nothing to merge.
    alone: dict[str, Any] = {**options, "timing": Fixed(seconds=(0.0, 2.0)), "communication": None}
    assert still(cycling(interval=2), epochs=4, **alone).time.tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("daso", "dtype", "size"),
    [
        (Daso(warm_up=1, cool_down=0), np.float32, 2),
        (Daso(warm_up=1, cool_down=0), np.float64, 2),
        (blocking(1), np.float32, 4),
        (blocking(1), np.float64, 8),
    ],
)
def test_the_cast_makes_what_is_sent_smaller(daso: Daso, dtype: type[float], size: int) -> None:
    elements, nodes = 10, 4  # three in the largest quarter
    trace = simulate_daso(
        daso,
        np.ones(elements),
        lambda theta, worker: np.zeros(elements),
        nodes=nodes,
        devices=1,
        learning_rate=1.0,
        epochs=1,
        batches=1,
        communication=Communication(latency=0.5, bandwidth=8.0),
        dtype=dtype,
    )
    assert trace.theta.dtype == dtype
    assert trace.time[0] == 1 + 2 * (nodes - 1) * (0.5 + 3 * size / 8.0)


@pytest.mark.parametrize("cast", [False, True])
def test_what_is_sent_while_cycling_is_not_made_smaller(cast: bool) -> None:
    # Two messages of one float64 at a byte a second: sent at 1, there at 17.
    trace = still(cycling(interval=1, cast=cast), epochs=2, communication=Communication(bandwidth=1.0))
    assert trace.time.tolist() == [1, 17]


@pytest.mark.parametrize("timing", [Gamma(), Memoryless(), SlowWorkers(share=0.2)])
def test_cycling_takes_less_time_than_blocking_for_the_same_batches(timing: Gamma | Memoryless | SlowWorkers) -> None:
    options: dict[str, Any] = {
        "timing": timing,
        "communication": Communication(latency=50.0),
        "epochs": 6,
        "dtype": np.float32,
    }
    fast, slow = run(Daso(), **options), run(Daso(warm_up=6, cool_down=0), **options)
    assert fast.time[2] == slow.time[2]  # one epoch of warm-up
    assert (np.diff(fast.time) > 0).all()
    assert fast.time[-1] < slow.time[-1]


# a run


def test_a_seed_gives_the_same_run_to_the_bit_and_another_other_times() -> None:
    options: dict[str, Any] = {"timing": Memoryless(), "loss": lambda theta: float(theta @ theta), "dtype": np.float32}
    first, again, other = (run(Daso(patience=1), seed=seed, **options) for seed in (5, 5, 6))
    for field in vars(first):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    np.testing.assert_array_equal(first.thetas, other.thetas)
    assert not np.array_equal(first.time, other.time)


def test_every_device_takes_every_batch_in_turn_at_its_node() -> None:
    start, calls = np.ones(2), []

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        calls.append((worker, theta.copy()))
        return np.full(2, float(worker // 2))

    simulate_daso(cycling(), start, gradient, nodes=2, devices=2, learning_rate=0.5, epochs=1, batches=2)
    assert [worker for worker, _ in calls] == [0, 1, 2, 3] * 2
    assert [theta[0] for _, theta in calls] == [1] * 4 + [1, 1, 0.5, 0.5]


@pytest.mark.parametrize("nodes", [1, 2])
def test_inputs_are_left_alone(nodes: int) -> None:
    start = np.ones(2)
    simulate_daso(
        Daso(), start, lambda theta, worker: start, nodes=nodes, devices=1, learning_rate=0.5, epochs=2, batches=2
    )
    np.testing.assert_array_equal(start, np.ones(2))


def test_schedules_are_over_batches() -> None:
    constant = run(Daso(), learning_rate=Constant(ETA))
    np.testing.assert_array_equal(constant.thetas, run(Daso()).thetas)
    trace = still(
        cycling(momentum=0.0),
        epochs=2,
        batches=2,
        learning_rate=WarmUp(0.4, length=4, divisor=4.0),
        gradient=lambda theta, worker: np.ones(1),
        keep_thetas=True,
    )
    assert_close(1 - trace.thetas[:, 0, 0], np.cumsum([0.1, 0.175, 0.25, 0.325]))


@pytest.mark.parametrize("keep", [False, True])
def test_thetas_are_kept_on_request(keep: bool) -> None:
    trace = run(Daso(), keep_thetas=keep)
    assert (trace.thetas is not None) == keep
    if keep:
        assert trace.thetas.shape == (12, 3, 5)
        np.testing.assert_array_equal(trace.thetas[-1], trace.theta)


# refusals


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
        ({"cast": "bf16"}, "`cast` must be one of True, False. Received: cast='bf16'"),
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 0}, "`nodes` must be a positive integer. Received: nodes=0"),
        ({"devices": 1.5}, "`devices` must be a positive integer. Received: devices=1.5"),
        ({"batches": 0}, "`batches` must be a positive integer. Received: batches=0"),
        ({"epochs": 0}, "`epochs` must be a positive integer. Received: epochs=0"),
        ({"epochs": 1}, "`epochs` must be at least those of warm-up and cool-down, 1 + 1. Received: epochs=1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be a finite number above 0. Received: learning_rate=0.0"),
        ({"dtype": np.int32}, f"`dtype` must be float32 or float64. Received: dtype={np.int32!r}"),
        (
            {"communication": Communication(service=1.0)},
            "`service` must be 0 where there is no server. Received: service=1.0",
        ),
        (
            {"gradient": lambda theta, worker: np.zeros(2)},
            "`gradient` must return shape (1,). Received: (2,)",
        ),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        still(Daso(), **options)
    assert str(caught.value) == text


def test_parameters_must_be_flat() -> None:
    with pytest.raises(ConfigurationError, match=r"^`theta0` must be one flat vector. Received: shape \(2, 2\)$"):
        simulate_daso(Daso(), np.ones((2, 2)), None, nodes=2, devices=1, learning_rate=0.1, epochs=2, batches=1)
