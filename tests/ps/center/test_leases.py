"""A partition's standing, as the server's news tell it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.frames import some_commit

from distkeras.ps.center.leases import PartitionLease


@pytest.mark.parametrize(
    ("told", "ends", "passed"),
    [
        (0.25, False, 0.25),
        (1.0, False, 1.0),
        (0.25, True, 0.0),
        (2.0, False, 0.0),
        (-1.0, False, 0.0),
        (math.nan, False, 0.0),
    ],
)
def test_the_share_of_its_epoch_that_a_partition_has_passed(told: float, ends: bool, passed: float) -> None:
    """It counts in the server's news, as far as it can be one; an ended epoch is whole."""
    lease = PartitionLease(0)
    lease.advance(some_commit(np.zeros(1, np.float32), passed=told, epoch_end=ends), now=0.0)
    assert (lease.epoch, lease.passed) == (int(ends), passed)
