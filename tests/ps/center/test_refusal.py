"""A refused commit consumes only its sequence number; its mini-batches remain, and its worker must pull."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ps.center_commits import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import LedgerError, RemoteProtocolError


def center_with_stale_worker(patience: int | None = None, **options: Any) -> Center:
    """Return a center with R = 1 that worker 1 has moved by 1 since worker 0 received it."""
    center = center_of("ringmaster", hyper={"threshold": 1, "patience": patience}, **options)
    for worker in range(2):
        joined(center, worker)
    assert send(center, commit_of(1))
    return center


def test_a_refused_commit_changes_only_the_sequence_number() -> None:
    center = center_with_stale_worker(scheduler=BoundedStaleness(2, 5))
    before, version, lease = capture(center), center.current, center.leases[0]
    commit = commit_of(0, last=1, epoch_end=True)
    assert not send(center, commit)
    assert (center.clock, len(center.log), center.log.skipped, center.refused) == (1, 1, 0, 1)
    assert center.current is version
    assert (lease.sequence, lease.epoch, lease.batch, lease.checksum, lease.refusals) == (1, 0, 0, -1, 1)
    assert center.scheduler.progress() == {0: 0, 1: 1}
    after = capture(center)
    assert after.header["counters"] == before.header["counters"]
    for key, array in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[key], array)


def test_a_repeated_refused_commit_is_counted_once() -> None:
    center = center_with_stale_worker()
    commit = commit_of(0)
    assert not send(center, commit)
    assert not send(center, commit)  # as after a lost reply
    assert (center.refused, center.leases[0].refusals) == (1, 1)


def test_a_refused_worker_must_pull_and_begin_at_the_same_mini_batch() -> None:
    center = center_with_stale_worker()
    send(center, commit_of(0, last=1))
    with pytest.raises(RemoteProtocolError, match="must pull before it commits"):
        send(center, commit_of(0, sequence=2, last=1))
    center.release(0, 0)
    with pytest.raises(LedgerError):
        send(center, commit_of(0, sequence=2, first=2, last=3))
    assert send(center, commit_of(0, sequence=2, last=1, value=2.0))
    assert center.current.array.tolist() == [3.0] * 3
    assert (center.clock, center.leases[0].refusals, center.leases[0].batch) == (2, 0, 2)
    assert center.log.commits()["sequence"].tolist() == [1, 2]


def refused_again(center: Center, sequence: int) -> bool:
    """Release the center to worker 0, commit for worker 1 and then for worker 0; return True if the last is refused."""
    center.release(0, 0)
    center.release(1, 0)
    other = center.leases[1]
    assert send(center, commit_of(1, sequence=other.sequence + 1, first=other.batch, last=other.batch))
    batch = center.leases[0].batch
    return not send(center, commit_of(0, sequence=sequence, first=batch, last=batch))


def test_patience_is_counted_separately_for_each_window() -> None:
    center = center_with_stale_worker(patience=2)
    send(center, commit_of(0))
    assert refused_again(center, 2)
    assert not refused_again(center, 3)
    assert refused_again(center, 4)


def test_a_skipped_commit_resets_the_count_of_refusals() -> None:
    center = center_with_stale_worker(patience=1)
    send(center, commit_of(0))
    center.release(0, 0)
    center.skip(commit_of(0, sequence=2))
    assert center.leases[0].refusals == 0
    assert refused_again(center, 3)


def test_the_count_of_refusals_survives_a_new_attempt_and_a_restored_server() -> None:
    center = center_with_stale_worker(patience=1)
    send(center, commit_of(0))
    after = center_of("ringmaster", hyper={"threshold": 1, "patience": 1})
    assert restore(after, capture(center), same_attempts=True)
    assert after.leases[0].refusals == 1
    for again in (center, after):
        again.leases.disconnected(0, 0)
        assert again.join(0, 7) is not None
        again.join(1, 0)
        again.release(0, 7)
        again.release(1, 0)
        assert send(again, commit_of(1, sequence=2, first=1, last=1))
        assert send(again, commit_of(0, attempt=7, sequence=2))  # the patience of 1 is used up
        assert again.log.commits()["scale"][-1] == 1.0  # R / tau = 1 / 1
