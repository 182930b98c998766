"""Every fault in every phase of a worker: each mini-batch counts once, and nothing is left.

Workers and server are processes; see `faults.job`. The single faults are slow tests; in the default suite, storms of
several faults in one job contain each fault and each phase.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults.job import LARGE, LONG, SIZE, Job
from support.faults.plan import FAULTS, PHASES, Faults

from distkeras.ps.rules import Rule, make

# The exact center of each rule with a number is known, in every order of commits: see `Job.counts`.
RULES = {
    "downpour": (make("downpour", window=2), 1.0),
    "aeasgd": (make("aeasgd", window=2, rho=0.25, learning_rate=1.0), None),
    "averaging": (make("averaging", window=2), 0.5),
    "in a group": (make("downpour", window=2), 1.0),
}
#: The number of commits before the breakpoint, for phases that occur several times.
STEPS = {"mid-commit": 3, "after-commit": 3, "mid-reply": 3}
STORMS = {
    "one": [
        (0, "kill", "handshake"),
        (1, "cut", "pull"),
        (0, "kill_server", "mid-commit"),
        (1, "slow", "between-epochs"),
        (0, "cut", "leave"),
    ],
    "two": [(0, "kill_server", "model"), (1, "kill", "after-commit"), (0, "stop", "mid-reply"), (1, "kill", "end")],
}


def schedule(plan: Faults, rule: Rule, worker: int, fault: str, phase: str) -> None:
    step = 3 if phase == "pull" and rule.traits.pull_first else STEPS.get(phase)
    at = plan.at(worker=worker, phase=phase, step=step)
    match fault:
        case "stop":
            at.stop(LONG)
        case "slow":
            at.slow(32 * 1024)
        case _:
            getattr(at, fault)()


def run_and_check(folder: Path, name: str, faults: list[tuple[int, str, str]]) -> None:
    """Run a job with these faults, and check its result."""
    rule, each = RULES[name]
    plan = Faults()
    for one in faults:
        schedule(plan, rule, *one)
    kinds = [kind for _, kind, _ in faults]
    size = LARGE if any(phase == "mid-reply" for *_, phase in faults) else SIZE
    with Job(folder, rule, plan, size=size, groups=1 if name == "in a group" else None) as job:
        job.run()
        job.check()
        if each is not None:
            job.counts(each)
        elif not {"kill", "kill_server"} & set(kinds):
            job.elastic()
        assert len(job.attempts) == job.workers + kinds.count("kill")
        assert job.restarts == kinds.count("kill_server")


def test_the_storms_contain_every_fault_and_every_phase() -> None:
    faults = [fault for storm in STORMS.values() for fault in storm]
    assert {fault for _, fault, _ in faults} == set(FAULTS)
    assert {phase for *_, phase in faults} == set(PHASES)


@pytest.mark.parametrize(
    ("storm", "rule"),
    [
        ("one", "downpour"),
        pytest.param("one", "averaging", marks=pytest.mark.slow),
        pytest.param("two", "aeasgd", marks=pytest.mark.slow),
        pytest.param("two", "in a group", marks=pytest.mark.slow),
    ],
)
def test_each_mini_batch_counts_once_in_a_storm_of_faults(tmp_path: Path, storm: str, rule: str) -> None:
    run_and_check(tmp_path, rule, STORMS[storm])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_each_mini_batch_counts_once_in_all_storms_together(tmp_path: Path, rule: str) -> None:
    run_and_check(tmp_path, rule, [fault for storm in STORMS.values() for fault in storm])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_mini_batch_counts_once_after_a_single_fault(tmp_path: Path, fault: str, phase: str, rule: str) -> None:
    run_and_check(tmp_path, rule, [(0, fault, phase)])


class TestJob:
    """Errors that `Job` itself must detect."""

    def test_a_fault_that_never_happens_is_an_error(self, tmp_path: Path) -> None:
        plan = Faults()
        plan.at(worker=0, phase="mid-commit", step=1000).cut()
        job = Job(tmp_path, RULES["downpour"][0], plan, workers=1, epochs=1)
        job.run()
        job.check()
        with pytest.raises(AssertionError, match=r"never happened: .*cut of worker 0 at mid-commit"):
            job.__exit__(None, None, None)

    @pytest.mark.slow
    def test_mini_batches_that_are_missing_or_have_less_weight_are_an_error(self, tmp_path: Path) -> None:
        with Job(tmp_path, make("adag", window=2), workers=1, epochs=1) as job:
            job.run()
            job.check()
            with pytest.raises(AssertionError):
                job.counts(1.0)
            job.epochs = 2
            with pytest.raises(AssertionError):
                job.check()
