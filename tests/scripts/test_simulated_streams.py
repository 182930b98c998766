"""Tests of streams in virtual time: each micro-batch counts once, although processes die in all of its phases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.command import find_planted
from simulation.plan import KINDS, PHASES, Fault, Plan
from simulation.simulation import simulate

#: Planted faults with the seed of the first schedule that finds each.
SOON = {
    "a-snapshot-forgets-its-micro-batch": 69,
    "a-snapshot-has-the-micro-batch-before": 69,
    "what-is-covered-begins-again": 197,
    "a-micro-batch-begins-where-the-one-before-ended": 20,
    "spark-notes-a-micro-batch-before-its-snapshot": 69,
    "an-attempt-of-an-earlier-micro-batch-gets-a-lease": 1266,
    "an-early-attempt-does-not-wait": 434,
    "records-of-earlier-micro-batches-are-drained": 69,
    "what-was-skipped-before-counts-as-present": 2903,
    "other-rows-are-taken-for-the-same": 821,
    "the-state-of-an-earlier-micro-batch-is-reused": 2586,
    "a-pace-goes-on-over-micro-batches": 691,
    "what-a-rule-has-for-a-partition-is-lost": 297,
}
#: A stream with empty partitions, and with an empty micro-batch.
STREAM = Plan(1, batches=(2, 0), stream=((2, 0), (1, 3), (0, 0), (1, 1)), every=2, compute=1.0)


@pytest.mark.parametrize("name", SOON)
def test_planted_faults_are_found(name: str) -> None:
    # If the code has changed, another schedule may find it; `python tests/simulation --planted NAME` names that one.
    assert find_planted(name, SOON[name], 400)


@pytest.mark.parametrize("phase", PHASES)
def test_each_row_counts_once_if_a_process_dies(phase: str) -> None:
    for kind in PHASES[phase]:
        for number in (1, 3):
            fault = Fault(kind, number, phase, min(2.0, KINDS[kind][1]), 1)
            outcome = simulate(replace(STREAM, seed=number, faults=(fault,)))
            assert outcome.finding is None
            assert outcome.error == ""
            assert [fault.kind for fault in outcome.injected] == [kind]


def test_changed_rows_of_a_covered_micro_batch_end_the_stream() -> None:
    plan = Plan(3, batches=(2, 2), stream=((2, 2), (1, 1)), altered=True, faults=(Fault("kill driver", 2, "checked"),))
    outcome = simulate(plan)
    assert outcome.finding is None
    assert outcome.error == "LedgerError"
