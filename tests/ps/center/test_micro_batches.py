"""The micro-batches of a stream are trained once each, in their order; the center continues from one to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.present import present
from support.ps.center_commits import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.commit_log import CommitLog
from distkeras.ps.center.micro_batches import (
    NO_MICRO_BATCH,
    begin_micro_batch,
    commits_before,
    is_complete,
    number_of,
    require_present,
)
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import DifferentJobError, LeaseLostError
from distkeras.ps.rules import all_rules, make

WORKERS = 2


def begin(center: Center, number: int, stream: str = "clicks") -> bool:
    return begin_micro_batch(center, stream, number, scheduler_for(center.rule, center.workers))


def train(center: Center, attempt: int = 0, *, leave: bool = True) -> None:
    """Commit once for each partition; if ``leave``, all workers leave then."""
    for worker in range(WORKERS):
        center.join(worker, attempt)
    for worker in range(WORKERS):
        center.release(worker, attempt)
    for worker in range(WORKERS):
        lease = present(center.leases.get(worker))
        send(center, commit_of(worker, attempt, lease.sequence + 1, epoch_end=True))
    for worker in range(WORKERS if leave else 0):
        center.leave(worker, attempt)


def restored(center: Center) -> Center:
    restored_center = center_of()
    assert restore(restored_center, capture(center), same_attempts=False)
    restored_center.log.extend(center.log.read())
    restored_center.log.restore_totals(center.log.totals())
    return restored_center


def test_a_job_that_trains_no_stream_has_no_micro_batches() -> None:
    center = center_of()
    joined(center, 0)
    with pytest.raises(DifferentJobError, match="must train a stream"):
        begin(center, 0)
    with pytest.raises(DifferentJobError, match="must train a stream"):
        require_present(center, 0, 1)
    assert require_present(center, NO_MICRO_BATCH, 1)


def test_a_micro_batch_begins_only_after_the_previous_one_has_ended() -> None:
    center = center_of()
    with pytest.raises(
        DifferentJobError, match="micro-batch 0 must come next, because the checkpoint covers no micro-batch"
    ):
        begin(center, 1)
    assert begin(center, 0)
    assert not begin(center, 0)
    train(center, leave=False)
    with pytest.raises(DifferentJobError, match="micro-batch 0 must come next"):
        begin(center, 1)
    for worker in range(WORKERS):
        center.leave(worker, 0)
    assert is_complete(center)
    with pytest.raises(DifferentJobError, match=r"micro-batch 1 must come next, .* up to 0\. Received: 3"):
        begin(center, 3)
    with pytest.raises(DifferentJobError, match=r"'clicks'\. Received: stream 'sales'"):
        begin(center, 1, "sales")
    assert begin(center, 1)
    assert not is_complete(center)


def test_commits_are_counted_across_micro_batches_and_mini_batches_within_each() -> None:
    center = center_of()
    for number in range(3):
        begin(center, number)
        assert commits_before(center) == number * WORKERS
        train(center, attempt=10 * number)
    assert center.clock == 3 * WORKERS
    np.testing.assert_array_equal(center.current.array, np.full(3, 3.0 * WORKERS, np.float32))
    rows = center.log.commits()
    assert [tuple(row) for row in rows[["worker", "sequence", "epoch", "first_batch"]].tolist()] == [
        (worker, number + 1, 0, 0) for number in range(3) for worker in range(WORKERS)
    ]
    assert center.ends == 3 * WORKERS  # the count that snapshots are compared with never decreases


def test_no_attempt_of_an_earlier_micro_batch_gets_a_lease() -> None:
    center = center_of()
    begin(center, 0)
    train(center, attempt=5)
    begin(center, 1)
    with pytest.raises(LeaseLostError, match="micro-batch 0 has ended, and the present one is 1"):
        require_present(center, 0, worker=1)
    assert require_present(center, 1, worker=1)
    assert not require_present(center, 2, worker=1)
    with pytest.raises(LeaseLostError, match="attempt 5 has lost its lease"):
        send(center, commit_of(0, 5, 2))
    joined(center, 0, attempt=3)  # attempts of a new driver count from 0 again


def test_a_skipped_commit_counts_as_a_record() -> None:
    center = center_of(check_finite=True)
    begin(center, 0)
    train(center, leave=False)
    joined(center, 0)
    assert center.skip(commit_of(0, 0, 2, 1, 0, 0))
    for worker in range(WORKERS):
        center.leave(worker, 0)
    begin(center, 1)
    assert commits_before(center) == len(center.log) == 3
    train(center, attempt=1)
    assert commits_before(center) == 3


def test_lost_records_of_the_current_micro_batch_are_not_replaced_by_earlier_ones() -> None:
    center = center_of()
    for number in range(3):
        begin(center, number)
        train(center, attempt=number)
    whole, damaged = center.log, CommitLog()
    damaged.extend(whole.read(0, len(whole) - 1))
    damaged.restore_totals(whole.totals())
    center.log = damaged
    assert commits_before(center) == 2 * WORKERS
    assert damaged.commits(2 * WORKERS)["clock"].tolist() == list(range(2 * WORKERS, 3 * WORKERS - 1))


def test_a_snapshot_contains_the_progress_of_the_micro_batch() -> None:
    center = center_of()
    begin(center, 0)
    train(center)
    begin(center, 1)
    joined(center, 0, attempt=7)
    send(center, commit_of(0, 7, 2))
    restored_center = restored(center)
    assert (number_of(restored_center), commits_before(restored_center)) == (1, 2)
    assert not begin(restored_center, 1)
    lease = joined(restored_center, 0, attempt=0)
    assert (lease.sequence, lease.epoch, lease.batch) == (2, 0, 1)
    with pytest.raises(DifferentJobError, match="micro-batch 1 must come next"):
        begin(restored_center, 2)


@pytest.mark.parametrize("rule", [name for name in all_rules() if make(name).traits.parts == 1])
def test_every_rule_trains_successive_micro_batches(rule: str) -> None:
    """Rules with state for each worker, rules with rounds and rules with buffered commits are among them."""
    made = make(rule)
    center = Center(made, np.zeros(3, np.float32), workers=WORKERS, learning_rate=0.1 if made.traits.gradient else None)
    for number in range(3):
        begin(center, number)
        before = center.current.array.copy()
        for worker in range(WORKERS):
            center.join(worker, number)
        for worker in range(WORKERS):
            center.release(worker, number)
        for worker in range(WORKERS):
            lease = center.leases[worker]
            wants_center = not made.traits.pull_first
            options: dict[str, Any] = {"epoch_end": True, "wants_center": wants_center, "value": number + 1.0}
            send(center, commit_of(worker, number, lease.sequence + 1, **options))
        for worker in range(WORKERS):
            center.leave(worker, number)
        assert is_complete(center)
        assert np.abs(center.current.array - before).min() > 0.0
