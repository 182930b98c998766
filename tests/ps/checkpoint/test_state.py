"""The state of a center: a center that is restored from it, also with other workers, continues as the original does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.ps.toy_model import ToyBatch, ToyReplica
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.data.ordering import ROW_HASH, RowChecksum
from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint.state import State, capture, restore, sum_of, sum_of_rows
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

#: Rules with more state than the center: vectors of the model and of workers, counters, a round.
RULES: dict[str, dict[str, Any]] = {
    "downpour": {},
    "dana_zero": {"learning_rate": 0.1},
    "multi_asgd": {"learning_rate": 0.1},
    "ormo": {"learning_rate": 0.1},
    "smega2": {"learning_rate": 0.1},
    "ssgd": {"learning_rate": 0.1},
    "ssgdm": {"learning_rate": 0.1},
}


def saved_state(center: Center) -> State:
    """Return the state as it is after it was written to a file and read from it."""
    state = capture(center)
    copied = State(json.loads(json.dumps(state.header)), {name: array.copy() for name, array in state.arrays.items()})
    state.drop()
    return copied


def commit(center: Center, worker: int, number: int) -> None:
    value = 0.5 + worker + 0.25 * number
    send(center, commit_of(worker, sequence=number, first=number - 1, last=number - 1, value=value))
    release(center)


def release(center: Center) -> None:
    """Release the center to all workers that are ready."""
    for worker in center.leases:
        if center.scheduler.ready(worker):
            center.release(worker, 0)


def comparable_state(center: Center) -> dict[str, Any]:
    """Return the state of a center without its log and the centers that its workers received."""
    state = saved_state(center)
    return state.header | {name: array.tolist() for name, array in state.arrays.items()}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("before", [1, 2, 3, 5])
def test_a_restored_center_continues_as_the_original_does(name: str, before: int) -> None:
    turns = [(0, 1), (1, 1), (1, 2), (0, 2), (0, 3), (1, 3), (1, 4), (0, 4)]
    center = center_of(name, **RULES[name])
    for worker in range(2):
        joined(center, worker)
    for worker, number in turns[:before]:
        commit(center, worker, number)
    restored = center_of(name, **RULES[name])
    assert restore(restored, saved_state(center), same_attempts=True)
    assert comparable_state(restored) == comparable_state(center)
    for worker in range(2):
        restored.join(worker, 0)
    for each in (center, restored):  # after a restart, each worker begins with a new center
        release(each)
    for worker, number in turns[before:]:
        for each in (center, restored):
            commit(each, worker, number)
    assert comparable_state(restored) == comparable_state(center)


def test_the_staleness_bound_holds_after_a_restart() -> None:
    center, restored = (center_of(scheduler=BoundedStaleness(2, 1)) for _ in range(2))
    for worker in range(2):
        joined(center, worker)
    for worker, number in ((0, 1), (1, 1), (0, 2)):
        commit(center, worker, number)
    assert restore(restored, saved_state(center), same_attempts=True)
    for each in (center, restored):
        assert each.scheduler.ready(0)
        joined(each, 0)
        send(each, commit_of(0, sequence=3, first=2, last=2))
        assert not each.scheduler.ready(0)
        assert each.scheduler.waiting_for(0) == {1}


@pytest.mark.parametrize("name", ["ssgd", "downpour"])
def test_moving_statistics_are_weighted_by_steps_after_a_restart(name: str) -> None:
    """In a round, earlier contributions count; without rounds, a worker's weight is the steps of its latest commit."""
    options: dict[str, Any] = {"learning_rate": 0.1} if name == "ssgd" else {}
    statistics = np.zeros(2, np.float32)
    center, restored = (center_of(name, moving_statistics=statistics, **options) for _ in range(2))
    for worker in range(2):
        center.join(worker, 0)
    release(center)
    send(center, commit_of(0, last=2, moving_statistics=np.array([4, 8], np.float32)))
    assert restore(restored, saved_state(center), same_attempts=True)
    joined(restored, 1)
    for each in (center, restored):
        send(each, commit_of(1, moving_statistics=np.array([8, 16], np.float32)))
        np.testing.assert_array_equal(each.moving_statistics, [5, 10])


def test_a_finished_partition_that_continues_has_the_vectors_of_its_rule_and_counts_again() -> None:
    center, restored = (center_of("dana_zero", learning_rate=0.1) for _ in range(2))
    for worker in range(2):
        joined(center, worker)
        send(center, commit_of(worker, value=1.0 + worker, epoch_end=True))
    before = center.model[0].copy()
    center.leave(0, 0)
    np.testing.assert_array_equal(center.model[1], center.leases[0].vectors[0])
    assert restore(restored, saved_state(center), same_attempts=False, epochs=2)
    assert not restored.leases[0].finished
    np.testing.assert_array_equal(restored.leases[0].vectors[0], center.leases[0].vectors[0])
    np.testing.assert_array_equal(restored.model, [before, np.zeros(3)])
    assert restored.counters == {}


def test_a_finished_partition_stays_finished() -> None:
    center, restored = center_of(), center_of()
    joined(center)
    commit(center, 0, 1)
    center.leave(0, 0)
    assert restore(restored, saved_state(center), same_attempts=True)
    assert restored.leases[0].finished
    assert asdict(restored.leases[0])["sequence"] == 1


def test_a_captured_state_does_not_change_with_later_commits() -> None:
    center = center_of("dana_zero", learning_rate=0.1)
    for worker in range(2):
        joined(center, worker)
    for worker in range(2):
        commit(center, worker, 1)
    state = capture(center)
    before = {name: array.copy() for name, array in state.arrays.items()}
    for worker in range(2):
        commit(center, worker, 2)
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    state.drop()


@pytest.mark.parametrize("same_attempts", [True, False])
def test_attempts_of_another_driver_hold_no_lease(same_attempts: bool) -> None:
    center, restored = center_of(), center_of()
    joined(center, attempt=7)
    restore(restored, saved_state(center), same_attempts=same_attempts)
    lease = restored.join(0, 3)
    assert (lease is None) == same_attempts  # an older attempt of the same job waits until the newer one's lease ends


#: The number of mini-batches in an epoch of each partition.
BATCHES = 2


def first_epoch(reached: Sequence[tuple[int, int]], *, leave: Sequence[int], stop: bool) -> int:
    """Return the epoch with which another number of workers begins.

    Args:
        reached: The complete epochs and further mini-batches of each partition.
        leave: The workers that leave.
        stop: Whether the job ends early.
    """
    before = center_of(workers=len(reached))
    for worker, (epochs, batches) in enumerate(reached):
        joined(before, worker)
        for number in range(epochs * BATCHES + batches):
            epoch, batch = divmod(number, BATCHES)
            last = batch == BATCHES - 1
            send(before, commit_of(worker, 0, number + 1, epoch, batch, batch, epoch_end=last))
            before.release(worker, 0)
    if stop:
        before.end_early("enough")
    for worker in leave:
        before.leave(worker, 0)
    after = center_of(workers=len(reached) + 1)
    assert not restore(after, capture(before), same_attempts=False, epochs=3)
    (epoch,) = {lease.epoch for lease in after.leases.values()}
    assert after.began == (before.clock, epoch)
    return epoch


@pytest.mark.parametrize(
    ("reached", "leave", "stop", "epoch"),
    [
        ([(1, 1), (2, 0)], [], False, 1),
        ([(3, 0), (2, 1)], [0], False, 2),
        ([(3, 0), (3, 0)], [0, 1], False, 3),
        ([(3, 0), (0, 0)], [0, 1], False, 3),
        ([(2, 1), (1, 1)], [0, 1], True, 1),
        ([(2, 1), (0, 0)], [0, 1], True, 0),
        ([(0, 0), (0, 0)], [], False, 0),
    ],
    ids=[
        "two partitions in the middle",
        "one partition has ended",
        "all partitions have ended",
        "one partition has no rows",
        "all workers have left because the job ended early",
        "one worker left before its first commit",
        "nothing was committed",
    ],
)
def test_the_job_begins_with_the_first_epoch_that_is_not_complete(
    reached: Sequence[tuple[int, int]], leave: Sequence[int], stop: bool, epoch: int
) -> None:
    assert first_epoch(reached, leave=leave, stop=stop) == epoch


def test_the_first_epoch_of_the_partitions_survives_another_restart() -> None:
    before = center_of(workers=2)
    for worker in range(2):
        joined(before, worker)
        send(before, commit_of(worker, epoch_end=True))
    after, later = center_of(workers=3), center_of(workers=3)
    assert not restore(after, capture(before), same_attempts=False)
    assert restore(later, capture(after), same_attempts=False)
    assert later.began == after.began == (2, 1)


#: Computed by hand: a center of 1 after a round to which one of two workers contributed 2, and the other one nothing.
ROUNDS: dict[str, tuple[dict[str, Any], float]] = {
    "averaging": ({}, 2.0),  # 2 / 1
    # m = 2 / 1: 1 + 0.5 * (2 + 0.5 * 2)
    "diloco": ({"hyper": {"server_rate": 0.5, "momentum": 0.5}}, 2.5),
    "easgd": ({}, 3.0),  # 1 + 2
    # D = 2, m = 1, v = 4 - 3 = 1: 1 + 0.5 * 1 / (1 + 1)
    "fedopt": ({"hyper": {"server_rate": 0.5, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 1.0}}, 1.25),
    "ssgd": ({"learning_rate": 0.25}, 0.5),  # 1 - 0.25 * 2 / 1
    "ssgdm": ({"learning_rate": 0.25}, 0.5),  # 1 - (0.9 * 0 + 0.25 * 2)
    "ssgdm_local": ({"learning_rate": 0.25}, -1.0),  # 1 - 2
}


def center_in_a_round(name: str) -> Center:
    """Return a center whose first worker has committed in a round, and whose second worker has not."""
    center = center_of(name, **ROUNDS[name][0])
    center.current.array[...] = 1.0
    for worker in range(2):
        joined(center, worker)
    send(center, commit_of(0, value=2.0, epoch_end=True))
    return center


def test_every_rule_with_rounds_has_an_example() -> None:
    assert ROUNDS.keys() == {name for name in center_rules() if make(name).traits.synchronous}


@pytest.mark.parametrize("name", ROUNDS)
def test_an_unfinished_round_ends_with_its_contributions(name: str) -> None:
    before, after = center_in_a_round(name), center_of(name, workers=3, **ROUNDS[name][0])
    assert not restore(after, capture(before), same_attempts=False)
    assert after.current.array.tolist() == [ROUNDS[name][1]] * 3
    assert [vector.tolist() for vector in after.model] == [[0.0] * 3 for _ in after.model]
    before.leave(1, 0)  # the center equals that of a round that ends because worker 1 leaves
    assert after.current.array.tolist() == before.current.array.tolist()


def test_the_first_round_has_the_learning_rate_of_its_clock() -> None:
    rate = StepDecay(1.0, boundaries=(2,), factor=0.25)
    before, after = (center_of("ssgd", workers=workers, learning_rate=rate) for workers in (2, 1))
    for worker in range(2):
        joined(before, worker)
        send(before, commit_of(worker, value=0.0, epoch_end=True))
    assert not restore(after, capture(before), same_attempts=False)
    joined(after, 0)
    send(after, commit_of(0, epoch=1, value=3.0))
    assert after.current.array.tolist() == [-0.75] * 3  # 0 - 0.25 * 3


SIZE, WORKERS, RESUMED_BATCHES = 4, 3, 4
DATA = np.random.default_rng(7).normal(size=(2, WORKERS, RESUMED_BATCHES, SIZE)).astype(np.float32)


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
                    yield ToyBatch(epoch, index, index == RESUMED_BATCHES - 1, value)

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
            while turn < commits - 1 and self._held and self.center.scheduler.ready(self._held[0]):
                self._answer()
        while self._held:
            self._answer()

    def _answer(self) -> None:
        worker = self._held.pop(0)
        assert self.center.scheduler.ready(worker)
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
    commits = 1 if rule.window is None else RESUMED_BATCHES // int(rule.window)
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


HASHES = np.random.default_rng(3).integers(-(2**63), 2**63, 1000)


def checksum(hashes: np.ndarray) -> int:
    accumulated = RowChecksum(block_rows=7)
    for piece in np.array_split(hashes, 3):
        accumulated.update(pa.RecordBatch.from_pydict({ROW_HASH: piece}))
    return accumulated.before(len(hashes))


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_the_sum_does_not_depend_on_partitions_and_order(partitions: int) -> None:
    shuffled = np.random.default_rng(4).permutation(HASHES)
    assert sum_of(map(checksum, np.array_split(shuffled, partitions))) == sum_of([checksum(HASHES)])
    assert 0 <= checksum(HASHES) < 2**63


def test_a_changed_missing_or_repeated_row_changes_the_sum() -> None:
    other = HASHES.copy()
    other[500] ^= 1 << 40
    data = (HASHES, other, HASHES[1:], np.append(HASHES, HASHES[0]))
    assert len({sum_of([checksum(hashes)]) for hashes in data}) == len(data)


def test_another_order_changes_the_checksum() -> None:
    assert checksum(HASHES[::-1]) != checksum(HASHES)


def lease(
    epoch: int, checksum: int = 5 << 32, *, sequence: int = 3, finished: bool = False, lent: int = -1
) -> dict[str, Any]:
    progress = {"epoch": epoch, "checksum": checksum, "sequence": sequence, "finished": finished}
    return progress | {"rows_checksum": lent}


EMPTY = lease(0, -1, sequence=0, finished=True)


@pytest.mark.parametrize(
    ("leases", "known"),
    [
        ([lease(1), lease(2)], 10),
        ([lease(1), lease(0)], None),
        ([lease(1), lease(0, lent=3 << 32)], 8),
        ([lease(1), lease(1, -1)], None),
        ([lease(1)], None),
        ([lease(1), EMPTY], 5),
    ],
    ids=[
        "all read",
        "one in its first epoch",
        "one whose first epoch is lent in part",
        "one read by another job",
        "one that has not joined",
        "one empty",
    ],
)
def test_the_sum_is_known_when_every_partition_was_read_to_its_end(leases: list[Any], known: int | None) -> None:
    header = {"workers": 2, "leases": dict(enumerate(leases)), "ends_early": False}
    assert sum_of_rows(State(header, {})) == known


def test_a_partition_that_left_a_job_that_ended_early_may_have_rows() -> None:
    header = {"workers": 2, "leases": {0: lease(1), 1: EMPTY}, "ends_early": True}
    assert sum_of_rows(State(header, {})) is None
