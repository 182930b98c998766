"""The random numbers of the real world."""

from __future__ import annotations

import random

from distkeras.ps.world.world import REAL


def test_random_pauses_do_not_change_the_users_random_state() -> None:
    random.seed(5)
    state = random.getstate()
    assert all(1.0 <= REAL.uniform(1.0, 2.0) <= 2.0 for _ in range(100))
    assert random.getstate() == state
