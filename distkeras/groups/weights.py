"""The weights of one group's model as bytes. Importing this module loads neither pyspark nor Keras."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.ps.errors import NonFiniteError

if TYPE_CHECKING:
    import keras


def packed_weights(arrays: Sequence[np.ndarray]) -> bytes:
    """Return arrays as one byte string, each in C order and in its own dtype."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpacked_weights(data: bytes, kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray]:
    """Reverse `packed_weights`: return the arrays, read-only, given the shape and the dtype of each."""
    arrays, start = [], 0
    for shape, dtype in kinds:
        count = math.prod(shape)
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return arrays


def weights_of(model: keras.Model) -> bytes:
    """Return all weights of a model as one byte string, in the order of `keras.Model.weights`.

    Raises:
        NonFiniteError: a weight is NaN or infinite, as after a last step that diverged.
    """
    import keras

    arrays = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    require_finite_weights(arrays)
    return packed_weights(arrays)


def require_finite_weights(arrays: Sequence[np.ndarray]) -> None:
    """Raise NonFiniteError unless all weights of a model are finite."""
    for array in arrays:
        is_float = np.issubdtype(array.dtype, np.floating) or array.dtype.name.startswith(("bfloat", "float"))
        if is_float and not np.isfinite(array).all():
            raise NonFiniteError(
                "the weights are not finite after the last step. Lower the learning rate or clip gradients"
            )


def load_weights(model: keras.Model, data: bytes) -> None:
    """Set the weights of a model from what `weights_of` returned."""
    kinds = [(tuple(weight.shape), np.dtype(weight.dtype)) for weight in model.weights]
    for weight, value in zip(model.weights, unpacked_weights(data, kinds), strict=True):
        weight.assign(value.copy())  # a backend may keep a reference to the array
