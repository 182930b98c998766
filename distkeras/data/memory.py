"""Memory that a backend can take over as it is."""

from __future__ import annotations

import math

import numpy as np

#: Bytes: the strictest alignment that any build of TensorFlow asks for.
ALIGNMENT = 64


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new, uninitialized array that TensorFlow can take over; one that lies elsewhere it would copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Whether TensorFlow can take ``array`` over."""
    return array.flags.c_contiguous and array.__array_interface__["data"][0] % ALIGNMENT == 0
