"""Between numpy arrays and TensorFlow, with no copy more than it takes, and updates that copy nothing.

Only for TensorFlow, which the functions import: loading this module does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import aligned

if TYPE_CHECKING:
    import tensorflow as tf


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a copy ``(len(arrays), *shape)`` of arrays of one shape and dtype, for `lent`."""
    joined = aligned((len(arrays), *arrays[0].shape), arrays[0].dtype)
    np.concatenate(arrays, out=joined.reshape(-1, *arrays[0].shape[1:]))
    return joined


def lent(array: np.ndarray) -> tf.Tensor:
    """Return a tensor in the memory of an `aligned` array, which must not be written to; another one is copied."""
    import tensorflow as tf

    return tf.raw_ops.Identity(input=array)  # `tf.convert_to_tensor` copies, twice what is not aligned


def assign_float32(handle: tf.Tensor, values: np.ndarray) -> None:
    """Set the float32 variable behind ``handle`` to ``values`` of its shape, which are copied once."""
    import tensorflow as tf

    copy = aligned(values.shape, np.dtype(np.float32))
    copy[...] = values
    tf.raw_ops.AssignVariableOp(resource=handle, value=copy)


def variable_memory(handle: tf.Tensor) -> np.ndarray:
    """Return the memory of the float32 variable behind ``handle``, to be read before the variable changes."""
    import tensorflow as tf

    return np.asarray(memoryview(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)))


@contextmanager
def updates_last(optimizer: Any) -> Iterator[None]:
    """While a step is traced, make a Keras optimizer wait for all gradients before it moves the first variable.

    TensorFlow copies a variable that is to be moved while an operation still reads it. A layer's kernel is read once
    more for the gradient of the layer below, so without this most of a model is copied in every step.
    """
    import tensorflow as tf

    apply = optimizer.apply

    def apply_after_all(gradients: Any, *args: Any, **options: Any) -> Any:
        gradients = list(gradients)
        parts = tf.nest.flatten(gradients, expand_composites=True)
        with tf.control_dependencies([part for part in parts if part is not None]):
            return apply(gradients, *args, **options)

    optimizer.apply = apply_after_all
    try:
        yield
    finally:
        del optimizer.apply
