"""Faults planted in the code under simulation; each must be found, or the schedules are not hostile enough."""

from __future__ import annotations

import math
from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import Leases, PartitionLease
from distkeras.ps.errors import DeadlineError, RemoteProtocolError, ServerLostError
from distkeras.ps.server import dispatcher, job_state
from distkeras.ps.server.job_state import LeaseConnections
from distkeras.ps.server.process import GOODBYE
from distkeras.ps.transport import worker_client
from distkeras.ps.transport.client import Client
from distkeras.ps.transport.worker_client import RestartFromCenter, WorkerClient
from distkeras.training.supervisor import Supervisor
from simulation import (  # noqa: F401 - they are among `MUTATIONS`, too
    disk_mutations,
    loan_mutations,
    member_mutations,
    shard_mutations,
    state_mutations,
    stream_mutations,
    table_mutations,
)
from simulation.planting import MUTATIONS, Patch, mutation, nothing, planted
from simulation.world import VirtualChild

__all__ = ["MUTATIONS", "planted"]


@mutation
def _no_lease_check() -> list[Patch]:
    """A commit counts even if the worker does not have the lease."""
    return [(Leases, "held", lambda self, worker, attempt: self[worker]), (LeaseConnections, "require", nothing)]


@mutation
def _late_connections_are_served() -> list[Patch]:
    """A commit that an attempt sent over an older connection counts."""
    return [(LeaseConnections, "require", nothing), (LeaseConnections, "require_newest", nothing)]


@mutation
def _duplicates_are_new_where_late_connections_are_served() -> list[Patch]:
    """A repeated commit counts as new; commits are repeated only if late connections are served."""
    due = Center._lease_for  # noqa: SLF001 - a fault within

    def never_again(self: Center, commit: Any, parts: int) -> PartitionLease | None:
        lease = due(self, commit, parts)
        return self.leases[commit.worker] if lease is None else lease

    return [(Center, "_lease_for", never_again), *_late_connections_are_served()]


@mutation
def _reply_before_apply() -> list[Patch]:
    """The worker receives a reply before its commit is applied."""
    commit = Center.commit

    def later(self: Center, message: Any, parts: Any, arrived: float) -> bool:
        queue = self.__dict__.setdefault("mutant", [])
        done = [commit(self, *queue.pop(0))] if queue else []
        queue.append((message, parts, arrived))
        return bool(done) or True

    return [(Center, "commit", later)]


@mutation
def _incarnation_is_ignored_at_both_ends() -> list[Patch]:
    """What a worker computed for an earlier server counts at the next one."""
    join = WorkerClient._join  # noqa: SLF001 - a fault within

    def goes_on(self: WorkerClient) -> Any:
        try:
            return join(self)
        except RestartFromCenter as restart:
            if restart.welcome.held:
                return restart.welcome
            raise

    return [(Center, "require_incarnation", nothing), (WorkerClient, "_join", goes_on)]


@mutation
def _a_server_outlives_its_driver() -> list[Patch]:
    """A server does not detect that its driver is gone."""

    def until_goodbye(self: VirtualChild, server: Any) -> int:
        self.server = server
        while GOODBYE not in self.lines:
            self.world.sleep(1.0)
        return 0

    return [(VirtualChild, "wait_until_over", until_goodbye)]


@mutation
def _a_server_that_stands_still_is_left_alone() -> list[Patch]:
    """A server that does not answer is not killed."""
    return [(Supervisor, "_kill_unresponsive", nothing), (Supervisor, "_answers", lambda self: True)]


@mutation
def _a_gap_in_the_mini_batches_is_taken() -> list[Patch]:
    """Commits need not continue where their partition stands, and a worker that lost its place does not go back."""
    join = WorkerClient._join  # noqa: SLF001 - a fault within

    def goes_on(self: WorkerClient) -> Any:
        try:
            return join(self)
        except RestartFromCenter as restart:
            return restart.welcome

    def check(self: PartitionLease, commit: Any) -> None:
        if commit.sequence != self.sequence + 1:
            raise RemoteProtocolError("a gap")

    return [(WorkerClient, "_join", goes_on), (PartitionLease, "require_next", check)]


@mutation
def _a_stranger_on_the_port_ends_the_job() -> list[Patch]:
    """A client that has met the server before trusts every process at its port."""
    connect = Client._connect  # noqa: SLF001 - a fault within

    def credulous(self: Client) -> Any:
        self._met = False
        return connect(self)

    return [(Client, "_connect", credulous), (worker_client, "UNREACHED", (ServerLostError, DeadlineError))]


@mutation
def _waits_run_out_while_the_server_stands_still() -> list[Patch]:
    """A server that resumes ends at once the waits whose messages it was not able to receive."""
    return [(job_state, "_CHECK_SECONDS_MAX", math.inf)]


@mutation
def _numbers_are_not_looked_at() -> list[Patch]:
    """A NaN is added to the center."""
    return [(dispatcher, "not_finite", nothing)]
