"""Inputs: valid frames of every message type, damaged with knowledge of their structure, and pure garbage."""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable, Iterator

import numpy as np

from distkeras.ps.protocol.framing import MAGIC, VERSION, encode
from distkeras.ps.protocol.messages import Answer, Challenge, Message, Proof
from distkeras.ps.protocol.registry import MESSAGES

HANDSHAKE = (Challenge, Answer, Proof)
#: Numbers with which code often fails.
EDGES = (0, 1, 2, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


class Inputs:
    """A generator of frames, damaged frames and garbage.

    Args:
        seed: the same seed gives the same inputs.
        size: the number of elements of the vectors in about a tenth of the frames; the others have up to 20.
    """

    def __init__(self, seed: int, size: int = 200) -> None:
        self._rng = np.random.default_rng(seed)
        self._size = size
        self._draws: Iterator[int] = iter(())
        self.corpus = [frame(self.message(kind)) for kind in MESSAGES for _ in range(8)]
        self._damages: list[Callable[[bytearray], bytearray]] = [
            self._flip,
            self._header,
            self._number,
            self._cut,
            self._insert,
            self._erase,
            self._repeat,
            self._splice,
        ]

    def below(self, bound: int) -> int:
        """Return a random number in [0, bound)."""
        for draw in self._draws:
            return draw % bound
        self._draws = iter(self._rng.integers(0, 2**62, 8192).tolist())  # Single draws would take most of the time.
        return self.below(bound)

    def chunk(self, most: int) -> bytes:
        """Return up to ``most`` random bytes."""
        return self._rng.bytes(self.below(most + 1))

    def message(self, kind: type[Message]) -> Message:
        """Return a message with random fields of the right types."""
        values: dict[str, object] = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if typing.get_origin(hint) is tuple:
                dtype = typing.get_args(typing.get_args(hint)[0])[1]
                values[name] = tuple(self._array(dtype) for _ in range(self.below(3)))
            elif typing.get_origin(hint) is typing.Annotated:
                dtype, *dimensions = typing.get_args(hint)[1:]
                if dimensions:
                    values[name] = self._rows(dtype)
                    continue
                values[name] = self._rng.bytes(32) if kind in HANDSHAKE else self._array(dtype)
                if kind in HANDSHAKE:
                    values[name] = np.frombuffer(typing.cast("bytes", values[name]), np.uint8)
            elif hint is str:
                values[name] = self.chunk(20).decode("latin-1")
            elif hint is bool:
                values[name] = bool(self.below(2))
            elif hint is float:
                values[name] = float(self._rng.normal())
            else:
                values[name] = self.below(2**62) if self.below(3) else self.below(4)
        return kind(**values)

    def _array(self, dtype: np.dtype) -> np.ndarray:
        size = self._size if self.below(10) == 0 else self.below(20)
        return np.frombuffer(self._rng.bytes(size * dtype.itemsize), dtype)

    def _rows(self, dtype: np.dtype) -> np.ndarray:
        columns = self.below(4)
        elements = self._array(dtype)
        return elements[: len(elements) // columns * columns].reshape(-1, columns) if columns else np.empty((0, 0))

    def any(self) -> bytes:
        """Return one input."""
        choice = self.below(16)
        if choice == 0:
            return self.chunk(300)
        if choice == 1:
            return struct.pack(">4sBB", MAGIC, VERSION, self.below(len(MESSAGES) + 2)) + self.chunk(300)
        if choice == 2:
            return b"".join(self._pick() for _ in range(1 + self.below(3)))
        damaged = self.damaged(self._pick())
        return self._pick() + damaged if choice == 3 else damaged

    def damaged(self, whole: bytes) -> bytes:
        """Return ``whole`` with one to three damages."""
        data = bytearray(whole)
        for _ in range(1 + self.below(3)):
            data = self._damages[self.below(len(self._damages))](data)
        return bytes(data)

    def pieces(self, data: bytes) -> int:
        """Return how many bytes of ``data`` to send at a time."""
        return (len(data) or 1, 1 + len(data) // 200, 1 + self.below(64))[self.below(3)]

    def _pick(self) -> bytes:
        return self.corpus[self.below(len(self.corpus))]

    def _flip(self, data: bytearray) -> bytearray:
        for _ in range(1 + self.below(8)):
            if data:
                data[self.below(len(data))] ^= 1 << self.below(8)
        return data

    def _header(self, data: bytearray) -> bytearray:
        """Change one field of the header."""
        at, length = ((4, 1), (5, 1), (6, 2), (8, 4), (12, 8))[self.below(5)]
        if len(data) >= at + length:
            data[at : at + length] = self._edge(length)
        return data

    def _number(self, data: bytearray) -> bytearray:
        """Change a number among the fields, the length of a string, or an entry of the array table."""
        length = (4, 8)[self.below(2)]
        if len(data) > 20 + length:
            at = 20 + self.below(min(len(data) - 20 - length, 200))
            data[at : at + length] = self._edge(length)
        return data

    def _edge(self, length: int) -> bytes:
        value = EDGES[self.below(len(EDGES))] if self.below(2) else self.below(300)
        return (value % (1 << 8 * length)).to_bytes(length, "big")

    def _cut(self, data: bytearray) -> bytearray:
        return data[: self.below(len(data) + 1)]

    def _insert(self, data: bytearray) -> bytearray:
        at = self.below(len(data) + 1)
        return data[:at] + self.chunk(20) + data[at:]

    def _erase(self, data: bytearray) -> bytearray:
        at = self.below(len(data) + 1)
        return data[:at] + data[at + self.below(20) :]

    def _repeat(self, data: bytearray) -> bytearray:
        at = self.below(len(data) + 1)
        return data[:at] + data[at : at + self.below(40)] + data[at:]

    def _splice(self, data: bytearray) -> bytearray:
        other = self._pick()
        return data[: self.below(len(data) + 1)] + other[self.below(len(other) + 1) :]


def frame(message: Message) -> bytes:
    """Return the bytes of a message."""
    return b"".join(bytes(buffer) for buffer in encode(message))
