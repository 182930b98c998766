"""Faults planted in work that moves: in cuts, loans, and the rows that travel between workers."""

from __future__ import annotations

from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import Leases, PartitionLease
from distkeras.ps.center.loans import Lending
from distkeras.ps.checkpoint import checkpointer, state
from distkeras.ps.protocol.loop import Position
from distkeras.ps.server.loan_requests import LoanRequests
from distkeras.ps.server.served_center import ServedCenter
from distkeras.ps.transport.row_links import RowServer
from distkeras.ps.transport.worker_client import WorkerClient
from simulation.planting import Patch, mutation, nothing


@mutation
def _a_lease_is_cut_within_the_next_window() -> list[Patch]:
    """The holder has begun mini-batches that are lent to another worker."""
    return [(Lending, "_window_end", lambda self, lease, count: (lease.epoch, lease.batch))]


@mutation
def _a_holder_does_not_look_at_the_end() -> list[Patch]:
    """The holder trains what was lent."""
    return [(WorkerClient, "_note_end", nothing)]


@mutation
def _a_cut_lease_keeps_its_end() -> list[Patch]:
    """Both shares have the later mini-batches."""
    cut = Leases.cut

    def overlapping(self: Leases, number: int, at: Position, *, before: float) -> int:
        end = self[number].end
        loan = cut(self, number, at, before=before)
        self[number].end = end
        return loan

    return [(Leases, "cut", overlapping), (PartitionLease, "require_next", nothing)]


@mutation
def _a_task_leaves_before_its_rows_are_trained() -> list[Patch]:
    """A helper asks for rows that are gone, and Spark does not start a task that has ended successfully."""
    may_leave = Lending.may_leave

    def early(self: Lending, worker: int, *others: Any) -> bool:
        return self._leases.owes(worker) or may_leave(self, worker, *others)

    return [(Lending, "may_leave", early)]


@mutation
def _a_task_leaves_before_a_snapshot_has_the_loans() -> list[Patch]:
    """A restarted server has loans whose rows are gone."""
    lend = LoanRequests.lend

    class Hasty:
        def __init__(self, served: ServedCenter) -> None:
            self._served = served

        def __getattr__(self, name: str) -> Any:
            return nothing if name == "wait_until_saved" else getattr(self._served, name)

    def hasty(self: LoanRequests, *request: Any) -> Any:
        served: Any = Hasty(self._served)
        return lend(LoanRequests(served), *request)

    return [(LoanRequests, "lend", hasty)]


@mutation
def _loans_are_not_saved() -> list[Patch]:
    """A restarted server has the ends of cut leases, and not what was lent."""
    capture = state.capture

    def without_loans(center: Center) -> state.State:
        saved = capture(center)
        leases = saved.header["leases"]
        saved.header["leases"] = {number: lease for number, lease in leases.items() if int(number) < center.workers}
        return saved

    return [(state, "capture", without_loans), (checkpointer, "capture", without_loans)]


@mutation
def _ends_are_not_saved() -> list[Patch]:
    """After a restart, a cut lease has all mini-batches again, and so has the loan."""
    kept = tuple(name for name in state._KEPT if name != "end")  # noqa: SLF001 - a fault within
    return [(state, "_KEPT", kept)]


@mutation
def _rows_are_sent_from_the_beginning() -> list[Patch]:
    """A helper gets the first mini-batches of the partition, under the numbers of later ones."""
    init = RowServer.__init__

    def __init__(self: RowServer, *arguments: Any, **options: Any) -> None:
        host, key, deadlines, batches, *others = arguments

        def renumbered(epoch: int, number: int) -> Any:
            for first, batch in zip(batches(0, 0), batches(epoch, number), strict=False):
                yield batch._replace(arrays=first.arrays)

        init(self, host, key, deadlines, renumbered, *others, **options)

    return [(RowServer, "__init__", __init__)]
