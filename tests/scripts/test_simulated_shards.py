"""Tests of jobs in virtual time whose center is divided among shards: each equals one server, under any faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.command import collecting, find_planted
from simulation.known import OF_SHARDS, SHARD_PLANS
from simulation.mutations import planted
from simulation.plan import Fault, Plan, draw
from simulation.simulation import simulate
from support.cases import scaled_down

#: Schedules of which those with shards are run; more are run by `python tests/simulation --divided`.
RUNS = range(2000, 2000 + scaled_down(32))
#: A job with many snapshots, each of which its shards write.
JOB = Plan(1, batches=(4, 3), every=1, shards=3, compute=1.0, statistics=1)


def test_drawn_jobs_with_shards_keep_all_promises() -> None:
    plans = {seed: draw(seed, shards=1.0) for seed in RUNS}
    outcomes = {seed: simulate(plans[seed]) for seed in collecting(RUNS) if plans[seed].divided}
    assert len(outcomes) > len(RUNS) / 3
    assert {seed: outcome.finding for seed, outcome in outcomes.items() if outcome.finding is not None} == {}


def test_shards_are_drawn_without_changes_to_the_job() -> None:
    for seed in range(40):
        whole, divided = draw(seed, shards=0.0), draw(seed, shards=1.0)
        alone = replace(divided, shards=1, reshards=0, tables=whole.tables, visits=False, faults=())
        assert alone == replace(whole, faults=())


@pytest.mark.parametrize("kind", ["kill shard", pytest.param("stop shard", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_shard_may_fail_at_many_moments(kind: str, place: int) -> None:
    for at in range(1, simulate(JOB).sends, 61):
        outcome = simulate(replace(JOB, faults=(Fault(kind, at, amount=70.0, place=place),)))
        assert (outcome.finding, outcome.error) == (None, ""), at


@pytest.mark.parametrize("name", OF_SHARDS)
def test_planted_faults_are_found(name: str) -> None:
    # If the code has changed, another schedule may find it; `python tests/simulation --planted NAME` names that one.
    assert find_planted(name, OF_SHARDS[name], 200)


@pytest.mark.parametrize("name", SHARD_PLANS)
def test_planted_faults_are_found_with_a_plan(name: str) -> None:
    assert simulate(SHARD_PLANS[name]).finding is None
    with planted(name):
        assert simulate(SHARD_PLANS[name]).finding is not None
