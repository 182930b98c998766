"""Faults planted in snapshots, in their ownership, and in servers that are started from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distkeras.ps.checkpoint.ownership import Claim, Name, Ownership
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import DeadlineError, OwnershipLostError, ServerLostError
from distkeras.ps.server import process
from distkeras.ps.server.served_center import ServedCenter
from simulation.disk import VirtualFiles
from simulation.planting import Patch, mutation, nothing
from simulation.world import VirtualChild


@mutation
def _let_go_before_the_snapshot() -> list[Patch]:
    """A worker returns although its last commit is in no snapshot."""
    return [(ServedCenter, "wait_until_saved", nothing)]


@mutation
def _durable_before_the_snapshot() -> list[Patch]:
    """The server promises a worker that a commit will survive the server, but has not saved it."""
    return [(ServedCenter, "durable", lambda self, worker, sequence: sequence)]


@mutation
def _restart_from_an_older_snapshot() -> list[Patch]:
    """The server continues from the snapshot before the latest one, if there is one."""
    newest = SnapshotDirectory._newest_of  # noqa: SLF001 - a fault within
    return [(SnapshotDirectory, "_newest_of", lambda self, snapshots: newest(self, snapshots[:-1] or snapshots))]


@mutation
def _no_owner() -> list[Patch]:
    """No server checks for a higher claim."""
    return [(Ownership, "require", nothing), (Ownership, "require_own", nothing)]


@mutation
def _nothing_is_synced() -> list[Patch]:
    """Snapshots are not synced."""
    return [(VirtualFiles, "sync", nothing)]


@mutation
def _a_claim_is_tried_once() -> list[Patch]:
    """A server that finds a full disk for its claim gives up."""
    return [(SnapshotDirectory, "_retry_unreachable", lambda self, call, patience=0.0: call())]


@mutation
def _a_port_that_is_taken_is_given_up() -> list[Patch]:
    """A server that is started again does not wait until its port is free."""
    return [(process, "_RETRY_SECONDS", 1e9)]


@mutation
def _a_first_server_is_started_once() -> list[Patch]:
    """A server that dies before it is up ends the job."""
    return [(process, "_ATTEMPTS", 1)]


@mutation
def _a_server_that_is_started_again_takes_the_highest_claim() -> list[Patch]:
    """It claims the snapshots even if another job has taken them over in the meantime."""
    write = Ownership.write

    def again(self: Ownership, names: Iterable[Name], epoch: int = 0, after: int = 0, *where: Any) -> None:
        write(self, [*names, Name("owner", Claim(after, ""))])

    return [(Ownership, "write", again)]


@mutation
def _a_tie_is_lost() -> list[Patch]:
    """A driver gives up if its server has claimed the snapshots with the same epoch as a dead driver's server."""
    return [(process, "_RESTART_ERRORS", (ServerLostError, DeadlineError)), *_a_server_begins_for_a_dead_driver()]


@mutation
def _a_server_begins_for_a_dead_driver() -> list[Patch]:
    """A server that starts does not check whether its driver is still alive."""
    return [(VirtualChild, "require_driver", nothing), (Ownership, "withdraw", nothing)]


@mutation
def _a_claim_counts_at_once() -> list[Patch]:
    """An owner gives up at a higher claim, although its server may find that its driver has ended and withdraw it."""
    return [(Ownership, "require_kept", Ownership.require)]


@mutation
def _a_first_start_that_stands_still_is_the_last() -> list[Patch]:
    """A driver's first server ends the job if it is suspended while it starts."""
    return [(process, "_RESTART_ERRORS", (ServerLostError, OwnershipLostError))]
