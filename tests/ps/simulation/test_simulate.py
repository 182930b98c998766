"""The simulator: determinism, memory, virtual time, and the arguments that it refuses."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.present import present

from distkeras.ps.center.center import Center
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.rules.schedules import Constant
from distkeras.ps.simulation import virtual_job
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Communication, Gamma, Memoryless, SlowWorkers, Timing
from distkeras.ps.simulation.virtual_job import Trace

CURVES = np.linspace(0.5, 2.0, 6, dtype=np.float32)


def quadratic_gradient(theta: np.ndarray, worker: int) -> np.ndarray:
    return CURVES * theta + np.float32(0.1) * np.float32(worker)


def with_finite_window(name: str) -> Rule:
    return make(name) if make(name).window is not None else make(name, window=2)


def run(
    rule: Rule | str,
    *,
    workers: int = 4,
    size: int = 6,
    gradient: Callable[..., Any] = quadratic_gradient,
    **options: Any,
) -> Trace:
    options.setdefault("learning_rate", 0.02)
    return simulate(rule, np.ones(size), gradient, workers=workers, **options)


@pytest.mark.parametrize("name", center_rules())
def test_a_run_is_determined_by_its_seed_to_the_bit(name: str) -> None:
    options: dict[str, Any] = {
        "timing": Memoryless(),
        "steps": 30,
        "dtype": np.float32,
        "measure_gap": True,
        "keep_centers": True,
    }
    first, again, other = (run(with_finite_window(name), seed=seed, **options) for seed in (5, 5, 6))
    for field in vars(first):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    assert first.theta.dtype == np.float32
    assert np.isfinite(first.theta).all()
    assert not np.array_equal(first.time, other.time)


@pytest.mark.parametrize("name", center_rules())
def test_a_recorded_order_replays_the_run_to_the_bit(name: str) -> None:
    recorded = run(with_finite_window(name), timing=Gamma(heterogeneous=True), steps=32, keep_centers=True)
    replayed = run(with_finite_window(name), schedule=recorded.worker.tolist(), keep_centers=True)
    np.testing.assert_array_equal(recorded.centers, replayed.centers)
    np.testing.assert_array_equal(recorded.staleness, replayed.staleness)


def test_the_trace_has_a_row_for_each_commit() -> None:
    trace = run(make("agn", window=3), schedule=[0, 1, 1, 3], keep_centers=True, measure_gap=True)
    assert trace.worker.tolist() == [0, 1, 1, 3]
    assert trace.clock.tolist() == trace.time.tolist() == [0, 1, 2, 3]
    assert trace.staleness.tolist() == [0, 1, 0, 3]
    assert trace.steps.tolist() == [3] * 4
    assert trace.scale.tolist() == [1.0] * 4
    assert trace.gap[0] == trace.gap[2] == 0 < trace.gap[1]
    np.testing.assert_array_equal(present(trace.centers)[-1], trace.theta)
    plain = run("asgd", schedule=[0, 1], steps=1)
    assert plain.centers is None
    assert np.isnan(plain.gap).tolist() == np.isnan(plain.normalized_gap).tolist() == [True]


def test_inputs_are_not_changed() -> None:
    start = np.ones(6)
    simulate("downpour", start, quadratic_gradient, workers=2, learning_rate=0.1, schedule=[0, 1, 0])
    np.testing.assert_array_equal(start, np.ones(6))


def test_all_workers_begin_with_the_center_at_clock_0() -> None:
    thetas = []
    run("asgd", schedule=[2, 0, 1, 3], gradient=lambda theta, worker: thetas.append(theta.copy()) or theta)
    np.testing.assert_array_equal(thetas, np.ones((4, 6)))


def test_the_gradient_is_called_once_per_step_in_the_order_of_the_commits() -> None:
    calls = []
    run(make("downpour", window=2), schedule=[1, 0, 1], gradient=lambda theta, worker: calls.append(worker) or theta)
    assert calls == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("window", [64, 65, 200])
def test_computing_long_windows_in_bursts_does_not_change_the_trace(window: int) -> None:
    options: dict[str, Any] = {"timing": Gamma(), "steps": 6, "communication": Communication(latency=5.0)}
    trace = run(make("downpour", window=window), gradient=lambda theta, worker: np.ones(6), workers=1, **options)
    assert trace.steps.tolist() == [window] * 6
    np.testing.assert_allclose(trace.theta, 1 - 0.02 * window * 6, rtol=1e-12)


# Memory


def vectors_allocated(monkeypatch: pytest.MonkeyPatch, rule: Rule, workers: int, steps: int, **options: Any) -> int:
    """Return the number of vectors that the pool has allocated at the end of a run."""
    centers: list[Center] = []

    class RecordedCenter(Center):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            centers.append(self)

    monkeypatch.setattr(virtual_job, "Center", RecordedCenter)
    run(rule, workers=workers, timing=Gamma(), steps=steps, **options)
    return centers[0].pool.made


@pytest.mark.parametrize("name", ["asgd", "downpour", "nag_asgd", "dana_slim", "dana_zero", "smega2", "dc_asgd"])
def test_a_run_allocates_one_vector_per_worker_and_a_few_more(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    steady = {"gradient": lambda theta, worker: CURVES, "learning_rate": 1e-4}
    assert vectors_allocated(monkeypatch, make(name), 64, 1000, **steady) <= 64 + 3


def test_synchronous_workers_share_the_center_that_they_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vectors_allocated(monkeypatch, make("ssgd"), 64, 640) <= 4


def test_memory_is_little_more_than_the_centers_of_the_workers() -> None:
    workers, size = 64, 20_000
    value = np.ones(size)
    tracemalloc.start()
    run("asgd", workers=workers, size=size, gradient=lambda theta, worker: value, timing=Gamma(), steps=500)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (workers + 8) * value.nbytes


# Virtual time


class ConstantTiming(Timing):
    """Each step takes the mean time; worker k begins k seconds late, so that no two events coincide."""

    def sampler(self, workers: int, rng: np.random.Generator) -> Callable[..., Any]:
        late = list(range(workers))

        def draw(worker: int, steps: int) -> float:
            extra, late[worker] = late[worker], 0
            return self.mean * steps + extra

        return draw


def test_time_without_communication_is_the_time_of_computation() -> None:
    trace = run(make("agn", window=2), workers=3, timing=ConstantTiming(mean=10.0), steps=6)
    assert trace.time.tolist() == [20, 21, 22, 40, 41, 42]


def test_an_exchange_takes_the_latency_and_the_bytes_of_both_directions() -> None:
    # A vector of 48 bytes at 16 bytes per second takes 3 s, and the latency is 2 s, in each direction.
    link = Communication(latency=2.0, bandwidth=16.0)
    trace = run("asgd", workers=1, timing=ConstantTiming(mean=10.0), steps=3, communication=link)
    assert trace.time.tolist() == [15, 35, 55]
    two_vectors = make("adag", window=1, algorithm=11)  # also sends the center that it received
    assert run(two_vectors, workers=1, timing=ConstantTiming(mean=10.0), steps=2, communication=link).time.tolist() == [
        18,
        41,
    ]
    pulls_first = make("aeasgd", window=1)
    assert run(pulls_first, workers=1, timing=ConstantTiming(mean=10.0), steps=2, communication=link).time.tolist() == [
        15,
        35,
    ]


def test_the_server_serves_one_exchange_at_a_time() -> None:
    # Each exchange of three workers takes 12 s at the server, and computation 10 s: the server is the bottleneck.
    trace = run("asgd", workers=3, timing=ConstantTiming(mean=10.0), steps=6, communication=Communication(service=12.0))
    assert trace.time.tolist() == [22, 34, 46, 58, 70, 82]


def test_a_window_with_early_stopping_takes_the_time_of_one_exchange() -> None:
    early = make(
        "easgd", window=6, rho=0.0, early_stopping="2.9"
    )  # tests the condition after each step; never stops early
    trace = run(early, workers=1, timing=ConstantTiming(mean=1.0), steps=2, communication=Communication(latency=100.0))
    assert trace.time.tolist() == [106, 312]


def test_the_server_is_occupied_from_the_arrival_of_a_commit_until_it_is_applied() -> None:
    # Steps end at 10, 11, 12, and each exchange takes 11.5 s at the server. Worker 0 finds the server free and occupies
    # it until 21.5. Worker 1 finds it occupied at 11 and 21, and commits at 31, with its third gradient and no probe.
    # Worker 2 finds it free at 22 and occupies it until 33.5, and worker 1 until 45. Worker 0, which continues at 21.5,
    # finds it occupied at 31.5 and 41.5, and commits at 51.5.
    zealous = make("zealous_downpour", window=3)
    trace = run(
        zealous, workers=3, timing=ConstantTiming(mean=10.0), steps=4, communication=Communication(service=11.5)
    )
    assert trace.worker.tolist() == [0, 2, 1, 0]
    assert trace.time.tolist() == [21.5, 33.5, 45, 63]
    assert trace.steps.tolist() == [1, 2, 3, 3]


def test_a_probe_takes_the_latency_of_both_directions() -> None:
    link = Communication(latency=2.0)
    options: dict[str, Any] = {"workers": 1, "timing": ConstantTiming(mean=10.0), "steps": 2, "communication": link}
    assert run(make("zealous_downpour", window=2), **options).time.tolist() == [16, 34]
    assert run(make("zealous_downpour", window=1), **options).time.tolist() == [12, 26]  # without a probe


def test_a_probe_is_answered_with_the_state_at_its_arrival() -> None:
    # The commits of steps that end at 10 and 11 are at the server from 16 until 29, and from 17 until 42, after probes.
    # Worker 0 continues at 31. Its probe leaves at 41, when the other commit is still there, and arrives at 43, when
    # the server is free. Its commit leaves at 45.
    link = Communication(latency=2.0, service=13.0)
    zealous = make("zealous_downpour", window=2)
    trace = run(zealous, workers=2, timing=ConstantTiming(mean=10.0), steps=3, communication=link)
    assert trace.time.tolist() == [29, 42, 60]
    assert trace.steps.tolist() == [1, 1, 1]


def test_a_commit_in_flight_does_not_occupy_the_server() -> None:
    # Each direction takes 12 s. Worker 0 probes and commits at 10, and worker 1 at 11, before the first commit arrives
    # at 22. Worker 0 continues at 74 and probes at 84 and 94, while worker 1's commit is at the server from 23 until
    # 102. The third gradient of worker 0 leaves at 104.
    link = Communication(bandwidth=4.0, service=40.0)
    zealous = make("zealous_downpour", window=3)
    trace = run(zealous, workers=2, timing=ConstantTiming(mean=10.0), steps=3, communication=link)
    assert trace.worker.tolist() == [0, 1, 0]
    assert trace.time.tolist() == [62, 102, 156]
    assert trace.steps.tolist() == [1, 1, 3]


def test_occupied_is_called_with_the_worker_and_the_clock() -> None:
    calls = []

    def occupied(worker: int, clock: int) -> bool:
        calls.append((worker, clock))
        return clock == 1

    trace = run(make("zealous_downpour", window=3), schedule=[2, 0, 2], occupied=occupied)
    assert calls == [(2, 0), (0, 1), (0, 1), (2, 2)]
    assert trace.steps.tolist() == [1, 3, 1]


def test_slow_workers_commit_less() -> None:
    trace = run("asgd", workers=16, timing=SlowWorkers(), steps=1600)
    commits = np.bincount(trace.worker, minlength=16)
    assert commits[0] == pytest.approx(commits[1:].mean() / 10, rel=0.2)


def test_in_rounds_the_workers_of_an_asynchronous_rule_begin_at_the_barrier() -> None:
    trace = run("asgd", timing=Gamma(), steps=12, rounds=True, keep_centers=True)
    assert [sorted(trace.worker[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert sorted(trace.staleness) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3  # by the other commits of the round


# Refusals


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "either `schedule` or `timing`"),
        ({"schedule": [0], "timing": Gamma(), "steps": 1}, "either `schedule` or `timing`"),
        ({"timing": Gamma()}, "`steps` must be"),
        ({"timing": Gamma(), "steps": -1}, "`steps` must be"),
        ({"timing": Gamma(), "steps": 1.5}, "`steps` must be"),
        ({"schedule": [0, 4]}, r"`schedule` must hold numbers in \[0, 4\). Received: 4 at place 1"),
        ({"schedule": [-1]}, "`schedule` must hold"),
        ({"schedule": [0], "workers": 0}, "`workers` must be"),
        ({"schedule": [0], "dtype": np.float16}, "`dtype` must be"),
        ({"schedule": [0], "dtype": int}, "`dtype` must be"),
        ({"schedule": [0], "learning_rate": -0.1}, "must be a finite number above 0"),
        ({"schedule": [0], "rule": "downpour", "learning_rate": 0.0}, "`learning_rate` must be a finite number"),
        ({"schedule": [0], "rule": "downpour", "learning_rate": Constant(0.1)}, "`learning_rate` must be"),
        ({"schedule": [0], "rule": "nonesuch"}, "`rule` must be one of"),
        ({"schedule": [0], "rule": "averaging"}, "`window` must be a number of steps"),
        ({"schedule": [0], "communication": Communication()}, "`communication` must come with `timing`"),
        ({"timing": Gamma(), "steps": 1, "occupied": lambda worker, clock: True}, "`occupied` must be given only with"),
        ({"schedule": [0], "rounds": True, "staleness_bound": 1}, "either `rounds` or `staleness_bound`"),
        ({"schedule": [0], "staleness_bound": -1}, "`staleness_bound` must be an integer of at least 0"),
        ({"schedule": [0], "rule": "aeasgd", "staleness_bound": 1}, "hold back the center"),
        ({"schedule": [0], "rule": "ssgd", "staleness_bound": 1}, "must run in rounds"),
        ({"schedule": [0], "gradient": lambda theta, worker: theta[:2]}, "`gradient` must return shape"),
        ({"schedule": [0, 0], "rule": "ssgd"}, "worker 0 at place 1, which waits for"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], text: str) -> None:
    change = dict(change)
    with pytest.raises(ConfigurationError, match=text):
        run(change.pop("rule", "asgd"), **change)


def test_a_start_that_is_not_a_vector_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one flat vector"):
        simulate("asgd", np.ones((2, 2)), quadratic_gradient, workers=1, learning_rate=0.1, schedule=[0])


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("downpour", {"groups": [[0], [0, 1]], "schedule": [0]}, "`groups` must contain each of 2 workers once"),
        ("downpour", {"groups": [[0]], "schedule": [0]}, "`groups` must contain each of 2 workers once"),
        ("aeasgd", {"groups": [[0, 1]], "schedule": [0]}, "a rule that adds movements"),
        ("downpour", {"groups": [[0, 1]], "schedule": [1]}, r"`schedule` must have numbers in \[0, 1\)"),
    ],
)
def test_inconsistent_groups_are_refused(rule: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(rule, np.ones(2), quadratic_gradient, workers=2, learning_rate=0.1, **options)


@pytest.mark.parametrize("name", ["fedbuff", "fadas"])
def test_the_trace_says_how_many_commits_a_buffer_holds_at_the_end(name: str) -> None:
    """The center does not contain them: a simulation has no end of the data at which a job drains the buffer."""
    rule = make(name, window=1, buffer=3)
    full, partly = (
        simulate(
            rule, np.ones(2), lambda theta, worker: theta, workers=2, learning_rate=0.1, schedule=[0, 1] * 4, steps=n
        )
        for n in (6, 8)
    )
    assert (full.buffered, partly.buffered) == (0, 2)
    np.testing.assert_array_equal(full.theta, partly.theta)
