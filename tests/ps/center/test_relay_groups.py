"""The commit of a group: it is applied for all of its workers or for none, with the largest staleness among them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.errors import LeaseLostError, LedgerError, RelayLostError, RemoteProtocolError
from distkeras.ps.protocol.companions import Companion, is_finite, join, split
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.rules import center_rules

SIZE = 3


def group_commit(center: Center, commits: Sequence[Commit]) -> None:
    """Join the commits at the relay (the first), then split, apply and release them as a server does."""
    total = (np.empty(SIZE, np.float32),)
    own, companions = split(join(commits[0], [Companion(0, other) for other in commits[1:]], total))
    others = [companion.commit for companion in companions]
    parts = [center.pool.adopt(part.copy()) for part in own.parts]
    assert center.commit(own, parts, companions=others)
    center.release_companions(others, center.release(own.worker, own.attempt))


def center_with(workers: int = 3, name: str = "dynsgd", **options: Any) -> Center:
    center = center_of(name, workers=workers, hyper={"window": 2}, **options)
    for worker in range(workers):
        joined(center, worker)
    return center


def test_each_commit_of_a_group_has_its_row_in_the_ledger_and_advances_the_clock() -> None:
    center = center_with()
    group_commit(center, [commit_of(2, value=4.0, last=1), commit_of(0, value=1.0), commit_of(1, value=2.0)])
    np.testing.assert_array_equal(center.current.array, [7.0] * SIZE)
    rows = center.log.commits()
    assert rows[["worker", "clock", "staleness", "steps", "bytes"]].tolist() == [
        (0, 0, 0, 1, 0),
        (1, 1, 0, 1, 0),
        (2, 2, 0, 2, 4 * SIZE),  # the relay, whose row has the bytes
    ]
    assert center.clock == 3
    assert [(lease.sequence, lease.batch, lease.released) for lease in center.leases.values()] == [
        (1, 1, 3),
        (1, 1, 3),
        (1, 2, 3),
    ]
    assert center.log.read().lengths.tolist() == [1, 1, 2]


def test_a_sum_does_not_depend_on_the_order_of_arrival() -> None:
    """In float32, 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    values = {0: 1e8, 1: 1.0, 2: -1e8}
    sums = []
    for order in itertools.permutations(values):
        first, *others = (commit_of(worker, value=values[worker]) for worker in order)
        total = np.empty(SIZE, np.float32)
        join(first, [Companion(0, other) for other in others], (total,))
        sums.append(total.tolist())
    assert sums == 6 * [[float(np.float32(1e8) + np.float32(1.0) - np.float32(1e8))] * SIZE]


def test_the_staleness_of_a_group_is_that_of_its_stalest_worker() -> None:
    center = center_with()
    group_commit(center, [commit_of(0), commit_of(1)])
    send(center, commit_of(2))  # staleness 2: scaled by a third
    np.testing.assert_allclose(center.current.array, 2 + 1 / 3)
    center.release(2, 0)
    send(center, commit_of(2, sequence=2, first=1, last=1))  # staleness 0: not scaled
    # Worker 0 has pulled since, and worker 1 has not: the group's commit has a staleness of 2.
    center.release(0, 0)
    before = center.current.array.copy()
    group_commit(center, [commit_of(0, sequence=2, first=1, last=1), commit_of(1, sequence=2, first=1, last=1)])
    np.testing.assert_allclose(center.current.array - before, 2 / 3, rtol=1e-6)
    assert center.log.commits()["staleness"].tolist() == [0, 0, 2, 0, 2, 2]


@pytest.mark.parametrize("name", [name for name, kind in center_rules().items() if kind().traits.sums])
def test_a_sum_moves_the_center_as_its_summands_would(name: str) -> None:
    """The summands begin at one version and have one staleness: `Traits.sums`."""

    def moved(*values: float) -> np.ndarray:
        center = center_with(workers=4, name=name)
        for worker in (2, 3):  # the group is stale by these commits
            send(center, commit_of(worker, value=0.5))
        before = center.current.array.copy()
        group_commit(center, [commit_of(worker, value=value) for worker, value in enumerate(values)])
        return center.current.array - before

    np.testing.assert_allclose(moved(1.0, 3.0), moved(1.0) + moved(3.0), rtol=1e-6, atol=1e-6)  # float32 numbers near 4


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (commit_of(1), RelayLostError),  # it was applied before
        (commit_of(1, sequence=3, first=2, last=2), RemoteProtocolError),
        (commit_of(1, sequence=2, first=0, last=1), LedgerError),
        (commit_of(1, attempt=1, sequence=2, first=1, last=1), LeaseLostError),
        (commit_of(1, sequence=2, first=1, last=1, incarnation=2), RemoteProtocolError),
    ],
)
def test_one_invalid_commit_refuses_the_whole_group(wrong: Commit, error: type[Exception]) -> None:
    center = center_with()
    group_commit(center, [commit_of(0), commit_of(1)])
    before = center.current.array.copy()
    # `join` requires one incarnation, so these commits are passed to the center without it.
    with pytest.raises(error):
        center.commit(commit_of(0, sequence=2, first=1, last=1), [center.pool.take()], companions=[wrong])
    np.testing.assert_array_equal(center.current.array, before)
    assert (center.clock, len(center.log)) == (2, 2)
    assert [lease.sequence for lease in center.leases.values()] == [1, 1, 0]


def test_moving_statistics_are_the_mean_over_all_steps() -> None:
    center = center_with(name="downpour", moving_statistics=np.zeros(1))
    own = commit_of(0, last=2, moving_statistics=np.full(1, 1.0, np.float32))
    other = commit_of(1, moving_statistics=np.full(1, 5.0, np.float32))
    group_commit(center, [own, other])
    np.testing.assert_allclose(center.moving_statistics, 2.0)
    send(center, commit_of(2, moving_statistics=np.full(1, 7.0, np.float32)))
    np.testing.assert_allclose(center.moving_statistics, 3.0)  # one step of five


def test_the_sum_does_not_depend_on_the_relay() -> None:
    random = np.random.default_rng(0)
    commits = [commit_of(worker, last=worker) for worker in range(4)]
    vectors = [random.normal(size=SIZE).astype(np.float32) * 10.0**worker for worker in range(4)]
    for commit, vector in zip(commits, vectors, strict=True):
        vars(commit)["parts"] = (vector,)
    sums = []
    for relay in range(4):
        out = (np.empty(SIZE, np.float32),)
        others = [Companion(relay, commit) for commit in commits if commit.worker != relay]
        sums.append(join(commits[relay], others, out).parts[0])
    for total in sums[1:]:
        np.testing.assert_array_equal(total, sums[0])


def test_split_returns_the_commits_that_were_joined() -> None:
    own, other = commit_of(3, last=1, checksum=-7), commit_of(1, attempt=1 << 40, sequence=9, epoch=2, epoch_end=True)
    third = commit_of(0, last=2)
    other.history[...], third.history[...] = 5.0, 6.0
    joined_commit = join(own, [Companion(17, other), Companion(4, third)], (np.empty(SIZE, np.float32),))
    assert joined_commit.grouped
    assert len(joined_commit.history) == 6
    relay_commit, ((connection, companion), (_, last)) = split(joined_commit)
    assert connection == 17
    np.testing.assert_array_equal(last.history, third.history)
    names = ("worker", "attempt", "sequence", "epoch", "first", "last", "epoch_end", "checksum", "learning_rate")
    for name in names:
        assert getattr(companion, name) == getattr(other, name)
        assert getattr(relay_commit, name) == getattr(own, name)
    np.testing.assert_array_equal(companion.history, other.history)
    assert len(relay_commit.history) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda joined_commit: {"companions": joined_commit.companions[:-1].copy()},
        lambda joined_commit: {"worker": 1},
        lambda joined_commit: {"history": joined_commit.history[:-1]},
    ],
)
def test_inconsistent_companions_are_refused(spoil: Any) -> None:
    joined_commit = join(commit_of(0), [Companion(1, commit_of(1))], (np.empty(SIZE, np.float32),))
    vars(joined_commit).update(spoil(joined_commit))
    with pytest.raises(RemoteProtocolError, match=r"a group|`companions`"):
        split(joined_commit)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_detected(value: float) -> None:
    assert is_finite(commit_of(value=3e38))
    assert not is_finite(commit_of(value=value))
    assert not is_finite(commit_of(moving_statistics=np.full(1, value, np.float32)))
