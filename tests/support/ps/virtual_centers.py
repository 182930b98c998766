"""Runs of a rule on the small problem in virtual time, and a center and its commits without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.messages import Commit
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


def center_of(name: str = "downpour", workers: int = 2, size: int = 3, **options: Any) -> Center:
    return Center(make(name, **options.pop("hyper", {})), np.zeros(size, np.float32), workers=workers, **options)


def commit_of(
    worker: int = 0,
    attempt: int = 0,
    sequence: int = 1,
    epoch: int = 0,
    first: int = 0,
    last: int = 0,
    *,
    value: float = 1.0,
    size: int = 3,
    **fields: Any,
) -> Commit:
    defaults: dict[str, Any] = {
        "worker": worker,
        "attempt": attempt,
        "sequence": sequence,
        "epoch": epoch,
        "first": first,
        "last": last,
        "incarnation": 1,
        "epoch_end": False,
        "wants_center": True,
        "learning_rate": 0.1,
        "scale": 1.0,
        "waited": 0.0,
        "moving_statistics": NO_FLOATS,
        "history": np.zeros((last - first + 1, 3)),
    }
    parts = (np.full(size, value, np.float32),)
    return Commit(parts=parts, **defaults | fields)


def send(center: Center, commit: Commit) -> bool:
    return center.commit(commit, [center.pool.adopt(part) for part in commit.parts])


def joined(center: Center, worker: int = 0, attempt: int = 0) -> PartitionLease:
    lease = present(center.join(worker, attempt))
    center.release(worker, attempt)
    return lease
