"""The state of a center: a center that is restored from it continues as the original center does."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from support.ps.center_commits import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint.state import State, capture, restore

#: Rules with more state than the center: vectors of the model and of workers, counters, a round.
RULES: dict[str, dict[str, Any]] = {
    "downpour": {},
    "dana_zero": {"learning_rate": 0.1},
    "multi_asgd": {"learning_rate": 0.1},
    "ormo": {"learning_rate": 0.1},
    "smega2": {"learning_rate": 0.1},
    "ssgd": {"learning_rate": 0.1},
    "ssgdm": {"learning_rate": 0.1},
}


def saved_state(center: Center) -> State:
    """Return the state as it is after it was written to a file and read from it."""
    state = capture(center)
    copied = State(json.loads(json.dumps(state.header)), {name: array.copy() for name, array in state.arrays.items()})
    state.drop()
    return copied


def commit(center: Center, worker: int, number: int) -> None:
    value = 0.5 + worker + 0.25 * number
    send(center, commit_of(worker, sequence=number, first=number - 1, last=number - 1, value=value))
    release(center)


def release(center: Center) -> None:
    """Release the center to all workers that are ready."""
    for worker in center.leases:
        if center.ready(worker):
            center.release(worker, 0)


def comparable_state(center: Center) -> dict[str, Any]:
    """Return the state of a center without its log and the centers that its workers received."""
    state = saved_state(center)
    return state.header | {name: array.tolist() for name, array in state.arrays.items()}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("before", [1, 2, 3, 5])
def test_a_restored_center_continues_as_the_original_does(name: str, before: int) -> None:
    turns = [(0, 1), (1, 1), (1, 2), (0, 2), (0, 3), (1, 3), (1, 4), (0, 4)]
    center = center_of(name, **RULES[name])
    for worker in range(2):
        joined(center, worker)
    for worker, number in turns[:before]:
        commit(center, worker, number)
    restored = center_of(name, **RULES[name])
    assert restore(restored, saved_state(center), same_attempts=True)
    assert comparable_state(restored) == comparable_state(center)
    for worker in range(2):
        restored.join(worker, 0)
    for each in (center, restored):  # after a restart, each worker begins with a new center
        release(each)
    for worker, number in turns[before:]:
        for each in (center, restored):
            commit(each, worker, number)
    assert comparable_state(restored) == comparable_state(center)


def test_the_staleness_bound_holds_after_a_restart() -> None:
    center, restored = (center_of(scheduler=BoundedStaleness(2, 1)) for _ in range(2))
    for worker in range(2):
        joined(center, worker)
    for worker, number in ((0, 1), (1, 1), (0, 2)):
        commit(center, worker, number)
    assert restore(restored, saved_state(center), same_attempts=True)
    for each in (center, restored):
        assert each.ready(0)
        joined(each, 0)
        send(each, commit_of(0, sequence=3, first=2, last=2))
        assert not each.ready(0)
        assert each.scheduler.waiting_for(0) == {1}


@pytest.mark.parametrize("name", ["ssgd", "downpour"])
def test_moving_statistics_are_weighted_by_steps_after_a_restart(name: str) -> None:
    """In a round, earlier contributions count; without rounds, a worker's weight is the steps of its latest commit."""
    options: dict[str, Any] = {"learning_rate": 0.1} if name == "ssgd" else {}
    statistics = np.zeros(2, np.float32)
    center, restored = (center_of(name, moving_statistics=statistics, **options) for _ in range(2))
    for worker in range(2):
        center.join(worker, 0)
    release(center)
    send(center, commit_of(0, last=2, moving_statistics=np.array([4, 8], np.float32)))
    assert restore(restored, saved_state(center), same_attempts=True)
    joined(restored, 1)
    for each in (center, restored):
        send(each, commit_of(1, moving_statistics=np.array([8, 16], np.float32)))
        np.testing.assert_array_equal(each.moving_statistics, [5, 10])


def test_a_finished_partition_that_continues_has_the_vectors_of_its_rule_and_counts_again() -> None:
    center, restored = (center_of("dana_zero", learning_rate=0.1) for _ in range(2))
    for worker in range(2):
        joined(center, worker)
        send(center, commit_of(worker, value=1.0 + worker, epoch_end=True))
    before = center.model[0].copy()
    center.leave(0, 0)
    np.testing.assert_array_equal(center.model[1], center.leases[0].vectors[0])
    assert restore(restored, saved_state(center), same_attempts=False, epochs=2)
    assert not restored.leases[0].finished
    np.testing.assert_array_equal(restored.leases[0].vectors[0], center.leases[0].vectors[0])
    np.testing.assert_array_equal(restored.model, [before, np.zeros(3)])
    assert restored.counters == {}


def test_a_finished_partition_stays_finished() -> None:
    center, restored = center_of(), center_of()
    joined(center)
    commit(center, 0, 1)
    center.leave(0, 0)
    assert restore(restored, saved_state(center), same_attempts=True)
    assert restored.leases[0].finished
    assert asdict(restored.leases[0])["sequence"] == 1


def test_a_captured_state_does_not_change_with_later_commits() -> None:
    center = center_of("dana_zero", learning_rate=0.1)
    for worker in range(2):
        joined(center, worker)
    for worker in range(2):
        commit(center, worker, 1)
    state = capture(center)
    before = {name: array.copy() for name, array in state.arrays.items()}
    for worker in range(2):
        commit(center, worker, 2)
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    state.drop()


@pytest.mark.parametrize("same_attempts", [True, False])
def test_attempts_of_another_driver_hold_no_lease(same_attempts: bool) -> None:
    center, restored = center_of(), center_of()
    joined(center, attempt=7)
    restore(restored, saved_state(center), same_attempts=same_attempts)
    lease = restored.join(0, 3)
    assert (lease is None) == same_attempts  # an older attempt of the same job waits until the newer one's lease ends
