"""Faults planted in what members exchange, and when."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.errors import MemberLostError
from distkeras.ps.protocol.messages import PeerVector
from distkeras.ps.rules.base import total_of
from distkeras.ps.rules.daso import Turns, merge
from distkeras.ps.server.rendezvous import Rendezvous
from distkeras.ps.transport import members
from distkeras.ps.transport.members import MemberLinks, Purpose
from distkeras.ps.worker import daso
from distkeras.ps.worker.daso import MemberReplica
from simulation.planting import Patch, mutation, nothing


@mutation
def _the_first_of_a_sum_counts_twice() -> list[Patch]:
    """A member that adds vectors counts its own vector twice."""
    return [(members, "total_of", lambda vectors, out=None: total_of([vectors[0], *vectors], out))]


@mutation
def _a_lost_member_has_sent_nothing() -> list[Patch]:
    """A node continues without the gradient of a lost member."""
    vector, send = MemberLinks._vector, MemberLinks._send  # noqa: SLF001 - a fault within

    def patient(self: MemberLinks, rank: int, purpose: Purpose, step: int, **options: Any) -> PeerVector:
        try:
            return vector(self, rank, purpose, step, **options)
        except MemberLostError:
            if purpose != Purpose.GRADIENT:
                raise
            return PeerVector(purpose, step, np.empty(0, np.float32), members=0)

    def silent(self: MemberLinks, rank: int, message: Any) -> None:
        try:
            send(self, rank, message)
        except MemberLostError:
            return

    return [(MemberLinks, "_vector", patient), (MemberLinks, "_send", silent)]


@mutation
def _an_exchange_begins_before_the_last_one_has_ended() -> list[Patch]:
    """Two threads read from the connections of a group."""
    collect, wait_for_posted = MemberLinks.collect, MemberLinks.wait_for_posted

    def settling(self: MemberLinks, step: int) -> Any:
        wait_for_posted(self, step)
        return collect(self, step)

    return [(MemberLinks, "wait_for_posted", nothing), (MemberLinks, "collect", settling)]


@mutation
def _groups_take_no_turns() -> list[Patch]:
    """The same members exchange each time."""
    return [(Turns, "_next_group", lambda self: 0)]


@mutation
def _a_merge_counts_another_step() -> list[Patch]:
    """The own parameters have more weight than the number of steps since they were sent implies."""
    return [(daso, "merge", lambda local, total, count, wait: merge(local, total, count, wait + 1))]


@mutation
def _blocking_exchanges_are_not_cast() -> list[Patch]:
    """Parameters are sent without the cast that the rule requires."""
    exact = MemberLinks.sum_parameters
    return [(MemberLinks, "sum_parameters", lambda self, step, theta, cast: exact(self, step, theta, cast=False))]


@mutation
def _a_plateau_is_each_members_own() -> list[Patch]:
    """Each member judges the loss of its own rows alone."""
    return [(MemberLinks, "mean_loss", lambda self, step, total, samples: total / samples)]


@mutation
def _commits_of_members_count_one_by_one() -> list[Patch]:
    """A round may count for some members and not for the others."""

    def at_once(self: Rendezvous, peer: Any, center: Center, commit: Any, parts: Any, arrived: float) -> bool:
        return center.commit(commit, parts, arrived)

    return [(Rendezvous, "commit", at_once)]


@mutation
def _a_momentum_begins_again() -> list[Patch]:
    """After a loss, a member continues with its parameters alone."""
    restore = MemberReplica._restore  # noqa: SLF001 - a fault within

    def forgetting(self: MemberReplica, state: Any) -> None:
        restore(self, state)
        self._velocity[:] = 0.0

    return [(MemberReplica, "_restore", forgetting)]


@mutation
def _turns_begin_again() -> list[Patch]:
    """After a loss, the first group has its turn, and the pending exchange is lost."""
    return [(Turns, "restore", nothing)]
