"""Faults planted in windows that follow the workers' speeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from distkeras.ps.center import center as center_module
from distkeras.ps.center.center import Center, window_by_speed
from distkeras.ps.center.leases import Leases, PartitionLease
from distkeras.ps.worker import loop
from simulation.planting import Patch, mutation, nothing


@mutation
def _windows_follow_the_slowest() -> list[Patch]:
    """The slowest worker has the longest window."""

    def upside_down(longest: int, speed: float | None, speeds: Iterable[float | None]) -> int:
        if speed is None:
            return longest
        return max(1, math.floor(longest * min(other for other in speeds if other is not None) / speed))

    return [(center_module, "window_by_speed", upside_down)]


@mutation
def _a_worker_that_has_left_is_the_fastest() -> list[Patch]:
    """The remaining workers all have short windows, relative to a worker that has left."""

    def next_window(self: Center, worker: int) -> int:
        longest = self.rule.window_by_speed
        if longest is None:
            return 0
        return window_by_speed(longest, self.leases[worker].speed, [lease.speed for lease in self.leases.values()])

    return [(Center, "next_window", next_window)]


@mutation
def _a_successor_has_its_predecessors_speed() -> list[Patch]:
    """An attempt on another machine is assumed to be as fast as the previous one."""
    join = Leases.join

    def remembering(self: Leases, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        speed = self[worker].speed if worker in self else None
        lease = join(self, worker, attempt, expired=expired)
        if lease is not None:
            lease.speed = speed
        return lease

    return [(Leases, "join", remembering)]


@mutation
def _a_speed_is_measured_from_the_first_center() -> list[Patch]:
    """Each window of a worker seems to take longer than the previous one."""
    release = PartitionLease.release
    return [(PartitionLease, "release", lambda self, clock, at: release(self, clock, self.released_at or at))]


@mutation
def _a_speed_counts_from_the_commit_before() -> list[Patch]:
    """A measurement begins with the previous commit instead of its answer, so that waits for others count."""
    release, measure = PartitionLease.release, PartitionLease.measure

    def measured(self: PartitionLease, steps: int, arrived: float) -> None:
        measure(self, steps, arrived)
        vars(self)["arrived"] = arrived

    def released(self: PartitionLease, clock: int, at: float) -> None:
        release(self, clock, vars(self).get("arrived", at))

    return [(PartitionLease, "measure", measured), (PartitionLease, "release", released)]


@mutation
def _a_commit_that_is_left_out_is_measured() -> list[Patch]:
    """The steps of a skipped window count in the speed of its worker."""
    skip = Center.skip

    def measuring(self: Center, commit: Any) -> bool:
        self.leases[commit.worker].measure(commit.steps, self._monotonic())
        return skip(self, commit)

    return [(Center, "skip", measuring)]


@mutation
def _workers_keep_the_longest_window() -> list[Patch]:
    """A worker ignores the next window that a reply names."""
    return [(loop._Worker, "_take_window", nothing)]  # noqa: SLF001 - a fault within
