"""The vectors of one connection in memory that both ends map; the frames say in which slot each of them is.

The worker makes the memory and names it in its `Hello`, with a random token that it has written there: the server that
can map it and finds the token is on the worker's host. Then the parts of commits and the centers of replies are in
slots, and their frames, which travel over the connection as ever, have the number of the slot in place of the bytes.
Between members of a node, the one that dials is the worker, and the vectors of both ends are in slots.

Rules:

1. A frame is sent after its slot is written; what no frame names is never read. So a process that dies while it writes
   has written nothing.
2. A worker writes to the slots of its payloads, which the server only reads: it copies them before it does anything
   else with the commit. A worker that sends a commit again sends the same bytes.
3. A payload's slot is written again when the commit is answered. If the connection is lost instead, it is not: the next
   connection has other memory, and what is in the old one travels with its frame.
4. A server writes the centers of its replies to two slots in turn: a worker may read one until it is sent the one after
   the next.
5. A member writes its vectors to two slots in turn as well. A step has two for the same member at most. Before a
   member writes the first one of a step, the other member has used all that it was sent in the step before the last
   one, and the first one that it was sent in the last step.
6. Next to tables, the rows of each table have slots of their own, of which a message fills the beginning. Row numbers
   travel.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.messages import CenterReply, Commit, Message, PeerVector

TOKEN_BYTES = 32
#: Slots of one kind: one is read while another is written.
_TURNS = 2
#: Every slot begins at a page, and so does what is in front of them.
_PAGE = 4096
#: Slots of a connection at most.
MOST_SLOTS = 32

_FLOAT32 = np.dtype("<f4")
_PACKED = np.dtype("u1")


@dataclass(frozen=True)
class SlotSizes:
    """What is in the memory of a connection; both ends compute it, and must agree.

    Args:
        size: elements of the center.
        parts: vectors of a payload.
        packed: bytes of an encoded vector; 0: vectors travel as they are.
        rows: for each table, elements of the rows that a window touches at most. Those of the first tables have slots,
            as many as there can be; the others' travel.
    """

    size: int
    parts: int
    packed: int = 0
    rows: tuple[int, ...] = ()

    @property
    def turns(self) -> int:
        """Payloads that there is room for: one is written while another travels, which is never so next to tables."""
        return 1 if self.rows else _TURNS

    @property
    def _payload_areas(self) -> int:
        return self.parts if self.packed else self.turns * self.parts  # a payload is encoded when its turn has come

    @property
    def per_area(self) -> int:
        """Slots of one vector and of the rows behind it."""
        return 1 + min(len(self.rows), MOST_SLOTS // (self._payload_areas + _TURNS) - 1)

    @property
    def payloads(self) -> int:
        """Slots of payloads."""
        return self._payload_areas * self.per_area

    @property
    def slots(self) -> int:
        """All slots."""
        return self.payloads + _TURNS * self.per_area

    @property
    def elements(self) -> int:
        """Elements of a vector with the rows of all tables behind it."""
        return self.size + sum(self.rows)

    @property
    def area_bytes(self) -> int:
        """Bytes from one vector, with rows behind it, to the next."""
        return math.ceil(max(self.elements * _FLOAT32.itemsize, self.packed, 1) / _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return _PAGE + (self._payload_areas + _TURNS) * self.area_bytes


class SharedSlots:
    """One end's view of the memory.

    Args:
        sizes: what is in it.
        memory: ``sizes.nbytes`` bytes.
        server: which end this is.
    """

    def __init__(self, sizes: SlotSizes, memory: memoryview, *, server: bool) -> None:
        self._sizes = sizes
        self.server = server
        self._token = np.ndarray((TOKEN_BYTES,), np.uint8, memory)
        places = range(_PAGE, sizes.nbytes, sizes.area_bytes)
        #: Each vector, with the rows behind it.
        self._areas = [np.ndarray((sizes.elements,), _FLOAT32, memory, place) for place in places]
        stops = tuple(accumulate((sizes.size, *sizes.rows[: sizes.per_area - 1])))
        cuts = [slice(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
        #: Each slot as a vector or as rows, and as an encoded vector.
        self._vectors = [area[cut] for area in self._areas for cut in cuts]
        self._packed = [np.ndarray((sizes.packed,), _PACKED, memory, place) for place in places for _ in cuts]
        #: The slot at an address, of those that this end writes to before it sends.
        own = range(sizes.payloads, sizes.slots) if server else range(sizes.payloads)
        self._slot_at = {_address(self._vectors[slot]): slot for slot in own if self._vectors[slot].size}
        if server:
            for slot in (*self._vectors[: sizes.payloads], *self._packed[: sizes.payloads]):
                slot.flags.writeable = False
        #: The first of the slots that this end takes in turn, which turn was written last, and that of rows.
        self._first, self._turn, self._rows_turn = (sizes.payloads if server else 0), 0, 0

    def write_token(self, token: bytes) -> None:
        """Write what shows the server that this is the memory that the worker has made."""
        self._token[...] = np.frombuffer(token, np.uint8)

    def has_token(self, token: bytes) -> bool:
        """Return whether ``token`` is what the worker wrote."""
        return hmac.compare_digest(self._token.tobytes(), token)

    def payload(self, turn: int) -> tuple[np.ndarray, ...]:
        """Return memory for the parts of a payload that is not encoded, float32, each with the rows of all tables.

        The number ``turn`` is below `SlotSizes.turns`.
        """
        return tuple(self._areas[turn * self._sizes.parts : (turn + 1) * self._sizes.parts])

    @property
    def turns(self) -> int:
        """How many payloads there is memory for."""
        return self._sizes.turns

    def packed_payload(self) -> tuple[np.ndarray, ...]:
        """Return memory for the encoded parts of a payload, uint8."""
        return tuple(self._packed[: self._sizes.parts])

    def rows_of_reply(self, sizes: Sequence[int]) -> list[np.ndarray | None]:
        """Return memory for the rows of each table in the next reply, float32; None for those that travel.

        Args:
            sizes: elements of the rows of each table.
        """
        self._rows_turn = (self._rows_turn + 1) % _TURNS
        first = self._sizes.payloads + self._rows_turn * self._sizes.per_area + 1
        slots = self._vectors[first : first + self._sizes.per_area - 1]
        own: list[np.ndarray | None] = [slot[:size] for slot, size in zip(slots, sizes, strict=False)]
        return own + [None] * (len(sizes) - len(own))

    def slot_of(self, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        """Return the slot in which ``array``, of a message that is about to be sent, is; None: it must travel.

        A worker's payload, and the rows of a server's reply, are in their slots if they were written there, and so is a
        member's vector in `next_vector`. The center of a reply, and any other vector of a member, is copied to one.
        """
        if not array.size:
            return None
        if kind is PeerVector and name == "vector":
            return self._copied(array, self._vectors)
        if name in (("rows",) if self.server else ("parts", "packed", "moved")):
            slot = self._slot_at.get(_address(array))
            return None if slot is None or not self._fits(slot, array.dtype, array.size) else slot
        if kind is CenterReply and self.server and name in ("center", "packed"):
            return self._copied(array, self._vectors if name == "center" else self._packed)
        return None

    def next_vector(self) -> np.ndarray:
        """Return memory for the next vector that a member sends, float32: what is written there is not copied then."""
        return self._vectors[self._slot(self._next_turn)]

    @property
    def _next_turn(self) -> int:
        return (self._turn + 1) % _TURNS

    def _slot(self, turn: int) -> int:
        return self._first + turn * self._sizes.per_area

    def _copied(self, array: np.ndarray, slots: list[np.ndarray]) -> int | None:
        """Return the slot whose turn it is, with ``array`` in it; None: it has another size."""
        turn = self._next_turn
        slot = self._slot(turn)
        if slots[slot].size != array.size:
            return None
        if _address(slots[slot]) != _address(array):
            slots[slot][...] = array
        self._turn = turn
        return slot

    def _fits(self, slot: int, dtype: np.dtype, size: int) -> bool:
        """Return whether an array of so many elements may be in a slot: the whole of a vector, or some rows."""
        if slot % self._sizes.per_area:
            return dtype == _FLOAT32 and size <= self._vectors[slot].size
        return size == {_FLOAT32: self._sizes.size, _PACKED: self._sizes.packed}.get(dtype)

    def require(self, kind: type[Message], slot: int, dtype: np.dtype, size: int) -> None:
        """Raise a RemoteProtocolError unless the peer may name this slot for such an array."""
        expected, slots = (Commit, range(self._sizes.payloads)) if self.server else (CenterReply, self._reply_slots)
        if kind not in (expected, PeerVector) or slot not in slots or not self._fits(slot, dtype, size):
            raise RemoteProtocolError(
                f"a slot must be one of {slots} with a vector of a {expected.__name__}, or with rows. "
                f"Received: slot {slot} with {size} elements of {dtype} of a {kind.__name__}"
            )

    def read(self, slot: int, dtype: np.dtype, size: int) -> np.ndarray:
        """Return what is in a slot that the peer has named; a commit must be copied, all else may be read there."""
        return (self._vectors if dtype == _FLOAT32 else self._packed)[slot][:size]

    @property
    def _reply_slots(self) -> range:
        return range(self._sizes.payloads, self._sizes.slots)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
