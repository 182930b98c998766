"""Loans: the shares of a partition cover it, in every schedule of commits, cuts, deaths and restores."""

from __future__ import annotations

import itertools
import random
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from support.cases import examples
from support.ps.virtual_centers import commit_of

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import Leases, LeaseState, PartitionLease
from distkeras.ps.center.loans import Offer
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import LeaseLostError, LedgerError
from distkeras.ps.rules import Rule, make

BATCHES, EPOCHS, WINDOW = 40, 3, 4
#: With faults forever, no loan would be held for long enough.
FAULTY_TURNS = 400


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """A center, and workers that train a window of their lease at a time, each mini-batch with its own element."""

    def __init__(self, workers: int, rule: Rule | None = None) -> None:
        self.rule = rule or make("downpour", window=WINDOW)
        self.clock, self.workers, self.incarnation = Clock(), workers, 1
        self.window = self.rule.window if isinstance(self.rule.window, int) else WINDOW
        self.center = self.new_center()
        self.trained: dict[tuple[int, int, int], int] = {}
        #: The lease that each worker has; None: it is looking for one.
        self.held: dict[int, int | None] = {}
        #: The windows that each worker has begun: epoch, first and last mini-batch; and the end that it knows of.
        self.begun: dict[int, list[tuple[int, int, int]]] = {}
        self.end: dict[int, tuple[int, int]] = {}
        #: The partition whose rows each worker has.
        self.rows: dict[int, int] = {}
        #: Workers that do not know yet that the server was restarted.
        self.stale = set[int]()
        #: The attempt of each worker's task, under which it holds its loans, too.
        self.attempts, self.attempt = 0, dict[int, int]()
        for worker in range(workers):
            self.begin(worker)
        self.save()

    def new_center(self, workers: int | None = None) -> Center:
        return Center(
            self.rule,
            np.zeros(1, np.float32),
            workers=self.workers if workers is None else workers,
            monotonic=self.clock,
            incarnation=self.incarnation,
            lends=True,
        )

    @property
    def lending(self) -> Any:
        assert self.center.lending is not None
        return self.center.lending

    def begin(self, worker: int) -> None:
        """Begin another attempt at a partition."""
        self.attempts += 1
        self.attempt[worker] = self.attempts
        self.stale.discard(worker)
        lease = self.center.join(worker, self.attempts)
        assert lease is not None
        self.lending.offer(worker, Offer(BATCHES, EPOCHS, "127.0.0.1", 1, 7))
        self.held[worker] = None
        if not lease.finished:
            self.hold(worker, worker)

    def step(self, worker: int, seconds: float) -> None:
        """Let a worker train a window, or look for work."""
        self.clock.now += seconds
        if worker in self.stale:
            self.rejoin(worker)
            return
        number = self.held[worker]
        if number is None:
            self.look(worker)
            return
        lease = self.center.leases[number]
        assert lease.partition == self.rows[worker], "the rows must be those of the lease"
        self.work_ahead(worker, lease)
        if not self.begun[worker]:
            self.center.leave(number, lease.attempt)
            self.held[worker] = None
            self.save()  # the server answers when a snapshot has it
            return
        epoch, first, last = self.begun[worker].pop(0)
        commit = commit_of(
            worker=number,
            attempt=lease.attempt,
            sequence=lease.sequence + 1,
            epoch=epoch,
            first=first,
            last=last,
            epoch_end=last == BATCHES - 1,
            incarnation=self.incarnation,
        )
        for batch in range(first, last + 1):
            place = lease.partition, epoch, batch
            self.trained[place] = self.trained.get(place, 0) + 1
        buffer = self.center.pool.take()
        buffer.array[...] = last + 1 - first
        assert self.center.commit(commit, [buffer])
        self.receive(worker, number)

    def work_ahead(self, worker: int, lease: PartitionLease) -> None:
        """Begin two windows, as with overlap: the second one before the reply to the first one is known."""
        begun, end = self.begun[worker], self.end[worker]
        place = (lease.epoch, lease.batch)
        if begun:
            epoch, _, last = begun[-1]
            place = (epoch + 1, 0) if last == BATCHES - 1 else (epoch, last + 1)
        while len(begun) < 2 and place < end:
            within = end[1] if place[0] == end[0] else BATCHES
            last = min(place[1] + self.window, within) - 1
            begun.append((*place, last))
            place = (place[0] + 1, 0) if last == BATCHES - 1 else (place[0], last + 1)

    def receive(self, worker: int, number: int) -> None:
        """Let a worker receive the center, and the end of its lease."""
        released = self.center.release(number, self.attempt[worker])
        released.buffer.drop()
        self.end[worker] = released.end or (EPOCHS, 0)

    def hold(self, worker: int, number: int) -> None:
        """Let a worker begin with a lease that it has joined."""
        self.held[worker], self.rows[worker] = number, self.center.leases[number].partition
        self.begun[worker] = []
        self.receive(worker, number)

    def look(self, worker: int) -> None:
        self.lending.ask(worker, 0)
        number = self.lending.free_loan()
        if number is not None:
            attempt = self.attempt[worker]
            self.lending.promise(number, worker, attempt)
            assert self.center.join(number, attempt) is not None
            self.lending.withdraw(worker, 0)
            self.hold(worker, number)

    def die(self, worker: int) -> None:
        """Let a worker die: its lease is free, and another attempt at its partition begins."""
        for number in self.center.leases:
            self.center.leases.disconnected(number, self.attempt[worker])
        self.lending.withdraw(worker, 0)
        self.begin(worker)

    def save(self) -> None:
        """Take a snapshot."""
        self.saved = capture(self.center), dict(self.trained)

    def restart(self) -> None:
        """Restart the server from its latest snapshot; the workers find what they hold there, or look for work."""
        state, self.trained = self.saved[0], dict(self.saved[1])
        self.incarnation += 1
        center = self.new_center()
        assert restore(center, state, same_attempts=True)
        self.center = center
        self.stale = set(range(self.workers))

    def rejoin(self, worker: int) -> None:
        """Let a worker find the restarted server: it asks for the lease that it has, or else for its partition's."""
        self.stale.discard(worker)
        self.lending.offer(worker, Offer(BATCHES, EPOCHS, "127.0.0.1", 1, 7))
        number = self.held[worker]
        if number is None:
            number = worker  # it has left, and its commits may be lost
        try:
            lease = self.center.join(number, self.attempt[worker])
        except LeaseLostError:
            self.held[worker] = None
            return
        assert lease is not None
        self.held[worker] = None
        if not lease.finished:
            self.hold(worker, number)

    def finish(self) -> None:
        for turn in range(100_000):
            if self.center.leases.complete:
                return
            self.step(turn % self.workers, 0.25)
        raise AssertionError("the job must end")

    def require_exact(self) -> None:
        expected = {(p, e, b): 1 for p in range(self.workers) for e in range(EPOCHS) for b in range(BATCHES)}
        assert self.trained == expected
        assert float(self.center.current.array[0]) == len(expected)


def test_a_slow_workers_share_is_trained_by_another() -> None:
    job = Job(2)
    while not job.center.leases[0].finished:
        job.step(0, 0.1)
    for _ in range(3):
        job.step(1, 4.0)
        job.step(0, 0.0)
    (loan,) = job.center.leases.loans()
    assert (loan[1].partition, loan[1].holder, loan[1].state) == (1, 0, LeaseState.HELD)
    job.finish()
    job.require_exact()


def slow_job(rule: Rule | None = None) -> Job:
    """Return a job in which worker 1 has no work left, and worker 0 commits slowly."""
    job = Job(2, rule)
    while not job.center.leases[1].finished:
        job.step(1, 0.1)
    job.look(1)
    for _ in range(3):
        job.step(0, 4.0)
    return job


def lent_job(rule: Rule | None = None) -> tuple[Job, int]:
    """Return a job in which worker 0 is slow, and has lent the later part of its partition; and the loan's number."""
    job = slow_job(rule)
    ((number, loan),) = job.center.leases.loans()
    assert (loan.partition, loan.state) == (0, LeaseState.FREE)
    return job, number


@pytest.mark.parametrize("window", [3, 5, 6, 7])
def test_a_lease_is_cut_where_a_window_ends(window: int) -> None:
    job = Job(2, make("downpour", window=window))
    while not job.center.leases[1].finished:
        job.step(1, 0.1)
    job.look(1)
    for _ in range(3):
        job.step(0, 0.25)
    end = job.center.leases[0].end
    assert end is not None
    assert end[1] % window == 0


def test_nothing_is_lent_that_a_worker_may_have_begun() -> None:
    job = slow_job(make("downpour", window="auto"))  # a window has up to a thousand mini-batches
    assert [*job.center.leases.loans()] == []


def test_a_loan_that_is_promised_is_kept_for_a_while() -> None:
    job, number = lent_job()
    job.lending.promise(number, 1, job.attempt[1])
    assert job.lending.free_loan() is None
    job.clock.now += 11.0
    assert job.lending.free_loan() == number


@pytest.mark.parametrize("held", [True, False])
def test_a_job_that_was_ended_early_continues_each_share(held: bool) -> None:
    job, number = lent_job()
    if held:
        job.look(1)
        job.step(1, 0.1)
        assert job.center.leases[number].sequence == 1
    places = {share: (lease.epoch, lease.batch) for share, lease in job.center.leases.items()}
    job.center.end_early("a callback's reason")
    if held:  # a loan ends at once
        with pytest.raises(LeaseLostError, match="because the job ends early"):
            job.step(1, 0.1)
    job.center.leave(0, job.attempt[0])
    assert len([*job.center.leases.loans()]) == 1
    assert job.center.leases.complete
    state = capture(job.center)
    resumed = job.new_center()
    restore(resumed, state, same_attempts=False, epochs=EPOCHS)
    assert {share: (lease.epoch, lease.batch) for share, lease in resumed.leases.items()} == places
    assert [share for share, lease in resumed.leases.items() if not lease.finished] == [0, number]
    # With other workers, the partitions are others; the first epoch that is not complete begins again.
    of_three = job.new_center(3)
    restore(of_three, state, same_attempts=False, epochs=EPOCHS)
    assert {(lease.epoch, lease.batch) for lease in of_three.leases.values()} == {(0, 0)}


def test_nothing_is_lent_when_a_job_ends_early() -> None:
    job = Job(2)
    while not job.center.leases[1].finished:
        job.step(1, 0.1)
    job.look(1)
    job.center.end_early("a callback's reason")
    for _ in range(4):
        job.step(0, 4.0)
    assert [*job.center.leases.loans()] == []


def test_a_buffer_is_applied_when_a_job_with_a_loan_without_a_holder_is_ended_early() -> None:
    job, _ = lent_job(make("fedbuff", window=WINDOW, buffer=100))
    assert float(job.center.current.array[0]) == 0.0
    job.center.end_early("a callback's reason")
    job.center.leave(0, job.attempt[0])
    assert float(job.center.current.array[0]) != 0.0


def test_a_buffer_waits_for_workers_that_join_a_job_that_ends_early() -> None:
    job = Job(2, make("fedbuff", window=WINDOW, buffer=100))
    center = job.new_center()
    center.join(0, 1)
    buffer = center.pool.take()
    buffer.array[...] = 4.0
    center.release(0, 1).buffer.drop()
    assert center.commit(commit_of(worker=0, attempt=1, sequence=1, epoch=0, first=0, last=3), [buffer])
    center.end_early("a callback's reason")
    center.leave(0, 1)
    assert float(center.current.array[0]) == 0.0
    center.join(1, 2)
    center.leave(1, 2)
    assert float(center.current.array[0]) != 0.0


def test_a_helper_whose_slot_is_needed_gets_no_rest_of_its_loan() -> None:
    job, number = lent_job()
    center, lending, helper = job.center, job.lending, 2
    lending.promise(number, helper, 77)
    center.join(number, 77)
    center.release(number, 77).buffer.drop()
    center.leases.disconnected(0, job.attempt[0])  # the executor of partition 0 is lost
    for _ in range(2):
        assert not lending.may_leave(helper)
        job.clock.now += 5.5
    lease, end = center.leases[number], center.leases[number].end or (EPOCHS, 0)
    for _ in range(3):
        job.clock.now += 0.1
        buffer = center.pool.take()
        buffer.array[...] = 1.0
        next_commit = commit_of(
            worker=number,
            attempt=77,
            sequence=lease.sequence + 1,
            epoch=lease.epoch,
            first=lease.batch,
            last=lease.batch + WINDOW - 1,
            epoch_end=lease.batch + WINDOW == BATCHES,
        )
        assert center.commit(next_commit, [buffer])
        center.release(number, 77).buffer.drop()
    assert lease.end is not None
    assert (lease.epoch, lease.batch) == lease.end < end
    center.leave(number, 77)
    assert lending.may_leave(helper)


def test_another_worker_does_not_get_a_loan_that_is_promised() -> None:
    job, number = lent_job()
    job.lending.promise(number, 1, job.attempt[1])
    with pytest.raises(LeaseLostError, match="was promised to attempt"):
        job.center.join(number, job.attempt[1] + 100)


def test_the_number_of_a_loan_is_none_of_a_partition() -> None:
    """One may have no task yet."""
    leases = Leases(5, lambda: (), lambda: 0.0)
    leases.join(0, 1)
    assert [leases.cut(0, (1, 0), before=1.0), leases.cut(0, (0, 5), before=0.5)] == [5, 6]


def test_an_offer_is_withdrawn_only_at_its_own_place() -> None:
    job = slow_job()
    offer = job.lending.offers[0]
    job.lending.withdraw_offer(0, ("127.0.0.1", 9))  # of an earlier attempt
    assert job.lending.offers[0] is offer
    job.lending.withdraw_offer(0, (offer.host, offer.port))
    assert 0 not in job.lending.offers


def test_a_share_that_was_ended_early_is_an_open_epoch() -> None:
    """The first share of partition 0 has ended within its first epoch, and the second one begins with the second."""
    job = slow_job()
    for number in [*job.center.leases]:
        if number >= job.workers:
            del job.center.leases[number]
    job.center.leases[0].end = None
    job.center.leases.cut(0, (1, 0), before=1.0)
    job.center.end_early("a callback's reason")
    job.center.leave(0, job.attempt[0])
    state = capture(job.center)
    resumed = job.new_center(3)
    restore(resumed, state, same_attempts=False, epochs=EPOCHS)
    assert {(lease.epoch, lease.batch) for lease in resumed.leases.values()} == {(0, 0)}


def test_a_task_whose_rows_others_need_does_not_leave_for_another_one() -> None:
    job, number = lent_job()
    job.look(1)
    job.center.leases.disconnected(0, job.attempt[0])  # the executor of partition 0 is lost
    job.begin(0)
    job.center.leases[0].state = LeaseState.FINISHED
    job.center.leases.disconnected(1, job.attempt[1])
    job.center.leases[1].state = LeaseState.FREE  # a restarted server has it again, and Spark has to start its task
    for _ in range(3):
        job.lending.may_leave(0)
        job.clock.now += 5.5
    assert job.lending.may_leave(1)
    assert not job.lending.may_leave(0)
    assert not job.center.leases[number].finished


def test_no_commit_goes_beyond_a_cut() -> None:
    job = Job(1)
    for _ in range(2):
        job.step(0, 0.1)
    lease = job.center.leases[0]
    job.center.leases.cut(0, (0, 10), before=0.25)
    with pytest.raises(LedgerError, match="are lent to another worker"):
        lease.require_next(commit_of(sequence=3, first=8, last=10))
    lease.require_next(commit_of(sequence=3, first=8, last=9))


@examples(100)
@hypothesis.given(st.integers(2, 4), st.integers(0, 1 << 32))
def test_each_mini_batch_is_trained_once_in_every_schedule(workers: int, seed: int) -> None:
    """Workers of different speeds, whose order is drawn; some die, and the server is restarted from older snapshots."""
    draw, job = random.Random(seed), Job(workers)
    paces = [draw.choice([0.05, 0.2, 1.0, 5.0]) for _ in range(workers)]
    faults = draw.choice([0.0, 0.02, 0.1])
    for turn in itertools.count():
        if job.center.leases.complete:
            break
        if turn < FAULTY_TURNS and draw.random() < faults:
            action = draw.choice([lambda: job.die(draw.randrange(workers)), job.save, job.restart])
            action()
        worker = draw.choices(range(workers), [1 / pace for pace in paces])[0]
        job.step(worker, paces[worker] / workers)
        assert job.clock.now < 1e4
    job.require_exact()
