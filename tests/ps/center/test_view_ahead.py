"""A view that is computed with its commit equals, to the bit, the view that the release would compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.ps.center_commits import commit_of

from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.base import BLOCK
from distkeras.ps.rules.schedules import StepDecay

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
