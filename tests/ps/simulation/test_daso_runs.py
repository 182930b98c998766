"""DASO: the inputs that a run does not change, the fields that it returns, and the arguments that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.present import present
from support.ps.daso_runs import ETA, assert_close, cycling, run_daso, run_without_gradients

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.daso import Daso
from distkeras.ps.rules.schedules import Constant, WarmUp
from distkeras.ps.simulation.daso import simulate_daso
from distkeras.ps.simulation.timing import Communication, Memoryless


def test_a_run_is_determined_by_its_seed_to_the_bit() -> None:
    options: dict[str, Any] = {"timing": Memoryless(), "loss": lambda theta: float(theta @ theta), "dtype": np.float32}
    first, again, other = (run_daso(Daso(patience=1), seed=seed, **options) for seed in (5, 5, 6))
    for field in vars(first):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    np.testing.assert_array_equal(first.thetas, other.thetas)
    assert not np.array_equal(first.time, other.time)


def test_every_device_takes_every_batch_in_turn_at_its_node() -> None:
    start, calls = np.ones(2), []

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        calls.append((worker, theta.copy()))
        return np.full(2, float(worker // 2))

    simulate_daso(cycling(), start, gradient, nodes=2, devices=2, learning_rate=0.5, epochs=1, batches=2)
    assert [worker for worker, _ in calls] == [0, 1, 2, 3] * 2
    assert [theta[0] for _, theta in calls] == [1] * 4 + [1, 1, 0.5, 0.5]


@pytest.mark.parametrize("nodes", [1, 2])
def test_inputs_are_not_changed(nodes: int) -> None:
    start = np.ones(2)
    simulate_daso(
        Daso(), start, lambda theta, worker: start, nodes=nodes, devices=1, learning_rate=0.5, epochs=2, batches=2
    )
    np.testing.assert_array_equal(start, np.ones(2))


def test_learning_rate_schedules_count_mini_batches() -> None:
    constant = run_daso(Daso(), learning_rate=Constant(ETA))
    np.testing.assert_array_equal(constant.thetas, run_daso(Daso()).thetas)
    trace = run_without_gradients(
        cycling(momentum=0.0),
        epochs=2,
        batches=2,
        learning_rate=WarmUp(0.4, length=4, divisor=4.0),
        gradient=lambda theta, worker: np.ones(1),
        keep_thetas=True,
    )
    assert_close(1 - present(trace.thetas)[:, 0, 0], np.cumsum([0.1, 0.175, 0.25, 0.325]))


@pytest.mark.parametrize("keep", [False, True])
def test_thetas_are_returned_on_request(keep: bool) -> None:
    trace = run_daso(Daso(), keep_thetas=keep)
    assert (trace.thetas is not None) == keep
    if keep:
        assert present(trace.thetas).shape == (12, 3, 5)
        np.testing.assert_array_equal(present(trace.thetas)[-1], trace.theta)


# Refusals


@pytest.mark.parametrize(
    ("hyper", "text"),
    [
        ({"interval": 0}, "`interval` must be a positive integer. Received: interval=0"),
        ({"interval": 2.0}, "`interval` must be a positive integer. Received: interval=2.0"),
        ({"wait": 0}, "`wait` must be an integer from 1 to 4. Received: wait=0"),
        ({"wait": 5}, "`wait` must be an integer from 1 to 4. Received: wait=5"),
        ({"wait": True}, "`wait` must be an integer from 1 to 4. Received: wait=True"),
        ({"warm_up": -1}, "`warm_up` must be an integer of at least 0. Received: warm_up=-1"),
        ({"cool_down": 0.5}, "`cool_down` must be an integer of at least 0. Received: cool_down=0.5"),
        ({"momentum": 1.0}, "`momentum` must be a finite number of at least 0 and below 1. Received: momentum=1.0"),
        ({"momentum": -0.1}, "`momentum` must be a finite number of at least 0 and below 1. Received: momentum=-0.1"),
        ({"cast": "bf16"}, "`cast` must be True or False. Received: cast='bf16'"),
        ({"threshold": 1.0}, "`threshold` must be a finite number of at least 0 and below 1. Received: threshold=1.0"),
        (
            {"threshold": -0.1},
            "`threshold` must be a finite number of at least 0 and below 1. Received: threshold=-0.1",
        ),
        ({"patience": 0}, "`patience` must be a positive integer. Received: patience=0"),
    ],
)
def test_bad_hyper_parameters_are_refused(hyper: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Daso(**hyper)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": 0}, "`nodes` must be a positive integer. Received: nodes=0"),
        ({"devices": 1.5}, "`devices` must be a positive integer. Received: devices=1.5"),
        ({"batches": 0}, "`batches` must be a positive integer. Received: batches=0"),
        ({"epochs": 0}, "`epochs` must be a positive integer. Received: epochs=0"),
        ({"epochs": 1}, "`epochs` must be at least those of warm-up and cool-down, 1 + 1. Received: epochs=1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be a finite number above 0. Received: learning_rate=0.0"),
        ({"dtype": np.int32}, f"`dtype` must be float32 or float64. Received: dtype={np.int32!r}"),
        (
            {"communication": Communication(service=1.0)},
            "`service` must be 0 where there is no server. Received: service=1.0",
        ),
        (
            {"gradient": lambda theta, worker: np.zeros(2)},
            "`gradient` must return shape (1,). Received: (2,)",
        ),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run_without_gradients(Daso(), **options)
    assert str(caught.value) == text


def test_parameters_must_be_flat() -> None:
    unused: Any = None
    with pytest.raises(ConfigurationError, match=r"^`theta0` must be one flat vector. Received: shape \(2, 2\)$"):
        simulate_daso(Daso(), np.ones((2, 2)), unused, nodes=2, devices=1, learning_rate=0.1, epochs=2, batches=1)
