"""Tests of jobs in virtual time: a fixed set of seeds, reproducible schedules, and planted faults that are found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation.command import find_planted, main
from simulation.known import LATE, OF_SHARDS, OF_STATE, PLANS, SHARD_PLANS
from simulation.mutations import planted
from simulation.plan import DEADLINES, KINDS, Fault, Plan, draw
from simulation.planting import simulated
from simulation.scheduler import Finding, Killed, Process, Scheduler
from simulation.shrink import shrink
from simulation.simulation import simulate
from support.cases import rest_slow, scaled_down
from support.programs import output_of

ROOT = Path(__file__).parents[2]
#: Planted faults with the seed of the first schedule that finds each; the others take longer.
SOON = {
    "reply-before-apply": 0,
    "let-go-before-the-snapshot": 5,
    "durable-before-the-snapshot": 5,
    "restart-from-an-older-snapshot": 81,
    "a lease is taken from a connected holder": 21,
    "a holder sends no heartbeats": 7,
    "no-owner": 125,
    "a-server-outlives-its-driver": 8,
    "a-file-that-is-no-snapshot-is-read": 16,
    "a-gap-in-the-mini-batches-is-taken": 5,
    "numbers-are-not-looked-at": 21,
    "a commit that was skipped counts": 126,
    "other-partitions-go-on-where-these-were": 114,
    "the-rows-of-a-reply-are-those-before-its-commit": 13,
    "rows-of-a-second-table-are-not-applied": 13,
    "rows-that-are-published-again-are-taken": 75,
    "a-reply-is-sent-before-its-slot-is-written": 6,
    "a-payload-is-the-one-before": 11,
    "payloads-take-no-turns": 35,
    "rows-of-a-reply-are-those-of-the-window-before": 103,
    "a-sum-counts-for-its-sender-alone": 3,
    "a-lost-relay-has-done-its-work": 217,
    "a-sum-is-as-stale-as-its-sender": 291,
    "an epoch's end is not noticed": 1,  # of tests/mutants
}


def test_a_seed_determines_a_schedule() -> None:
    seeds = range(300, 300 + scaled_down(8))
    forwards = [simulate(draw(seed)).digest for seed in seeds]
    backwards = [simulate(draw(seed)).digest for seed in reversed(seeds)]
    assert backwards[::-1] == forwards
    assert len(set(forwards)) == len(forwards)
    code = (
        "from simulation.plan import draw; from simulation.simulation import simulate; "
        f"print([simulate(draw(seed)).digest for seed in range({seeds.start}, {seeds.stop})])"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    elsewhere = output_of("-c", code, PYTHONPATH=paths, PYTHONSAFEPATH="1", PYTHONHASHSEED="7")
    assert elsewhere.strip() == str(forwards)


@pytest.mark.parametrize(
    "name", rest_slow(SOON, *(name for name in SOON if name != "rows-that-are-published-again-are-taken"))
)
def test_planted_faults_are_found(name: str) -> None:
    # If the code has changed, another schedule may find it; `python tests/simulation --planted NAME` names that one.
    assert find_planted(name, SOON[name], 400)


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("a-tie-is-lost", (Fault("disk slow", 12, amount=2.0), Fault("kill driver twice", 14, amount=0.5))),
        (
            "a-first-start-that-stands-still-is-the-last",
            (Fault("stop at start", 13, amount=150.0), Fault("kill driver", 14, amount=0.5)),
        ),
        ("a-stranger-on-the-port-ends-the-job", (Fault("impostor", 6, amount=10.0),)),
    ],
)
def test_schedules_that_found_defects_pass(name: str, faults: tuple[Fault, ...]) -> None:
    plans = [Plan(seed, compute=5.0, faults=faults) for seed in range(8)]
    assert [simulate(plan).finding for plan in plans] == [None] * len(plans)
    with planted(name):
        assert any(simulate(plan).finding for plan in plans)


def test_a_suspended_server_does_not_end_the_job() -> None:
    """The server is suspended between its start and its driver's first message, for longer than that wait may take."""
    stops = (Fault("stop server", 1, "w0", 74.0), Fault("stop server", 25, amount=75.0))
    plan = Plan(1018793, batches=(1, 1), compute=1.0, every=100, latency=0.1, capacity=64, yielding=0.0, disk=0.01)
    plan = replace(plan, hyper_parameters={"window": 2}, faults=stops)
    assert simulate(plan).finding is None
    with planted("waits-run-out-while-the-server-stands-still"):
        assert "the driver to publish the center" in str(simulate(plan).finding)


#: A server dies before its first snapshot, and then some workers are back while others compute for several leases.
BACK_LATE = Plan(
    0,
    workers=3,
    epochs=2,
    batches=(3, 3, 3),
    hyper_parameters={"window": 1},
    compute=0.01,
    long=0.5,
    every=100,
    deadlines=replace(DEADLINES, gather=30.0),
)


@pytest.mark.parametrize(
    ("seed", "at", "options"),
    [
        (0, 36, {"rule": "averaging"}),
        (0, 36, {"rule": "ormo", "hyper_parameters": {}, "learning_rate": 0.5}),
        (0, 36, {"bound": 1}),
        (1, 40, {"relays": 1}),
        (2, 36, {"rule": "averaging", "stream": ((2, 2, 2), (2, 2, 2))}),
    ],
    ids=["rounds", "fixed workers", "a bound", "relays", "a stream"],
)
def test_a_restarted_server_waits_for_workers_that_compute(seed: int, at: int, options: dict[str, Any]) -> None:
    plan = replace(BACK_LATE, seed=seed, faults=(Fault("kill server", at),), **options)
    outcome = simulate(plan)
    assert (outcome.finding, outcome.error) == (None, "")
    with planted("a restarted server waits for its workers as briefly as the first one"):
        assert "all workers to run at once" in str(simulate(plan).finding)


#: Plans in which a planted fault, by its name, makes two drivers at one checkpoint harm each other.
RIVALRIES = {
    "a-server-that-is-started-again-takes-the-highest-claim": Plan(
        3019241,
        workers=1,
        batches=(1,),
        hyper_parameters={"window": 2},
        compute=3.0,
        every=100,
        latency=0.1,
        fragmenting=0.0,
        yielding=0.0,
        disk=0.1,
        faults=(Fault("second driver", 3, "w0", 5.754501479552088), Fault("impostor", 1, "w0", 9.305969332864422)),
    )
}


@pytest.mark.parametrize("name", RIVALRIES)
def test_drivers_at_one_checkpoint_do_not_harm_each_other(name: str) -> None:
    assert simulate(RIVALRIES[name]).finding is None
    with planted(name):
        assert simulate(RIVALRIES[name]).finding is not None


#: Faults that need so rare a combination that a plan states it; drawing one takes tens of thousands of schedules.
SPECIAL_PLANS = {
    "waits-run-out-while-the-server-stands-still",
    "a-first-start-that-stands-still-is-the-last",
    "a-tie-is-lost",
    "a-stranger-on-the-port-ends-the-job",
    *RIVALRIES,
    *PLANS,
    *OF_SHARDS,
    *SHARD_PLANS,
}
#: Faults that tests find, too.
ALSO = {
    "tags are not checked",
    "a connection that breaks ends the job",
    "the rule's vectors are not saved",
    "an exception ends the saver for good",
    "windows are relative to a worker that has left",
    "other workers start without the unfinished round",
    "a buffer is lost when the last worker leaves",
    "a refused worker need not pull",
    "a refused window is computed from the next one's rows",
    "what moves while a driver reads tables is missing",
    "checksums are not compared",
}
#: Faults that need few kinds of events, one soon after the other.
NARROW = {
    "a-server-begins-for-a-dead-driver": ("kill driver twice", "kill driver", "disk slow", "slow start"),
    "a-pull-brings-the-rows-of-the-window-before": ("half cut", "stall"),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted({*simulated(), *ALSO} - SOON.keys() - OF_STATE.keys() - SPECIAL_PLANS))
def test_faults_that_need_a_special_plan_are_found(name: str) -> None:
    assert find_planted(name, LATE.get(name, 0), 10_000, NARROW.get(name, tuple(KINDS)))


@pytest.mark.slow
def test_a_finding_is_reduced_to_a_short_story() -> None:
    with planted("let-go-before-the-snapshot"):
        plan = next(
            plan for plan in map(draw, range(200)) if (found := simulate(plan).finding) and found.kind == "let go"
        )
        smaller, _ = shrink(plan, "let go")
        outcome = simulate(smaller, story=True)
    assert outcome.finding is not None
    assert outcome.finding.kind == "let go"
    assert len(smaller.faults) <= 2
    assert len(outcome.story) < 40
    assert simulate(smaller).finding is None  # Without the planted fault, the plan has no finding.


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_is_injected(kind: str) -> None:
    plan = Plan(1, faults=(Fault(kind, 12, amount=min(2.0, KINDS[kind][1])),))
    outcome = simulate(replace(plan, batches=(3, 3)))
    assert outcome.finding is None
    assert [fault.kind for fault in outcome.injected] == [kind]


def test_a_server_that_dies_again_and_again_is_given_up() -> None:
    deaths = tuple(Fault("kill server", at, "driver") for at in range(6, 200, 6))
    outcome = simulate(Plan(1, every=100, faults=deaths))
    assert outcome.finding is not None
    assert "the parameter server died 5 times without progress" in outcome.finding.text


def test_the_command_reports_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "5"]) == 0
    assert "ended: well 5" in capsys.readouterr().out
    with planted("reply-before-apply"):
        assert main(["--seed", "2", "--schedules", "20", "--findings", "1"]) == 1  # This fault is reduced quickly.
    output = capsys.readouterr().out
    assert "seed 2: " in output
    assert "has partition" in output


class TestScheduler:
    def test_a_killed_task_never_runs_again(self) -> None:
        scheduler, events = Scheduler(0), []
        victim = Process("victim", "here")

        def linger() -> None:
            try:
                scheduler.wait(None, 10.0)
            finally:
                events.append("dies")
                try:
                    scheduler.wait(None, 1.0)
                except Killed:
                    events.append("again")
                    raise

        def main() -> None:
            scheduler.start(victim, linger, "linger")
            scheduler.wait(None, 1.0)
            scheduler.kill(victim)
            scheduler.wait(None, 1.0)
            assert scheduler.now == 2.0

        scheduler.run(Process("main", "here"), main)
        assert events == ["dies", "again"]

    def test_a_suspended_process_does_not_run_until_it_is_resumed(self) -> None:
        scheduler, ticks = Scheduler(0), []
        stopped = Process("stopped", "here")

        def tick() -> None:
            for _ in range(3):
                scheduler.wait(None, 1.0)
                ticks.append(scheduler.now)

        def main() -> None:
            scheduler.start(stopped, tick, "tick")
            scheduler.wait(None, 1.5)
            scheduler.stop(stopped, 5.0)
            scheduler.wait(None, 20.0)

        scheduler.run(Process("main", "here"), main)
        assert ticks == [1.0, 6.5, 7.5]

    def test_a_wait_without_a_deadline_is_found(self) -> None:
        scheduler = Scheduler(0)
        with pytest.raises(Finding, match="every wait must end"):
            scheduler.run(Process("main", "here"), lambda: scheduler.wait(None, None))

    def test_an_uncaught_error_of_a_task_is_found(self) -> None:
        scheduler = Scheduler(0)

        def main() -> None:
            scheduler.start(Process("other", "here"), lambda: 1 // 0, "divides")
            scheduler.wait(None, 1.0)

        with pytest.raises(Finding, match="ZeroDivisionError"):
            scheduler.run(Process("main", "here"), main)
