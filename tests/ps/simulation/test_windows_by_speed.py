"""Windows that follow the workers' speeds, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import center_rules, make
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Communication, Draw, SlowWorkers, Timing
from distkeras.ps.simulation.virtual_job import Trace


@dataclass(frozen=True)
class FixedTiming(Timing):
    """Each step of a worker takes the worker's given seconds."""

    seconds: tuple[float, ...] = ()

    def sampler(self, workers: int, rng: np.random.Generator) -> Draw:
        return lambda worker, steps: self.seconds[worker] * steps


#: The first of four workers takes four times as long.
ONE_SLOW = FixedTiming(seconds=(4.0, 1.0, 1.0, 1.0))


def run(rule: Any, timing: Timing = ONE_SLOW, *, workers: int = 4, steps: int = 40, **options: Any) -> Trace:
    options.setdefault("gradient", lambda theta, worker: theta * (1 + worker) - 1)
    options.setdefault("learning_rate", 0.01)
    return simulate(rule, np.ones(3), options.pop("gradient"), workers=workers, timing=timing, steps=steps, **options)


def windows_of(trace: Trace, worker: int) -> list[int]:
    steps: list[int] = trace.steps[trace.worker == worker].tolist()
    return steps


ASYNCHRONOUS = [
    name
    for name, kind in center_rules().items()
    if not (rule := kind()).traits.synchronous and not rule.traits.gradient and not rule.probes
]


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_windows_of_a_worker_that_is_four_times_slower_become_a_quarter(name: str) -> None:
    rule = make(name, window="by_speed", window_max=8)
    trace = run(rule, steps=60)
    slow = windows_of(trace, 0)
    if name == "ringmaster":  # the rule refuses the first commit and applies its retry
        assert trace.refused[:1, 0].tolist() == [0]
    assert slow == [8] + [2] * (len(slow) - 1)
    assert set(windows_of(trace, 1)) == {8}
    # After that, workers commit equally often: 8 steps of 1 s, or 2 steps of 4 s.
    assert len(slow) > 3
    late = trace.worker[trace.time > trace.time[trace.worker == 0][0]]
    counts = Counter(late.tolist())
    assert max(counts.values()) - min(counts.values()) <= 1


def test_workers_that_are_equally_fast_keep_the_longest_window() -> None:
    even = FixedTiming(seconds=(3.0,) * 4)
    by_speed = run(make("agn", window="by_speed", window_max=6), even, keep_centers=True)
    fixed = run(make("agn", window=6), even, keep_centers=True)
    np.testing.assert_array_equal(by_speed.centers, fixed.centers)
    np.testing.assert_array_equal(by_speed.time, fixed.time)


def test_drawn_times_give_windows_in_proportion() -> None:
    trace = run(make("mla", window="by_speed"), SlowWorkers(share=0.25, factor=4.0, variation=0.1), steps=200)
    slow = windows_of(trace, 0)
    assert slow[0] == 50
    assert all(10 <= window <= 14 for window in slow[1:])


def test_a_speed_includes_the_time_of_exchanges() -> None:
    # 8 steps of 1 s and 8 s of transfers: 1/2 step per second. 8 steps of 4 s and 4 s of transfers, because the first
    # center needs none: 2/9 per second, hence floor(8 * 4/9) = 3. 3 in 20 s: floor(8 * .15 / .5) = 2. 2 in 16 s: 2.
    rule, timing = make("downpour", window="by_speed", window_max=8), FixedTiming(seconds=(4.0, 1.0))
    trace = run(rule, timing, workers=2, communication=Communication(latency=4.0))
    assert windows_of(trace, 0)[:5] == [8, 3, 2, 2, 2]
    assert set(windows_of(trace, 1)) == {8}


def test_a_speed_excludes_the_time_at_a_busy_server() -> None:
    # Each exchange takes 20 s at the server, one after the other. Windows depend on the time of the workers only.
    trace = run(make("downpour", window="by_speed", window_max=8), communication=Communication(service=20.0), steps=60)
    assert windows_of(trace, 0)[1:] == [2] * (len(windows_of(trace, 0)) - 1)


def test_a_run_with_the_same_seed_is_the_same() -> None:
    first, again = (run(make("fedbuff", window="by_speed"), SlowWorkers(share=0.5), steps=50, seed=3) for _ in range(2))
    for field in vars(first):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))


def test_a_refused_window_is_computed_again_from_the_same_mini_batches() -> None:
    calls: list[tuple[int, int]] = []

    def gradient(theta: np.ndarray, worker: int, batch: int) -> np.ndarray:
        calls.append((worker, batch))
        return theta

    rule = make("ringmaster", window="by_speed", window_max=8, threshold=6)
    trace = run(rule, gradient=gradient, numbered=True, steps=30)
    assert trace.refused[0, 0] == 0
    batches = [batch for worker, batch in calls if worker == 0]
    assert batches[:18] == [*range(8), *range(8), 8, 9]
    assert windows_of(trace, 0)[:2] == [8, 2]


def test_windows_by_speed_can_have_a_staleness_bound() -> None:
    trace = run(make("agn", window="by_speed", window_max=8), staleness_bound=1, steps=30)
    slow = windows_of(trace, 0)
    assert slow == [8] + [2] * (len(slow) - 1)


def test_windows_by_speed_are_refused_under_a_schedule() -> None:
    with pytest.raises(ConfigurationError, match="`window` must be a number of steps under a schedule"):
        simulate(
            make("agn", window="by_speed"), np.ones(1), lambda t, w: t, workers=1, learning_rate=0.1, schedule=[0, 0]
        )


def test_windows_by_speed_are_refused_in_rounds() -> None:
    with pytest.raises(ConfigurationError, match=r"`rounds` need the same window at all workers.*'by_speed'"):
        run(make("agn", window="by_speed"), rounds=True)


def test_other_windows_without_a_number_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="`window` must be a number of steps or 'by_speed' in a simulation"):
        run(make("agn", window="auto"))
