"""A quadratic for each worker of a DASO job, and its simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.rules.daso import Daso
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from support.patience import PATIENT
from support.present import present
from support.ps.daso_members import Killed, Member, RecordingReplica
from support.ps.daso_simulator import DasoTrace, simulate_daso

SIZE, ETA = 37, 0.05
START = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
OPTIMA = np.random.default_rng(4).normal(size=(6, SIZE)).astype(np.float32)


WORKERS, EPOCHS, BATCHES = 4, 5, 3
#: One epoch of warm-up, three of cycling, one of cool-down. An exchange is in progress during each epoch of cycling.
DASO = Daso(nodes=2, interval=2, wait=2, warm_up=1, cool_down=1)


def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
    """Return the gradient of a quadratic with the worker's own optimum."""
    return np.float32(1 + worker / 8) * (theta - OPTIMA[worker])


def members_of(
    address: Address, daso: Daso, workers: int, epochs: int, batches: Any, *, deadlines: Deadlines = PATIENT
) -> list[Member]:
    counts = [batches] * workers if isinstance(batches, int) else batches
    return [
        Member(
            address,
            deadlines,
            daso,
            RecordingReplica(SIZE, ETA, gradient),
            [worker] * counts[worker],
            worker=worker,
            epochs=epochs,
        )
        for worker in range(workers)
    ]


def simulated(daso: Daso, workers: int, epochs: int, batches: int, **options: Any) -> DasoTrace:
    nodes = present(daso.nodes)
    return simulate_daso(
        daso,
        START,
        gradient,
        nodes=nodes,
        devices=workers // nodes,
        learning_rate=ETA,
        epochs=epochs,
        batches=batches,
        dtype=np.float32,
        **options,
    )


def killed_at(step: int, act: Any) -> Any:
    """Return a gradient function that calls ``act`` in the member's step number ``step``."""
    steps = iter(range(1 << 30))

    def compute(theta: np.ndarray, worker: int) -> np.ndarray:
        return act(theta) if next(steps) == step else gradient(theta, worker)

    return compute


def die(*args: Any) -> Any:
    raise Killed


def die_at(number: int) -> Callable[[int, Any], None]:
    """Return a `Member`'s ``die`` that ends it before the request of that number."""
    return lambda at, request: die() if at == number else None


def assert_as_without_a_death(driver: DriverClient, members: Sequence[Member], epochs: int = EPOCHS) -> None:
    """Check that the members' latest steps, the center and the ledger are those of the simulator."""
    assert [member.error for member in members] == [None] * len(members)
    trace = simulated(DASO, len(members), epochs, BATCHES)
    thetas = present(trace.thetas)
    for worker, member in enumerate(members):
        if member.replica.thetas:  # Otherwise the member joined after all steps.
            np.testing.assert_array_equal(member.replica.thetas[-BATCHES:], thetas[-BATCHES:, worker // 2])
    np.testing.assert_allclose(driver.center().center, trace.mean, rtol=1e-6)
    commits = driver.drain().commits.view(COMMIT)
    counted = sorted(commits[["worker", "epoch", "first_batch", "last_batch"]].tolist())
    assert counted == [(worker, epoch, 0, BATCHES - 1) for worker in range(len(members)) for epoch in range(epochs)]
