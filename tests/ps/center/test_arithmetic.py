"""A NaN or infinity is detected at the commit whose arithmetic produces it from finite numbers."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
from support.ps.center_commits import commit_of, joined, send

from distkeras.ps.center.center import Center
from distkeras.ps.errors import NonFiniteError
from distkeras.ps.rules import Chunk, Context, center_rules, make
from distkeras.ps.rules.base import Scalars
from distkeras.ps.rules.downpour import Downpour
from distkeras.ps.rules.gradient import SSGD


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
