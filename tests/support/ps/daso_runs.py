"""Runs of DASO on small problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distkeras.ps.rules.daso import Daso
from support.ps.daso_simulator import DasoTrace, simulate_daso
from support.ps.transcriptions import Problem

ETA = 0.05
#: Every epoch has the same loss: the first counts as a decrease, and the later ones do not.
FLAT: dict[str, Any] = {"loss": lambda theta: 1.0}


def run_daso(
    daso: Daso, *, nodes: int = 3, devices: int = 2, epochs: int = 4, batches: int = 3, **options: Any
) -> DasoTrace:
    """Simulate DASO on a noisy quadratic."""
    job = Problem(nodes * devices, [], eta=ETA, seed=7)
    options.setdefault("learning_rate", ETA)
    return simulate_daso(
        daso,
        job.start,
        lambda theta, worker: job.g(worker, theta),
        nodes=nodes,
        devices=devices,
        epochs=epochs,
        batches=batches,
        **options,
    )


def run_without_gradients(
    daso: Daso,
    *,
    nodes: int = 2,
    devices: int = 2,
    epochs: int = 20,
    batches: int = 1,
    gradient: Callable[..., Any] = lambda theta, worker: np.zeros(1),
    **options: Any,
) -> DasoTrace:
    """Simulate DASO with constant parameters, to test when each device sends."""
    options.setdefault("learning_rate", 1.0)
    return simulate_daso(
        daso, np.ones(1), gradient, nodes=nodes, devices=devices, epochs=epochs, batches=batches, **options
    )


def cycling(**hyper: Any) -> Daso:
    """Return DASO with the cycling phase only."""
    return Daso(**{"warm_up": 0, "cool_down": 0, **hyper})


def blocking(epochs: int, **hyper: Any) -> Daso:
    """Return DASO that blocks in every epoch, as sequential methods do, and does not cast."""
    return Daso(**{"warm_up": epochs, "cool_down": 0, "cast": False, **hyper})


def assert_close(actual: list[np.ndarray] | np.ndarray | float, expected: float | np.ndarray | list[Any]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
