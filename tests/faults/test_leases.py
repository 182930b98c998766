"""Two concurrent attempts at one partition: one holds the lease, the other waits for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.faults.job import DEADLINES, LARGE, Job
from support.faults.plan import PATIENCE, Faults
from support.patience import PATIENT, brief
from support.present import present

from distkeras.ps.rules import make

RULE = make("downpour", window=2)
#: A lease that a suspended worker loses while a test waits; the other deadlines are not missed.
SHORT_LEASE = dataclasses.replace(DEADLINES, lease=brief(2))
#: Longer than that lease plus the second after which the server checks again.
OUTLASTS = SHORT_LEASE.lease + brief(2)


def attempts_in_order(job: Job, worker: int = 0) -> list[int]:
    """Return the attempts that made a partition's commits, in the ledger's order, without repetitions."""
    commits = job.commits()
    numbers = commits["attempt"][commits["worker"] == worker].tolist()
    return [number for place, number in enumerate(numbers) if place == 0 or number != numbers[place - 1]]


def check(job: Job, each: float = 1.0) -> None:
    job.wait()
    job.check()
    job.counts(each)


@pytest.mark.slow  # The server's part is tested in `ps/server/test_joining`.
def test_a_later_attempt_waits_while_the_holder_lives_and_then_finds_the_partition_ended(tmp_path: Path) -> None:
    """The holder waits in its round and is silent for longer than a lease, but the server owes it an answer."""
    plan = Faults()
    slow = plan.at(worker=1, phase="mid-commit", step=1).hold()
    late = plan.at(worker=0, phase="after-commit", step=1).hold()
    deadlines = dataclasses.replace(SHORT_LEASE, frame=PATIENT.frame)
    with Job(tmp_path, make("averaging", window=2), plan, deadlines=deadlines) as job:
        holder, _ = job.start_one(0), job.start_one(1)
        late.wait()
        slow.wait()
        late.release()
        newcomer = job.start_one(0)
        assert not newcomer.joined.wait(OUTLASTS)
        slow.release()
        check(job, each=0.5)
        assert attempts_in_order(job) == [holder.number]
        assert present(newcomer.welcome)["finished"]
        assert present(newcomer.welcome)["sequence"] == 6


@pytest.mark.slow
def test_a_later_attempt_takes_over_at_once_when_the_holder_is_killed(tmp_path: Path) -> None:
    """This happens long before the lease has expired."""
    plan = Faults()
    held = plan.at(worker=0, phase="between-epochs").hold()
    with Job(tmp_path, RULE, plan, workers=1) as job:
        holder = job.start_one(0)
        held.wait()
        newcomer = job.start_one(0)
        assert not newcomer.joined.wait(brief(1))
        holder.kill()
        held.release()
        check(job)
        assert attempts_in_order(job) == [holder.number, newcomer.number]
        welcome = present(newcomer.welcome)
        assert (welcome["finished"], welcome["sequence"]) == (False, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "step", "attempts"),
    [
        ("mid-commit", 1, [0, 1]),
        ("end", None, [0]),
        ("pull", None, [1]),
        ("after-commit", 1, [0, 1]),
        ("mid-reply", 1, [0, 1]),
        ("between-epochs", None, [0, 1]),
        ("leave", None, [0]),
    ],
)
def test_a_suspended_holder_loses_its_lease_and_finds_the_partition_ended_when_it_resumes(
    tmp_path: Path, phase: str, step: int | None, attempts: list[int]
) -> None:
    plan = Faults()
    held = plan.at(worker=0, phase=phase, step=step, attempt=0).hold()
    with Job(tmp_path, RULE, plan, workers=1, size=LARGE, deadlines=SHORT_LEASE) as job:
        holder = job.start_one(0)
        held.wait()
        holder.stop()
        newcomer = job.start_one(0)
        assert newcomer.over.wait(PATIENCE)
        holder.wake()
        held.release()
        check(job)
        assert attempts_in_order(job) == attempts
        assert set(job.ended) == {holder.number, newcomer.number}


@pytest.mark.parametrize("phase", [pytest.param("mid-commit", marks=pytest.mark.slow), "after-commit"])
def test_a_resumed_holder_is_fenced_and_waits_for_the_end_of_the_partition(tmp_path: Path, phase: str) -> None:
    """Its late commit is refused and not in the ledger; its connection is closed by then, or is not."""
    plan = Faults()
    held = plan.at(worker=0, phase=phase, step=1, attempt=0).hold()
    rival = plan.at(worker=0, phase="between-epochs", attempt=1).hold()
    with Job(tmp_path, RULE, plan, workers=1, deadlines=dataclasses.replace(SHORT_LEASE, lease=brief(6))) as job:
        holder = job.start_one(0)
        held.wait()
        holder.stop()
        newcomer = job.start_one(0)
        rival.wait()
        commits = len(job.commits())
        holder.wake()
        held.release()
        assert holder.went_on.wait(PATIENCE)
        assert not holder.over.wait(brief(2))
        assert len(job.commits()) == commits
        rival.release()
        check(job)
        assert attempts_in_order(job) == [holder.number, newcomer.number]
        assert job.ended[holder.number]["begun"] == 1  # It has not restarted its training.


@pytest.mark.slow
def test_an_older_attempt_takes_over_when_the_newer_dies_without_a_successor(tmp_path: Path) -> None:
    plan = Faults()
    held = plan.at(worker=0, phase="after-commit", step=1, attempt=0).hold()
    rival = plan.at(worker=0, phase="between-epochs", attempt=1).hold()
    with Job(tmp_path, RULE, plan, workers=1, deadlines=SHORT_LEASE) as job:
        holder = job.start_one(0)
        held.wait()
        holder.stop()
        newcomer = job.start_one(0)
        rival.wait()
        newcomer.kill()
        rival.release()
        holder.wake()
        held.release()
        check(job)
        assert attempts_in_order(job) == [holder.number, newcomer.number, holder.number]
        assert job.ended[holder.number]["begun"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("rival", [False, True], ids=["alone", "with a rival"])
def test_a_window_may_outlast_a_restart_of_the_server_and_a_lease(tmp_path: Path, rival: bool) -> None:
    """The worker learns of it with its next request; until then a later attempt may take over the partition."""
    plan = Faults()
    held = plan.at(worker=0, phase="between-epochs", attempt=0).hold()
    with Job(tmp_path, RULE, plan, workers=1, every=1, deadlines=SHORT_LEASE) as job:
        holder = job.start_one(0)
        held.wait()
        job.kill_server()
        job.revive()
        if rival:
            assert job.start_one(0).over.wait(PATIENCE)
        else:
            assert not holder.over.wait(OUTLASTS)
        held.release()
        check(job)
        assert attempts_in_order(job)[-1] == (1 if rival else 0)
        assert set(job.ended) == ({0, 1} if rival else {0})


@pytest.mark.slow
def test_an_attempt_that_finds_the_partition_ended_ends_only_after_a_snapshot(tmp_path: Path) -> None:
    """Otherwise no worker would be left to repeat commits that a server loses if it dies before it saves them."""
    plan, folder = Faults(), tmp_path / "snapshots"
    end = plan.at(worker=0, phase="end", attempt=0).hold()
    leave = plan.at(worker=0, phase="leave", attempt=0).hold()
    with Job(folder, RULE, plan, workers=1, every=1000) as job:
        holder = job.start_one(0)
        end.wait()
        folder.rename(tmp_path / "away")  # Like on a full disk, nothing can be written.
        end.release()
        leave.wait()
        job.until_finished(1)
        holder.kill()
        leave.release()
        newcomer = job.start_one(0)
        assert not newcomer.joined.wait(brief(2))
        (tmp_path / "away").rename(folder)
        check(job)
        assert present(newcomer.welcome)["finished"]
        job.kill_server()
        job.revive()
        check(job)
