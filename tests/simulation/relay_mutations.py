"""Faults planted in the commits of groups, and in the reaction of workers to a lost relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.errors import RelayLostError
from distkeras.ps.protocol import companions
from distkeras.ps.protocol.messages import CenterReply, Commit, Pull
from distkeras.ps.protocol.tables import NO_IDS
from distkeras.ps.transport import relay_group
from distkeras.ps.transport.relay_group import RelayGroup
from simulation.planting import Patch, mutation


@mutation
def _a_sum_counts_for_its_sender_alone() -> list[Patch]:
    """The movements of the other workers are in the payload, but the ledger does not have their mini-batches."""
    join = companions.join

    def alone(own: Commit, others: Any, parts: Any) -> Commit:
        return replace(join(own, others, parts), history=own.history, companions=NO_IDS)

    return [(relay_group, "join", alone)]


@mutation
def _a_lost_relay_has_done_its_work() -> list[Patch]:
    """A worker whose relay is lost assumes that its movement was applied."""
    hand = RelayGroup._send_commit  # noqa: SLF001 - a fault within

    def trusting(self: RelayGroup, client: Any, commit: Commit, link: Any) -> CenterReply:
        try:
            return hand(self, client, commit, link)
        except RelayLostError:
            self.leave()
            reply: CenterReply = client.request(Pull(client.worker, client.attempt, client.incarnation), CenterReply)
            return reply

    return [(RelayGroup, "_send_commit", trusting)]


@mutation
def _a_sum_is_as_stale_as_its_sender() -> list[Patch]:
    """The staleness of a group's commit is not that of its stalest worker."""
    stalest = Center._stalest  # noqa: SLF001 - a fault within

    def senders(self: Center, commits: Sequence[Commit]) -> PartitionLease:
        stalest(self, commits)
        return self.leases[commits[0].worker]

    return [(Center, "_stalest", senders)]
