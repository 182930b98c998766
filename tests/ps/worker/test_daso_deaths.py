"""Members that die: successors replace them, and the job's numbers are those of a job without a death."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.patience import PATIENT, brief
from support.present import present
from support.ps.daso_members import Killed, Member, RecordingReplica, run_members
from support.ps.daso_toys import (
    BATCHES,
    DASO,
    EPOCHS,
    ETA,
    SIZE,
    START,
    WORKERS,
    assert_as_without_a_death,
    die,
    die_at,
    killed_at,
    members_of,
)
from support.ps.running_server import Running

from distkeras.ps.errors import JobStoppedError, MemberLostError, SnapshotError
from distkeras.ps.protocol.loop import CommitRecord, KeepRequest
from distkeras.ps.protocol.messages import error_of
from distkeras.ps.server.rendezvous import LOST_MEMBERSHIPS_MAX

#: The requests of a member's loop: a pull; then a computation, a state and a commit in each epoch.
REQUESTS = 1 + 3 * EPOCHS


def run_with(change: Callable[[list[Member]], None]) -> None:
    with Running(DASO, workers=WORKERS, size=SIZE, start=START) as running:
        members = members_of(running.address, DASO, WORKERS, EPOCHS, BATCHES)
        change(members)
        last = run_members(members)
        assert any(isinstance(member.error, Killed) for member in members)
        assert_as_without_a_death(running.driver, last)


@pytest.mark.parametrize("step", range(EPOCHS * BATCHES))
def test_a_death_within_a_step_changes_no_number(step: int) -> None:
    """The steps cover each phase; in the cycling phase, an exchange is in flight."""

    def change(members: list[Member]) -> None:
        members[step % WORKERS].replica = RecordingReplica(SIZE, ETA, killed_at(step, die))

    run_with(change)


@pytest.mark.parametrize("number", range(REQUESTS))
def test_a_death_between_two_requests_changes_no_number(number: int) -> None:
    """The deaths are before and after a pull, a state and a commit."""

    def change(members: list[Member]) -> None:
        members[number % WORKERS].die = die_at(number)

    run_with(change)


@pytest.mark.parametrize("lost", [(0, 1), (0, 2), (1, 2), (0, 1, 2, 3)])
def test_a_node_a_group_or_all_members_may_die_at_once(lost: tuple[int, ...]) -> None:
    def change(members: list[Member]) -> None:
        for worker in lost:
            members[worker].replica = RecordingReplica(SIZE, ETA, killed_at(7, die))

    run_with(change)


def test_a_successor_may_die_as_well() -> None:
    def change(members: list[Member]) -> None:
        first, successor = members[2], members[2].successor
        first.replica = RecordingReplica(SIZE, ETA, killed_at(4, die))

        def dying_successor() -> Member:
            second = successor()
            second.die = die_at(1)  # it has connected to the other members
            return second

        first.successor = dying_successor

    run_with(change)


def test_a_round_is_applied_for_all_members_or_for_none() -> None:
    """One worker dies before its commit, when the other commits have arrived: no commit is applied."""
    sequences: list[int] = []

    def change(members: list[Member]) -> None:
        def watch(number: int, request: Any) -> None:
            if isinstance(request, CommitRecord) and request.epoch == 2:
                sequences.append(members[3].client.sequence)
                die()

        members[3].die = watch

    run_with(change)
    assert sequences == [2]


def lose_in_cycling(members: list[Member], *, worker: int) -> None:
    members[worker].replica = RecordingReplica(SIZE, ETA, killed_at(4, die))


def test_without_a_successor_the_job_ends_with_one_error() -> None:
    deadlines = dataclasses.replace(PATIENT, reply=brief(1.0))
    with Running(DASO, workers=2, size=SIZE, start=START, deadlines=deadlines) as running:
        members = members_of(running.address, DASO, 2, EPOCHS, BATCHES, deadlines=deadlines)
        lose_in_cycling(members, worker=1)
        run_members(members, replaced=False)
        fault = running.server.fault
    assert isinstance(members[0].error, JobStoppedError)
    error = error_of(present(fault))
    assert isinstance(error, MemberLostError)
    assert (error.worker, error.step) == (1, 0)
    assert "workers [1], which exchange with others, were lost in epoch 1, and no successor has come" in str(error)


def test_members_that_lose_each_other_repeatedly_end_the_job() -> None:
    with Running(DASO, workers=2, size=SIZE, start=START) as running:
        clients = [running.client(worker, size=SIZE) for worker in (0, 1)]
        for client in clients:
            client.join()
        with ThreadPoolExecutor(2) as pool:
            for port in range(1, LOST_MEMBERSHIPS_MAX + 2):
                requests = [pool.submit(client.announce, "127.0.0.1", port, "a", 3) for client in clients]
                assert [request.result().nodes for request in requests] == [2, 2]
            requests = [pool.submit(client.announce, "127.0.0.1", 99, "a", 3) for client in clients]
            for request in requests:
                with pytest.raises(JobStoppedError, match="have lost each other 6 times in a row without a death"):
                    request.result()
        for client in clients:
            client.close()


def test_a_missing_state_ends_the_job() -> None:
    """The state is requested when a later round than that of the state has ended."""
    with Running(DASO, workers=2, size=SIZE, start=START) as running:
        members = members_of(running.address, DASO, 2, EPOCHS, BATCHES)

        def forget(number: int, request: Any) -> None:
            if isinstance(request, KeepRequest) and members[1].client.sequence == 2:
                with running.server.dispatcher.changed:
                    present(running.server.center).leases[1].optimizer = None
                die()

        members[1].die = forget
        last = run_members(members)
        fault = running.server.fault
    assert isinstance(last[1].error, SnapshotError)
    assert isinstance(error_of(present(fault)), SnapshotError)
    assert "must have the worker's state after commit 2" in str(last[1].error)
    assert isinstance(last[0].error, JobStoppedError)
