"""Micro-batches, each trained once in their order, and the numbers that the driver sets for the workers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.present import present
from support.ps.toy_model import ToyJob
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.commit_log import CommitLog
from distkeras.ps.center.driver_values import RATE, VALUES_MAX
from distkeras.ps.center.driver_values import set_values as set_checked
from distkeras.ps.center.micro_batches import (
    NO_MICRO_BATCH,
    begin_micro_batch,
    commits_before,
    number_of,
    require_present,
)
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import ConfigurationError, DifferentJobError, LeaseLostError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import SetValues
from distkeras.ps.rules import all_rules, make
from distkeras.ps.rules.schedules import StepDecay

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
    assert center.leases.complete
    with pytest.raises(DifferentJobError, match=r"micro-batch 1 must come next, .* up to 0\. Received: 3"):
        begin(center, 3)
    with pytest.raises(DifferentJobError, match=r"'clicks'\. Received: stream 'sales'"):
        begin(center, 1, "sales")
    assert begin(center, 1)
    assert not center.leases.complete


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
        assert center.leases.complete
        assert np.abs(center.current.array - before).min() > 0.0


REQUESTS = itertools.count(1)


def set_values(center: Center, numbers: np.ndarray, request: int | None = None) -> bool:
    message = SetValues(numbers, next(REQUESTS) if request is None else request)
    return set_checked(center.values, message, center.clock, center.rule, center.schedule)


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


def test_a_late_or_repeated_request_changes_nothing() -> None:
    center = center_of("asgd", learning_rate=0.5)
    assert set_values(center, rows(p3=2.0), 2)
    assert not set_values(center, rows(p3=1.0), 1)
    assert not set_values(center, rows(p3=2.0), 2)
    assert center.values.current.rows.tolist() == [[3.0, 2.0]]
    assert set_values(center, rows(p3=1.0), 4)
    # Two callbacks set other numbers side by side, and the requests arrive in another order than they were made in.
    assert set_values(center, rows(p3=5.0, p7=6.0), 3)
    assert center.values.current.rows.tolist() == [[3.0, 1.0], [7.0, 6.0]]


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
