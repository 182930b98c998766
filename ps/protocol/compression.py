"""Wire formats: lossy encodings of float32 vectors in fewer bytes.

A codec belongs to one connection, because it has scratch memory of one block. Vectors are float32 of shape ``(size,)``,
encoded vectors uint8 of shape ``(nbytes,)``; the caller owns them. A NaN or infinity is decoded as a number that is not
finite at the same place, and the other numbers stay finite, so that a check of the decoded vector finds it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.messages import CenterReply, Commit
from distkeras.ps.rules.base import BLOCK, Rule, Vector
from distkeras.ps.validate import invalid, require_choice


class Codec(ABC):
    """A wire format for vectors of ``size`` elements, which are encoded and decoded in blocks of at most `BLOCK`."""

    #: Whether it is too coarse without error feedback. Then a worker adds the quantization residual of its earlier
    #: commits to each commit, and a reply to a commit contains the change since the previous reply.
    needs_error_feedback: ClassVar[bool] = False
    #: Bytes before the elements of a block, and of each element.
    _head: ClassVar[int] = 0
    _width: ClassVar[int]

    def __init__(self, size: int) -> None:
        self.size = size
        #: Bytes of an encoded vector.
        self.nbytes = self._head * -(-size // BLOCK) + self._width * size
        self._scratch = np.empty(min(size, BLOCK), np.float32)

    @abstractmethod
    def _encode(self, block: Vector, data: np.ndarray) -> None: ...

    @abstractmethod
    def _decode(self, data: np.ndarray, out: Vector) -> None: ...

    def _encode_and_read(self, block: Vector, data: np.ndarray, out: Vector) -> bool:
        """Encode ``block``, and decode it into ``out``, which may be ``block``; return True if it is surely finite."""
        self._encode(block, data)
        self._decode(data, out)
        return False

    def known_finite(self, data: np.ndarray) -> bool:
        """Return True if a quick check shows that all decoded numbers are finite; False means unknown."""
        return False

    def encode(self, vector: Vector, out: np.ndarray) -> None:
        """Encode ``vector`` into ``out``."""
        with _without_numeric_warnings():
            for stretch, data in self._blocks(out):
                self._encode(vector[stretch], data)

    def decode(self, data: np.ndarray, out: Vector) -> None:
        """Decode ``data`` into ``out``; any bytes are valid."""
        with _without_numeric_warnings():
            for stretch, piece in self._blocks(data):
                self._decode(piece, out[stretch])

    def encode_with_residual(self, vector: Vector, rest: Vector, out: np.ndarray) -> None:
        """Encode ``vector + rest``, and set ``rest`` to the rounding error; 0 for a number that is not finite."""
        with _without_numeric_warnings():
            for stretch, data in self._blocks(out):
                kept = rest[stretch]
                read = self._scratch[: kept.size]
                kept += vector[stretch]
                finite = self._encode_and_read(kept, data, read)
                kept -= read
                if not finite:
                    kept[~np.isfinite(kept)] = 0.0

    def encode_change(self, vector: Vector, known: Vector, out: np.ndarray) -> None:
        """Encode ``vector - known``, and set ``known`` to the result of the reader's `decode_change`, to the bit.

        The next change includes the rounding error, so that errors do not accumulate.
        """
        with _without_numeric_warnings():
            for stretch, data in self._blocks(out):
                known_block = known[stretch]
                change = self._scratch[: known_block.size]
                np.subtract(vector[stretch], known_block, out=change)
                self._encode_and_read(change, data, change)
                known_block += change

    def decode_change(self, data: np.ndarray, known: Vector, out: Vector) -> None:
        """Decode a change of ``known`` that `encode_change` wrote; ``known`` is not modified."""
        with _without_numeric_warnings():
            for stretch, piece in self._blocks(data):
                self._decode(piece, out[stretch])
                out[stretch] += known[stretch]

    def span(self, stretch: slice) -> slice:
        """Return the bytes of the elements ``stretch``, which begin and end with blocks."""
        heads = [-(-end // BLOCK) * self._head for end in (stretch.start, stretch.stop)]
        return slice(heads[0] + self._width * stretch.start, heads[1] + self._width * stretch.stop)

    def _blocks(self, data: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the elements of each block, as a slice, and its bytes in ``data``."""
        step = self._head + self._width * BLOCK
        for number, start in enumerate(range(0, self.size, BLOCK)):
            yield slice(start, start + BLOCK), data[number * step : (number + 1) * step]


class BFloat16(Codec):
    """The upper half of each float32, rounded to nearest, ties to even; 2 bytes per element.

    The error of an element is at most 2^-8 of its value or 2^-134, the larger of both. Finite numbers from
    (2 - 2^-8) * 2^127 = 3.396e38 on become infinite.
    """

    _width = 2

    def _encode(self, block: Vector, data: np.ndarray) -> None:
        data.view(bfloat16)[...] = block

    def _decode(self, data: np.ndarray, out: Vector) -> None:
        out[...] = data.view(bfloat16)


class Int8(Codec):
    """Each block as a float32 (little-endian) ``scale = max(max|x| / 127, 2^-126)``, and integers ``x / scale``.

    They are rounded to nearest, ties to even, and take 1 byte per element. The error of an element is at most
    (1/2 + 2^-16) scale: 1/254 of the block's largest absolute value, if that is above 127 * 2^-126. A zero stays a
    zero. Numbers within a relative distance of 2^-22 from float32's largest may become infinite.

    In a block with a NaN or infinity, scale is NaN; then the integer 1 marks such a number, which is decoded as NaN,
    and 0 marks any other, which is decoded as 0.
    """

    needs_error_feedback = True
    _head = 4
    _width = 1
    _SMALLEST: ClassVar[float] = 2.0**-126  # a smaller scale would be subnormal, and not exact enough
    #: Adding this to a number of at most 2^22 leaves the nearest integer in the low bits: ties to even, and no -0.
    _ROUNDING: ClassVar[np.float32] = np.float32(1.5 * 2**23)
    #: If the largest number of a block is at most this, its decoded numbers are finite.
    _FINITE_MAX: ClassVar[float] = 2.0**126

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._quotients = np.empty_like(self._scratch)

    def _encode(self, block: Vector, data: np.ndarray) -> None:
        self._encode_and_read(block, data, None)

    def _encode_and_read(self, block: Vector, data: np.ndarray, out: Vector | None) -> bool:
        largest = max(float(block.max()), -float(block.min()))  # NaN if one is
        codes = data[4:].view(np.int8)
        if not math.isfinite(largest):
            codes[...] = ~np.isfinite(block)
            data[:4].view("<f4")[0] = math.nan
            if out is not None:
                self._decode(data, out)
            return False
        scale = np.float32(max(largest / 127, self._SMALLEST))
        data[:4].view("<f4")[0] = scale
        quotients = np.divide(block, scale, out=self._quotients[: block.size] if out is None else out)
        quotients += self._ROUNDING
        np.copyto(codes, quotients.view(np.int32), casting="unsafe")  # the low eight bits
        if out is not None:
            quotients -= self._ROUNDING
            quotients *= scale
        return largest <= self._FINITE_MAX

    def known_finite(self, data: np.ndarray) -> bool:
        """Check the scales only: the integers are at most 128."""
        step = self._head + BLOCK
        scales = np.ndarray((-(-self.size // BLOCK),), "<f4", data, strides=(step,))
        with _without_numeric_warnings():
            return bool(np.isfinite(scales * np.float32(128)).all())

    def _decode(self, data: np.ndarray, out: Vector) -> None:
        scale = data[:4].view("<f4")[0]
        codes = data[4:].view(np.int8)
        np.copyto(out, codes)
        out *= scale
        if not math.isfinite(scale):
            out[codes == 0] = 0.0


def _without_numeric_warnings() -> np.errstate:
    # The server checks decoded vectors for NaN and infinity.
    return np.errstate(over="ignore", invalid="ignore")


_CODECS: dict[str, type[Codec] | None] = {"float32": None, "bfloat16": BFloat16, "int8": Int8}
#: The names of the wire formats; the first one does not encode vectors.
FORMATS = tuple(_CODECS)


def codec_of(wire_format: str, size: int) -> Codec | None:
    """Return a wire format's codec for ``size`` elements, None for float32; raise ConfigurationError if unknown."""
    require_choice("wire_format", wire_format, FORMATS)
    kind = _CODECS[wire_format]
    return None if kind is None else kind(size)


def require_format(wire_format: str, rule: Rule) -> None:
    """Raise a ConfigurationError unless ``rule`` supports this wire format."""
    codec = codec_of(wire_format, 0)
    why = None if codec is None else rule.reason_against_encoding(coarse=codec.needs_error_feedback)
    if why is not None:
        raise invalid("wire_format", wire_format, f"'float32': rule {rule.name!r} {why}")


class WorkerFormat:
    """A worker's end of a wire format, one of `FORMATS`. If `nbytes` is None, vectors are not encoded."""

    def __init__(self, wire_format: str, size: int) -> None:
        self._codec = codec_of(wire_format, size)
        #: Bytes of an encoded vector; None: vectors are not encoded.
        self.nbytes = None if self._codec is None else self._codec.nbytes
        self._encoded: tuple[np.ndarray, ...] = ()
        #: Whether `_encoded` is shared memory of a connection, which may be lost.
        self._borrowed = False
        self._residuals: tuple[Vector, ...] = ()

    def forget_residuals(self) -> None:
        """Discard the residuals, because their steps were discarded."""
        self._residuals = ()

    def encode(self, parts: tuple[Vector, ...], memory: tuple[np.ndarray, ...] = ()) -> tuple[np.ndarray, ...]:
        """Return the encoded parts of the next commit, in ``memory`` or own memory, valid until the next call."""
        codec = self._codec
        assert codec is not None, "vectors of this format are sent as they are"
        if memory:
            self._encoded, self._borrowed = memory, True
        elif self._borrowed or len(self._encoded) != len(parts):
            self._borrowed = False
            self._encoded = tuple(np.empty(codec.nbytes, np.uint8) for _ in parts)
        if codec.needs_error_feedback and len(self._residuals) != len(parts):
            self._residuals = tuple(np.zeros_like(part) for part in parts)
        for number, (part, out) in enumerate(zip(parts, self._encoded, strict=True)):
            if codec.needs_error_feedback:
                codec.encode_with_residual(part, self._residuals[number], out)
            else:
                codec.encode(part, out)
        return self._encoded

    def restore_residuals(self, parts: tuple[Vector, ...]) -> None:
        """Restore the residuals from before the latest commit, of ``parts``, which was refused."""
        for part, data, rest in zip(parts, self._encoded, self._residuals, strict=False):
            assert self._codec is not None
            read = np.empty_like(part)
            self._codec.decode(data, read)
            rest += read
            rest -= part

    def decode(self, reply: CenterReply, known: Vector | None, out: Vector) -> None:
        """Write the center of an encoded ``reply`` into ``out``; ``known`` is that of the previous reply."""
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
    """The server's end, for one peer: decodes its commits, encodes replies."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        #: The peer's center, to the bit, with a format that needs error feedback; None: it has none yet.
        self._known: Vector | None = None

    def decode(self, commit: Commit, out: Sequence[Vector]) -> None:
        """Write the parts of an encoded ``commit``, whose shapes are right, into ``out``."""
        for data, part in zip(commit.packed, out, strict=True):
            self.codec.decode(data, part)

    def encode(self, reply: CenterReply, take: Callable[[], np.ndarray], *, whole: bool) -> CenterReply:
        """Return ``reply`` encoded, in memory from ``take``; ``whole``: the center, not a change of the peer's."""
        codec, center = self.codec, reply.center
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
