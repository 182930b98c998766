"""Faults planted in memory that workers share with their server and with each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.protocol.messages import Message, PeerVector
from distkeras.ps.protocol.shared_slots import SharedSlots
from simulation.planting import Patch, mutation


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
def _replies_take_no_turns() -> list[Patch]:
    """A center overwrites the one that the worker still reads."""
    slot_of = SharedSlots.slot_of

    def same(self: SharedSlots, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        self._turn = 0
        return slot_of(self, kind, name, array)

    return [(SharedSlots, "slot_of", same)]


@mutation
def _payloads_take_no_turns() -> list[Patch]:
    """A payload overwrites one that its server may still have to read."""
    payload = SharedSlots.payload
    first: dict[SharedSlots, Any] = {}

    def same(self: SharedSlots, turn: int) -> Any:
        return first.setdefault(self, payload(self, 0)) if turn else tuple(payload(self, 0))

    return [(SharedSlots, "payload", same)]


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
def _vectors_of_members_take_no_turns() -> list[Patch]:
    """A member overwrites a vector that the other member may still have to read."""
    slot_of = SharedSlots.slot_of

    def same(self: SharedSlots, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        self._turn = 0 if kind is PeerVector else self._turn
        return slot_of(self, kind, name, array)

    return [(SharedSlots, "slot_of", same)]


@mutation
def _a_member_is_sent_half_a_vector() -> list[Patch]:
    """A frame names a slot that is only written in part."""
    slot_of = SharedSlots.slot_of

    def half(self: SharedSlots, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        slot = slot_of(self, kind, name, array)
        if kind is PeerVector and slot is not None:
            self._vectors[slot][array.size // 2 :] = 0.0
        return slot

    return [(SharedSlots, "slot_of", half)]


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


@mutation
def _rows_are_looked_for_at_the_end_of_their_slot() -> list[Patch]:
    """A server reads rows that an earlier and longer commit has left at the end of a slot."""
    read = SharedSlots.read

    def end(self: SharedSlots, slot: int, dtype: np.dtype, size: int) -> np.ndarray:
        if not self.server or not slot % self._sizes.per_area or dtype != np.float32:
            return read(self, slot, dtype, size)
        vector = self._vectors[slot]
        return vector[vector.size - size :]

    return [(SharedSlots, "read", end)]
