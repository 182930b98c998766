"""Faults planted in how a stream's micro-batches begin, in what covers them, and in what follows them."""

from __future__ import annotations

from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import MicroBatch
from distkeras.ps.center.micro_batches import begin_micro_batch, number_of
from distkeras.ps.server import dispatcher, driver_requests
from distkeras.ps.server.served_center import ServedCenter
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper
from distkeras.training import task
from simulation.driver import Executors
from simulation.planting import Patch, mutation, nothing


@mutation
def _what_is_covered_begins_again() -> list[Patch]:
    """A micro-batch that Spark sends again counts again."""

    def again(center: Center, stream: str, number: int, scheduler: Any) -> bool:
        present = center.micro_batch
        if present is not None and present.number == number and center.leases.complete:
            center.micro_batch = MicroBatch(stream, number - 1, present.skipped)
        return begin_micro_batch(center, stream, number, scheduler)

    return [(driver_requests, "begin_micro_batch", again)]


@mutation
def _spark_notes_a_micro_batch_before_its_snapshot() -> list[Patch]:
    """The driver returns a micro-batch to Spark when its rows are applied, although no snapshot covers them yet."""
    wait = ServedCenter.wait_until_saved

    def early(self: ServedCenter, peer: Any, worker: int) -> None:
        if self.center is None or self.center.micro_batch is None:
            wait(self, peer, worker)

    return [(ServedCenter, "wait_until_saved", early)]


@mutation
def _an_attempt_of_an_earlier_micro_batch_gets_a_lease() -> list[Patch]:
    """The rows that an attempt has of the previous micro-batch count as those of this one."""

    def present(center: Center, number: int, worker: int) -> bool:
        return number <= number_of(center)

    return [(dispatcher, "require_present", present), (Executors, "_end_attempt", nothing)]


@mutation
def _an_early_attempt_does_not_wait() -> list[Patch]:
    """After a restart, a worker continues with the micro-batch before that of its rows."""
    return [(dispatcher, "require_present", lambda center, number, worker: True)]


@mutation
def _records_of_earlier_micro_batches_are_drained() -> list[Patch]:
    """The driver also receives the records of the previous micro-batches."""
    return [(driver_requests, "commits_before", lambda center: 0)]


@mutation
def _other_rows_are_taken_for_the_same() -> list[Patch]:
    """A covered micro-batch may be sent again with other rows."""
    return [(task, "require_same_rows", nothing)]


@mutation
def _the_state_of_an_earlier_micro_batch_is_reused() -> list[Patch]:
    """The optimizer of a partition continues with a state that lacks the last steps of the previous micro-batch."""
    return [(OptimizerKeeper, "end", lambda self: iter(()))]
