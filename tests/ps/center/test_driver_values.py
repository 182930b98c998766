"""What the driver sets for the workers: the center's learning rate by clocks, versions, snapshots and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.ps.center_commits import center_of, commit_of, joined, send
from support.ps.toy_model import ToyJob

from distkeras.ps.center.center import Center
from distkeras.ps.center.driver_values import RATE, VALUES_MAX
from distkeras.ps.center.driver_values import set_values as set_checked
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import ConfigurationError, RemoteProtocolError
from distkeras.ps.rules import make
from distkeras.ps.rules.schedules import StepDecay


def set_values(center: Center, numbers: np.ndarray) -> bool:
    return set_checked(center.values, numbers, center.clock, center.rule, center.schedule)


def rows(**values: float) -> np.ndarray:
    """Return rows of places ``p0``, ``p1`` and so on."""
    return np.array([(int(place[1:]), value) for place, value in values.items()], np.float64)


def commits(center: Center, count: int) -> np.ndarray:
    """Apply commits of the gradient 1, and return the steps of the first element."""
    steps = []
    lease = center.leases.get(0) or joined(center)
    for _ in range(count):
        before = center.current.array.copy()
        number = lease.sequence
        send(center, commit_of(sequence=number + 1, first=number, last=number))
        center.release(0, 0)
        steps.append(float((center.current.array - before)[0]))
    return np.array(steps)


def test_a_gradient_rule_steps_with_the_rate_that_was_set() -> None:
    center = center_of("asgd", workers=1, learning_rate=0.5)
    np.testing.assert_allclose(commits(center, 2), [-0.5, -0.5])
    assert set_values(center, rows(p0=0.125))
    np.testing.assert_allclose(commits(center, 2), [-0.125, -0.125])
    assert [center.rate(clock) for clock in range(4)] == [0.5, 0.5, 0.125, 0.125]


def test_momentum_is_corrected_as_under_a_schedule() -> None:
    scheduled = ToyJob(
        make("multi_asgd", momentum=0.9), [0.0], [[1.0] * 4], eta=StepDecay(rate=0.5, boundaries=(2,), factor=0.25)
    )
    job = ToyJob(make("multi_asgd", momentum=0.9), [0.0], [[1.0] * 4], eta=0.5)
    job.run([0, 0])
    set_values(job.center, rows(p0=0.125))
    np.testing.assert_allclose(job.run([0, 0]), scheduled.run([0] * 4), rtol=1e-12)


def test_a_version_rises_with_each_change_and_earlier_places_stay() -> None:
    center = center_of()
    assert center.values.current.version == 0
    assert set_values(center, rows(p0=0.1, p7=2.0))
    assert not set_values(center, rows(p7=2.0))
    assert set_values(center, rows(p3=-1.0))
    version, values = center.values.current
    assert (version, values.tolist()) == (2, [[RATE, 0.1], [3.0, -1.0], [7.0, 2.0]])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_snapshot_has_what_was_set(workers: int) -> None:
    before = center_of("asgd", workers=1, learning_rate=0.5)
    commits(before, 2)
    set_values(before, rows(p0=0.25, p1=3.0))
    after = center_of("asgd", workers=workers, learning_rate=0.5)
    restore(after, capture(before), same_attempts=True)
    assert after.values.current.version == 1
    np.testing.assert_array_equal(after.values.current.rows, before.values.current.rows)
    assert [after.rate(clock) for clock in range(4)] == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("center", "values", "error", "text"),
    [
        (center_of("daso"), rows(p0=0.1), ConfigurationError, "rule 'daso'"),
        (
            center_of("asgd", learning_rate=StepDecay(rate=0.5, boundaries=(2,), factor=0.25)),
            rows(p0=0.1),
            ConfigurationError,
            "`learning_rate` is a schedule",
        ),
        (center_of(), np.zeros((2, 3)), RemoteProtocolError, r"shape \(2, 3\)"),
        (center_of(), rows(p0=np.nan), RemoteProtocolError, "finite"),
        (center_of(), np.array([[-1.0, 0.0]]), RemoteProtocolError, "from 0 on"),
        (center_of(), np.array([[0.5, 0.0]]), RemoteProtocolError, "from 0 on"),
        (center_of(), np.zeros((VALUES_MAX + 1, 2)) + np.arange(VALUES_MAX + 1)[:, None], RemoteProtocolError, "4096"),
    ],
)
def test_what_cannot_be_set_is_refused(center: Center, values: np.ndarray, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        set_values(center, values)
    assert center.values.current.version == 0
