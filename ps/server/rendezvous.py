"""Where the workers of a rule with peers find each other: each announces itself, and receives the whole membership."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.errors import ConfigurationError, MemberLostError
from distkeras.ps.protocol.member_places import line_of
from distkeras.ps.protocol.messages import Announce, Members
from distkeras.ps.rules.daso import Daso
from distkeras.ps.server.waiting import JobCondition
from distkeras.ps.settings import ServerSettings


class Waiter(Protocol):
    """A session, as far as a wait for others needs it."""

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end."""


class Rendezvous:
    """The membership of a job. Once it is complete, it does not change: a member's successor is an error.

    Args:
        settings: the server's.
        changed: the job's lock.
    """

    def __init__(self, settings: ServerSettings, changed: JobCondition) -> None:
        self._settings, self._changed = settings, changed
        self._announced: dict[int, Announce] = {}
        #: The answer to all; None before the membership is complete.
        self._members: Members | None = None

    def announce(
        self, peer: Waiter, center: Center, require_lease: Callable[[], PartitionLease], message: Announce
    ) -> Members:
        """Wait until all have announced themselves; the caller holds the lock.

        Args:
            peer: the sender's session.
            center: the job's.
            require_lease: returns the lease of the sender's partition; raises a LeaseLostError if it has none.
            message: the announcement.

        Raises:
            LeaseLostError: another attempt has the lease now.
            ConfigurationError: the rule has no peers, or nodes of unequal size.
            MemberLostError: another attempt is a member in the place of the sender.
            DeadlineError: a worker did not come.
        """
        rule, worker = self._settings.rule, message.worker
        if not isinstance(rule, Daso):
            raise ConfigurationError(f"`rule` must have peers. Received: {rule.name!r}", worker=worker)
        lease = require_lease()
        if self._members is not None:
            return self._answer(lease, message, self._members)
        self._announced[worker] = message
        self._changed.notify_all()
        deadlines = self._settings.deadlines
        self._changed.require(
            lambda: not center.scheduler.missing(),
            deadlines.gather,
            peer.hung_up,
            lambda: center.scheduler.awaited(worker),
            worker,
        )
        self._changed.require(
            lambda: len(self._announced) == center.workers or center.stopping is not None,
            deadlines.rows,
            peer.hung_up,
            lambda: f"workers {sorted(set(range(center.workers)) - self._announced.keys())} to read their rows",
            worker,
        )
        lease = require_lease()
        if self._members is None and center.stopping is not None:
            self._members = Members("", 0, 0)  # to all: none trains
        if self._members is None:
            self._members = membership(self._announced, rule.nodes, whole=self._settings.authenticate_vectors)
        return self._answer(lease, message, self._members)

    def _answer(self, lease: PartitionLease, message: Announce, members: Members) -> Members:
        member = self._announced.get(message.worker)
        if not members.places or (member and (member.attempt, member.port) == (message.attempt, message.port)):
            return members
        assert member is not None, "a complete membership has every worker"
        raise MemberLostError(
            f"attempt {member.attempt} of worker {message.worker}, with which others exchange, was lost in epoch "
            f"{lease.epoch}, and attempt {message.attempt} cannot take its place: rule "
            f"{self._settings.rule.name!r} does not go on after the death of a worker",
            worker=message.worker,
            step=lease.batch,
        )


def membership(announced: Mapping[int, Announce], nodes: int | None, *, whole: bool) -> Members:
    """Return the members, node by node.

    Args:
        announced: each worker's announcement, by its number from 0 on.
        nodes: how many nodes to make of them, in the order of the workers; None: one of each machine.
        whole: whether tags cover the long vectors between members.

    Raises:
        ConfigurationError: the nodes would not be equally large.
    """
    workers = sorted(announced)
    if nodes is not None and len(workers) % nodes:
        raise ConfigurationError(f"`num_workers` must be a multiple of `nodes`={nodes}. Received: {len(workers)}")
    devices = len(workers) // (nodes or 1)
    by_node: dict[str | int, list[int]] = {}
    for worker in workers:
        node = announced[worker].node if nodes is None else worker // devices
        by_node.setdefault(node, []).append(worker)
    if len({len(members) for members in by_node.values()}) > 1:
        sizes = ", ".join(f"{node}: {len(members)}" for node, members in by_node.items())
        raise ConfigurationError(
            f"each host must run equally many workers, which are a node's devices; or give the rule `nodes`, their "
            f"number. Received: {sizes}"
        )
    ranks = [worker for members in by_node.values() for worker in members]
    places = [line_of(announced[worker]) for worker in ranks]
    return Members("\n".join(places), len(by_node), max(one.batches for one in announced.values()), whole)
