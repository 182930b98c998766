"""The drain: a rule's buffered commits are applied once, when no worker is left or before other workers begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ps.center_commits import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.state import capture, restore

FEDBUFF: dict[str, Any] = {"buffer": 3, "exponent": 0.0}
#: D = 2 / 4, m = .25, v = .75 * 0 + .25 * .25: a step of .1 * .25 / (.25 + .25).
FADAS: dict[str, Any] = {"server_rate": 0.1, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.25}


def center_with_buffer(name: str = "fedbuff", *, workers: int = 2, **hyper: Any) -> Center:
    """Return a center whose buffer has one movement of 2, and all of whose workers have joined."""
    center = center_of(name, workers=workers, hyper={"window": 1, **hyper})
    for worker in range(workers):
        joined(center, worker)
    send(center, commit_of(0, value=2.0))
    assert center.current.array.tolist() == [0.0] * 3
    return center


@pytest.mark.parametrize("early", [False, True])
def test_the_buffer_is_applied_when_the_last_worker_has_left(early: bool) -> None:
    center = center_with_buffer(**FEDBUFF)
    if early:
        center.end_early("enough")
    center.leave(1, 0)
    assert center.current.array.tolist() == [0.0] * 3
    center.leave(0, 0)
    np.testing.assert_allclose(
        center.current.array, 2 / 3, rtol=1e-6
    )  # divided by the buffer's size, not by the number of its movements
    assert (center.clock, center.counters, center.model[0].tolist()) == (1, {}, [0.0] * 3)
    assert len(center.log) == 1
    drained = center.current.array.copy()
    center.leave(0, 0)  # as after a lost reply
    np.testing.assert_array_equal(center.current.array, drained)


def test_the_buffer_is_not_applied_while_a_worker_has_not_joined_yet() -> None:
    center = center_of("fedbuff", workers=2, hyper={"window": 1, **FEDBUFF})
    joined(center, 0)
    send(center, commit_of(0, value=2.0))
    center.leave(0, 0)
    assert center.current.array.tolist() == [0.0] * 3
    joined(center, 1)
    send(center, commit_of(1, value=4.0))
    center.leave(1, 0)
    np.testing.assert_allclose(center.current.array, 2.0, rtol=1e-6)


def test_the_drain_of_an_empty_buffer_changes_nothing() -> None:
    center = center_of("fedbuff", hyper={"buffer": 1, "exponent": 0.0})
    for worker in range(2):
        joined(center, worker)
    send(center, commit_of(0, value=2.0))
    version = center.current
    center.leave(0, 0)
    center.leave(1, 0)
    assert center.current is version


def test_the_drain_of_fadas_takes_a_step_of_its_optimizer() -> None:
    center = center_with_buffer("fadas", workers=4, **FADAS)
    for worker in range(4):
        center.leave(worker, 0)
    np.testing.assert_allclose(center.current.array, 0.05, rtol=1e-6)
    np.testing.assert_allclose(center.model[1], 0.25)
    np.testing.assert_allclose(center.model[3], 0.0625)


@pytest.mark.parametrize(("size", "expected"), [(3, 2 / 3), (None, 1.0)])
def test_the_buffer_is_applied_with_its_former_size_before_another_number_of_workers_begins(
    size: int | None, expected: float
) -> None:
    hyper = {"window": 1, "buffer": size, "exponent": 0.0}
    after = center_of("fedbuff", workers=5, hyper=hyper)
    assert not restore(after, capture(center_with_buffer(buffer=size, exponent=0.0)), same_attempts=False)
    np.testing.assert_allclose(after.current.array, expected, rtol=1e-6)
    assert (after.counters, after.model[0].tolist(), after.clock) == ({}, [0.0] * 3, 1)


def test_the_buffer_is_kept_when_the_same_workers_continue() -> None:
    before, after = center_with_buffer(**FEDBUFF), center_of("fedbuff", hyper={"window": 1, **FEDBUFF})
    assert restore(after, capture(before), same_attempts=True)
    assert (after.counters, after.model[0].tolist()) == ({"count": 1}, [2.0] * 3)
    assert after.current.array.tolist() == [0.0] * 3


def test_a_job_that_continues_with_more_epochs_begins_with_an_empty_buffer() -> None:
    before = center_with_buffer(**FEDBUFF)
    for worker in range(2):
        before.leave(worker, 0)
    after = center_of("fedbuff", hyper={"window": 1, **FEDBUFF})
    assert restore(after, capture(before), same_attempts=False, epochs=5)
    assert not any(lease.finished for lease in after.leases.values())
    np.testing.assert_allclose(after.current.array, 2 / 3, rtol=1e-6)
    assert after.counters == {}
