"""A job that continues with another number of workers begins with the first epoch that some partition has not ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.ps.center_commits import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.schedules import StepDecay

#: The number of mini-batches in an epoch of each partition.
BATCHES = 2


def first_epoch(reached: Sequence[tuple[int, int]], *, leave: Sequence[int], stop: bool) -> int:
    """Return the epoch with which another number of workers begins.

    Args:
        reached: The complete epochs and further mini-batches of each partition.
        leave: The workers that leave.
        stop: Whether the job ends early.
    """
    before = center_of(workers=len(reached))
    for worker, (epochs, batches) in enumerate(reached):
        joined(before, worker)
        for number in range(epochs * BATCHES + batches):
            epoch, batch = divmod(number, BATCHES)
            last = batch == BATCHES - 1
            send(before, commit_of(worker, 0, number + 1, epoch, batch, batch, epoch_end=last))
            before.release(worker, 0)
    if stop:
        before.end_early("enough")
    for worker in leave:
        before.leave(worker, 0)
    after = center_of(workers=len(reached) + 1)
    assert not restore(after, capture(before), same_attempts=False, epochs=3)
    (epoch,) = {lease.epoch for lease in after.leases.values()}
    assert after.began == (before.clock, epoch)
    return epoch


@pytest.mark.parametrize(
    ("reached", "leave", "stop", "epoch"),
    [
        ([(1, 1), (2, 0)], [], False, 1),
        ([(3, 0), (2, 1)], [0], False, 2),
        ([(3, 0), (3, 0)], [0, 1], False, 3),
        ([(3, 0), (0, 0)], [0, 1], False, 3),
        ([(2, 1), (1, 1)], [0, 1], True, 1),
        ([(2, 1), (0, 0)], [0, 1], True, 0),
        ([(0, 0), (0, 0)], [], False, 0),
    ],
    ids=[
        "two partitions in the middle",
        "one partition has ended",
        "all partitions have ended",
        "one partition has no rows",
        "all workers have left because the job ended early",
        "one worker left before its first commit",
        "nothing was committed",
    ],
)
def test_the_job_begins_with_the_first_epoch_that_is_not_complete(
    reached: Sequence[tuple[int, int]], leave: Sequence[int], stop: bool, epoch: int
) -> None:
    assert first_epoch(reached, leave=leave, stop=stop) == epoch


def test_the_first_epoch_of_the_partitions_survives_another_restart() -> None:
    before = center_of(workers=2)
    for worker in range(2):
        joined(before, worker)
        send(before, commit_of(worker, epoch_end=True))
    after, later = center_of(workers=3), center_of(workers=3)
    assert not restore(after, capture(before), same_attempts=False)
    assert restore(later, capture(after), same_attempts=False)
    assert later.began == after.began == (2, 1)


#: Computed by hand: a center of 1 after a round to which one of two workers contributed 2, and the other one nothing.
ROUNDS: dict[str, tuple[dict[str, Any], float]] = {
    "averaging": ({}, 2.0),  # 2 / 1
    # m = 2 / 1: 1 + 0.5 * (2 + 0.5 * 2)
    "diloco": ({"hyper": {"server_rate": 0.5, "momentum": 0.5}}, 2.5),
    "easgd": ({}, 3.0),  # 1 + 2
    # D = 2, m = 1, v = 4 - 3 = 1: 1 + 0.5 * 1 / (1 + 1)
    "fedopt": ({"hyper": {"server_rate": 0.5, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 1.0}}, 1.25),
    "ssgd": ({"learning_rate": 0.25}, 0.5),  # 1 - 0.25 * 2 / 1
    "ssgdm": ({"learning_rate": 0.25}, 0.5),  # 1 - (0.9 * 0 + 0.25 * 2)
    "ssgdm_local": ({"learning_rate": 0.25}, -1.0),  # 1 - 2
}


def center_in_a_round(name: str) -> Center:
    """Return a center whose first worker has committed in a round, and whose second worker has not."""
    center = center_of(name, **ROUNDS[name][0])
    center.current.array[...] = 1.0
    for worker in range(2):
        joined(center, worker)
    send(center, commit_of(0, value=2.0, epoch_end=True))
    return center


def test_every_rule_with_rounds_has_an_example() -> None:
    assert ROUNDS.keys() == {name for name in center_rules() if make(name).traits.synchronous}


@pytest.mark.parametrize("name", ROUNDS)
def test_an_unfinished_round_ends_with_its_contributions(name: str) -> None:
    before, after = center_in_a_round(name), center_of(name, workers=3, **ROUNDS[name][0])
    assert not restore(after, capture(before), same_attempts=False)
    assert after.current.array.tolist() == [ROUNDS[name][1]] * 3
    assert [vector.tolist() for vector in after.model] == [[0.0] * 3 for _ in after.model]
    before.leave(1, 0)  # the center equals that of a round that ends because worker 1 leaves
    assert after.current.array.tolist() == before.current.array.tolist()


def test_the_first_round_has_the_learning_rate_of_its_clock() -> None:
    rate = StepDecay(1.0, boundaries=(2,), factor=0.25)
    before, after = (center_of("ssgd", workers=workers, learning_rate=rate) for workers in (2, 1))
    for worker in range(2):
        joined(before, worker)
        send(before, commit_of(worker, value=0.0, epoch_end=True))
    assert not restore(after, capture(before), same_attempts=False)
    joined(after, 0)
    send(after, commit_of(0, epoch=1, value=3.0))
    assert after.current.array.tolist() == [-0.75] * 3  # 0 - 0.25 * 3
