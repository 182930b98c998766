"""Windows in proportion to the workers' speeds: the formula, and the speeds that a center measures."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import window_by_speed
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make

#: Rules with rounds, and rules with a default window of one step.
ROUNDS, ONE_STEP = ("ssgd", "averaging", "diloco", "fedopt", "easgd"), ("downpour", "ringmaster", "delay_adaptive")
#: Speeds as a real clock may measure them, and integral ones, whose quotients are known exactly.
measured = st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=6)
integral = st.lists(st.integers(1, 10_000), min_size=1, max_size=6)
longest_windows = st.integers(1, 10_000)


def windows(longest: int, speeds: list[float | None]) -> list[int]:
    return [window_by_speed(longest, speed, speeds) for speed in speeds]


def test_the_windows_of_the_papers_example() -> None:
    assert windows(50, [1.0, 0.5, 0.27, 0.001]) == [50, 25, 13, 1]


@given(longest_windows, integral)
def test_a_window_is_the_rounded_down_share_of_the_fastest_workers_and_at_least_one_step(
    longest: int, speeds: list[int]
) -> None:
    expected = [max(1, Fraction(longest * speed, max(speeds)).__floor__()) for speed in speeds]
    assert windows(longest, [float(speed) for speed in speeds]) == expected
    # The same speeds in another unit of time: their quotients differ from these by rounding.
    assert windows(longest, [speed / 3.7 for speed in speeds]) == expected


@given(longest_windows, measured)
def test_the_fastest_worker_has_the_longest_window_and_windows_are_ordered_by_speed(
    longest: int, speeds: list[float]
) -> None:
    lengths = windows(longest, [*speeds])
    assert lengths[speeds.index(max(speeds))] == max(lengths) == longest
    assert min(lengths) >= 1
    assert [window for _, window in sorted(zip(speeds, lengths, strict=True))] == sorted(lengths)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.floats(1e-6, 1e6))
def test_all_windows_take_the_same_time_if_the_quotients_are_integral(shares: list[int], unit: float) -> None:
    speeds = [share * unit for share in shares]
    seconds = [window / speed for window, speed in zip(windows(max(shares), [*speeds]), speeds, strict=True)]
    assert seconds == pytest.approx([1 / unit] * len(shares), rel=1e-12)


def test_a_worker_without_a_measured_speed_has_the_longest_window() -> None:
    assert windows(50, [None, 2.0, 1.0, None]) == [50, 50, 25, 50]
    assert windows(7, [None]) == [7]


def test_a_quotient_that_is_below_an_integer_only_by_rounding_counts_as_the_integer() -> None:
    assert 100 * 0.29 < 29
    assert windows(100, [1.0, 0.29]) == [100, 29]


class ManualClock:
    """A manual clock, and a center that measures with it."""

    def __init__(self, name: str = "downpour", workers: int = 2, longest: int = 12, **options: object) -> None:
        self.seconds = 0.0
        self._hyper = {"window": "by_speed", "window_max": longest, **options}
        self._name, self._workers = name, workers
        self.center = self.new_center()

    def new_center(self) -> Center:
        return center_of(self._name, self._workers, hyper=self._hyper, monotonic=lambda: self.seconds)

    def at(self, seconds: float) -> Center:
        self.seconds = seconds
        return self.center


def measured_clock() -> ManualClock:
    """Return the clock after 12 steps of worker 0 in one second, and of worker 1 in four."""
    clock = ManualClock()
    for worker in range(2):
        joined(clock.center, worker)
    for worker, seconds in enumerate((1.0, 4.0)):
        send(clock.at(seconds), commit_of(worker, last=11))
    return clock


def test_a_window_is_measured_from_the_reply_with_the_center_until_the_commit_arrives() -> None:
    clock = ManualClock()
    joined(clock.center, 0)
    joined(clock.at(1.0), 1)
    assert [clock.center.next_window(worker) for worker in range(2)] == [12, 12]
    assert send(clock.at(3.0), commit_of(0, last=11))  # 12 steps in 3 s
    assert clock.center.release(0, 0).window == 12
    assert send(clock.at(9.0), commit_of(1, last=11))  # 12 steps in 8 s: 3/8 of that
    assert clock.center.release(1, 0).window == 4
    # 4 steps in 4 s: only the time since the last reply counts.
    assert send(clock.at(13.0), commit_of(1, sequence=2, first=12, last=15))
    assert clock.center.release(1, 0).window == 3
    assert send(clock.center, commit_of(0, sequence=2, first=12, last=12))  # 1 step in 10 s: now worker 1 is faster
    assert clock.center.release(0, 0).window == 1
    assert clock.center.next_window(1) == 12


def test_the_time_between_the_arrival_of_a_commit_and_its_application_is_not_measured() -> None:
    clock = ManualClock()
    for worker in range(2):
        joined(clock.center, worker)
    for worker, arrived in enumerate([1.0, 2.0]):
        commit = commit_of(worker, last=11)
        assert clock.at(50.0).commit(commit, [clock.center.pool.adopt(part) for part in commit.parts], arrived)
    assert [clock.center.next_window(worker) for worker in range(2)] == [12, 6]


def test_a_window_of_zero_seconds_has_a_speed() -> None:
    clock = ManualClock(workers=1)
    joined(clock.center)
    assert send(clock.center, commit_of(last=11))
    assert clock.center.release(0, 0).window == 12


def test_a_fast_worker_that_has_left_is_ignored() -> None:
    clock = measured_clock()
    assert clock.center.next_window(1) == 3
    clock.center.leave(0, 0)
    assert clock.center.release(1, 0).window == 12


def test_a_new_attempt_has_no_measured_speed() -> None:
    clock = measured_clock()
    clock.center.leases.disconnected(1, 0)
    joined(clock.center, 1, attempt=1)
    assert clock.center.next_window(1) == 12
    joined(clock.center, 0)  # the same attempt with a new connection
    assert clock.center.leases[0].speed == 12.0


def test_a_skipped_commit_is_not_measured() -> None:
    clock = measured_clock()
    clock.center.release(1, 0)
    clock.at(5.0).skip(commit_of(1, sequence=2, first=12, last=99))
    assert clock.center.release(1, 0).window == 3


def test_a_refused_commit_is_not_measured_and_its_retry_is_measured_from_its_pull() -> None:
    clock = ManualClock("ringmaster", threshold=1, patience=None)
    for worker in range(2):
        joined(clock.center, worker)
    send(clock.at(1.0), commit_of(1, last=11))
    clock.center.release(1, 0)
    assert not send(clock.at(8.0), commit_of(0, last=11))
    assert clock.center.release(0, 0).window == 12  # not measured
    assert send(clock.at(12.0), commit_of(0, sequence=2, last=11))  # 12 steps in 4 s
    assert clock.center.release(0, 0).window == 3


def test_a_worker_that_pulls_before_it_commits_is_measured_from_its_last_commit() -> None:
    clock = ManualClock("aeasgd", longest=12)
    for worker in range(2):
        joined(clock.center, worker)
    for worker, seconds in enumerate([2.0, 8.0]):
        clock.at(seconds - 1).release(worker, 0)  # within the window
        assert send(clock.at(seconds), commit_of(worker, last=11, wants_center=False))
    assert [clock.center.next_window(worker) for worker in range(2)] == [12, 3]
    clock.at(13.0).release(1, 0)
    assert send(clock.at(14.0), commit_of(1, sequence=2, first=12, last=14, wants_center=False))  # 3 steps in 6 s
    assert clock.center.next_window(1) == 1


def test_a_restarted_server_has_no_measured_speeds() -> None:
    clock = measured_clock()
    restarted = clock.new_center()
    restore(restarted, capture(clock.center), same_attempts=True)
    for worker in range(2):
        restarted.join(worker, 0)
        assert restarted.release(worker, 0).window == 12


def test_a_reply_contains_no_window_if_the_rules_window_is_a_number() -> None:
    center = center_of("downpour", hyper={"window": 3})
    joined(center)
    assert send(center, commit_of(last=2))
    assert center.release(0, 0).window == center.next_window(0) == 0


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        *((name, {}, "needs the same one at all workers.*by_speed") for name in ROUNDS),
        *((name, {"window_max": 5}, "commits every gradient") for name in ("asgd", "dana_zero", "ormo")),
        ("zealous_downpour", {}, "ends its windows itself"),
        *((name, {}, f"`window_max` must be given: rule '{name}' has no default window") for name in ONE_STEP),
        *(("agn", {"window_max": longest}, "must be a positive integer") for longest in (0, -1, 2.5, "9", True)),
        *(("agn", {"window": w, "window_max": 5}, "must be None unless.*Received: .*5") for w in (20, None, "auto")),
    ],
)
def test_windows_by_speed_that_a_rule_cannot_have_are_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make(name, **{"window": "by_speed", **options})


def test_the_longest_window_is_the_given_one_or_else_the_rules_default() -> None:
    assert make("mla", window="by_speed").window_by_speed == 50
    assert make("mla", window="by_speed", window_max=20).window_by_speed == 20
    assert make("mla").window_by_speed is None
    assert make("downpour", window="by_speed", window_max=1).window_by_speed == 1
    assert make("mla", window="by_speed", window_max=20).config()["window_max"] == 20
    assert "window_max" not in make("mla", window="by_speed").config()
