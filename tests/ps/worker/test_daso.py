"""DASO's members over real sockets: their trace equals the simulator's, also after deaths and restarts."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
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
    gradient,
    killed_at,
    members_of,
    simulated,
)
from support.ps.running_server import Running
from support.ps.toy_model import ToyBatch

from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError, JobStoppedError, MemberLostError, NonFiniteError, SnapshotError
from distkeras.ps.protocol.loop import CommitRecord, KeepRequest
from distkeras.ps.protocol.messages import error_of
from distkeras.ps.rules.daso import Daso
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.rendezvous import LOST_MEMBERSHIPS_MAX
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient


@pytest.mark.parametrize(
    ("daso", "workers"),
    [
        (Daso(nodes=2, interval=2, warm_up=1, cool_down=1), 4),
        (Daso(nodes=3, interval=3, wait=2, warm_up=0, cool_down=0), 6),
        (Daso(nodes=2, warm_up=4, cool_down=0, cast=False), 6),
        (Daso(nodes=2, interval=4, wait=4, warm_up=1, cool_down=1), 2),
        (Daso(nodes=1), 3),
    ],
)
def test_every_step_equals_the_simulators_to_the_bit(daso: Daso, workers: int) -> None:
    epochs, batches = 4, 3
    with Running(daso, workers=workers, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, workers, epochs, batches)
        run_members(members)
        assert [member.error for member in members] == [None] * workers
        center = running.driver.center().center
    trace = simulated(daso, workers, epochs, batches)
    devices = workers // present(daso.nodes)
    for worker, member in enumerate(members):
        # The first theta is the pulled center.
        np.testing.assert_array_equal(member.replica.thetas[1:], trace.thetas[:, worker // devices])
    np.testing.assert_allclose(center, trace.mean, rtol=1e-6)


def epoch_losses(means: list[float], worker: int) -> Callable[[ToyBatch], float]:
    """Return the loss function of one of four workers, whose losses in an epoch have the mean of ``means``."""
    return lambda batch: means[batch.epoch] + (worker - 1.5) / 8


def test_a_plateau_of_the_epochs_mean_loss_changes_the_interval() -> None:
    daso = Daso(nodes=2, interval=4, warm_up=0, cool_down=0, patience=1)
    means = [1.0, 1.0, 0.5, 0.5, 0.5, 0.2]
    with Running(daso, workers=4, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, 4, len(means), 2)
        for worker, member in enumerate(members):
            member.replica.losses = epoch_losses(means, worker)
        run_members(members)
        assert [member.error for member in members] == [None] * 4
    losses = iter(means)
    trace = simulated(daso, 4, len(means), 2, loss=lambda theta: next(losses))
    assert trace.interval.tolist() == [4] * 4 + [2] * 4 + [1] * 2 + [4] * 2
    for worker, member in enumerate(members):
        np.testing.assert_array_equal(member.replica.thetas[1:], trace.thetas[:, worker // 2])


def test_a_member_whose_rows_have_ended_takes_part_without_a_gradient() -> None:
    daso = Daso(nodes=2, warm_up=2, cool_down=0, cast=False, momentum=0.0)
    with Running(daso, workers=4, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, 4, 2, [3, 2, 1, 1])
        run_members(members)
        assert [member.error for member in members] == [None] * 4
        theta, expected = START.copy(), []
        for _ in range(2):
            for first, second in (([0, 1], [2, 3]), ([0, 1], []), ([0], [])):
                moved = [theta.copy(), theta.copy()]
                for node, active in enumerate((first, second)):
                    if active:
                        gradients = [gradient(theta, worker) for worker in active]
                        moved[node] -= ETA * np.mean(gradients, axis=0)
                theta = np.mean(moved, axis=0)
                expected.append(theta)
    for member in members:
        np.testing.assert_allclose(member.replica.thetas[1:], expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_an_error_before_it_is_added_to_a_sum() -> None:
    daso = Daso(nodes=2)
    with Running(daso, workers=2, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, 2, 3, 3)
        members[1].replica = RecordingReplica(SIZE, ETA, killed_at(4, lambda theta: theta * np.float32("nan")))
        run_members(members)
    assert isinstance(members[1].error, NonFiniteError)
    assert (members[1].error.worker, members[1].error.step) == (1, 1)
    assert isinstance(members[0].error, JobStoppedError)


def test_nodes_of_unequal_size_are_an_error_for_all() -> None:
    daso = Daso()
    with Running(daso, workers=3, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, 3, 3, 1)
        for member, node in zip(members, "aab", strict=True):
            member.node = node
        run_members(members)
    for member in members:
        assert isinstance(member.error, (ConfigurationError, JobStoppedError))  # the first error ends the job
        assert "same number of workers" in str(member.error)
        assert "a: 2, b: 1" in str(member.error)


def test_hosts_with_interleaved_partitions_are_separate_nodes() -> None:
    daso = Daso(warm_up=4, cool_down=0, cast=False)
    with Running(daso, workers=4, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, 4, 4, 2)
        for member, node in zip(members, "abab", strict=True):
            member.node = node
        run_members(members)
        assert [member.error for member in members] == [None] * 4
        assert [member.links.membership.rank for member in members] == [0, 2, 1, 3]


def test_an_unauthenticated_connection_to_a_members_port_disturbs_nothing() -> None:
    daso = Daso(nodes=2)
    with Running(daso, workers=2, size=SIZE, start=START) as running:
        members = members_of(running.address, daso, 2, 3, 2)
        with socket.create_connection(members[0].links.address) as silent:
            with socket.create_connection(members[0].links.address) as loud:
                loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
                run_members(members)
            assert [member.error for member in members] == [None] * 2
            silent.settimeout(patience(30))
            while silent.recv(4096):
                pass  # the member closes the connection


#: The requests of a member's loop: a pull; then a computation, a state and a commit in each epoch.
REQUESTS = 1 + 3 * EPOCHS


def run_with(change: Callable[[list[Member]], None]) -> None:
    with Running(DASO, workers=WORKERS, size=SIZE, start=START) as running:
        members = members_of(running.address, DASO, WORKERS, EPOCHS, BATCHES)
        change(members)
        last = run_members(members)
        assert any(isinstance(member.error, Killed) for member in members)
        assert_as_without_a_death(running.driver, last)


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.slow] * (step % 3 > 0)) for step in range(EPOCHS * BATCHES)]
)
def test_a_death_within_a_step_changes_no_number(step: int) -> None:
    """The steps cover each phase; in the cycling phase, an exchange is in flight."""

    def change(members: list[Member]) -> None:
        members[step % WORKERS].replica = RecordingReplica(SIZE, ETA, killed_at(step, die))

    run_with(change)


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number % 3 > 0)) for number in range(REQUESTS)]
)
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


@pytest.mark.slow
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


class Job:
    """A server process that has the center and saves snapshots."""

    def __init__(self, folder: Path, every: int, *, resume: bool = False) -> None:
        checkpoint = Checkpoint(str(folder), every=every)
        settings = ServerSettings(DASO, workers=WORKERS, deadlines=PATIENT, checkpoint=checkpoint)
        self.process = ServerProcess(settings, resume=resume, epochs=EPOCHS)
        self.process.start()
        self.driver = DriverClient(self.process.address, PATIENT)
        self.publish()

    def publish(self) -> None:
        self.driver.publish(START, model=b"the model")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.exited(patience(10))

    def kill_and_restart(self) -> None:
        self.kill()
        self.driver.close()
        self.process.restart()
        self.publish()


@contextmanager
def job_in(folder: Path, every: int, **options: Any) -> Iterator[Job]:
    job = Job(folder, every, **options)
    try:
        yield job
    finally:
        job.driver.close()
        job.process.close()


@pytest.mark.parametrize("every", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_members_continue_from_the_snapshot_of_a_killed_server(tmp_path: Path, every: int) -> None:
    """The snapshot is that of the previous round, or the first one, with which the members begin again."""
    with job_in(tmp_path, every) as job:
        members = members_of(job.process.address, DASO, WORKERS, EPOCHS, BATCHES)
        restarts: list[int] = []

        def watch(number: int, request: Any) -> None:
            if isinstance(request, CommitRecord) and request.epoch == 2 and not restarts:
                restarts.append(number)
                job.kill_and_restart()

        members[1].die = watch
        last = run_members(members)
        assert restarts
        assert_as_without_a_death(job.driver, last)


@pytest.mark.slow
def test_a_job_continues_after_the_death_of_all_its_processes(tmp_path: Path) -> None:
    with job_in(tmp_path, every=1) as job:
        members = members_of(job.process.address, DASO, WORKERS, EPOCHS, BATCHES)

        def watch(number: int, request: Any) -> None:
            if isinstance(request, CommitRecord) and request.epoch == 3:
                die()

        for member in members:
            member.die = watch
        run_members(members, replaced=False)
        until(lambda: job.driver.observe(-1, 1.0).saved_clock == 3 * WORKERS)
        job.kill()
    with job_in(tmp_path, every=1, resume=True) as job:
        last = run_members(members_of(job.process.address, DASO, WORKERS, EPOCHS, BATCHES))
        assert_as_without_a_death(job.driver, last)
