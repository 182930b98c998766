"""Loans of a job whose center is divided: the shards end the leases that the sequencer ends."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.ps.virtual_centers import commit_of

from distkeras.ps.center.center import Center
from distkeras.ps.center.loans import Offer
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.rules import make
from distkeras.ps.shards.sequencer import ELEMENTS, SequencingCenter
from distkeras.ps.shards.shard import CommitPart, Shard
from distkeras.ps.shards.spread_client import without_payload
from distkeras.ps.shards.tickets import PartKey

BATCHES, WINDOW, WORKERS = 120, 4, 2
#: Its buffer is applied when the last lease ends.
RULE = make("fedbuff", window=WINDOW, buffer=100)


class Job:
    """A sequencer and one shard, whose workers commit windows of ones; attempt and number of a worker are the same."""

    def __init__(self) -> None:
        self.seconds = 100.0
        clock: dict[str, Any] = {"monotonic": lambda: self.seconds, "now": lambda: self.seconds}
        options: dict[str, Any] = {"workers": WORKERS, "lends": True}
        self.sequencer = SequencingCenter(RULE, np.zeros(1, np.float32), shards=1, **options, **clock)
        self.shard = Shard(
            lambda now: Center(RULE, np.zeros(1, np.float32), now=now, **options), lambda: scheduler_for(RULE, WORKERS)
        )
        for worker in range(WORKERS):
            self.sequencer.join(worker, worker)
            assert self.sequencer.lending is not None
            self.sequencer.lending.offer(worker, Offer(BATCHES, 1, "127.0.0.1", 1, 7))
            self.sequencer.release(worker, worker).buffer.drop()
        self.deliver()

    def commit(self, worker: int, seconds: float) -> None:
        """Let a worker commit a window, which has taken it ``seconds``."""
        self.seconds += seconds
        lease, sequencer = self.sequencer.leases[worker], self.sequencer
        last = lease.batch + WINDOW - 1
        commit = commit_of(
            worker, worker, lease.sequence + 1, 0, lease.batch, last, size=1, epoch_end=last == BATCHES - 1
        )
        key = PartKey(worker, worker, 0, commit.sequence)
        self.shard.put(CommitPart(key, [self.shard.center.pool.adopt(np.ones(1, np.float32))]))
        buffer = sequencer.pool.adopt(np.zeros(ELEMENTS, np.float32))
        assert sequencer.commit(without_payload(commit), [buffer])
        sequencer.release(worker, worker).buffer.drop()
        self.deliver()

    def deliver(self) -> None:
        for ticket in self.sequencer.log_of_tickets.after(0, self.shard.applied):
            self.shard.apply(ticket)


def test_a_promised_loan_that_nothing_has_joined_ends_early_at_the_shards_too() -> None:
    job = Job()
    lending = job.sequencer.lending
    assert lending is not None
    for _ in range(BATCHES // WINDOW):
        job.commit(1, 0.1)
    job.sequencer.leave(1, 1)
    lending.ask(1, 1)
    for _ in range(3):
        job.commit(0, 4.0)
    number = lending.free_loan()
    assert number is not None
    lending.promise(number, 1, 1)
    job.sequencer.end_early("a callback's reason")
    job.sequencer.leave(0, 0)
    assert job.shard.center.current.array[0] == 0.0
    job.deliver()
    assert job.shard.center.leases[number].finished
    assert job.shard.center.leases.complete
    assert job.shard.center.current.array[0] != 0.0
