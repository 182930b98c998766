"""Tests of DASO in virtual time: under any faults, each step equals the simulator's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from simulation.command import collecting
from simulation.members import Course, loss_of
from simulation.mutations import planted
from simulation.plan import Fault, Plan, draw_members
from simulation.simulation import simulate
from support.cases import scaled_down
from support.present import present
from support.ps.daso_simulator import simulate_daso

from distkeras.ps.rules.daso import Daso

#: With these seeds, a sender, a server and a worker fail in the few runs of the default suite, too.
RUNS = range(40, 40 + scaled_down(80))
#: Planted faults with the seed of the first schedule that finds each.
SOON = {
    "the-first-of-a-sum-counts-twice": 0,
    "a-lost-member-has-sent-nothing": 3,
    "an-exchange-begins-before-the-last-one-has-ended": 0,
    "groups-take-no-turns": 0,
    "a-merge-counts-another-step": 0,
    "blocking-exchanges-are-not-cast": 6,
    "a-plateau-is-each-members-own": 0,
    "commits-of-members-count-one-by-one": 56,
    "a-momentum-begins-again": 24,
    "turns-begin-again": 15,
    "vectors-take-no-turns": 0,
    "a-member-is-sent-half-a-vector": 0,
}
CYCLING = Plan(
    0,
    workers=4,
    epochs=5,
    batches=(3, 3, 3, 3),
    rule="daso",
    hyper_parameters={"nodes": 2, "interval": 4, "wait": 2, "warm_up": 1, "cool_down": 1, "patience": 1},
    rounding=True,
)


@pytest.mark.parametrize(
    "hyper_parameters", [{}, {"interval": 2, "wait": 1, "warm_up": 0}, {"nodes": 4, "cast": False}]
)
def test_the_expected_state_of_members_equals_the_simulator_s(hyper_parameters: dict[str, int]) -> None:
    plan = replace(CYCLING, hyper_parameters=CYCLING.hyper_parameters | hyper_parameters)
    element = plan.layout(0).element
    amounts = (1.0 - 0.13 * (np.arange(plan.epochs * plan.total) % 5)).astype(np.float32)
    daso, taken = plan.make_rule(), Counter[int]()
    assert isinstance(daso, Daso)

    def gradient(theta: np.ndarray, worker: int) -> np.ndarray:
        epoch, index = divmod(taken[worker], max(plan.batches))
        taken[worker] += 1
        found, out = element(worker, epoch, index), np.zeros_like(theta)
        out[found] = -amounts[found]
        return out

    epochs = iter(range(plan.epochs))

    def loss(theta: np.ndarray) -> float:
        epoch = next(epochs)
        return float(np.mean([loss_of(plan.workers, worker, epoch) for worker in range(plan.workers)]))

    nodes = present(daso.nodes)
    trace = simulate_daso(
        daso,
        np.zeros_like(amounts),
        gradient,
        nodes=nodes,
        devices=plan.workers // nodes,
        learning_rate=1.0,
        epochs=plan.epochs,
        batches=max(plan.batches),
        loss=loss,
        dtype=np.float32,
    )
    course = Course(plan, element, amounts)
    np.testing.assert_array_equal(course.thetas, trace.thetas)
    groups = [course.exchanges.get(step, (-1, False))[0] for step in range(len(course.thetas))]
    assert groups == trace.group.tolist()
    assert len({*trace.interval.tolist()}) > 1


def test_every_promise_holds() -> None:
    outcomes = {seed: simulate(draw_members(seed)) for seed in collecting(RUNS)}
    assert not [f"seed {seed}: {one.finding}" for seed, one in outcomes.items() if one.finding]
    assert {one.error for one in outcomes.values()} <= {"", "NonFiniteError"}
    assert {"kill sender", "kill server", "stop worker"} <= {
        fault.kind for one in outcomes.values() for fault in one.injected
    }


@pytest.mark.parametrize("name", SOON)
def test_planted_faults_are_found(name: str) -> None:
    with planted(name):
        assert any(simulate(draw_members(seed)).finding for seed in range(SOON[name], SOON[name] + 40))


@pytest.mark.parametrize("at", [33, 42])
def test_the_server_may_die_while_members_assemble(at: int) -> None:
    """Members that have announced themselves learn the next server's address when they send their next request."""
    outcome = simulate(replace(CYCLING, faults=(Fault("kill server", at),)))
    assert (outcome.finding, outcome.error) == (None, "")
