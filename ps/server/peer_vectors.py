"""The memory of one connection's requests and replies, pooled and in its wire format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distkeras.ps.center.buffers import Buffer, Pool
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import StateMemory
from distkeras.ps.protocol.compression import Codec, PeerFormat
from distkeras.ps.protocol.messages import CenterReply, Commit, KeepOptimizer, Message
from distkeras.ps.protocol.shared_slots import SharedSlots, SlotSizes
from distkeras.ps.protocol.tables import Ids, TableShape, row_elements
from distkeras.ps.rules.base import Vector


class PeerVectors:
    """The memory of one session's request and reply, in the connection's wire format; pooled after `agree`.

    Args:
        states: memory for optimizer states, which are never pooled.
    """

    def __init__(self, states: StateMemory | None = None) -> None:
        #: The wire format of vectors; None: they are not encoded.
        self._format: PeerFormat | None = None
        self._states = states
        self._center_pool: Pool | None = None
        self._encoded_pool = Pool(0, np.uint8)
        #: The buffer of each array of the current request, in the message's order; None: the array is not pooled.
        self._received: list[Buffer | None] = []
        #: Buffers that must not be reused until the reply is sent.
        self._sending: list[Buffer] = []
        #: The memory that both ends of the connection share; None: they share none.
        self.slots: SharedSlots | None = None
        #: The version of the driver's values that the peer was sent last.
        self.version_sent = 0

    def allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        """Return the memory for the next array of an arriving message."""
        if kind is Commit and size:
            for pool in (self._center_pool, self._encoded_pool):
                if pool is not None and pool.size == size and pool.dtype == dtype:
                    buffer = pool.take()
                    self._received.append(buffer)
                    return buffer.array
        self._received.append(None)
        if kind is KeepOptimizer and self._states is not None:
            return self._states.array(size)
        return np.empty(size, dtype)

    @property
    def codec(self) -> Codec | None:
        """The codec of the wire format; None for float32."""
        return None if self._format is None else self._format.codec

    def agree(self, codec: Codec | None, pool: Pool) -> None:
        """Use ``pool`` and ``codec`` from now on; reset the format's state, such as the peer's vector."""
        self._format, self._center_pool = None if codec is None else PeerFormat(codec), pool
        self._encoded_pool = Pool(codec.nbytes if codec else 0, np.uint8)

    def take_parts(self, commit: Commit, pool: Pool) -> list[Buffer]:
        """Return the parts of ``commit``, whose shapes are right, as vectors of ``pool``; the caller owns them."""
        if self._format is not None:
            parts = [pool.take() for _ in commit.packed]
            self._format.decode(commit, [part.array for part in parts])
            return parts
        # A commit's parts are its first arrays.
        parts = [buffer or pool.take() for buffer in self._received[: len(commit.parts)]]
        for buffer, part in zip(parts, commit.parts, strict=True):
            if buffer.array is not part:  # it was received into memory that is not pooled
                buffer.array[...] = part
        self._received[: len(parts)] = [None] * len(parts)
        return parts

    def slot_sizes(self, center: Center) -> SlotSizes:
        """Return the layout of the memory that both ends of this connection may share."""
        packed = 0 if self.codec is None else self.codec.nbytes
        return SlotSizes(center.size, center.traits.parts, packed, row_elements(center.table_shapes))

    def rows_of_reply(self, shapes: Sequence[TableShape], wants: Sequence[Ids]) -> Sequence[Vector | None]:
        """Return shared memory for the rows of the next reply, table by table; None: no memory is shared."""
        if self.slots is None or not wants:
            return [None] * len(wants)
        return self.slots.rows_of_reply([ids.size * shape.width for ids, shape in zip(wants, shapes, strict=True)])

    def known_finite(self, commit: Commit) -> bool:
        """Return whether the vectors of ``commit`` are known to be finite, without checking each number."""
        codec = self.codec
        return codec is not None and all(map(codec.known_finite, commit.packed))

    def encode(self, reply: CenterReply, *, whole: bool) -> CenterReply:
        """Return ``reply`` in the wire format: see `PeerFormat.encode`."""
        if self._format is None:
            return reply
        return self._format.encode(reply, lambda: self.hold_until_sent(self._encoded_pool.take()).array, whole=whole)

    def hold_until_sent(self, buffer: Buffer) -> Buffer:
        """Keep ``buffer``, which the reply contains, until `drop`."""
        self._sending.append(buffer)
        return buffer

    @property
    def in_use(self) -> int:
        """The number of pooled vectors in the current request and its reply."""
        return sum(buffer is not None for buffer in self._received) + len(self._sending)

    def drop(self) -> None:
        """Return all memory to the pools, after the reply is sent."""
        for buffer in self._received:
            if buffer is not None:
                buffer.drop()
        for buffer in self._sending:
            buffer.drop()
        self._received, self._sending = [], []
