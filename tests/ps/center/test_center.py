"""The center as a state machine: leases, ledger, versions, views, rounds, statistics, schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.present import present
from support.ps.frames import some_commit
from support.ps.toy_model import ToyJob
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import TRANSITIONS, Leases, LeaseState, PartitionLease
from distkeras.ps.center.schedulers import BoundedStaleness, Scheduler, Synchronous, scheduler_for
from distkeras.ps.errors import ConfigurationError, LeaseLostError, LedgerError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.rules.base import BLOCK
from distkeras.ps.rules.schedules import StepDecay


class TestLedger:
    def test_commits_continue_where_the_last_one_ended(self) -> None:
        center = center_of()
        lease = joined(center)
        assert send(center, commit_of(sequence=1, first=0, last=4))
        assert send(center, commit_of(sequence=2, first=5, last=6, epoch_end=True))
        assert (lease.sequence, lease.epoch, lease.batch) == (2, 1, 0)
        assert send(center, commit_of(sequence=3, epoch=1, first=0, last=0))
        assert center.clock == 3

    def test_a_repeated_commit_is_applied_once(self) -> None:
        center = center_of()
        joined(center)
        assert send(center, commit_of())
        assert not send(center, commit_of())
        assert center.clock == 1
        np.testing.assert_array_equal(center.current.array, [1, 1, 1])

    @pytest.mark.parametrize("wrong", [{"first": 4, "last": 5}, {"first": 6, "last": 6}, {"epoch": 1, "first": 0}])
    def test_a_gap_or_an_overlap_is_refused_and_changes_nothing(self, wrong: dict[str, int]) -> None:
        center = center_of()
        joined(center)
        send(center, commit_of(first=0, last=4))
        before = center.current.array.copy()
        with pytest.raises(LedgerError, match="which is at mini-batch 5 of epoch 0"):
            send(center, commit_of(sequence=2, **wrong))
        np.testing.assert_array_equal(center.current.array, before)
        assert (center.clock, center.leases[0].sequence) == (1, 1)

    @pytest.mark.parametrize("wrong", [{"sequence": 3}, {"incarnation": 2}])
    def test_a_sequence_gap_or_another_incarnation_is_refused(self, wrong: dict[str, int]) -> None:
        center = center_of()
        joined(center)
        with pytest.raises(RemoteProtocolError):
            send(center, commit_of(**wrong))

    def test_a_commit_before_a_pull_is_refused(self) -> None:
        center = center_of()
        center.join(0, 0)
        with pytest.raises(RemoteProtocolError, match="must pull before"):
            send(center, commit_of())


class TestLease:
    def test_a_new_attempt_gets_no_lease_while_the_holder_is_connected(self) -> None:
        center = center_of()
        joined(center, attempt=3)
        assert center.join(0, 7) is None
        center.leases.disconnected(0, 3)
        assert present(center.join(0, 7)).attempt == 7

    def test_an_older_attempt_is_refused_until_the_lease_expires(self) -> None:
        center = center_of()
        joined(center, attempt=3)
        center.leases.disconnected(0, 3)
        center.join(0, 7)
        with pytest.raises(LeaseLostError, match="attempt 7 holds the lease"):
            send(center, commit_of(attempt=3))
        with pytest.raises(LeaseLostError):
            center.release(0, 3)
        assert center.join(0, 3) is None
        assert center.join(0, 3, expired=True) is not None
        with pytest.raises(LeaseLostError, match="attempt 3 holds the lease"):
            send(center, commit_of(attempt=7))

    def test_a_lease_does_not_go_back_to_an_older_attempt_before_it_expires(self) -> None:
        center = center_of()
        joined(center, attempt=7)
        center.leases.disconnected(0, 7)
        assert center.join(0, 3) is None

    def test_a_late_disconnect_of_the_old_attempt_does_not_disconnect_the_new_one(self) -> None:
        center = center_of()
        joined(center, attempt=3)
        center.leases.disconnected(0, 3)
        center.join(0, 7)
        center.leases.disconnected(0, 3)
        assert center.leases[0].connected

    def test_a_new_attempt_must_pull_before_it_commits(self) -> None:
        center = center_of()
        joined(center, attempt=3)
        center.leases.disconnected(0, 3)
        center.join(0, 7)
        with pytest.raises(RemoteProtocolError, match="must pull before it commits"):
            send(center, commit_of(attempt=7))

    def test_the_lease_of_a_new_attempt_says_where_to_continue(self) -> None:
        center = center_of()
        joined(center, attempt=1)
        send(center, commit_of(attempt=1, first=0, last=4))
        center.leases.disconnected(0, 1)
        lease = present(center.join(0, 2))
        assert (lease.sequence, lease.epoch, lease.batch) == (1, 0, 5)

    @pytest.mark.parametrize("worker", [-1, 2])
    def test_a_worker_outside_the_job_is_refused(self, worker: int) -> None:
        with pytest.raises(RemoteProtocolError, match=r"`worker` must be in \[0, 2\)"):
            center_of().join(worker, 0)


class TestVersions:
    def test_the_payload_buffer_becomes_the_center(self) -> None:
        center = center_of()
        joined(center)
        payload = np.ones(3, np.float32)
        center.commit(commit_of(), [center.pool.adopt(payload)])
        assert center.current.array is payload

    def test_a_version_still_being_sent_is_not_reused(self) -> None:
        center = center_of()
        center.join(0, 0)
        released = center.release(0, 0)
        send(center, commit_of())
        assert all(array is not released.buffer.array for array in center.pool.free)
        released.buffer.drop()
        assert any(array is released.buffer.array for array in center.pool.free)

    def test_many_commits_need_few_buffers(self) -> None:
        center = center_of()
        joined(center).released = 0
        center.release(0, 0).buffer.drop()
        for sequence in range(1, 50):
            buffer = center.pool.take()
            buffer.array[...] = 1
            commit = commit_of(sequence=sequence, first=sequence - 1, last=sequence - 1)
            center.commit(commit, [buffer])
            center.release(0, 0).buffer.drop()
        assert center.pool.made <= 4

    def test_the_gap_is_the_root_mean_square_change_of_the_center_since_it_was_sent(self) -> None:
        center = center_of(measure_gap=True)
        joined(center, 0)
        joined(center, 1)
        send(center, commit_of(0, value=3.0))
        send(center, commit_of(1, value=1.0))
        assert center.log.commits()["gap"].tolist() == [0.0, 3.0]


def center_in_a_round() -> Center:
    """Return a center of two workers, numbered as their attempts, of which the first has contributed 2 to a round."""
    center = center_of("averaging")
    for worker in (0, 1):
        center.join(worker, worker)
    for worker in (0, 1):
        center.release(worker, worker)
    send(center, commit_of(0, 0, value=2.0))
    return center


class TestSynchronous:
    def test_no_worker_starts_before_all_have_joined(self) -> None:
        center = center_of("averaging")
        center.join(0, 0)
        assert not center.scheduler.ready(0)
        assert center.scheduler.waiting_for(0) == {1}
        center.join(1, 0)
        assert center.scheduler.ready(0)
        assert center.scheduler.ready(1)

    def test_a_round_waits_for_a_dead_worker_until_its_next_attempt_commits(self) -> None:
        center = center_in_a_round()
        center.leases.disconnected(1, 1)
        assert not center.scheduler.ready(0)
        center.join(1, 5)
        center.release(1, 5)
        send(center, commit_of(1, 5, value=4.0))
        assert center.scheduler.ready(0)
        np.testing.assert_array_equal(center.current.array, [3, 3, 3])

    def test_a_new_attempt_whose_partition_has_contributed_waits_for_the_end_of_the_round(self) -> None:
        center = center_in_a_round()
        center.leases.disconnected(0, 0)
        center.join(0, 9)
        assert not center.scheduler.ready(0)
        send(center, commit_of(1, 1, value=4.0))
        assert center.scheduler.ready(0)

    def test_a_round_ends_when_the_worker_that_it_waits_for_leaves(self) -> None:
        center = center_in_a_round()
        center.leave(1, 1)
        assert center.scheduler.ready(0)
        np.testing.assert_array_equal(center.current.array, [2, 2, 2])


class TestMovingStatistics:
    def test_a_single_worker_sets_them_with_each_commit(self) -> None:
        center = center_of(workers=1, moving_statistics=np.zeros(1, np.float32))
        joined(center)
        for number, value in enumerate((4.0, 8.0)):
            statistics = np.array([value], np.float32)
            send(center, commit_of(sequence=number + 1, first=number, last=number, moving_statistics=statistics))
            np.testing.assert_array_equal(center.moving_statistics, [value])

    def test_workers_are_weighted_by_the_steps_of_their_latest_commits(self) -> None:
        center = center_of(moving_statistics=np.zeros(1, np.float32))
        joined(center, 0)
        joined(center, 1)
        send(center, commit_of(0, first=0, last=2, moving_statistics=np.array([4.0], np.float32)))
        send(center, commit_of(1, first=0, last=0, moving_statistics=np.array([8.0], np.float32)))
        np.testing.assert_array_equal(center.moving_statistics, [5])  # 4 + (8 - 4) * 1 / (3 + 1)

    def test_a_worker_that_has_left_has_no_weight(self) -> None:
        center = center_of(moving_statistics=np.zeros(1, np.float32))
        joined(center, 0)
        joined(center, 1)
        send(center, commit_of(0, last=2, epoch_end=True, moving_statistics=np.array([4.0], np.float32)))
        center.leave(0, 0)
        send(center, commit_of(1, moving_statistics=np.array([8.0], np.float32)))
        np.testing.assert_array_equal(center.moving_statistics, [8])

    def test_a_round_weights_workers_by_their_steps(self) -> None:
        center = center_of("averaging", moving_statistics=np.zeros(1, np.float32))
        for worker in (0, 1):
            center.join(worker, 0)
        for worker in (0, 1):
            center.release(worker, 0)
        send(center, commit_of(0, first=0, last=2, moving_statistics=np.array([4.0], np.float32)))
        send(center, commit_of(1, first=0, last=0, moving_statistics=np.array([8.0], np.float32)))
        np.testing.assert_array_equal(center.moving_statistics, [5])


def test_a_worker_whose_commit_was_skipped_must_pull() -> None:
    center = center_of()
    joined(center)
    assert center.skip(commit_of())
    with pytest.raises(RemoteProtocolError, match="must pull before it commits"):
        send(center, commit_of(sequence=2, first=1, last=1))


def test_a_gradient_rule_needs_a_learning_rate() -> None:
    with pytest.raises(ConfigurationError, match="`learning_rate` must be given"):
        center_of("asgd")


def test_a_rule_with_rounds_refuses_another_scheduler() -> None:
    with pytest.raises(ConfigurationError, match="must run in rounds"):
        center_of("averaging", scheduler=Scheduler(2))


def test_a_rule_without_rounds_applies_each_commit_at_once_under_a_synchronous_scheduler() -> None:
    center = center_of("downpour", scheduler=Synchronous(2))
    for worker in (0, 1):
        center.join(worker, 0)
    for worker in (0, 1):
        center.release(worker, 0)
    send(center, commit_of(0))
    np.testing.assert_array_equal(center.current.array, [1, 1, 1])
    assert not center.scheduler.ready(0)
    send(center, commit_of(1))
    np.testing.assert_array_equal(center.current.array, [2, 2, 2])
    assert center.scheduler.ready(0)


class TestRecords:
    @pytest.mark.parametrize("rule", [make("aeasgd", window=1, rho=1.0), make("adag", window=1, algorithm=13)], ids=str)
    def test_the_gap_of_a_rule_that_pulls_first_is_measured_from_the_beginning_of_its_window(self, rule: Rule) -> None:
        """The center that is pulled right before the commit is the current one: the gap from that would always be 0."""
        job = ToyJob(rule, [0.0], [[np.array([1.0])] * 3, [np.array([1.0])] * 3], eta=0.5, measure_gap=True)
        sent = {0: [0.0], 1: [0.0]}  # the center that each worker pulled for each window, the initial one first
        gaps = []
        for worker in (0, 1, 0, 1, 1, 0):
            before = float(job.theta[0])
            gaps.append(abs(before - sent[worker][-1]))
            sent[worker].append(before)
            job.commit(worker)
        assert job.center.log.commits()["gap"].tolist() == pytest.approx(gaps, abs=1e-15)
        assert max(gaps) > 0

    @pytest.mark.parametrize("name", ["ssgd", "ssgdm", "ssgdm_local", "averaging", "easgd"])
    def test_the_staleness_within_a_round_counts_the_earlier_commits_of_the_round(self, name: str) -> None:
        rule = make(name, **({"window": 1} if name in ("averaging", "easgd") else {}))
        job = ToyJob(rule, [0.0], [[np.array([1.0])] * 2] * 3)
        job.run([1, 0, 2, 2, 1, 0])
        assert job.center.log.commits()["staleness"].tolist() == [0, 1, 2, 0, 1, 2]

    def test_the_staleness_of_an_overlapped_commit_includes_the_workers_own_previous_commit(self) -> None:
        center = center_of()
        joined(center)
        for number in range(3):
            send(center, commit_of(sequence=number + 1, first=number, last=number, overlapped=number > 0))
            center.release(0, 0).buffer.drop()
        assert center.log.commits()["staleness"].tolist() == [0, 1, 1]


def test_a_window_of_an_elastic_rule_begins_after_the_workers_own_commit() -> None:
    center = center_of("aeasgd")
    joined(center)
    for number in range(3):
        center.release(0, 0)
        send(center, commit_of(sequence=number + 1, first=number, last=number, wants_center=False))
    assert center.log.commits(0)["staleness"].tolist() == [0, 0, 0]


VIEWS = [name for name in center_rules() if make(name).traits.view]
#: Two full chunks and a short one.
SIZE = 2 * BLOCK + 77
WORKERS = 3


def centers(name: str) -> tuple[Center, Center]:
    """Return two centers with the same state: one replies at once, and the replies of the other may have to wait."""
    vector = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    pair = []
    for scheduler in (None, BoundedStaleness(WORKERS, 1000)):
        center = Center(
            make(name),
            vector,
            workers=WORKERS,
            learning_rate=StepDecay(0.1, (2, 4), factor=0.5),
            scheduler=scheduler,
            block=BLOCK // 2,
        )
        for worker in range(WORKERS):
            center.join(worker, 0)
        for worker in range(WORKERS):
            center.release(worker, 0).buffer.drop()
        pair.append(center)
    return pair[0], pair[1]


def commit(center: Center, worker: int, seed: int, *, wants_center: bool = True) -> None:
    part = center.pool.take()
    part.array[...] = np.random.default_rng(seed).normal(size=SIZE)
    lease = center.leases[worker]
    numbers = {"worker": worker, "sequence": lease.sequence + 1, "first": lease.batch, "last": lease.batch}
    center.commit(commit_of(**numbers, wants_center=wants_center), [part])


def release(center: Center, worker: int) -> np.ndarray:
    released = center.release(worker, 0)
    sent = released.buffer.array.copy()
    released.buffer.drop()
    return sent


def commit_of_another_worker(center: Center) -> None:
    commit(center, 1, 77)


def commit_without_reply(center: Center) -> None:
    commit(center, 1, 78, wants_center=False)


def worker_leaves(center: Center) -> None:
    center.leave(2, 0)


def nothing_happens(center: Center) -> None:
    pass


@pytest.mark.parametrize("between", [nothing_happens, commit_of_another_worker, commit_without_reply, worker_leaves])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_computed_ahead_equals_the_view_of_the_release(name: str, between: Callable[[Center], None]) -> None:
    ahead, later = centers(name)
    for center in (ahead, later):
        commit(center, 2, 99)
        release(center, 2)
    for seed, worker in enumerate([0, 0, 1, 0, 1]):
        sent = []
        for center in (ahead, later):
            commit(center, worker, seed)
            if seed == 3:
                between(center)
            sent.append(release(center, worker))
        assert sent[0].tobytes() == sent[1].tobytes()
        assert ahead.current.array.tobytes() == later.current.array.tobytes()
        assert release(ahead, worker).tobytes() == release(later, worker).tobytes(), (
            "the views differ after a lost reply"
        )


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reuses_the_memory_of_the_payload_and_returns_it_to_the_pool(name: str) -> None:
    center, _ = centers(name)
    before = center.pool.made
    for seed in range(6):
        commit(center, 0, seed, wants_center=seed != 3)
        release(center, 0)
    assert center.pool.made - before <= 1
    for seed in range(6, 12):  # most of these views are not sent
        commit(center, 0, seed)
        if seed % 3 == 0:
            release(center, 0)
    assert center.pool.made - before <= 2


@pytest.mark.parametrize(
    ("reported", "ends", "passed"),
    [
        (0.25, False, 0.25),
        (1.0, False, 1.0),
        (0.25, True, 0.0),
        (2.0, False, 0.0),
        (-1.0, False, 0.0),
        (math.nan, False, 0.0),
    ],
)
def test_the_passed_share_of_an_epoch_is_taken_from_the_commit(reported: float, ends: bool, passed: float) -> None:
    """A share outside [0, 1] counts as 0, and so does the share of a commit that ends the epoch."""
    lease = PartitionLease(0)
    lease.advance(some_commit(np.zeros(1, np.float32), passed=reported, epoch_end=ends), now=0.0)
    assert (lease.epoch, lease.passed) == (int(ends), passed)


def test_every_state_of_a_lease_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(LeaseState)
    assert {state for following in TRANSITIONS.values() for state in following} == set(LeaseState)


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize("following", LeaseState)
def test_a_lease_changes_its_state_as_the_table_allows(state: LeaseState, following: LeaseState) -> None:
    lease = PartitionLease(attempt=1, state=state)
    if following is state or following in TRANSITIONS[state]:
        lease.move(following)
        assert lease.state is following
        assert (lease.connected, lease.finished) == (following is LeaseState.HELD, following is LeaseState.FINISHED)
    else:
        with pytest.raises(LocalProtocolError, match=f"{state.value} cannot become {following.value}"):
            lease.move(following)
        assert lease.state is state


def test_a_finished_partition_stays_finished_when_its_worker_disconnects() -> None:
    leases = Leases(1, tuple, lambda: 0.0)
    lease = leases.add(0, 1)
    lease.move(LeaseState.FINISHED)
    leases.disconnected(0, 1)
    assert lease.finished


def test_a_worker_is_ahead_by_at_most_the_bound() -> None:
    scheduler = BoundedStaleness(2, bound=1)
    for worker in (0, 1):
        scheduler.joined(worker)
    scheduler.committed(0)
    assert scheduler.ready(0)
    scheduler.committed(0)
    assert not scheduler.ready(0)
    assert scheduler.waiting_for(0) == {1}
    scheduler.committed(1)
    assert scheduler.ready(0)


def test_a_finished_worker_does_not_block_others() -> None:
    scheduler = BoundedStaleness(2, bound=0)
    for worker in (0, 1):
        scheduler.joined(worker)
    scheduler.committed(0)
    assert not scheduler.ready(0)
    scheduler.finished(1)
    assert scheduler.ready(0)


@pytest.mark.parametrize("name", center_rules())
def test_each_rule_has_the_scheduler_of_its_traits(name: str) -> None:
    traits = make(name).traits
    scheduler = scheduler_for(make(name), 3)
    assert type(scheduler) is (Synchronous if traits.synchronous else Scheduler)
    assert scheduler.gather == (traits.synchronous or traits.fixed_workers)


@pytest.mark.parametrize("name", center_rules())
def test_a_staleness_bound_is_refused_for_rules_with_rounds_and_rules_that_pull_first(name: str) -> None:
    traits = make(name).traits
    if traits.synchronous or traits.pull_first:
        with pytest.raises(ConfigurationError, match="`staleness_bound`"):
            scheduler_for(make(name), 3, 2)
    else:
        scheduler = scheduler_for(make(name), 3, 2)
        assert isinstance(scheduler, BoundedStaleness)
        assert scheduler.bound == 2


def test_a_rule_without_rounds_can_run_in_rounds() -> None:
    assert isinstance(scheduler_for(make("downpour"), 3, rounds=True), Synchronous)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("downpour", {"staleness_bound": -1}, "`staleness_bound` must be an integer of at least 0"),
        ("downpour", {"staleness_bound": 1.5}, "`staleness_bound` must be"),
        ("downpour", {"staleness_bound": 1, "rounds": True}, "either `rounds` or `staleness_bound`"),
        ("aeasgd", {"rounds": True}, "hold back the center"),
    ],
)
def test_incompatible_options_are_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        scheduler_for(make(name), 3, **options)
