"""Tests of jobs in virtual time: state that a restart must keep is checked, and every option is drawn."""

from __future__ import annotations

import pytest
from simulation.census import EXCEPTIONS, Census, take_census
from simulation.command import collecting, find_planted
from simulation.known import OF_STATE, PLANS
from simulation.mutations import planted
from simulation.plan import draw
from simulation.simulation import simulate
from support.cases import scaled_down

#: Runs whose messages, options and states are recorded, and draws whose options are.
RUNS, DRAWS = range(150), range(150, 1500)


@pytest.fixture(scope="module")
def census() -> Census:
    return take_census(RUNS)


@pytest.mark.slow
def test_every_option_is_drawn_or_listed_as_an_exception(census: Census) -> None:
    """These are options of server, workers and checkpoint, start modes, messages, leases, rules, wire formats and
    faults.
    """
    wrong = [row.verdict for row in census.rows(map(draw, DRAWS)) if row.verdict]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_promise_holds(census: Census) -> None:
    assert not [f"seed {seed}: {finding}" for seed, finding in census.findings.items()]


def test_every_promise_holds_in_the_first_runs() -> None:
    findings = {seed: simulate(draw(seed)).finding for seed in collecting(RUNS[: scaled_down(40)])}
    assert not [f"seed {seed}: {finding}" for seed, finding in findings.items() if finding]


def test_an_option_that_is_never_drawn_is_found() -> None:
    empty = {row.name for row in Census().rows() if row.verdict}
    assert {"ServerSettings.measure_gap", "message Goodbye", "rule downpour", "fault rival"} <= empty
    assert not empty & set(EXCEPTIONS)


@pytest.mark.parametrize("name", OF_STATE)
def test_planted_faults_are_found(name: str) -> None:
    # If the code has changed, another schedule may find it; `python tests/simulation --planted NAME` names that one.
    assert find_planted(name, OF_STATE[name], 400)


@pytest.mark.parametrize("name", PLANS)
def test_rare_planted_faults_are_found_by_special_plans(name: str) -> None:
    assert simulate(PLANS[name]).finding is None
    with planted(name):
        assert simulate(PLANS[name]).finding is not None
