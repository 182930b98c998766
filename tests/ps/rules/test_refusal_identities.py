"""Identities of the rule that refuses stale commits, and bounds on the number of its refusals."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.present import present
from support.ps import virtual_centers
from support.ps.toy_model import ToyJob
from support.ps.transcriptions import Problem
from support.ps.virtual_centers import ETA, ROUND_ROBIN, N, schedules

from distkeras.ps.rules import make

limits = st.sampled_from([1, 2, 4])
patiences = st.sampled_from([0, 1, 2, None])
fast = examples(25)
#: A window that is computed again has the same mini-batches: gradients depend on the mini-batch's number.
run, centers = partial(virtual_centers.run, numbered=True), partial(virtual_centers.centers, numbered=True)


@fast
@given(schedules, st.sampled_from([1, 3]))
def test_ringmaster_with_a_threshold_that_no_staleness_reaches_is_downpour_to_the_bit(
    schedule: list[int], window: int
) -> None:
    found = centers("ringmaster", schedule, window=window, threshold=len(schedule) + 1, patience=None)
    np.testing.assert_array_equal(found, centers("downpour", schedule, window=window))
    if window == 1:
        np.testing.assert_allclose(found, centers("asgd", schedule), rtol=1e-11, atol=1e-13)


@fast
@given(schedules, limits)
def test_ringmaster_without_patience_is_delay_adaptive_to_the_bit(schedule: list[int], limit: int) -> None:
    found = centers("ringmaster", schedule, window=2, threshold=limit, patience=0)
    np.testing.assert_array_equal(found, centers("delay_adaptive", schedule, window=2, threshold=limit))


def test_no_commit_is_refused_while_workers_take_turns() -> None:
    trace = run("ringmaster", ROUND_ROBIN, threshold=N, patience=None)
    assert len(trace.refused) == 0
    np.testing.assert_array_equal(present(trace.centers), centers("downpour", ROUND_ROBIN))


@fast
@given(schedules, st.sampled_from([1, 2]))
def test_the_applied_commits_of_ringmaster_with_a_threshold_of_one_are_sequential_sgd(
    schedule: list[int], window: int
) -> None:
    trace = run("ringmaster", schedule, window=window, threshold=1, patience=None)
    assert not trace.staleness.any()
    job, done, iterates = Problem(N, schedule, eta=ETA), [0] * N, []
    theta = job.start
    for worker in trace.worker:
        for batch in range(done[worker], done[worker] + window):
            theta = theta - ETA * job.numbered(worker, theta, batch)
        done[worker] += window
        iterates.append(theta)
    np.testing.assert_allclose(present(trace.centers), iterates, rtol=1e-11, atol=1e-13)


def test_ringmaster_with_one_worker_is_sgd() -> None:
    np.testing.assert_array_equal(centers("ringmaster", [0] * 10, n=1), centers("downpour", [0] * 10, n=1))


def arrivals(schedule: list[int], limit: int, patience: int | None) -> list[tuple[int, int, int, int]]:
    """Return worker, staleness, verdict (1: refused) and clock of each commit, computed from the definitions."""
    sent, refused, clock, found = [0] * N, [0] * N, 0, []
    for worker in schedule:
        staleness = clock - sent[worker]
        refusal = staleness >= limit and (patience is None or refused[worker] < patience)
        found.append((worker, staleness, int(refusal), clock))
        clock += not refusal
        sent[worker], refused[worker] = clock, refused[worker] + 1 if refusal else 0
    return found


@fast
@given(schedules, limits, patiences)
def test_refusals_and_the_sum_of_staleness_follow_from_the_definitions(
    schedule: list[int], limit: int, patience: int | None
) -> None:
    trace = run("ringmaster", schedule, threshold=limit, patience=patience)
    expected = arrivals(schedule, limit, patience)
    refused = [(worker, clock, staleness) for worker, staleness, verdict, clock in expected if verdict]
    assert trace.refused.tolist() == [list(row) for row in refused]
    assert trace.staleness.tolist() == [staleness for _, staleness, verdict, _ in expected if not verdict]
    # The sum over all commits, refused or not, is the sum of the clocks last sent to workers, minus applied commits.
    applied, last = len(trace.worker), [0] * N
    for worker, _, verdict, clock in expected:
        last[worker] = clock + (not verdict)
    assert trace.staleness.sum() + trace.refused[:, 2].sum() == sum(last) - applied


@fast
@given(schedules, limits, patiences)
def test_the_number_of_refusals_is_bounded(schedule: list[int], limit: int, patience: int | None) -> None:
    trace = run("ringmaster", schedule, threshold=limit, patience=patience)
    verdicts = [verdict for *_, verdict, _ in arrivals(schedule, limit, patience)]
    for first in range(len(schedule) - N):
        assert not all(verdicts[first : first + N + 1])  # of n + 1 consecutive commits, one is applied
    total = len(trace.worker)
    for worker in range(N):
        own = int((trace.refused[:, 0] == worker).sum())
        assert own <= (total - int((trace.worker == worker).sum())) // limit
        if patience is not None:
            streaks = [
                len([*group])
                for refusal, group in itertools.groupby(own_verdicts(worker, schedule, verdicts))
                if refusal
            ]
            assert all(streak <= patience for streak in streaks)
    assert len(trace.refused) <= (N - 1) * total / limit


def own_verdicts(worker: int, schedule: list[int], verdicts: list[int]) -> list[int]:
    return [verdict for other, verdict in zip(schedule, verdicts, strict=True) if other == worker]


@pytest.mark.parametrize("patience", [1, None])
def test_workers_that_are_always_stale_commit_only_after_the_others_unless_patience_is_limited(
    patience: int | None,
) -> None:
    batches = 6
    job = ToyJob(make("ringmaster", threshold=1, patience=patience), [0.0], [[1.0] * batches] * 3)
    for worker in itertools.cycle(range(3)):
        if all(lease.finished for lease in job.center.leases.values()):
            break
        if not job.center.leases[worker].finished:
            job.commit(worker)
    rows = job.center.log.commits()
    for worker in range(3):  # each mini-batch is committed once, in order
        assert rows[rows["worker"] == worker]["first_batch"].tolist() == [*range(batches)]
    first = [int(row["worker"]) for row in rows][:batches]
    assert (set(first) == {0}) == (patience is None)
