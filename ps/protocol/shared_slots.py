"""The vectors of one connection in shared memory that both ends map; each frame names the slots of its vectors.

The worker creates the memory and names it in its `Hello`, with a random token that it has written there: a server that
can map it and finds the token is on the worker's host. Then the parts of commits and the centers of replies are in
slots. Their frames are still sent over the connection, with the number of the slot instead of the bytes. Between
members of a node, the one that dials acts as the worker, and the vectors of both ends are in slots.

Rules:

1. A frame is sent after its slot is written, and only slots that a frame names are read. So the partial write of a
   process that dies is never read.
2. A worker writes to the slots of its payloads, which the server only reads: it copies them before it processes the
   commit. If a worker repeats a commit, it sends the same bytes.
3. A payload's slot is reused once its commit is answered. After a lost connection it is never reused: the next
   connection has new memory, and a payload in the old memory is sent in its frame.
4. A server writes the centers of its replies to two slots in turn: a worker may read a center until it receives the
   second reply after it.
5. A member writes its vectors to two slots in turn as well. In a step, it sends at most two vectors to the same member.
   Before it writes the first vector of a step, the other member has used both vectors of the step before the previous
   one, and the first vector of the previous step.
6. If there are tables, the rows of each table have separate slots, which a message fills from the beginning. Row
   numbers are sent in the frame.
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
#: The number of slots for each vector: one is read while the other is written.
_TURNS = 2
#: The size of a page in bytes: each vector begins at a page; the first page has the token.
_PAGE = 4096
#: Slots of a connection at most.
SLOTS_MAX = 32

_FLOAT32 = np.dtype("<f4")
_PACKED = np.dtype("u1")


@dataclass(frozen=True)
class SlotSizes:
    """The layout of the memory of a connection; both ends compute it, and must agree.

    ``packed`` is bytes of an encoded vector (0: none), ``rows`` the most elements of rows for each table. The first
    tables have slots, up to `SLOTS_MAX`; the rows of the others are sent in frames.
    """

    size: int
    parts: int
    packed: int = 0
    rows: tuple[int, ...] = ()

    @property
    def turns(self) -> int:
        """The number of payloads: with tables, none is written while another one is in flight."""
        return 1 if self.rows else _TURNS

    @property
    def _payload_areas(self) -> int:
        return self.parts if self.packed else self.turns * self.parts  # one payload is encoded at a time

    @property
    def per_area(self) -> int:
        """The number of slots for one vector and the rows after it."""
        return 1 + min(len(self.rows), SLOTS_MAX // (self._payload_areas + _TURNS) - 1)

    @property
    def payloads(self) -> int:
        return self._payload_areas * self.per_area

    @property
    def slots(self) -> int:
        return self.payloads + _TURNS * self.per_area

    @property
    def elements(self) -> int:
        """Elements of a vector and the rows of all tables after it."""
        return self.size + sum(self.rows)

    @property
    def area_bytes(self) -> int:
        """Bytes of one vector and the rows after it, rounded up to pages."""
        return math.ceil(max(self.elements * _FLOAT32.itemsize, self.packed, 1) / _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return _PAGE + (self._payload_areas + _TURNS) * self.area_bytes


class SharedSlots:
    """One end's view of the memory, which has ``sizes.nbytes`` bytes."""

    def __init__(self, sizes: SlotSizes, memory: memoryview, *, server: bool) -> None:
        self._sizes = sizes
        self.server = server
        self._token = np.ndarray((TOKEN_BYTES,), np.uint8, memory)
        places = range(_PAGE, sizes.nbytes, sizes.area_bytes)
        #: Each vector, with the rows after it.
        self._areas = [np.ndarray((sizes.elements,), _FLOAT32, memory, place) for place in places]
        stops = tuple(accumulate((sizes.size, *sizes.rows[: sizes.per_area - 1])))
        cuts = [slice(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
        #: Each slot as a vector or as rows, and as an encoded vector.
        self._vectors = [area[cut] for area in self._areas for cut in cuts]
        self._packed = [np.ndarray((sizes.packed,), _PACKED, memory, place) for place in places for _ in cuts]
        #: The slots to which this end writes, by address.
        own = range(sizes.payloads, sizes.slots) if server else range(sizes.payloads)
        self._slot_at = {_address(self._vectors[slot]): slot for slot in own if self._vectors[slot].size}
        if server:
            for slot in (*self._vectors[: sizes.payloads], *self._packed[: sizes.payloads]):
                slot.flags.writeable = False
        #: The first of the two slots that this end writes in turn, the latest turn of vectors, and that of rows.
        self._first, self._turn, self._rows_turn = (sizes.payloads if server else 0), 0, 0

    def write_token(self, token: bytes) -> None:
        """Write the token by which the server recognizes the worker's memory."""
        self._token[...] = np.frombuffer(token, np.uint8)

    def has_token(self, token: bytes) -> bool:
        """Return whether ``token`` is the one that the worker wrote."""
        return hmac.compare_digest(self._token.tobytes(), token)

    def payloads(self) -> list[tuple[np.ndarray, ...]]:
        """Return memory for the parts of payloads that are not encoded, float32, each with the rows of all tables."""
        parts = self._sizes.parts
        return [tuple(self._areas[turn * parts : (turn + 1) * parts]) for turn in range(self._sizes.turns)]

    def packed_payload(self) -> tuple[np.ndarray, ...]:
        """Return memory for the encoded parts of a payload, uint8."""
        return tuple(self._packed[: self._sizes.parts])

    def rows_of_reply(self, sizes: Sequence[int]) -> list[np.ndarray | None]:
        """Return memory for ``sizes`` elements of rows of each table in the next reply; None: they have no slot."""
        self._rows_turn = (self._rows_turn + 1) % _TURNS
        first = self._sizes.payloads + self._rows_turn * self._sizes.per_area + 1
        slots = self._vectors[first : first + self._sizes.per_area - 1]
        own: list[np.ndarray | None] = [slot[:size] for slot, size in zip(slots, sizes, strict=False)]
        return own + [None] * (len(sizes) - len(own))

    def slot_of(self, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        """Return the slot for ``array``, a part of a message that is about to be sent; None: it is sent in the frame.

        It may be in its slot already. A reply's center, and a member's vector of other memory, is copied to a slot.
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
        """Return memory for the next vector that a member sends, float32; a vector in it is sent without a copy."""
        return self._vectors[self._slot(self._next_turn)]

    @property
    def _next_turn(self) -> int:
        return (self._turn + 1) % _TURNS

    def _slot(self, turn: int) -> int:
        return self._first + turn * self._sizes.per_area

    def _copied(self, array: np.ndarray, slots: list[np.ndarray]) -> int | None:
        """Copy ``array`` to the slot whose turn it is, and return its number; None: the size differs."""
        turn = self._next_turn
        slot = self._slot(turn)
        if slots[slot].size != array.size:
            return None
        if _address(slots[slot]) != _address(array):
            slots[slot][...] = array
        self._turn = turn
        return slot

    def _fits(self, slot: int, dtype: np.dtype, size: int) -> bool:
        """Return whether an array of ``size`` elements may be in a slot: exactly a vector, or at most all rows."""
        if slot % self._sizes.per_area:
            return dtype == _FLOAT32 and size <= self._vectors[slot].size
        return size == {_FLOAT32: self._sizes.size, _PACKED: self._sizes.packed}.get(dtype)

    def require(self, kind: type[Message], slot: int, dtype: np.dtype, size: int) -> None:
        """Raise a RemoteProtocolError unless the peer may use this slot for such an array."""
        first = self._sizes.payloads
        expected, slots = (Commit, range(first)) if self.server else (CenterReply, range(first, self._sizes.slots))
        if kind not in (expected, PeerVector) or slot not in slots or not self._fits(slot, dtype, size):
            raise RemoteProtocolError(
                f"a slot must be one of {slots} with a vector of a {expected.__name__}, or with rows. "
                f"Received: slot {slot} with {size} elements of {dtype} of a {kind.__name__}"
            )

    def read(self, slot: int, dtype: np.dtype, size: int) -> np.ndarray:
        """Return the array in a slot that the peer has named; the caller must copy that of a commit."""
        return (self._vectors if dtype == _FLOAT32 else self._packed)[slot][:size]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
