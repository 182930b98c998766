"""DASO under a virtual clock: which nodes wait for each other, and how long."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ps.daso_runs import blocking, cycling, run_daso, run_without_gradients

from distkeras.ps.rules.daso import Daso
from distkeras.ps.simulation.daso import simulate_daso
from distkeras.ps.simulation.timing import Communication, Gamma, Memoryless, SlowWorkers, Timing


@dataclasses.dataclass(frozen=True)
class FixedTiming(Timing):
    """Each step of a worker takes the worker's given seconds."""

    seconds: tuple[float, ...] = ()

    def sampler(self, workers: int, rng: np.random.Generator) -> Callable[..., Any]:
        return lambda worker, steps: self.seconds[worker] * steps


#: With two nodes, an exchange is two messages of half the payload and takes 2 * 3 seconds.
SLOW = Communication(latency=3.0)


def test_all_nodes_wait_for_a_blocking_exchange_and_a_node_for_its_slowest_device() -> None:
    trace = run_without_gradients(
        blocking(3), epochs=3, timing=FixedTiming(seconds=(1.0, 2.0, 5.0, 4.0)), communication=SLOW
    )
    assert trace.time.tolist() == [5 + 6, 10 + 12, 15 + 18]


@dataclasses.dataclass(frozen=True)
class AlternatingTiming(Timing):
    """In one mini-batch, the first worker takes 5 s and the second one 1 s; in the next one, it is reversed."""

    def sampler(self, workers: int, rng: np.random.Generator) -> Callable[..., Any]:
        seconds = itertools.cycle([5.0, 1.0, 1.0, 5.0])
        return lambda worker, steps: next(seconds)


def test_a_fast_node_waits_for_the_slow_one_at_each_blocking_exchange() -> None:
    options: dict[str, Any] = {"devices": 1, "epochs": 2, "timing": AlternatingTiming()}
    assert run_without_gradients(blocking(2), communication=SLOW, **options).time.tolist() == [5 + 6, 11 + 5 + 6]
    assert run_without_gradients(cycling(), **options).time.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("interval", "wait", "times"),
    [
        # Sent at 2, received at 8: a wait of 6 mini-batches hides it, unlike a wait of 1.
        (2, 1, [1, 2, 8, 9, 15, 16, 22, 23]),
        (2, 2, [1, 2, 3, 8, 9, 14, 15, 20]),
        (6, 6, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_node_waits_for_a_non_blocking_exchange_only_if_it_is_late(
    interval: int, wait: int, times: list[int]
) -> None:
    trace = run_without_gradients(cycling(interval=interval, wait=wait), epochs=8, communication=SLOW)
    assert trace.time.tolist() == times


def test_nodes_do_not_wait_for_each_other_until_they_merge() -> None:
    # Node 0 takes 1 s per mini-batch, and node 1 takes 2 s. Node 1 sends last, at 4, and both receive at 10.
    options: dict[str, Any] = {"devices": 1, "timing": FixedTiming(seconds=(1.0, 2.0)), "communication": SLOW}
    assert run_without_gradients(cycling(interval=2), epochs=4, **options).time.tolist() == [2, 4, 10, 12]
    # A node that has nothing to merge does not wait for the slower one.
    alone: dict[str, Any] = {**options, "timing": FixedTiming(seconds=(0.0, 2.0)), "communication": None}
    assert run_without_gradients(cycling(interval=2), epochs=4, **alone).time.tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("daso", "dtype", "size"),
    [
        (Daso(warm_up=1, cool_down=0), np.float32, 2),
        (Daso(warm_up=1, cool_down=0), np.float64, 2),
        (blocking(1), np.float32, 4),
        (blocking(1), np.float64, 8),
    ],
)
def test_the_cast_makes_messages_smaller(daso: Daso, dtype: type[float], size: int) -> None:
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
def test_the_cast_does_not_make_messages_smaller_while_cycling(cast: bool) -> None:
    # Two messages of one float64 at one byte per second: sent at 1, received at 17.
    trace = run_without_gradients(cycling(interval=1, cast=cast), epochs=2, communication=Communication(bandwidth=1.0))
    assert trace.time.tolist() == [1, 17]


@pytest.mark.parametrize("timing", [Gamma(), Memoryless(), SlowWorkers(share=0.2)])
def test_cycling_takes_less_time_than_blocking_for_the_same_batches(timing: Gamma | Memoryless | SlowWorkers) -> None:
    options: dict[str, Any] = {
        "timing": timing,
        "communication": Communication(latency=50.0),
        "epochs": 6,
        "dtype": np.float32,
    }
    fast, slow = run_daso(Daso(), **options), run_daso(Daso(warm_up=6, cool_down=0), **options)
    assert fast.time[2] == slow.time[2]  # one epoch of warm-up
    assert (np.diff(fast.time) > 0).all()
    assert fast.time[-1] < slow.time[-1]
