"""Faults planted in what members and groups exchange, and in memory that is shared."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.errors import MemberLostError, RelayLostError
from distkeras.ps.protocol.messages import CenterReply, Commit, Message, PeerVector, Pull
from distkeras.ps.protocol.shared_slots import SharedSlots
from distkeras.ps.rules.base import total_of
from distkeras.ps.rules.daso import Turns, merge
from distkeras.ps.transport import members
from distkeras.ps.transport.members import MemberLinks, Purpose
from distkeras.ps.transport.relay_group import RelayGroup
from distkeras.ps.worker import daso
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
def _turns_begin_again() -> list[Patch]:
    """After a loss, the first group has its turn, and the pending exchange is lost."""
    return [(Turns, "restore", nothing)]


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
def _a_reply_is_sent_before_its_slot_is_written() -> list[Patch]:
    """A frame states where the center is, but the center is written a little later."""
    slot_of = SharedSlots.slot_of

    def early(self: SharedSlots, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        if not self.server or name != "center":
            return slot_of(self, kind, name, array)
        late = vars(self).setdefault("mutant", [])
        if late:
            slot, center = late.pop()
            self._vectors[slot][: center.size] = center
        slot = slot_of(self, kind, name, array)
        if slot is not None:
            late.append((slot, array.copy()))
            self._vectors[slot].fill(0.0)
        return slot

    return [(SharedSlots, "slot_of", early)]


@mutation
def _a_payload_is_the_one_before() -> list[Patch]:
    """A server finds the worker's previous payload in a slot."""
    read = SharedSlots.read

    def late(self: SharedSlots, slot: int, dtype: np.dtype, size: int) -> np.ndarray:
        found = read(self, slot, dtype, size)
        if not self.server:
            return found
        before = vars(self).setdefault("mutant", {})
        array, before[slot, dtype, size] = before.get((slot, dtype, size), found), found.copy()
        return np.asarray(array)

    return [(SharedSlots, "read", late)]


@mutation
def _rows_of_a_reply_are_those_of_the_window_before() -> list[Patch]:
    """A worker finds the rows of the server's previous reply in a slot."""
    read = SharedSlots.read

    def late(self: SharedSlots, slot: int, dtype: np.dtype, size: int) -> np.ndarray:
        found = read(self, slot, dtype, size)
        if self.server or not slot % self._sizes.per_area:
            return found
        before = vars(self).setdefault("mutant", {})
        rows, before[slot] = before.get(slot, found), self._vectors[slot].copy()
        return np.asarray(rows[:size])

    return [(SharedSlots, "read", late)]
