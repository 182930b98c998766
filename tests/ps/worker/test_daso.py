"""DASO's members over real sockets: their trace equals the simulator's."""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import pytest
from support.patience import patience
from support.present import present
from support.ps.daso_members import RecordingReplica, run_members
from support.ps.daso_toys import ETA, SIZE, START, gradient, killed_at, members_of, simulated
from support.ps.running_server import Running
from support.ps.toy_model import ToyBatch

from distkeras.ps.errors import ConfigurationError, JobStoppedError, NonFiniteError
from distkeras.ps.rules.daso import Daso


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
        np.testing.assert_array_equal(member.replica.thetas[1:], present(trace.thetas)[:, worker // devices])
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
        np.testing.assert_array_equal(member.replica.thetas[1:], present(trace.thetas)[:, worker // 2])


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
