"""The vectors of one connection: the memory that its commits are received into and its replies are made in."""

from __future__ import annotations

import numpy as np

from distkeras.ps.center.buffers import Buffer, Pool
from distkeras.ps.protocol.compression import Codec
from distkeras.ps.protocol.messages import CenterReply, Commit, Message
from distkeras.ps.protocol.wire_format import PeerFormat


class PeerVectors:
    """Pooled memory of one request and its reply, in the connection's wire format.

    Before `agree`, nothing is pooled.
    """

    def __init__(self) -> None:
        self._format = PeerFormat(None)
        self._center_pool: Pool | None = None
        self._encoded_pool = Pool(0, np.uint8)
        #: Where each array of the present request was received, in the message's order; None: not in pooled memory.
        self._received: list[Buffer | None] = []
        #: What must stay as it is until the reply is out.
        self._sending: list[Buffer] = []

    def allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        """Memory for the next array of a message that arrives."""
        if kind is Commit and size:
            for pool in (self._center_pool, self._encoded_pool):
                if pool is not None and pool.size == size and pool.dtype == dtype:
                    buffer = pool.take()
                    self._received.append(buffer)
                    return buffer.array
        self._received.append(None)
        return np.empty(size, dtype)

    @property
    def codec(self) -> Codec | None:
        """Of the wire format; None for float32."""
        return self._format.codec

    def agree(self, codec: Codec | None, pool: Pool) -> None:
        """Let vectors, of ``pool``, travel in the format of ``codec``; the peer begins again, with nothing."""
        self._format, self._center_pool = PeerFormat(codec), pool
        self._encoded_pool = Pool(codec.nbytes if codec else 0, np.uint8)

    def take_parts(self, commit: Commit, pool: Pool) -> list[Buffer]:
        """The parts of ``commit``, whose shapes are right, as vectors of ``pool``; the caller owns them."""
        if self._format.codec is not None:
            parts = [pool.take() for _ in commit.packed]
            self._format.decode(commit, [part.array for part in parts])
            return parts
        # A commit's parts are its first arrays.
        parts = [self._received[number] or _copied(part, pool) for number, part in enumerate(commit.parts)]
        self._received[: len(parts)] = [None] * len(parts)
        return parts

    def known_finite(self, commit: Commit) -> bool:
        """Return whether the vectors of ``commit`` need no look at each number."""
        codec = self._format.codec
        return codec is not None and all(map(codec.known_finite, commit.packed))

    def encode(self, reply: CenterReply, *, whole: bool) -> CenterReply:
        """``reply`` in the wire format: see `PeerFormat.encode`."""
        return self._format.encode(reply, lambda: self.hold_until_sent(self._encoded_pool.take()).array, whole=whole)

    def hold_until_sent(self, buffer: Buffer) -> Buffer:
        """Takes over ``buffer`` until `drop`: the reply is made of it."""
        self._sending.append(buffer)
        return buffer

    @property
    def in_use(self) -> int:
        """Pooled vectors that the present request, or its reply, has."""
        return sum(buffer is not None for buffer in self._received) + len(self._sending)

    def drop(self) -> None:
        """The request is done with, and its reply is out."""
        for buffer in self._received:
            if buffer is not None:
                buffer.drop()
        for buffer in self._sending:
            buffer.drop()
        self._received, self._sending = [], []


def _copied(part: np.ndarray, pool: Pool) -> Buffer:
    """A part that came before the peer's Hello, and so not into pooled memory."""
    buffer = pool.take()
    buffer.array[...] = part
    return buffer
