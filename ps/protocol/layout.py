"""A list of named arrays as one contiguous float32 vector, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import Vector


@dataclass(frozen=True)
class Layout:
    """The position of each array in the flat vector: their names and shapes, in vector order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ConfigurationError(
                f"`names` and `shapes` must be equally long. Received: {len(self.names)} and {len(self.shapes)}"
            )
        if any(extent < 0 for shape in self.shapes for extent in shape):
            raise ConfigurationError(f"`shapes` must hold no negative extent. Received: shapes={self.shapes}")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each array, and the total as the last entry."""
        offsets = [0]
        for shape in self.shapes:
            offsets.append(offsets[-1] + math.prod(shape))
        return tuple(offsets)

    @property
    def size(self) -> int:
        return self.offsets[-1]

    def empty(self) -> Vector:
        """Return a new, uninitialized float32 vector of this layout."""
        return np.empty(self.size, np.float32)

    def views(self, vector: Vector) -> list[np.ndarray]:
        """Return views of the arrays in ``vector`` (any dtype, shape ``(size,)``)."""
        if vector.shape != (self.size,):
            raise ConfigurationError(f"`vector` must have shape ({self.size},). Received: {vector.shape}")
        spans = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [vector[start:stop].reshape(shape) for start, stop, shape in spans]

    def locate(self, index: int) -> str:
        """Return the name of the array that contains element ``index`` of the vector."""
        for name, stop in zip(self.names, self.offsets[1:], strict=True):
            if index < stop:
                return name
        raise ConfigurationError(f"`index` must be below {self.size}. Received: index={index}")


def encode(layouts: Sequence[Layout]) -> bytes:
    return json.dumps([list(zip(layout.names, layout.shapes, strict=True)) for layout in layouts]).encode()


def decode(data: bytes, sizes: Sequence[int]) -> list[Layout]:
    """Return the layouts that `encode` encoded; raise ConfigurationError unless their vectors have these ``sizes``."""
    try:
        layouts = [
            Layout(tuple(str(name) for name, _ in arrays), tuple(tuple(map(int, shape)) for _, shape in arrays))
            for arrays in json.loads(data)
        ]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"layouts must be lists of names and shapes. Received: {error}") from None
    if [layout.size for layout in layouts] != list(sizes):
        raise ConfigurationError(
            f"layouts must have {list(sizes)} elements. Received: {[layout.size for layout in layouts]}"
        )
    return layouts
