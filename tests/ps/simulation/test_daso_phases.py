"""DASO: the mini-batches after which each group sends, and the effect of a plateau of the loss on B and W."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.present import present
from support.ps.daso_runs import assert_close, cycling, run_daso, run_without_gradients

from distkeras.ps.rules.daso import Daso
from distkeras.ps.simulation.timing import Communication


def test_the_phases_take_their_epochs_and_groups_take_turns_through_all_of_them() -> None:
    trace = run_without_gradients(Daso(interval=2, warm_up=2, cool_down=1), devices=3, epochs=6, batches=2)
    assert trace.phase.tolist() == ["warm_up"] * 4 + ["cycling"] * 6 + ["cool_down"] * 2
    assert trace.interval.tolist() == [1] * 4 + [2] * 6 + [1] * 2
    assert trace.wait.tolist() == [0] * 4 + [1] * 6 + [0] * 2
    assert trace.group.tolist() == [0, 1, 2, 0, -1, 1, -1, 2, -1, 0, 1, 2]
    # The blocking exchange after mini-batch 10 replaces the exchange that was sent after mini-batch 9.
    assert trace.merged.tolist() == [0, 1, 2, 3, -1, -1, 5, -1, 7, -1, 10, 11]


def test_nodes_are_equal_after_each_blocking_exchange_and_differ_while_cycling() -> None:
    trace = run_daso(Daso(warm_up=1, cool_down=1))
    apart = np.ptp(present(trace.thetas), axis=1).max(axis=1) > 0
    assert apart.tolist() == (trace.phase == "cycling").tolist()


def test_after_a_halving_a_send_waits_for_the_exchange_in_flight() -> None:
    # An exchange is sent after mini-batch 3 and merged after 7; with a plateau after 3, B = W = 2, and the next send
    # would be due after 5.
    losses = iter([1.0, 0.9, 0.8, 0.8, *[0.1 / 2**epoch for epoch in range(10)]])
    trace = run_without_gradients(cycling(interval=4, wait=4, patience=1), epochs=12, loss=lambda theta: next(losses))
    assert trace.interval.tolist() == [4] * 4 + [2] * 8
    assert np.flatnonzero(trace.group >= 0).tolist() == [3, 7, 9, 11]
    assert np.flatnonzero(trace.merged >= 0).tolist() == [7, 9, 11]
    assert trace.merged[[7, 9, 11]].tolist() == [3, 7, 9]


def test_a_single_node_exchanges_nothing() -> None:
    options: dict[str, Any] = {"nodes": 1, "devices": 3, "communication": Communication(latency=100.0)}
    trace = run_daso(Daso(), **options)
    assert (trace.group == -1).all()
    assert (trace.merged == -1).all()
    assert trace.time[-1] == 12
    np.testing.assert_array_equal(trace.thetas, run_daso(cycling(), **options).thetas)


# Plateaus


def epochs_of_plateaus(losses: list[float], **hyper: Any) -> list[int]:
    """Return the epochs at the end of which B changed."""
    remaining = iter(losses)
    trace = run_without_gradients(cycling(interval=4, **hyper), epochs=len(losses), loss=lambda theta: next(remaining))
    return np.flatnonzero(np.diff(trace.interval)).tolist()


@pytest.mark.parametrize(
    ("losses", "hyper", "plateaus"),
    [
        ([9, 8, 7, 6, 5, 4], {"patience": 1}, []),
        ([9, 9, 8, 8, 7, 7, 0], {"patience": 1}, [1, 3, 5]),
        ([9, 9, 9, 8, 8, 8, 0], {"patience": 2}, [2, 5]),
        ([9, 9, 8, 8, 7, 7, 0], {"patience": 2}, []),
        ([9, 9, 9, 9, 9, 9, 9, 0], {"patience": 3}, [3, 6]),  # counted from zero after each plateau
        ([9] * 6 + [0], {}, [5]),  # the default patience is 5
        ([100, 99.1, 98.2, 0], {"patience": 1}, [1]),  # 98.2 is more than 1 % below 100, unlike 99.1
        ([100, 99, 0], {"patience": 1}, [1]),  # a decrease of exactly 1 % is too small
        ([100, 91, 89, 0], {"patience": 1, "threshold": 0.1}, [1]),
        ([100, 99.99, 99.98, 0], {"patience": 1, "threshold": 0.0}, []),
        ([5, 9, 8, 7, 0], {"patience": 1}, [1, 2, 3]),  # compared with the lowest loss, not the previous one
        ([-1, -1.005, -1.02, -9], {"patience": 1}, [1]),
        ([9, float("nan"), 8, 0], {"patience": 1}, [1]),
    ],
)
def test_a_plateau_is_patience_epochs_without_a_decrease_by_the_threshold(
    losses: list[float], hyper: dict[str, Any], plateaus: list[int]
) -> None:
    assert epochs_of_plateaus(losses, **hyper) == plateaus


def test_plateaus_count_in_the_cycling_phase_only_and_the_loss_is_that_of_the_mean() -> None:
    thetas = []

    def loss(theta: np.ndarray) -> float:
        thetas.append(theta.copy())
        return 1.0

    daso = Daso(interval=4, warm_up=3, cool_down=2, patience=1)
    trace = run_daso(daso, epochs=8, batches=2, loss=loss)
    assert trace.interval[trace.phase == "cycling"].tolist() == [4, 4, 4, 4, 2, 2]
    assert_close(thetas, present(trace.thetas)[1::2].mean(axis=1))
    assert np.isnan(trace.loss[::2]).all()
    assert trace.loss[1::2].tolist() == [1.0] * 8
    assert np.isnan(run_daso(daso, epochs=8).loss).all()
