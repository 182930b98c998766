"""Worker, shard, sequencer or driver die at any send of jobs with shards: before, in and after each phase of a commit.

Each job must end with each mini-batch counted once, and its shards must equal one server after each ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from simulation import simulation
from simulation.disk import Disk
from simulation.plan import Fault, Plan
from simulation.simulation import simulate
from simulation.world import Surroundings

from distkeras.ps.shards.sequencer import SequencingCenter
from distkeras.ps.shards.tickets import Kind

#: The second job writes snapshots all the time, and one shard has the last elements only.
JOBS = {
    "two shards": Plan(3, batches=(2, 2), every=2, shards=2, disk=0.05),
    "three shards": Plan(1, workers=1, batches=(4,), every=1, shards=3, disk=0.1, fragmenting=0.3),
    "tickets of rounds": Plan(5, batches=(2, 2), rule="ssgd", learning_rate=1.0, every=2, shards=2),
}
VICTIMS = {
    "worker": Fault("kill worker", 0),
    "first shard": Fault("kill shard", 0),
    "second shard": Fault("kill shard", 0, place=1),
    "sequencer": Fault("kill server", 0),
    "driver": Fault("kill driver", 0, amount=0.5),
    "all processes, with what was not synced": Fault("power cut", 0),
    "stopped shard": Fault("stop shard", 0, amount=70.0, place=1),
    "stopped sequencer": Fault("stop server", 0, amount=70.0),
    "stopped worker, and a second attempt": Fault("stop and rival", 0, amount=50.0),
    "the process that writes its third file": Fault("crash in disk", 0, amount=3.0),
    "a second driver": Fault("second driver", 0, amount=1.0),
}
#: What must be there at some send of each job, so that each victim dies in each of these phases.
PHASES = {
    "some shards have a part",
    "all shards have a part",
    "no shard has applied the ticket",
    "some shards have applied the ticket",
    "no part of the snapshot is written",
    "some parts of the snapshot are written",
    "all parts of the snapshot are written",
}


def phases_of(surroundings: Surroundings) -> set[str]:
    """Return which of `PHASES` the latest server is in."""
    child = surroundings.servers[-1] if surroundings.servers else None
    if child is None or child.server is None:
        return set()
    dispatchers = [other.server.dispatcher for other in child.shards if other.server]
    shards = [dispatcher._shard for dispatcher in dispatchers if dispatcher._shard is not None]  # noqa: SLF001 - no view
    center = child.server.dispatcher.center
    if not isinstance(center, SequencingCenter) or len(shards) < len(child.shards):
        return set()
    log, phases = center.log_of_tickets, set[str]()
    first = log.last - len(log._tickets)  # noqa: SLF001 - as above
    due = {first + 1 + place: ticket for place, ticket in enumerate(log._tickets)}  # noqa: SLF001 - as above
    decided = {ticket.part for ticket in due.values() if ticket.kind is Kind.COMMIT}
    parts: list[Any] = [key for shard in shards for key in shard._parts if key not in decided]  # noqa: SLF001 - as above
    for key in parts:
        phases.add(f"{'all' if parts.count(key) == len(shards) else 'some'} shards have a part")
    for number, ticket in due.items():
        applied = [shard.applied >= number for shard in shards]
        if ticket.kind is Kind.COMMIT and not all(applied):
            phases.add(f"{'some shards have' if any(applied) else 'no shard has'} applied the ticket")
        if ticket.kind is Kind.SAVE and not any(applied):
            phases.add("no part of the snapshot is written")
    saved = child.server.dispatcher._parts  # noqa: SLF001 - as above
    if saved is not None and saved._saved:  # noqa: SLF001 - as above
        all_written = len(saved._saved) == len(shards)  # noqa: SLF001 - as above
        phases.add(f"{'all' if all_written else 'some'} parts of the snapshot are written")
    return phases


@pytest.mark.parametrize("job", JOBS)
def test_these_jobs_have_each_phase(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, on_send = set[str](), simulation._Run._on_send  # noqa: SLF001 - where faults strike

    def looked(self: Any, stream: Any) -> Any:
        seen.update(phases_of(self.surroundings))
        return on_send(self, stream)

    monkeypatch.setattr(simulation._Run, "_on_send", looked)  # noqa: SLF001 - as above
    assert simulate(JOBS[job]).finding is None
    assert seen == PHASES


def check(
    plan: Plan, faults: Callable[[int], tuple[Fault, ...]], sends: range, errors: Collection[str] = ("",)
) -> None:
    """Simulate ``plan`` with faults at each of ``sends``; one of ``errors`` must end it, "" for none."""
    for at in sends:
        outcome = simulate(replace(plan, faults=faults(at)))
        assert outcome.finding is None, (at, outcome.finding)
        assert outcome.error in errors, (at, outcome.error)


@pytest.mark.parametrize(
    ("job", "victim"),
    [
        *(("two shards", victim) for victim in VICTIMS),
        *((job, "sequencer") for job in JOBS if job != "two shards"),
    ],
)
def test_a_process_may_die_at_many_moments(job: str, victim: str) -> None:
    plan = JOBS[job]
    check(plan, lambda at: (replace(VICTIMS[victim], at=at),), range(3, simulate(plan).sends, 61))


@pytest.mark.parametrize("victim", ["first shard", "second shard", "sequencer"])
def test_without_a_checkpoint_a_death_ends_the_job_with_one_typed_error(victim: str) -> None:
    plan = replace(JOBS["two shards"], every=0)
    check(plan, lambda at: (replace(VICTIMS[victim], at=at),), range(3, simulate(plan).sends, 23), ("ServerLostError",))


@pytest.mark.parametrize("kind", ["snapshot", "part"])
def test_a_snapshot_with_a_damaged_file_is_not_restored(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next server restores the one before it; without one, or with fewer commits, one typed error ends the job."""
    damage = Disk.rot
    monkeypatch.setattr(Disk, "rot", lambda disk, _, share: damage(disk, kind, share))
    plan, rot = JOBS["three shards"], Fault("snapshot rot", 0, amount=0.5)
    check(
        plan,
        lambda at: (replace(rot, at=at), replace(VICTIMS["sequencer"], at=at + 1)),
        range(3, simulate(plan).sends, 31),
        ("", "SnapshotError", "LedgerError"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("job", JOBS)
def test_a_process_may_die_at_any_moment(job: str, victim: str) -> None:
    plan = JOBS[job]
    check(plan, lambda at: (replace(VICTIMS[victim], at=at),), range(1, simulate(plan).sends))


@pytest.mark.slow
@pytest.mark.parametrize("second", ["worker", "first shard", "sequencer", "driver"])
@pytest.mark.parametrize("first", ["worker", "first shard", "sequencer", "driver"])
def test_two_processes_may_die(first: str, second: str) -> None:
    plan = JOBS["two shards"]
    for later in (1, 7, 23, 60):
        faults = VICTIMS[first], VICTIMS[second]
        check(
            plan,
            lambda at, later=later, faults=faults: (replace(faults[0], at=at), replace(faults[1], at=at + later)),  # type: ignore[misc]  # mypy does not infer a default
            range(1, simulate(plan).sends, 11),
        )
