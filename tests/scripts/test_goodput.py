"""Tests of the figures of the goodput benchmark."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from bench.goodput_job import faults, figures


def commit(clock: int, attempt: int, epoch: int, first: int, last: int) -> dict[str, Any]:
    return {"worker": 0, "attempt": attempt, "epoch": epoch, "first_batch": first, "last_batch": last, "clock": clock}


def history(steps: int) -> list[dict[str, Any]]:
    return [{"worker": 0, "iteration": step, "at": 100.0 + step, "samples": 8} for step in range(steps)]


def test_faults_have_the_given_rate_and_reproducible_times() -> None:
    drawn = list(faults(3600 * 40, 60, 5))
    assert drawn == list(faults(3600 * 40, 60, 5))
    assert len(drawn) == pytest.approx(2400, rel=0.1)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(drawn)]
    # Their intervals have the variation of exponential ones.
    assert statistics.stdev(gaps) == pytest.approx(60, rel=0.1)
    assert {kind for _, kind in drawn} == {"kill", "suspend", "cut off", "kill server"}
    assert not list(faults(3600, 0, 5))


def test_a_restart_is_timed_from_the_kill_to_the_successor_s_first_step() -> None:
    ledger = [commit(1, 0, 0, 0, 1), commit(2, 3, 0, 2, 3), commit(3, 3, 1, 0, 1)]
    found = figures(ledger, history(6), [(101.5, "kill"), (102.5, "suspend")])
    assert (found["lost"], found["doubled"], found["successors"]) == (0, 0, [0.5])
    assert found["rate"] == pytest.approx(6 * 8 / 5)


@pytest.mark.parametrize(
    ("second", "lost", "doubled"), [(commit(2, 0, 0, 3, 3), 1, 0), (commit(2, 0, 0, 1, 3), 0, 1)], ids=["gap", "twice"]
)
def test_lost_and_repeated_steps_are_counted(second: dict[str, Any], lost: int, doubled: int) -> None:
    found = figures([commit(1, 0, 0, 0, 1), second], history(6), [])
    assert (found["lost"], found["doubled"]) == (lost, doubled)
