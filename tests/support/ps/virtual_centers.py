"""Runs of a rule on the small problem in virtual time, for identities between rules."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from distkeras.ps.rules import make
from distkeras.ps.simulation.virtual_job import Trace
from support.present import present
from support.ps.transcriptions import Problem

N, ETA = 3, 0.05
ROUND_ROBIN = [*range(N)] * 8

#: The order in which workers commit: an arbitrary one, and one with complete rounds.
schedules = st.lists(st.integers(0, N - 1), min_size=1, max_size=20)
rounds = st.lists(st.permutations(range(N)), min_size=1, max_size=6).map(lambda orders: np.ravel(orders).tolist())


def run(
    name: str, schedule: list[int], *, n: int = N, barrier: bool = False, numbered: bool = False, **hyper: Any
) -> Trace:
    problem = Problem(n, schedule, eta=ETA)
    return problem.simulated(make(name, **hyper), rounds=barrier, numbered=numbered)


def centers(name: str, schedule: list[int], **options: Any) -> np.ndarray:
    return present(run(name, schedule, **options).centers)


def at_barriers(name: str, schedule: list[int], **options: Any) -> np.ndarray:
    return centers(name, schedule, **options)[N - 1 :: N]


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)
