"""Faults planted in the state of a center, in what rules and drivers put there, and in what a snapshot restores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from distkeras.ps.center import center as center_module
from distkeras.ps.center.center import Center
from distkeras.ps.center.driver_values import DriverValues
from distkeras.ps.center.leases import KeptState, PartitionLease
from distkeras.ps.center.schedulers import BoundedStaleness
from distkeras.ps.checkpoint import checkpointer, ownership, state
from distkeras.ps.checkpoint.checkpointer import OptimizerFiles
from distkeras.ps.checkpoint.ownership import parsed
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.protocol.compression import Int8, WorkerFormat
from distkeras.ps.rules.gradient import DanaZero
from distkeras.ps.rules.outer import FADAS, FedBuff
from distkeras.ps.server.announced import Standby
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker import loop
from distkeras.ps.worker.optimizer_keeper import SaveInterval
from distkeras.training.cluster_server import ClusterServer
from distkeras.training.supervisor import Supervisor
from simulation.planting import Patch, mutation, nothing


@mutation
def _a_rounds_moving_statistics_are_not_restored() -> list[Patch]:
    """After a restart within a round, contributions to the average of moving statistics are lost."""
    restore = state._restore_round  # noqa: SLF001 - a fault within

    def forgetful(center: Center, values: dict[str, int], arrays: dict[str, np.ndarray]) -> None:
        restore(center, values, arrays | {"round/moving_statistics": np.zeros_like(center.moving_statistics)})

    return [(state, "_restore_round", forgetful)]


@mutation
def _residuals_outlive_their_steps() -> list[Patch]:
    """With int8, a restarted worker adds the residuals of its discarded steps."""
    return [(WorkerClient, "forget_residuals", nothing)]


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
def _moving_statistics_are_averaged_by_workers() -> list[Patch]:
    """The moving statistics of a worker with one step weigh as much as those of one with three steps."""
    blend = Center._blend_moving_statistics  # noqa: SLF001 - a fault within

    def equal(self: Center, commits: Any) -> None:
        for other in self.leases.values():
            other.steps = min(other.steps, 1)
        blend(self, commits)

    return [(Center, "_blend_moving_statistics", equal)]


@mutation
def _steps_are_not_restored() -> list[Patch]:
    """After a restart, moving statistics are those of the first worker that commits."""
    kept = tuple(name for name in state._KEPT if name != "steps")  # noqa: SLF001 - a fault within
    return [(state, "_KEPT", kept)]


@mutation
def _momenta_of_workers_are_not_restored() -> list[Patch]:
    """After a restart, DANA's sum of momenta is that of momenta that are lost."""
    return [(checkpointer, "capture", _capture_with(lambda name: name.startswith("worker/")))]


@mutation
def _what_a_rule_keeps_is_not_restored() -> list[Patch]:
    """After a restart, a server's own momentum starts at zero."""
    return [(checkpointer, "capture", _capture_with(lambda name: name.startswith("model/")))]


@mutation
def _an_unfinished_round_is_not_restored() -> list[Patch]:
    """After a restart, the workers that had contributed to a round have contributed nothing."""
    return [(checkpointer, "capture", _capture_with(lambda name: name == "round"))]


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
def _those_who_ended_hold_up_the_others() -> list[Patch]:
    """Others wait for a worker whose data has ended."""
    return [(BoundedStaleness, "finished", nothing)]


@mutation
def _a_schedule_begins_with_each_server() -> list[Patch]:
    """After a restart, the learning rate is that of a job that has just started."""
    rate = Center.rate

    def begun(self: Center, clock: int) -> float:
        born = self.__dict__.setdefault("mutant_born", self.clock)
        return rate(self, clock - born)

    return [(center_module.Center, "rate", begun)]


@mutation
def _a_restored_ledger_lacks_its_last_commit() -> list[Patch]:
    """A snapshot's log lacks the last commit of its center."""
    save = SnapshotDirectory.save_log

    def short(self: SnapshotDirectory, rows: Any, files: Any, *, replaced: int = 0) -> Any:
        if len(rows.commits) > 1 and not replaced:
            rows = rows._replace(commits=np.concatenate([rows.commits[:-1], rows.commits[-2:-1]]))
        return save(self, rows, files, replaced=replaced)

    return [(SnapshotDirectory, "save_log", short)]


@mutation
def _a_second_attempt_takes_the_job() -> list[Patch]:
    """The second attempt of a server's task does not check whether the first one serves."""
    return [(Standby, "other_owner", nothing)]


@mutation
def _any_announcement_is_believed() -> list[Patch]:
    """Workers connect to the server that was announced first."""

    def lowest(store: Any) -> Any:
        names = [name for name in map(parsed, store.names()) if name is not None]
        claim = min((name.claim for name in names if name.kind == "server"), default=None)
        return claim, claim is not None

    return [(ownership, "_highest", lowest)]


@mutation
def _the_end_is_sent_once() -> list[Patch]:
    """A server that reconnects continues a job that a callback has ended."""

    def end_early(self: Supervisor, reason: str) -> None:
        self.ask(lambda driver: driver.finish(reason))

    return [(Supervisor, "end_early", end_early), (ClusterServer, "_send_end", nothing)]


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
def _buffers_are_not_drained() -> list[Patch]:
    """Movements in a buffer that is not full are lost."""
    return [(Center, "_drain", nothing)]


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
def _a_drained_buffer_is_divided_by_what_it_holds() -> list[Patch]:
    """The movements in a drained buffer weigh more than all others."""

    def divided(begin: Any) -> Any:
        def begin_drain(self: Any, workers: int, counters: dict[str, int]) -> Any:
            count = counters.get("count", 0)
            scalars = begin(self, workers, counters)
            return scalars and (1 / count, *scalars[1:])

        return begin_drain

    return [(kind, "begin_drain", divided(kind.begin_drain)) for kind in (FedBuff, FADAS)]


@mutation
def _a_buffer_is_drained_for_the_workers_that_come() -> list[Patch]:
    """If the number of workers changes, movements of the former workers are weighted by the new number."""
    begin = Center.replace_workers
    return [(Center, "replace_workers", lambda self, count, _: begin(self, count, self.workers))]


@mutation
def _a_refused_worker_need_not_pull() -> list[Patch]:
    """The payload that was refused may be sent again as the next commit."""

    def refuse(self: PartitionLease, commit: Any, now: float) -> None:
        self.sequence, self.active_at, self.skipped = commit.sequence, now, False
        self.refusals += 1

    return [(PartitionLease, "refuse", refuse)]


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
def _windows_follow_the_slowest() -> list[Patch]:
    """The slowest worker has the longest window."""

    def upside_down(longest: int, speed: float | None, speeds: Iterable[float | None]) -> int:
        if speed is None:
            return longest
        return max(1, math.floor(longest * min(other for other in speeds if other is not None) / speed))

    return [(center_module, "window_by_speed", upside_down)]


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
def _workers_keep_the_longest_window() -> list[Patch]:
    """A worker ignores the next window that a reply names."""
    return [(loop._Worker, "_take_window", nothing)]  # noqa: SLF001 - a fault within


@mutation
def _values_are_not_restored() -> list[Patch]:
    """A restarted server has nothing of what the driver has set."""
    return [(DriverValues, "restore", nothing)]


@mutation
def _values_are_acknowledged_before_they_are_saved() -> list[Patch]:
    """A server acknowledges what the driver sets, and saves it with a later commit."""
    answer = Dispatcher._on_set_values  # noqa: SLF001 - a fault within

    def early(self: Any, peer: Any, message: Any) -> Any:
        self._wait_until_saved = nothing
        try:
            return answer(self, peer, message)
        finally:
            del self._wait_until_saved

    return [(Dispatcher, "_on_set_values", early)]
