"""A job that goes on with another number of workers begins with the first epoch that some partition had not ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.center_commits import center_of, commit_of, joined, send

from distkeras.ps.checkpoint.snapshot import capture, restore

#: Mini-batches of an epoch of each partition.
BATCHES = 2


def began_with(reached: Sequence[tuple[int, int]], *, leave: Sequence[int], stop: bool) -> int:
    """The epoch that one worker begins with, after so many whole epochs and mini-batches of each partition.

    Args:
        reached: epoch and mini-batch of each partition.
        leave: those that leave.
        stop: the job ends early.
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
        "in the midst of it",
        "one has ended",
        "all have ended",
        "one has no rows",
        "all have left, for the job ended early",
        "one left before it had committed anything",
        "nothing was committed",
    ],
)
def test_it_begins_with(reached: Sequence[tuple[int, int]], leave: Sequence[int], stop: bool, epoch: int) -> None:
    assert began_with(reached, leave=leave, stop=stop) == epoch


def test_what_its_partitions_began_with_is_known_after_another_restart() -> None:
    before = center_of(workers=2)
    for worker in range(2):
        joined(before, worker)
        send(before, commit_of(worker, epoch_end=True))
    after, later = center_of(workers=3), center_of(workers=3)
    assert not restore(after, capture(before), same_attempts=False)
    assert restore(later, capture(after), same_attempts=False)
    assert later.began == after.began == (2, 1)
