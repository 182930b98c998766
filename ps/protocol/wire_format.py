"""A connection's wire format: how its vectors are encoded, and what each end remembers for that.

With a format that needs error feedback (int8) a worker keeps what was rounded off its commits, and the server what
vector the worker has, of which it sends the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.compression import Codec, codec_of
from distkeras.ps.protocol.messages import NO_FLOATS, CenterReply, Commit
from distkeras.ps.rules.base import Vector


class WorkerFormat:
    """The worker's end: encodes commits, decodes replies.

    Args:
        wire_format: a name in `compression.FORMATS`.
        size: elements of each vector.

    Raises:
        ConfigurationError: no such format.
    """

    def __init__(self, wire_format: str, size: int) -> None:
        self._codec = codec_of(wire_format, size)
        #: Bytes of an encoded vector; None where vectors are sent as they are.
        self.nbytes = None if self._codec is None else self._codec.nbytes
        self._encoded: tuple[np.ndarray, ...] = ()
        self._residuals: tuple[Vector, ...] = ()

    def forget_residuals(self) -> None:
        """The steps that the residuals belong to are forgotten."""
        self._residuals = ()

    def encode(self, parts: tuple[Vector, ...]) -> tuple[np.ndarray, ...]:
        """The parts of the next commit, encoded; none where they are sent as they are. Overwritten by the next call."""
        codec = self._codec
        if codec is None:
            return ()
        if len(self._encoded) != len(parts):
            self._encoded = tuple(np.empty(codec.nbytes, np.uint8) for _ in parts)
        if codec.needs_error_feedback and len(self._residuals) != len(parts):
            self._residuals = tuple(np.zeros_like(part) for part in parts)
        for number, (part, out) in enumerate(zip(parts, self._encoded, strict=True)):
            if codec.needs_error_feedback:
                codec.encode_with_residual(part, self._residuals[number], out)
            else:
                codec.encode(part, out)
        return self._encoded

    def decode(self, reply: CenterReply, known: Vector | None, out: Vector) -> None:
        """Writes the center of an encoded ``reply`` into ``out``.

        Args:
            reply: as it came, with ``packed``.
            known: the center of the reply before; None: there was none.
            out: another vector than ``known``.

        Raises:
            RemoteProtocolError: it is not encoded as was agreed, or a change of what there is not.
        """
        codec, sizes = self._codec, (reply.center.size, reply.packed.size)
        if codec is None or sizes != (0, codec.nbytes) or (codec.needs_error_feedback and known is None):
            raise RemoteProtocolError(
                "a center must come as the Hello asked, and whole before a change of it. "
                f"Received: {sizes[0]} elements and {sizes[1]} bytes"
            )
        if codec.needs_error_feedback and known is not None:
            codec.decode_change(reply.packed, known, out)
        else:
            codec.decode(reply.packed, out)


class PeerFormat:
    """The server's end, for one peer: decodes its commits, encodes what it is sent.

    Args:
        codec: None: vectors are sent as they are.
    """

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec
        #: What the peer has, to the bit, with a format that needs error feedback; None: nothing yet.
        self._known: Vector | None = None

    def decode(self, commit: Commit, out: Sequence[Vector]) -> None:
        """Writes the parts of an encoded ``commit``, whose shapes are right, into ``out``."""
        if self.codec is not None:
            for data, part in zip(commit.packed, out, strict=True):
                self.codec.decode(data, part)

    def encode(self, reply: CenterReply, take: Callable[[], np.ndarray], *, whole: bool) -> CenterReply:
        """``reply`` as it is sent.

        Args:
            reply: with the center as a vector.
            take: gives the memory for an encoded vector.
            whole: even with a format that needs error feedback, not as a change of what the peer has.
        """
        codec, center = self.codec, reply.center
        if codec is None:
            return reply
        if not codec.needs_error_feedback:
            encoded = take()
            codec.encode(center, encoded)
        elif whole or self._known is None:
            self._known = np.empty_like(center) if self._known is None else self._known
            self._known[...] = center
            return reply
        else:
            encoded = take()
            codec.encode_change(center, self._known, encoded)
        return replace(reply, center=NO_FLOATS, packed=encoded)
