"""Learning rates as functions of the server's clock."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from distkeras.ps.center.center import Center
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.ps.rules.schedules import Constant, Cosine, Schedule, StepDecay, WarmUp, schedule_of

ALL = [
    Constant(0.1),
    StepDecay(0.1, (3, 7), 0.5),
    WarmUp(0.1, length=4, divisor=8.0, boundaries=(6,), factor=0.2),
    Cosine(0.1, length=8, least=0.02),
]


def rates(schedule: Schedule, clocks: list[int] | range) -> list[float]:
    return [schedule(clock) for clock in clocks]


def test_a_constant_rate_does_not_depend_on_the_clock() -> None:
    assert rates(Constant(0.3), [0, 1, 10**6]) == [0.3] * 3


def test_step_decay_multiplies_the_rate_at_each_boundary() -> None:
    np.testing.assert_allclose(rates(StepDecay(1.0, (3, 7), 0.5), [0, 2, 3, 6, 7, 99]), [1, 1, 0.5, 0.5, 0.25, 0.25])
    assert StepDecay(1.0)(10**6) == 1.0


def test_warm_up_rises_from_a_share_of_the_rate_to_the_rate() -> None:
    # From 1/8, the rate rises by 7/32 with each commit; from commit 6, it is multiplied by .2.
    schedule = WarmUp(1.0, length=4, divisor=8.0, boundaries=(6,), factor=0.2)
    np.testing.assert_allclose(rates(schedule, range(7)), [1 / 8, 11 / 32, 18 / 32, 25 / 32, 1, 1, 0.2])


def test_cosine_falls_to_its_least_rate() -> None:
    np.testing.assert_allclose(rates(Cosine(1.0, length=8, least=0.2), [0, 4, 8, 9, 99]), [1, 0.6, 0.2, 0.2, 0.2])
    quarter = 0.2 + 0.8 * (1 + np.sqrt(0.5)) / 2
    assert Cosine(1.0, length=8, least=0.2)(2) == pytest.approx(quarter)
    falling = np.diff(rates(Cosine(1.0, length=50), range(51)))
    assert (falling < 0).all()


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_the_configuration_survives_json(schedule: Schedule) -> None:
    assert schedule_of(json.loads(json.dumps(schedule.config()))) == schedule


def test_schedule_of_a_number_is_constant_and_schedule_of_a_schedule_is_itself() -> None:
    assert schedule_of(0.5) == Constant(0.5)
    assert schedule_of(ALL[1]) is ALL[1]


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_the_center_sends_each_worker_the_rate_of_the_next_commit(schedule: Schedule) -> None:
    center = Center(make("asgd"), np.zeros(2), workers=1, learning_rate=schedule)
    center.join(0, 0)
    assert center.release(0, 0).learning_rate == schedule(0)
    center.clock = 5
    assert center.release(0, 0).learning_rate == schedule(5)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (Constant, {"rate": 0}),
        (Constant, {"rate": float("inf")}),
        (Constant, {"rate": True}),
        (StepDecay, {"rate": -1.0}),
        (StepDecay, {"boundaries": (3, 3)}),
        (StepDecay, {"boundaries": (5, 3)}),
        (StepDecay, {"boundaries": 5}),
        (StepDecay, {"boundaries": "12"}),
        (StepDecay, {"boundaries": (-1, 3)}),
        (StepDecay, {"boundaries": (1.5, 3)}),
        (StepDecay, {"boundaries": ("1",)}),
        (StepDecay, {"factor": 0.0}),
        (WarmUp, {"length": 0}),
        (WarmUp, {"length": 2.0}),
        (WarmUp, {"divisor": 0.5}),
        (WarmUp, {"boundaries": (2, 1)}),
        (Cosine, {"length": 0}),
        (Cosine, {"least": -0.1}),
        (Cosine, {"least": 0.2}),  # above the rate, so that the rate would rise
    ],
)
def test_bad_arguments_are_refused(kind: type[Schedule], bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigurationError, match=f"`{name}` must be .* Received: {name}="):
        kind(**{"rate": 0.1, **bad})


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"rate": 0.1},
        {"schedule": "linear", "rate": 1.0},
        {"schedule": ["step"], "rate": 1.0},
        {"schedule": "constant"},
        {"schedule": "constant", "rate": 1.0, "factor": 2},
    ],
)
def test_an_unknown_schedule_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="`learning_rate` must be a number or a schedule of constant, step"):
        schedule_of(bad)


@pytest.mark.parametrize("bad", ["0.1", None, -0.1])
def test_a_value_that_is_not_a_rate_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="`learning_rate` must be a finite number above 0"):
        schedule_of(bad)
