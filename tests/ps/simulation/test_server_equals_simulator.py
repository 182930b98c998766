"""Comparison of the real server, under a forced schedule, with the simulator: they are equal to the bit in float32."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, patience
from support.present import present
from support.ps.clocks import HandWorld
from support.ps.running_server import SIZE, Running
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.protocol.loop import Compute, ProbeRequest, PullRequest, Reply
from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.rules.schedules import StepDecay
from distkeras.ps.simulation.simulate import simulate
from distkeras.ps.simulation.timing import Gamma
from distkeras.ps.simulation.virtual_job import Trace
from distkeras.ps.transport.relay_group import RelayGroup

WORKERS = 3
SCHEDULE = [0, 1, 1, 0, 2, 0, 2, 1, 2, 0, 1, 2]
ROUNDS = [0, 1, 2, 1, 2, 0, 2, 1, 0]
WAIT = patience(20)  # seconds; replies normally arrive at once
#: More steps than any worker computes, so that no worker leaves.
STEPS = np.arange(1, 200, dtype=np.float32)


def variants() -> Iterator[Rule]:
    for name, kind in center_rules().items():
        yield make(name) if kind().traits.gradient else make(name, window=2)
    yield make("adag", window=2, algorithm=11, form="4.1")
    yield make("adag", window=2, algorithm=13, form="4.10", gamma=0.1)
    yield make("adag", window=2, form="4.7norm")
    yield make("easgd", window=4, early_stopping="2.10")
    yield make("zealous_downpour", window=3, explore=True)
    yield make("dc_asgd", adaptive=True, momentum=0.9)
    yield make("mla", window=2, reach=1.0)
    yield make("fedbuff", window=2, buffer=2, momentum=0.5, nesterov=True)


def occupied_answers() -> Any:
    """Return the answers to one worker's probes whether the server is occupied."""
    return itertools.cycle([True, False, True, True])


class ScheduledWorker:
    """A worker with a socket and a thread, which makes one exchange in each turn."""

    def __init__(
        self,
        running: Running,
        rule: Rule,
        worker: int,
        values: np.ndarray,
        gradient: Callable[..., Any],
        paused: Any,
        group: RelayGroup | None = None,
    ) -> None:
        self._answers = occupied_answers()
        options: dict[str, Any] = {"deadlines": PATIENT, "group": group, "shared": group is not None}
        self.client, welcome, begin = toy_client(
            running.address, rule, values, worker=worker, size=SIZE, eta=0.05, gradient=gradient, **options
        )
        self._loop = begin(welcome)
        self._worker, self._paused = worker, paused
        self._turns: queue.Queue[bool] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        self._turns.put(True)

    def stop(self) -> None:
        self._turns.put(False)
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        self.client.close()

    def _run(self) -> None:
        next(self._loop)
        request: Any = self._loop.send(self.client.pull())
        while True:
            while isinstance(request, (Compute, ProbeRequest)):
                reply = None
                if isinstance(request, ProbeRequest):
                    assert not self.client.occupied()  # all other workers are paused
                    reply = Reply(occupied=next(self._answers))
                request = self._loop.send(reply)
            self._paused.put(self._worker)
            if not self._turns.get(timeout=WAIT):
                return
            if isinstance(request, PullRequest):  # right before the commit
                request = self._loop.send(self.client.pull())
            request = self._loop.send(self.client.commit(request))


def job(rule: Rule) -> tuple[np.ndarray, Callable[[int], Callable[..., Any]], Callable[..., Trace]]:
    """Return the initial center, the gradients of each worker's steps 1, 2, 3 …, and the simulation of such a job."""
    rng = np.random.default_rng(5)
    start = rng.normal(size=SIZE).astype(np.float32)
    noise = rng.normal(size=(WORKERS, SIZE)).astype(np.float32)
    steps = [iter(STEPS) for _ in range(WORKERS)]

    def gradient_of(worker: int) -> Callable[..., Any]:
        return lambda theta, step: theta * np.float32(0.5) + noise[worker] / step

    def simulated(**options: Any) -> Trace:
        return simulate(
            rule,
            start,
            lambda theta, worker: gradient_of(worker)(theta, next(steps[worker])),
            workers=WORKERS,
            dtype=np.float32,
            keep_centers=True,
            **options,
        )

    return start, gradient_of, simulated


@pytest.mark.parametrize("rule", list(variants()), ids=str)
def test_a_forced_schedule_gives_the_simulators_centers_to_the_bit(rule: Rule) -> None:
    rounds = rule.traits.synchronous
    schedule = ROUNDS if rounds else SCHEDULE
    # Two decays, the second in the middle of a round.
    eta = StepDecay(0.05, boundaries=(3, 7), factor=0.5) if rule.traits.gradient else 0.05
    answers = [occupied_answers() for _ in range(WORKERS)]
    start, gradient_of, simulated = job(rule)
    expected = present(
        simulated(learning_rate=eta, schedule=schedule, occupied=lambda worker, clock: next(answers[worker])).centers
    )
    assert expected.dtype == np.float32
    paused: queue.Queue[int] = queue.Queue()
    with Running(rule, workers=WORKERS, start=start, eta=eta) as running:
        workers = [
            ScheduledWorker(running, rule, worker, STEPS, gradient_of(worker), paused) for worker in range(WORKERS)
        ]
        for _ in workers:
            paused.get(timeout=WAIT)
        for clock, worker in enumerate(schedule):
            workers[worker].turn()
            assert running.driver.observe(clock, WAIT).clock == clock + 1
            if not rounds:
                assert paused.get(timeout=WAIT) == worker
            elif (clock + 1) % WORKERS == 0:  # the barrier releases all workers
                assert sorted(paused.get(timeout=WAIT) for _ in workers) == list(range(WORKERS))
            np.testing.assert_array_equal(running.driver.center().center, expected[clock])
        for paced in workers:
            paced.stop()


@pytest.mark.parametrize("name", [name for name, kind in center_rules().items() if kind().traits.sums])
def test_groups_give_the_simulators_centers_to_the_bit(name: str) -> None:
    rule, groups, schedule = make(name, window=2), [[0, 2], [1]], [0, 1, 1, 0, 0, 1]
    start, gradient_of, simulated = job(rule)
    trace = simulated(learning_rate=0.05, schedule=schedule, groups=groups)
    paused: queue.Queue[int] = queue.Queue()
    places = [RelayGroup(lambda: "127.0.0.1", f"host {worker % 2}", WORKERS) for worker in range(WORKERS)]
    with Running(rule, workers=WORKERS, start=start, groups="host") as running:
        workers = [
            ScheduledWorker(running, rule, worker, STEPS, gradient_of(worker), paused, places[worker])
            for worker in range(WORKERS)
        ]
        for _ in workers:
            paused.get(timeout=WAIT)
        clock = 0
        for number in schedule:
            for worker in groups[number]:
                workers[worker].turn()
            assert sorted(paused.get(timeout=WAIT) for _ in groups[number]) == groups[number]
            clock += len(groups[number])
            np.testing.assert_array_equal(running.driver.center().center, present(trace.centers)[clock - 1])
        commits = running.driver.drain().commits.view(COMMIT)
        assert commits["worker"].tolist() == trace.worker.tolist()
        assert commits["staleness"].tolist() == trace.staleness.tolist() == [0, 0, 2, 0, 2, 2, 0, 0, 4]
        for paced, place in zip(workers, places, strict=True):
            paced.stop()
            place.close()


@pytest.mark.parametrize("patience_limit", [None, 1])
def test_refusals_equal_the_simulators(patience_limit: int | None) -> None:
    rule = make("ringmaster", window=2, threshold=1, patience=patience_limit)
    start, gradient_of, _ = job(rule)
    trace = simulate(
        rule,
        start,
        lambda theta, worker, number: gradient_of(worker)(theta, STEPS[number]),
        numbered=True,
        workers=WORKERS,
        learning_rate=0.05,
        schedule=SCHEDULE,
        dtype=np.float32,
        keep_centers=True,
    )
    centers, refused = [start, *present(trace.centers)], [worker for worker, _, _ in trace.refused.tolist()]
    paused: queue.Queue[int] = queue.Queue()
    with Running(rule, workers=WORKERS, start=start) as running:
        workers = [
            ScheduledWorker(running, rule, worker, STEPS, gradient_of(worker), paused) for worker in range(WORKERS)
        ]
        for _ in workers:
            paused.get(timeout=WAIT)
        refused_workers, clock = [], 0
        for worker in SCHEDULE:
            workers[worker].turn()
            assert paused.get(timeout=WAIT) == worker
            reply = running.driver.center()
            np.testing.assert_array_equal(reply.center, centers[reply.clock])
            if reply.clock == clock:
                refused_workers.append(worker)
            clock = reply.clock
        assert refused_workers == refused
        assert len(set(refused_workers)) == WORKERS
        commits = running.driver.drain().commits.view(COMMIT)
        assert commits["worker"].tolist() == trace.worker.tolist()
        assert commits["staleness"].tolist() == trace.staleness.tolist()
        for paced in workers:
            paced.stop()


@pytest.mark.parametrize("name", ["downpour", "aeasgd", "fedbuff", "mla"])
def test_windows_by_speed_equal_the_simulators_under_its_clock(name: str) -> None:
    rule = make(name, window="by_speed", window_max=8)
    start, gradient_of, simulated = job(rule)
    # The fastest and the slowest worker change during the run.
    trace = simulated(learning_rate=0.05, timing=Gamma(mean=1.0, v_machine=0.8), steps=30, seed=2)
    assert len(set(trace.steps.tolist())) > 3
    clock, paused = HandWorld(), queue.Queue[int]()
    with Running(rule, workers=WORKERS, start=start, world=clock) as running:
        workers = [
            ScheduledWorker(running, rule, worker, STEPS, gradient_of(worker), paused) for worker in range(WORKERS)
        ]
        for _ in workers:
            paused.get(timeout=WAIT)
        for number, worker in enumerate(trace.worker.tolist()):
            clock.now = float(trace.time[number])
            workers[worker].turn()
            assert paused.get(timeout=WAIT) == worker
            np.testing.assert_array_equal(running.driver.center().center, present(trace.centers)[number])
        assert running.driver.drain().commits.view(COMMIT)["steps"].tolist() == trace.steps.tolist()
        for paced in workers:
            paced.stop()
