"""Commits that are malformed, refused, buffered until a drain, or not finite after the arithmetic."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
from support.ps.frames import some_commit
from support.ps.virtual_centers import center_of, commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.center.checks import check_shapes, not_finite
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import LedgerError, NonFiniteError, RemoteProtocolError, ShapeError
from distkeras.ps.rules import Chunk, Context, center_rules, make
from distkeras.ps.rules.base import Scalars
from distkeras.ps.rules.downpour import Downpour
from distkeras.ps.rules.gradient import SSGD


def center_with_stale_worker(patience: int | None = None, **options: Any) -> Center:
    """Return a center with R = 1 that worker 1 has moved by 1 since worker 0 received it."""
    center = center_of("ringmaster", hyper={"threshold": 1, "patience": patience}, **options)
    for worker in range(2):
        joined(center, worker)
    assert send(center, commit_of(1))
    return center


def test_a_refused_commit_changes_only_the_sequence_number() -> None:
    center = center_with_stale_worker(scheduler=BoundedStaleness(2, 5))
    before, version, lease = capture(center), center.current, center.leases[0]
    commit = commit_of(0, last=1, epoch_end=True)
    assert not send(center, commit)
    assert (center.clock, len(center.log), center.log.skipped, center.refused) == (1, 1, 0, 1)
    assert center.current is version
    assert (lease.sequence, lease.epoch, lease.batch, lease.checksum, lease.refusals) == (1, 0, 0, -1, 1)
    assert center.scheduler.progress() == {0: 0, 1: 1}
    after = capture(center)
    assert after.header["counters"] == before.header["counters"]
    for key, array in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[key], array)


def test_a_repeated_refused_commit_is_counted_once() -> None:
    center = center_with_stale_worker()
    commit = commit_of(0)
    assert not send(center, commit)
    assert not send(center, commit)  # as after a lost reply
    assert (center.refused, center.leases[0].refusals) == (1, 1)


def test_a_refused_worker_must_pull_and_begin_at_the_same_mini_batch() -> None:
    center = center_with_stale_worker()
    send(center, commit_of(0, last=1))
    with pytest.raises(RemoteProtocolError, match="must pull before it commits"):
        send(center, commit_of(0, sequence=2, last=1))
    center.release(0, 0)
    with pytest.raises(LedgerError):
        send(center, commit_of(0, sequence=2, first=2, last=3))
    assert send(center, commit_of(0, sequence=2, last=1, value=2.0))
    assert center.current.array.tolist() == [3.0] * 3
    assert (center.clock, center.leases[0].refusals, center.leases[0].batch) == (2, 0, 2)
    assert center.log.commits()["sequence"].tolist() == [1, 2]


def refused_again(center: Center, sequence: int) -> bool:
    """Release the center to worker 0, commit for worker 1 and then for worker 0; return True if the last is refused."""
    center.release(0, 0)
    center.release(1, 0)
    other = center.leases[1]
    assert send(center, commit_of(1, sequence=other.sequence + 1, first=other.batch, last=other.batch))
    batch = center.leases[0].batch
    return not send(center, commit_of(0, sequence=sequence, first=batch, last=batch))


def test_patience_is_counted_separately_for_each_window() -> None:
    center = center_with_stale_worker(patience=2)
    send(center, commit_of(0))
    assert refused_again(center, 2)
    assert not refused_again(center, 3)
    assert refused_again(center, 4)


def test_a_skipped_commit_resets_the_count_of_refusals() -> None:
    center = center_with_stale_worker(patience=1)
    send(center, commit_of(0))
    center.release(0, 0)
    center.skip(commit_of(0, sequence=2))
    assert center.leases[0].refusals == 0
    assert refused_again(center, 3)


def test_the_count_of_refusals_survives_a_new_attempt_and_a_restored_server() -> None:
    center = center_with_stale_worker(patience=1)
    send(center, commit_of(0))
    after = center_of("ringmaster", hyper={"threshold": 1, "patience": 1})
    assert restore(after, capture(center), same_attempts=True)
    assert after.leases[0].refusals == 1
    for again in (center, after):
        again.leases.disconnected(0, 0)
        assert again.join(0, 7) is not None
        again.join(1, 0)
        again.release(0, 7)
        again.release(1, 0)
        assert send(again, commit_of(1, sequence=2, first=1, last=1))
        assert send(again, commit_of(0, attempt=7, sequence=2))  # the patience of 1 is used up
        assert again.log.commits()["scale"][-1] == 1.0  # R / tau = 1 / 1


FEDBUFF: dict[str, Any] = {"buffer": 3, "exponent": 0.0}
#: D = 2 / 4, m = .25, v = .75 * 0 + .25 * .25: a step of .1 * .25 / (.25 + .25).
FADAS: dict[str, Any] = {"server_rate": 0.1, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.25}


def center_with_buffer(name: str = "fedbuff", *, workers: int = 2, **hyper: Any) -> Center:
    """Return a center whose buffer has one movement of 2, and all of whose workers have joined."""
    center = center_of(name, workers=workers, hyper={"window": 1, **hyper})
    for worker in range(workers):
        joined(center, worker)
    send(center, commit_of(0, value=2.0))
    assert center.current.array.tolist() == [0.0] * 3
    return center


@pytest.mark.parametrize("early", [False, True])
def test_the_buffer_is_applied_when_the_last_worker_has_left(early: bool) -> None:
    center = center_with_buffer(**FEDBUFF)
    if early:
        center.end_early("enough")
    center.leave(1, 0)
    assert center.current.array.tolist() == [0.0] * 3
    center.leave(0, 0)
    np.testing.assert_allclose(
        center.current.array, 2 / 3, rtol=1e-6
    )  # divided by the buffer's size, not by the number of its movements
    assert (center.clock, center.counters, center.model[0].tolist()) == (1, {}, [0.0] * 3)
    assert len(center.log) == 1
    drained = center.current.array.copy()
    center.leave(0, 0)  # as after a lost reply
    np.testing.assert_array_equal(center.current.array, drained)


def test_the_buffer_is_not_applied_while_a_worker_has_not_joined_yet() -> None:
    center = center_of("fedbuff", workers=2, hyper={"window": 1, **FEDBUFF})
    joined(center, 0)
    send(center, commit_of(0, value=2.0))
    center.leave(0, 0)
    assert center.current.array.tolist() == [0.0] * 3
    joined(center, 1)
    send(center, commit_of(1, value=4.0))
    center.leave(1, 0)
    np.testing.assert_allclose(center.current.array, 2.0, rtol=1e-6)


def test_the_drain_of_an_empty_buffer_changes_nothing() -> None:
    center = center_of("fedbuff", hyper={"buffer": 1, "exponent": 0.0})
    for worker in range(2):
        joined(center, worker)
    send(center, commit_of(0, value=2.0))
    version = center.current
    center.leave(0, 0)
    center.leave(1, 0)
    assert center.current is version


def test_the_drain_of_fadas_takes_a_step_of_its_optimizer() -> None:
    center = center_with_buffer("fadas", workers=4, **FADAS)
    for worker in range(4):
        center.leave(worker, 0)
    np.testing.assert_allclose(center.current.array, 0.05, rtol=1e-6)
    np.testing.assert_allclose(center.model[1], 0.25)
    np.testing.assert_allclose(center.model[3], 0.0625)


@pytest.mark.parametrize(("size", "expected"), [(3, 2 / 3), (None, 1.0)])
def test_the_buffer_is_applied_with_its_former_size_before_another_number_of_workers_begins(
    size: int | None, expected: float
) -> None:
    hyper = {"window": 1, "buffer": size, "exponent": 0.0}
    after = center_of("fedbuff", workers=5, hyper=hyper)
    assert not restore(after, capture(center_with_buffer(buffer=size, exponent=0.0)), same_attempts=False)
    np.testing.assert_allclose(after.current.array, expected, rtol=1e-6)
    assert (after.counters, after.model[0].tolist(), after.clock) == ({}, [0.0] * 3, 1)


def test_the_buffer_is_kept_when_the_same_workers_continue() -> None:
    before, after = center_with_buffer(**FEDBUFF), center_of("fedbuff", hyper={"window": 1, **FEDBUFF})
    assert restore(after, capture(before), same_attempts=True)
    assert (after.counters, after.model[0].tolist()) == ({"count": 1}, [2.0] * 3)
    assert after.current.array.tolist() == [0.0] * 3


def test_a_job_that_continues_with_more_epochs_begins_with_an_empty_buffer() -> None:
    before = center_with_buffer(**FEDBUFF)
    for worker in range(2):
        before.leave(worker, 0)
    after = center_of("fedbuff", hyper={"window": 1, **FEDBUFF})
    assert restore(after, capture(before), same_attempts=False, epochs=5)
    assert not any(lease.finished for lease in after.leases.values())
    np.testing.assert_allclose(after.current.array, 2 / 3, rtol=1e-6)
    assert after.counters == {}


class Broken(Downpour):
    """A rule whose arithmetic produces a NaN from finite numbers, at worker 1."""

    name: ClassVar[str] = "broken"

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (float(context.worker != 1),)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        np.divide(chunk.payload[0] * scalars[0], scalars[0], out=chunk.out)
        return None


class Unbounded(Downpour):
    """A rule whose factor is infinite; numpy raises no error for it."""

    name: ClassVar[str] = "unbounded"

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        return (math.inf,)

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        np.multiply(chunk.payload[0], scalars[0], out=chunk.out)
        return None


class OutOfMemory(SSGD):
    """A rule that raises MemoryError at the end of a round."""

    name: ClassVar[str] = "forgetful"

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        raise MemoryError


class TestPartialUpdate:
    """A center is marked as corrupt if an update fails half-way."""

    @pytest.mark.parametrize("skipped", [False, True], ids=["a worker leaves", "a commit is skipped"])
    def test_a_round_whose_end_fails_leaves_a_corrupt_center(self, skipped: bool) -> None:
        center = Center(OutOfMemory(), np.zeros(3, np.float32), workers=2, learning_rate=1.0, check_finite=True)
        for worker in range(2):
            joined(center, worker)
        send(center, commit_of(0))
        assert not center.corrupt
        with pytest.raises(MemoryError):  # noqa: PT012 - one of two statements raises
            if skipped:
                center.skip(commit_of(1))
            else:
                center.leave(1, 0)
        assert center.corrupt


class TestFinite:
    def test_an_infinite_factor_is_detected_before_the_center_changes(self) -> None:
        center = Center(Unbounded(), np.zeros(3, np.float32), workers=1, check_finite=True)
        joined(center)
        with pytest.raises(NonFiniteError, match=r"rule 'unbounded' made the center non-finite.*factors \(inf,\)"):
            send(center, commit_of())
        assert center.current.array.tolist() == [0.0, 0.0, 0.0]

    def test_a_nan_of_a_kernel_is_detected_at_the_commit_that_produces_it(self) -> None:
        center = Center(Broken(), np.zeros(3, np.float32), workers=2, check_finite=True)
        for worker in (0, 1):
            joined(center, worker)
        send(center, commit_of(0))
        text = "rule 'broken' made the center non-finite at clock 1: invalid value encountered in divide. "
        with pytest.raises(NonFiniteError, match=text) as caught:
            send(center, commit_of(1))
        assert (caught.value.worker, caught.value.step) == (1, 0)
        assert center.corrupt
        assert center.clock == 1

    @pytest.mark.parametrize("name", ["downpour", "averaging"])
    def test_moving_statistics_that_overflow_are_detected(self, name: str) -> None:
        """The statistics of both workers are finite; the computation of their mean overflows."""
        statistics = np.full(1, 3e38, np.float32)
        zeros = np.zeros(3, np.float32)
        center = Center(make(name), zeros, workers=2, moving_statistics=statistics, check_finite=True)
        for worker in (0, 1):
            joined(center, worker)
        with pytest.raises(NonFiniteError, match=r"made the center non-finite.*overflow"):  # noqa: PT012 - either commit
            for worker, sign in ((0, -1), (1, 1)):
                send(center, commit_of(worker, last=1, moving_statistics=statistics * np.float32(sign)))

    @pytest.mark.parametrize("name", list(center_rules()))
    def test_a_center_that_overflows_is_detected_under_every_rule(self, name: str) -> None:
        """The payloads are finite, and so is the center before the commits."""
        largest, rule = 3e38, make(name)
        gradient = rule.traits.gradient
        vector = np.full(3, largest, np.float32)
        center = Center(rule, vector, workers=2, learning_rate=1.0 if gradient else None, check_finite=True)
        for worker in (0, 1):
            center.join(worker, 0)
        for worker in (0, 1):
            center.release(worker, 0)

        value = -largest if gradient else largest
        with pytest.raises(NonFiniteError, match=f"rule '{name}' made the center non-finite"):  # noqa: PT012 - either commit
            for worker in (0, 1):
                send(center, commit_of(worker, value=value, wants_center=not rule.traits.pull_first))


ONES = np.ones(3, np.float32)
STATISTICS = np.ones(2, np.float32)


def center_with_statistics() -> Center:
    return Center(make("downpour"), np.zeros(3, np.float32), workers=1, moving_statistics=np.zeros(2, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["part", "statistics"])
def test_a_number_that_is_not_finite_is_detected(bad: float, where: str) -> None:
    part, statistics = ONES.copy(), STATISTICS.copy()
    (part if where == "part" else statistics)[1] = bad
    error = not_finite(some_commit(part, moving_statistics=statistics), [part])
    assert error is not None
    assert f"a commit holds {bad} in element 1 (1 such elements)" in error.message
    assert not_finite(some_commit(ONES, moving_statistics=STATISTICS), [ONES]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": (ONES, ONES)},
        {"parts": (np.ones(4, np.float32),)},
        {"packed": (np.ones(3, np.uint8),)},
        {"moving_statistics": ONES},
        {"history": np.zeros((2, 3))},
        {"history": np.zeros((1, 1))},
        {"last": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_part_of_a_wrong_shape_is_refused(wrong: dict[str, Any]) -> None:
    valid: dict[str, Any] = {"parts": (ONES,), "moving_statistics": STATISTICS, "history": np.zeros((1, 3))}
    check_shapes(center_with_statistics(), some_commit(**valid))
    with pytest.raises(ShapeError):
        check_shapes(center_with_statistics(), some_commit(**valid | wrong))
