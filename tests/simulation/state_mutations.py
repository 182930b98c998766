"""Faults planted in the state of a center, in what a snapshot restores, and in the rounding of wire formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from distkeras.ps.center import center as center_module
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import KeptState, PartitionLease
from distkeras.ps.center.schedulers import BoundedStaleness, Scheduler
from distkeras.ps.checkpoint import checkpointer, ownership, snapshots, state
from distkeras.ps.checkpoint.checkpointer import OptimizerFiles
from distkeras.ps.checkpoint.ownership import parsed
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.protocol.compression import Int8, WorkerFormat
from distkeras.ps.rules.gradient import DanaZero
from distkeras.ps.server.announced import Standby
from distkeras.ps.server.process import StartRequest
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, SaveInterval
from distkeras.training.cluster_server import ClusterServer
from distkeras.training.supervisor import Supervisor
from simulation.planting import Patch, mutation, nothing


@mutation
def _iterations_are_not_restored() -> list[Patch]:
    """After a restart, bounded staleness assumes that all workers have made equal progress."""

    def restore(self: BoundedStaleness, progress: dict[int, int], *, seen: set[int], active: set[int]) -> None:
        Scheduler.restore(self, {}, seen=seen, active=active)

    return [(BoundedStaleness, "restore", restore)]


@mutation
def _a_rounds_moving_statistics_are_not_restored() -> list[Patch]:
    """After a restart within a round, contributions to the average of moving statistics are lost."""
    restore = state._restore_round  # noqa: SLF001 - a fault within

    def forgetful(center: Center, values: dict[str, int], arrays: dict[str, np.ndarray]) -> None:
        restore(center, values, arrays | {"round/moving_statistics": np.zeros_like(center.moving_statistics)})

    return [(state, "_restore_round", forgetful)]


@mutation
def _drafts_of_newer_owners_are_removed() -> list[Patch]:
    """A server that starts to save removes all incomplete files, including another server's snapshot."""

    def sweep(self: SnapshotDirectory) -> None:
        drafts = ((draft, parsed(draft)) for draft in self._store.drafts())
        self._store.delete_drafts(draft for draft, name in drafts if name and name.claim != self.claim)

    return [(SnapshotDirectory, "sweep", sweep)]


@mutation
def _residuals_outlive_their_steps() -> list[Patch]:
    """With int8, a restarted worker adds the residuals of its discarded steps."""
    return [(WorkerClient, "forget_residuals", nothing)]


@mutation
def _residuals_are_not_kept() -> list[Patch]:
    """The residuals of a commit in int8 are lost."""
    encode = WorkerFormat.encode

    def forgetful(
        self: WorkerFormat, parts: tuple[np.ndarray, ...], memory: tuple[np.ndarray, ...] = ()
    ) -> tuple[np.ndarray, ...]:
        self.forget_residuals()
        return encode(self, parts, memory)

    return [(WorkerFormat, "encode", forgetful)]


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
def _an_overlapped_commit_counts_from_the_latest_reply() -> list[Patch]:
    """Rules that divide by staleness divide by too small a number."""

    def staleness(self: PartitionLease, commit: Any, clock: int) -> int:
        assert self.released is not None
        return clock - self.released

    return [(PartitionLease, "staleness", staleness)]


@mutation
def _the_gap_is_to_the_center_before_the_last() -> list[Patch]:
    """The center for a worker's gap is recorded when the worker commits, instead of when it is sent."""
    keep = PartitionLease.keep_sent

    def once(self: PartitionLease, version: Any, *, within_window: bool) -> None:
        if self.sent is None:
            keep(self, version, within_window=within_window)

    return [(PartitionLease, "keep_sent", once)]


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


@mutation
def _other_workers_begin_without_the_unfinished_round() -> list[Patch]:
    """After a resume with another number of workers, earlier contributions to a round are lost."""
    begin = Center.replace_workers

    def forgetful(self: Center, contributions: int, workers: int) -> None:
        self.round.total = None
        begin(self, contributions, workers)

    return [(Center, "replace_workers", forgetful)]


@mutation
def _other_workers_begin_with_the_first_rate() -> list[Patch]:
    """After a resume with another number of workers, the first round has the schedule's first learning rate."""
    begin = Center.replace_workers

    def forgetful(self: Center, contributions: int, workers: int) -> None:
        begin(self, contributions, workers)
        self.round.began = 0

    return [(Center, "replace_workers", forgetful)]


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
def _one_more_than_the_bound() -> list[Patch]:
    """Stale synchronous training allows one iteration more than its bound."""
    ready = BoundedStaleness.ready

    def lenient(self: BoundedStaleness, worker: int) -> bool:
        self.bound += 1
        try:
            return ready(self, worker)
        finally:
            self.bound -= 1

    return [(BoundedStaleness, "ready", lenient)]


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
def _a_restart_forgets_the_epochs() -> list[Patch]:
    """A server that dies before it has saved a snapshot of a longer job continues with the shorter one."""
    again = StartRequest.again

    def forgetful(self: StartRequest, epoch: int, after: int, port: int | None = None) -> StartRequest:
        request = again(self, epoch, after, port)
        return replace(request, mode=replace(request.mode, epochs=None))

    return [(StartRequest, "again", forgetful)]


@mutation
def _partitions_that_have_ended_stay_so() -> list[Patch]:
    """In a job that is resumed with more epochs, partitions that had ended have none."""
    restore = state.restore

    def forgetful(center: Center, state: Any, *, same_attempts: bool, epochs: int | None = None) -> bool:
        return restore(center, state, same_attempts=same_attempts)

    return [(snapshots, "restore", forgetful)]


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
def _the_first_state_is_kept() -> list[Patch]:
    """A successor receives the state of the oldest attempt."""
    keep = PartitionLease.keep_optimizer

    def once(self: PartitionLease, message: Any, now: float) -> None:
        if self.optimizer is None:
            keep(self, message, now)

    return [(PartitionLease, "keep_optimizer", once)]


@mutation
def _a_state_is_sent_once() -> list[Patch]:
    """Workers send their first state, and no later one."""
    return [(SaveInterval, "due", lambda self: not self._took and self.now() >= self._due)]


@mutation
def _a_state_is_that_of_a_later_commit() -> list[Patch]:
    """With overlap, a state is read when the commit is answered, so that it has steps that do not count yet."""
    send = OptimizerKeeper.send

    def late(self: OptimizerKeeper) -> Any:
        if self._captured is not None:
            self._captured = self._replica.read_optimizer()
        return send(self)

    return [(OptimizerKeeper, "send", late)]


@mutation
def _the_last_snapshot_names_older_states() -> list[Patch]:
    """A server that ends does not write the optimizers' states for which there was no time before."""
    save = OptimizerFiles.save

    def later(self: OptimizerFiles, states: Mapping[int, KeptState], *, now: bool) -> dict[int, str]:
        return save(self, states, now=False)

    return [(OptimizerFiles, "save", later), (OptimizerFiles, "behind", lambda self, states: False)]
