"""Faults planted in the state of a center, in what rules and drivers put there, and in what a snapshot restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.driver_values import DriverValues
from distkeras.ps.center.leases import KeptState, PartitionLease
from distkeras.ps.checkpoint import ownership, state
from distkeras.ps.checkpoint.checkpointer import OptimizerFiles
from distkeras.ps.protocol.compression import Int8, WorkerFormat
from distkeras.ps.rules.gradient import DanaZero
from distkeras.ps.server.announced import Standby
from distkeras.ps.worker import loop
from distkeras.ps.worker.optimizer_keeper import SaveInterval
from simulation.planting import Patch, mutation, nothing


@mutation
def _changes_are_of_what_was_meant() -> list[Patch]:
    """With int8, the server assumes that a worker has the unrounded center, so that rounding errors add up."""

    def encode_change(self: Int8, vector: np.ndarray, known: np.ndarray, out: np.ndarray) -> None:
        self.encode(vector - known, out)
        known[...] = vector + np.float32(0.03) * np.sign(vector - known)

    return [(Int8, "encode_change", encode_change)]


@mutation
def _a_window_begins_when_its_worker_joins() -> list[Patch]:
    """For a rule that pulls before it commits, every commit is as stale as the job is old."""
    return [(PartitionLease, "begin_window", nothing)]


@mutation
def _steps_are_not_restored() -> list[Patch]:
    """After a restart, moving statistics are those of the first worker that commits."""
    kept = tuple(name for name in state._KEPT if name != "steps")  # noqa: SLF001 - a fault within
    return [(state, "_KEPT", kept)]


def _capture_with(zeroed: Any) -> Any:
    """Return `state.capture` with zeros in place of some arrays."""
    capture = state.capture

    def forgetful(center: Center) -> state.State:
        state = capture(center)
        arrays = {name: np.zeros_like(array) if zeroed(name) else array for name, array in state.arrays.items()}
        return replace(state, arrays=arrays)

    return forgetful


@mutation
def _who_leaves_keeps_its_momentum() -> list[Patch]:
    """The parameters sent to others are moved by the momentum of a worker that has left."""
    return [(DanaZero, "leave", nothing)]


@mutation
def _a_second_attempt_takes_the_job() -> list[Patch]:
    """The second attempt of a server's task does not check whether the first one serves."""
    return [(Standby, "other_owner", nothing)]


@mutation
def _the_first_address_is_the_server() -> list[Patch]:
    """The driver's requests go to the address that was announced first."""
    locate = ownership.AnnouncedAddress.locate

    def first(self: Any, world: Any) -> Any:
        if "mutant" not in self.__dict__:
            object.__setattr__(self, "mutant", locate(self, world))
        return self.mutant

    return [(ownership.AnnouncedAddress, "locate", first)]


@mutation
def _states_of_optimizers_are_not_in_snapshots() -> list[Patch]:
    """After a restart, every optimizer starts with an empty state."""
    return [(OptimizerFiles, "save", lambda self, states, *, now: {})]


@mutation
def _a_successor_is_given_another_partitions_state() -> list[Patch]:
    """The server sends the latest state of any partition to the first worker that requests one."""
    keep = PartitionLease.keep_optimizer
    latest: list[Any] = []

    def shared(self: PartitionLease, message: Any, now: float) -> None:
        if latest and latest[-1].state.content.size:
            message = replace(message, content=latest[-1].state.content, checksum=latest[-1].state.checksum)
        keep(self, message, now)
        latest.append(self.optimizer)

    return [(PartitionLease, "keep_optimizer", shared)]


@mutation
def _a_state_is_sent_once() -> list[Patch]:
    """Workers send their first state, and no later one."""
    return [(SaveInterval, "due", lambda self: not self._took and self.now() >= self._due)]


@mutation
def _the_last_snapshot_names_older_states() -> list[Patch]:
    """A server that ends does not write the optimizers' states for which there was no time before."""
    save = OptimizerFiles.save

    def later(self: OptimizerFiles, states: Mapping[int, KeptState], *, now: bool) -> dict[int, str]:
        return save(self, states, now=False)

    return [(OptimizerFiles, "save", later), (OptimizerFiles, "behind", lambda self, states: False)]


@mutation
def _buffers_are_drained_twice() -> list[Patch]:
    """The contents of a buffer remain in it after it was drained."""
    drain = Center._drain  # noqa: SLF001 - a fault within

    def twice(self: Center, workers: int) -> None:
        held = [vector.copy() for vector in self.model], dict(self.counters)
        drain(self, workers)
        vectors, self.counters = held
        for vector, before in zip(self.model, vectors, strict=True):
            vector[...] = before
        drain(self, workers)

    return [(Center, "_drain", twice)]


@mutation
def _a_buffer_is_drained_for_the_workers_that_come() -> list[Patch]:
    """If the number of workers changes, movements of the former workers are weighted by the new number."""
    begin = Center.replace_workers
    return [(Center, "replace_workers", lambda self, count, _: begin(self, count, self.workers))]


@mutation
def _residuals_of_a_refused_commit_are_lost() -> list[Patch]:
    """With int8, the residuals in a refused payload are lost."""
    return [(WorkerFormat, "restore_residuals", nothing)]


@mutation
def _refusals_are_not_restored() -> list[Patch]:
    """After a restart, a window may be refused more often than the rule allows."""
    kept = tuple(name for name in state._KEPT if name != "refusals")  # noqa: SLF001 - a fault within
    return [(state, "_KEPT", kept)]


@mutation
def _a_speed_is_measured_from_the_first_center() -> list[Patch]:
    """Each window of a worker seems to take longer than the previous one."""
    release = PartitionLease.release
    return [(PartitionLease, "release", lambda self, clock, at: release(self, clock, self.released_at or at))]


@mutation
def _workers_keep_the_longest_window() -> list[Patch]:
    """A worker ignores the next window that a reply names."""
    return [(loop._Worker, "_take_window", nothing)]  # noqa: SLF001 - a fault within


@mutation
def _values_are_not_restored() -> list[Patch]:
    """A restarted server has nothing of what the driver has set."""
    return [(DriverValues, "restore", nothing)]
