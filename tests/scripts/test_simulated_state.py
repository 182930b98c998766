"""Jobs in virtual time: what a restart must keep is watched, and all that there is to draw is drawn."""

from __future__ import annotations

import pytest
from simulation.census import EXCEPTIONS, Census, take_census
from simulation.command import find_planted
from simulation.mutations import planted
from simulation.plan import Fault, Plan, draw
from simulation.simulation import simulate

#: Runs of which all messages, options and states are noted, and draws of which all options are.
RUNS, DRAWS = range(150), range(150, 1500)
#: What is planted, with the seed of the first schedule that finds it.
SOON = {
    "residuals-are-not-kept": 1,
    "a-window-begins-when-its-worker-joins": 5,
    "an-overlapped-commit-counts-from-the-latest-reply": 19,
    "moving-statistics-are-averaged-by-workers": 29,
    "steps-are-not-restored": 8,
    "momenta-of-workers-are-not-restored": 8,
    "who-leaves-keeps-its-momentum": 7,
    "those-who-ended-hold-up-the-others": 22,
    "a-restored-ledger-lacks-its-last-commit": 8,
    "the-end-is-sent-once": 53,
    "states-of-optimizers-are-not-in-snapshots": 26,
    "a-successor-is-given-another-partitions-state": 0,
    "the-first-state-is-kept": 0,
    "a-state-is-sent-once": 3,
    "a-state-is-that-of-a-later-commit": 24,
    "windows-follow-the-slowest": 9,
    "a-successor-has-its-predecessors-speed": 95,
    "a-speed-is-measured-from-the-first-center": 1,
    "a-speed-counts-from-the-commit-before": 1431,
    "workers-keep-the-longest-window": 23,
}


@pytest.fixture(scope="module")
def census() -> Census:
    return take_census(RUNS)


def test_all_that_there_is_is_drawn_or_named_as_an_exception(census: Census) -> None:
    """Options of server, workers and checkpoint, start modes, messages, leases, rules, wire formats, faults."""
    wrong = [row.verdict for row in census.rows(map(draw, DRAWS)) if row.verdict]
    assert not wrong, "\n".join(wrong)


def test_no_promise_breaks(census: Census) -> None:
    assert not [f"seed {seed}: {finding}" for seed, finding in census.findings.items()]


def test_an_option_that_is_never_drawn_is_found() -> None:
    empty = {row.name for row in Census().rows() if row.verdict}
    assert {"ServerSettings.measure_gap", "message Goodbye", "rule downpour", "fault rival"} <= empty
    assert not empty & set(EXCEPTIONS)


@pytest.mark.parametrize("name", SOON)
def test_what_is_planted_is_found(name: str) -> None:
    # Where the code has changed, another schedule finds it: `python tests/simulation --planted NAME` says which.
    assert find_planted(name, SOON[name], 400)


#: Two workers that are far apart, in a job whose server dies.
BOUNDED = Plan(
    0,
    batches=(6, 6),
    bound=1,
    every=1,
    compute=1.0,
    faults=(Fault("stop worker", 20, amount=15.0, place=1), Fault("kill server", 40)),
)
#: A round that a restart interrupts.
ROUNDS = Plan(
    5,
    workers=3,
    batches=(4, 4, 4),
    rule="ssgd",
    learning_rate=12.0,
    statistics=2,
    every=1,
    compute=1.0,
    faults=(Fault("kill server", 50), Fault("kill server", 90), Fault("kill server", 140)),
)
#: A job with more epochs than the one before, whose server dies before it has saved anything.
RAISED = Plan(
    7,
    batches=(1, 6),
    raised=1,
    every=1,
    compute=1.0,
    disk=0.01,
    faults=(Fault("kill next server", 32, amount=0.6), Fault("kill driver", 33, amount=1.0)),
)
#: With int8, a worker that begins again.
COARSE = Plan(
    0,
    batches=(6, 6),
    hyper_parameters={"window": 2},
    wire_format="int8",
    rounding=True,
    every=1,
    faults=(Fault("kill server", 29),),
)
#: A driver that asks for the table of workers while its server has no center yet.
ASKED = Plan(
    16915,
    batches=(0, 1),
    compute=0.01,
    every=5,
    latency=0.005,
    fragmenting=0.0,
    yielding=0.0,
    disk=0.1,
    lists=True,
    faults=(Fault("vanish", 34, place=1), Fault("stop at start", 9, "w1", 1.0, 1)),
)
NAMED = {
    "iterations-are-not-restored": BOUNDED,
    "one-more-than-the-bound": BOUNDED,
    "a-rounds-moving-statistics-are-not-restored": ROUNDS,
    "an-unfinished-round-is-not-restored": ROUNDS,
    "a-restart-forgets-the-epochs": RAISED,
    "partitions-that-have-ended-stay-so": RAISED,
    "residuals-outlive-their-steps": COARSE,
    "questions-do-not-wait-for-the-center": ASKED,
}


@pytest.mark.parametrize("name", NAMED)
def test_what_takes_many_draws_is_found_where_it_matters(name: str) -> None:
    assert simulate(NAMED[name]).finding is None
    with planted(name):
        assert simulate(NAMED[name]).finding is not None
