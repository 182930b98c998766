"""Owner, helper, server or driver die at any send of jobs that lend: before, in and after each phase of a loan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.plan import Fault, Plan
from simulation.simulation import simulate
from support.cases import rest_slow

from distkeras.ps.server.loan_requests import LoanRequests

#: Worker 0 is slow and has most rows, so that worker 1, or a helper without rows, trains some of them.
JOBS = {
    "one epoch": Plan(3, batches=(20, 2), slow=(4, 1)),
    "two epochs": Plan(3, batches=(14, 2), slow=(4, 1), epochs=2),
    "a helper without rows": Plan(3, workers=1, batches=(20,), slow=(4,), helpers=1),
}
VICTIMS = {
    "owner": ("kill worker", 0),
    "helper": ("kill worker", 1),
    "server": ("kill server", 0),
    "driver": ("kill driver", 0),
}


def lending(job: str) -> Plan:
    return replace(JOBS[job], lends=True, compute=0.2, every=2, disk=0.1, hyper_parameters={"window": 1})


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the loans that servers have promised."""
    numbers: list[int] = []
    promise = LoanRequests._promise  # noqa: SLF001 - the server has no such list

    def noted(self: LoanRequests, *arguments: object) -> object:
        loan = promise(self, *arguments)  # type: ignore[arg-type]  # they are passed on as they are
        numbers.append(loan.number)
        return loan

    monkeypatch.setattr(LoanRequests, "_promise", noted)
    return numbers


def check(job: str, victim: str, sends: range) -> None:
    kind, place = VICTIMS[victim]
    for at in sends:
        outcome = simulate(replace(lending(job), faults=(Fault(kind, at, place=place),)))
        assert outcome.finding is None, (at, outcome.finding)
        assert not outcome.error, (at, outcome.error)


@pytest.mark.parametrize("job", JOBS)
def test_these_jobs_lend(promised: list[int], job: str) -> None:
    outcome = simulate(lending(job))
    assert outcome.finding is None
    assert promised


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("job", rest_slow(JOBS, "one epoch"))
def test_a_process_may_die_at_many_moments(job: str, victim: str) -> None:
    check(job, victim, range(1, simulate(lending(job)).sends, 17))


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("job", JOBS)
def test_a_process_may_die_at_any_moment(job: str, victim: str) -> None:
    check(job, victim, range(1, simulate(lending(job)).sends))


@pytest.mark.slow
@pytest.mark.parametrize("second", VICTIMS)
@pytest.mark.parametrize("first", VICTIMS)
def test_two_processes_may_die(first: str, second: str) -> None:
    plan = lending("one epoch")
    sends = simulate(plan).sends
    for at in range(1, sends, 9):
        for later in range(at, sends, 13):
            faults = [
                Fault(VICTIMS[name][0], when, place=VICTIMS[name][1]) for name, when in ((first, at), (second, later))
            ]
            outcome = simulate(replace(plan, faults=tuple(faults)))
            assert outcome.finding is None, (at, later, outcome.finding)
            assert not outcome.error, (at, later, outcome.error)
