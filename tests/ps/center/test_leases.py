"""The lease of a partition: its states, and the progress of the partition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.ps.frames import some_commit

from distkeras.ps.center.leases import TRANSITIONS, Leases, LeaseState, PartitionLease
from distkeras.ps.errors import LocalProtocolError


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
