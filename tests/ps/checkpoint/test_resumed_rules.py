"""Under every rule, a resumed job has the center of an uninterrupted one if commits have the same order, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.ps.toy_model import ToyBatch, ToyReplica

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.protocol.loop import (
    CommitRecord,
    Compute,
    FetchRequest,
    KeepRequest,
    Loop,
    OptimizerState,
    ProbeRequest,
    PullRequest,
    Reply,
    Request,
    TakenRequest,
)
from distkeras.ps.protocol.messages import Commit, KeepOptimizer, Welcome
from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.base import Rule
from distkeras.ps.rules.schedules import StepDecay
from distkeras.ps.worker.loop import work
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, SaveInterval, is_kept

SIZE, WORKERS, BATCHES = 4, 3, 4
DATA = np.random.default_rng(7).normal(size=(2, WORKERS, BATCHES, SIZE)).astype(np.float32)


class StatefulReplica(ToyReplica):
    """A toy replica whose optimizer has no state."""

    def read_optimizer(self) -> OptimizerState | None:
        return None

    def load_optimizer(self, state: OptimizerState | None, example: Any) -> str | None:
        assert state is None
        return None


class AlwaysDue(SaveInterval):
    """An interval in which a state follows each commit."""

    def due(self) -> bool:
        return True


class Job:
    """A center and its workers, which take turns; all of them begin after an interruption with a new loop.

    Args:
        epochs: of the job.
        schedule: of the server's learning rate.
    """

    def __init__(self, rule: Rule, epochs: int, schedule: Any) -> None:
        self.rule, self.epochs, self._schedule = rule, epochs, schedule
        self.center = Center(
            rule, np.ones(SIZE, np.float32), workers=WORKERS, learning_rate=schedule if rule.traits.gradient else None
        )
        self.problems: list[str] = []
        self._loops: list[Loop] = []
        self._pending: dict[int, Request] = {}
        #: Workers whose commit is applied and not answered.
        self._held: list[int] = []

    def begin(self) -> None:
        """Let each worker begin at its partition's progress, and pull."""
        for worker in range(WORKERS):
            lease = self.center.join(worker, 0)
            assert lease is not None
            optimizer = 0 if lease.optimizer is None else lease.optimizer.sequence
            welcome = Welcome(1, 0, lease.sequence, 0, lease.epoch, lease.batch, finished=False, optimizer=optimizer)
            replica = StatefulReplica(SIZE, 0.05, lambda theta, value: theta * 0.3 + value, np.float32)
            keeper = OptimizerKeeper(self.rule, replica, AlwaysDue(), welcome, at_end=True)
            loop = work(
                self.rule,
                replica,
                self._batches(worker, welcome),
                lambda: tuple(np.empty(SIZE, np.float32) for _ in range(self.rule.traits.parts)),
                keeper=keeper if is_kept(self.rule) else None,
                now=None,
            )
            self._loops.append(loop)
            next(loop)
        for worker in range(WORKERS):
            self._advance(worker, self._pull(worker))

    def _batches(self, worker: int, welcome: Welcome) -> Any:
        for epoch in range(self.epochs):
            for index, value in enumerate(DATA[epoch, worker]):
                if (epoch, index) >= (welcome.epoch, welcome.batch):
                    yield ToyBatch(epoch, index, index == BATCHES - 1, value)

    def _pull(self, worker: int) -> Reply:
        released = self.center.release(worker, 0)
        return Reply(released.learning_rate, released.buffer.array.copy())

    def _advance(self, worker: int, reply: Reply | None) -> None:
        lease = self.center.leases[worker]
        try:
            while True:
                match request := self._loops[worker].send(reply):
                    case CommitRecord() | PullRequest():
                        break
                    case KeepRequest():
                        state, reply = request.state, None
                        lease.keep_optimizer(
                            KeepOptimizer(
                                state.layout,
                                state.content,
                                state.checksum,
                                worker=worker,
                                attempt=0,
                                incarnation=1,
                                sequence=lease.sequence,
                            ),
                            0.0,
                        )
                    case FetchRequest():
                        reply = Reply(optimizer=None if lease.optimizer is None else lease.optimizer.state)
                    case TakenRequest():
                        self.problems.append(request.problem)
                        reply = None
                    case ProbeRequest():
                        reply = Reply(occupied=True)
                    case Compute():
                        reply = None
            self._pending[worker] = request
        except StopIteration:
            self._pending.pop(worker, None)
            self.center.leave(worker, 0)

    def run(self, commits: int) -> None:
        """Apply so many commits of each worker, in turn; all of them continue after the last one, not before."""
        for turn, worker in itertools.product(range(commits), range(WORKERS)):
            if isinstance(self._pending[worker], PullRequest):
                self._advance(worker, self._pull(worker))
            record = self._pending[worker]
            assert isinstance(record, CommitRecord)
            sequence = self.center.leases[worker].sequence + 1
            commit = Commit.of(record, worker=worker, attempt=0, incarnation=1, sequence=sequence)
            assert self.center.commit(commit, [self.center.pool.adopt(part) for part in record.parts])
            self._held.append(worker)
            while turn < commits - 1 and self._held and self.center.ready(self._held[0]):
                self._answer()
        while self._held:
            self._answer()

    def _answer(self) -> None:
        worker = self._held.pop(0)
        assert self.center.ready(worker)
        self._advance(worker, Reply() if self.rule.traits.pull_first else self._pull(worker))

    def resumed(self) -> Job:
        """Return a job of two epochs that continues from the snapshot of this one."""
        job = Job(self.rule, 2, self._schedule)
        assert restore(job.center, capture(self.center), same_attempts=False, epochs=2)
        for worker, lease in self.center.leases.items():
            job.center.leases[worker].optimizer = lease.optimizer
        return job


def rule_of(name: str) -> Rule:
    kind = center_rules()[name]
    windowed = isinstance(kind.__dataclass_fields__["window"].default, int) and not kind().traits.gradient
    options: dict[str, Any] = {"window": 2} if windowed else {}
    if name in ("dc_asgd", "fedbuff"):
        options["momentum"] = 0.5  # the default is none
    return make(name, **options)


@pytest.mark.parametrize("ended", [True, False], ids=["more epochs", "the driver was lost"])
@pytest.mark.parametrize("name", list(center_rules()))
def test_a_resumed_job_equals_an_uninterrupted_one_to_the_bit(name: str, ended: bool) -> None:
    rule = rule_of(name)
    commits = 1 if rule.window is None else BATCHES // int(rule.window)
    first = commits if ended else max(1, commits - 1)
    schedule = StepDecay(0.05, (commits * WORKERS - 1, commits * WORKERS), 0.5)
    whole, interrupted = Job(rule, 2, schedule), Job(rule, 1 if ended else 2, schedule)
    for job in (whole, interrupted):
        job.begin()
        job.run(first)
    resumed = interrupted.resumed()
    resumed.begin()
    for job in (whole, resumed):
        job.run(2 * commits - first)
    assert all(lease.finished for lease in resumed.center.leases.values())
    np.testing.assert_array_equal(resumed.center.current.array, whole.center.current.array)
    assert resumed.problems == ([""] * WORKERS if rule.traits.history else [])
