"""Faults planted in what rules buffer at the server, and in what they refuse."""

from __future__ import annotations

from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.checkpoint import state
from distkeras.ps.protocol.compression import WorkerFormat
from distkeras.ps.rules.federated import FADAS, FedBuff
from distkeras.ps.transport.worker_client import WorkerClient
from simulation.planting import Patch, mutation, nothing


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
def _a_refused_commit_counts_its_mini_batches() -> list[Patch]:
    """A refused window is not computed again."""
    refuse = PartitionLease.refuse

    def counted(self: PartitionLease, commit: Any, now: float) -> None:
        refusals = self.refusals
        self.advance(commit, now)
        self.refusals = refusals
        refuse(self, commit, now)

    return [(PartitionLease, "refuse", counted)]


@mutation
def _a_lost_refusal_is_taken_for_an_applied_commit() -> list[Patch]:
    """A worker whose answer was lost continues after mini-batches that were refused."""
    join = WorkerClient._join  # noqa: SLF001 - a fault within

    def forgetful(self: WorkerClient) -> Any:
        welcome = join(self)
        self._refused = False
        return welcome

    return [(WorkerClient, "_join", forgetful)]


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
