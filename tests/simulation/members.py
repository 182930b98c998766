"""Jobs of DASO: the actions of a member, and its parameters after each step under any faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules.base import Vector
from distkeras.ps.rules.daso import Daso
from distkeras.ps.simulation.virtual_job import VirtualBatch
from distkeras.ps.transport.members import MemberLinks
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.daso import MemberReplica, run_member
from simulation.plan import Plan
from simulation.scheduler import Finding
from simulation.world import VirtualWorld


def node_of(plan: Plan, worker: int) -> str:
    """Return the name of a worker's host."""
    return f"host{worker % plan.hosts}" if plan.hosts else f"executor{worker}"


def nodes_of(plan: Plan) -> list[list[int]]:
    """Return the workers of each node, in the order of their ranks."""
    daso, nodes = plan.make_rule(), dict[str | int, list[int]]()
    assert isinstance(daso, Daso)
    for worker in range(plan.workers):
        place = worker // (plan.workers // daso.nodes) if daso.nodes else node_of(plan, worker)
        nodes.setdefault(place, []).append(worker)
    return list(nodes.values())


def loss_of(workers: int, worker: int, epoch: int) -> float:
    """Return the loss of each sample of a worker: the first one's falls, but the mean over equal workers does not.

    It falls by a number for which no mean falls by exactly the rule's threshold, which rounding would decide.
    """
    fallen = 1.037 * epoch
    return 4.0 - fallen if worker == 0 else 4.0 + fallen / max(1, workers - 1)


class Course:
    """The parameters of each node after each step, and the exchanges, computed independently from the paper.

    Args:
        plan: plan of the run.
        element: returns the element of a mini-batch, by worker, epoch and number.
        amounts: how far each mini-batch moves its element.

    Attributes:
        thetas: by step, over all epochs; each of shape ``(nodes, size)``.
        exchanges: by step: the device of the group that exchanges after it, and whether it blocks.
    """

    def __init__(self, plan: Plan, element: Callable[[int, int, int], int], amounts: np.ndarray) -> None:
        daso = plan.make_rule()
        assert isinstance(daso, Daso)
        self._plan, self._daso, self._element, self._amounts = plan, daso, element, amounts
        self.nodes = nodes_of(plan)
        self.batches = max(plan.batches)
        self.thetas: list[np.ndarray] = []
        self.exchanges: dict[int, tuple[int, bool]] = {}
        self._theta = np.zeros((len(self.nodes), amounts.size), np.float32)
        self._velocity = np.zeros_like(self._theta)
        self._interval, self._wait = self._first = daso.interval, daso.wait or max(1, daso.interval // 4)
        self._since = self._count = self._stable = 0
        self._lowest = math.inf
        #: The pending exchange: the step after which it began, the number of steps until it ends, and the sum.
        self._sent: tuple[int, int, np.ndarray] | None = None
        for epoch in range(plan.epochs):
            cycling = daso.warm_up <= epoch < plan.epochs - daso.cool_down
            for index in range(self.batches):
                self._step(epoch, index)
                if len(self.nodes) > 1:
                    self._cycle(len(self.thetas)) if cycling else self._block(len(self.thetas))
                self.thetas.append(self._theta.copy())
            if cycling:
                self._judge(epoch)

    def _step(self, epoch: int, index: int) -> None:
        for node, workers in enumerate(self.nodes):
            total, members = np.zeros_like(self._amounts), 0
            for worker in workers:
                if index < self._plan.batches[worker]:
                    element = self._element(worker, epoch, index)
                    total[element] -= self._amounts[element]
                    members += 1
            if members:
                self._velocity[node] = self._velocity[node] * self._daso.momentum + total / members
                self._theta[node] -= self._velocity[node]

    def _exchange(self, step: int, *, block: bool) -> np.ndarray:
        self.exchanges[step] = self._count % len(self.nodes[0]), block
        self._count += 1
        sent = self._theta
        if block and self._daso.cast:
            sent = sent.astype(bfloat16).astype(np.float32)
        total: np.ndarray = sent[0].copy()
        for vector in sent[1:]:
            total += vector
        return total

    def _block(self, step: int) -> None:
        self._theta[...] = self._exchange(step, block=True) / len(self.nodes)

    def _cycle(self, step: int) -> None:
        self._since += 1
        if self._sent is not None and step == self._sent[0] + self._sent[1]:
            twice, total, count = 2 * self._sent[1], self._sent[2], len(self.nodes)
            self._theta = (twice * self._theta + total) / (twice + count)
            self._sent = None
        if self._since >= self._interval and self._sent is None:
            self._sent = step, self._wait, self._exchange(step, block=False)
            self._since = 0

    def _judge(self, epoch: int) -> None:
        batches = self._plan.batches
        losses = [loss_of(len(batches), worker, epoch) * count for worker, count in enumerate(batches)]
        loss = sum(losses) / sum(batches)
        better = math.isinf(self._lowest) or loss < self._lowest - self._daso.threshold * abs(self._lowest)
        self._lowest, self._stable = (loss, 0) if better else (self._lowest, self._stable + 1)
        if self._stable == self._daso.patience:
            again = self._interval == self._wait == 1
            self._interval, self._wait = (
                self._first if again else (max(1, self._interval // 2), max(1, self._wait // 2))
            )
            self._stable = 0

    def check_end(self, center: np.ndarray) -> None:
        """Raise a finding unless ``center`` is the mean of the workers' final parameters."""
        expected = self.thetas[-1].mean(axis=0)
        if not np.allclose(center, expected, rtol=1e-5, atol=1e-5):
            raise Finding("result", f"the center must be {expected.tolist()}. Received: {center.tolist()}")


class WatchedLinks(MemberLinks):
    """Links that check that only the group whose turn it is exchanges parameters."""

    course: Course

    def sum_parameters(self, step: int, theta: Vector, *, cast: bool) -> Vector:
        """See `MemberLinks`."""
        expected = self.course.exchanges.get(step)
        if expected is None or expected[0] != self.membership.device:
            rank = self.membership.rank
            raise Finding("turn", f"{expected} must exchange after step {step}. Received: the member of rank {rank}")
        return super().sum_parameters(step, theta, cast=cast)


class WatchedMember(MemberReplica):
    """A member that compares its parameters after each step with those of the `Course`."""

    def __init__(self, course: Course, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._course = course

    def _step(self, epoch: int, index: int, gradient: Vector | None, learning_rate: float) -> None:
        super()._step(epoch, index, gradient, learning_rate)
        membership = self._membership
        expected = self._course.thetas[epoch * membership.batches + index][membership.rank // membership.devices]
        if not np.array_equal(expected, self.theta):
            raise Finding(
                "trace",
                f"the member of rank {membership.rank} must have {expected.tolist()} after step {index} of epoch "
                f"{epoch}. Received: {self.theta.tolist()}",
            )


class Member:
    """One attempt's place among the members, as a task on Spark has it.

    Args:
        plan, course: plan and course of the run.
        client, world: client and world of the attempt.
    """

    def __init__(self, plan: Plan, course: Course, client: WorkerClient, world: VirtualWorld) -> None:
        self._plan, self._course, self._client, self._world = plan, course, client, world
        self._links: WatchedLinks | None = None

    def begin(self, welcome: Welcome, replica: Any, batches: Iterator[VirtualBatch]) -> Loop:
        """Return the loop."""
        plan, client, rule = self._plan, self._client, self._plan.make_rule()
        assert isinstance(rule, Daso)
        return run_member(
            rule,
            replica,
            batches,
            lambda: client.payload(rule.traits.parts),
            welcome=welcome,
            worker=client.worker,
            node=node_of(plan, client.worker),
            epochs=plan.epochs,
            meet=self._meet,
            moving_statistics=plan.statistics,
            now=self._world.time,
            make=partial(WatchedMember, self._course),
        )

    def _meet(self, node: str) -> MemberLinks | None:
        plan, client = self._plan, self._client
        self._links = links = WatchedLinks(
            self._world.process.host,
            client.address.key,
            worker=client.worker,
            attempt=client.attempt,
            size=client.size,
            shared=plan.neighbors > 0,
            deadlines=plan.deadlines,
            world=self._world,
        )
        links.course = self._course
        return links if links.meet(client, node, plan.batches[client.worker]) else None

    def close(self) -> None:
        """Close the connections to the other members."""
        if self._links is not None:
            self._links.close()
