"""What the system's own world draws."""

from __future__ import annotations

import random

from distkeras.ps.world.world import REAL


def test_pauses_leave_the_users_random_numbers_alone() -> None:
    random.seed(5)
    state = random.getstate()
    assert all(1.0 <= REAL.uniform(1.0, 2.0) <= 2.0 for _ in range(100))
    assert random.getstate() == state
