"""Conversions between NumPy arrays and TensorFlow without needless copies, and updates without copies.

The functions import TensorFlow; importing this module does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import aligned

if TYPE_CHECKING:
    import tensorflow as tf


#: From this size in bytes on, a copy of a variable takes longer than another call of TensorFlow.
_LARGE = 1 << 18


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a copy ``(len(arrays), *shape)`` of arrays of one shape and dtype, for `lent`."""
    joined = aligned((len(arrays), *arrays[0].shape), arrays[0].dtype)
    np.concatenate(arrays, out=joined.reshape(len(arrays) * len(arrays[0]), *arrays[0].shape[1:]))
    return joined


def lent(array: np.ndarray) -> tf.Tensor:
    """Return a tensor in the memory of an `aligned` array, which must not be written to; any other array is copied."""
    import tensorflow as tf

    return tf.raw_ops.Identity(input=array)  # `tf.convert_to_tensor` copies, twice if the array is not aligned


def assign_float32(handle: tf.Tensor, values: np.ndarray) -> None:
    """Set the float32 variable behind ``handle`` to ``values`` of its shape, which are copied once."""
    copy = aligned(values.shape, np.dtype(np.float32))
    copy[...] = values
    assign_own_float32(handle, copy)


def assign_own_float32(handle: tf.Tensor, values: np.ndarray) -> None:
    """Set the float32 variable behind ``handle`` to an `aligned` array of its shape, whose memory it takes over."""
    import tensorflow as tf

    if values.nbytes >= _LARGE:
        _end_copies(handle)
    tf.raw_ops.AssignVariableOp(resource=handle, value=values)


def variable_memory(handle: tf.Tensor, elements: int = 0) -> np.ndarray:
    """Return the memory of the float32 variable behind ``handle``, to be read before the variable changes.

    Args:
        elements: the number of the variable's elements; 0: it is small.
    """
    import tensorflow as tf

    if elements * np.dtype(np.float32).itemsize >= _LARGE:
        _end_copies(handle)
    return np.asarray(memoryview(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)))


def _end_copies(handle: tf.Tensor) -> None:
    """Make TensorFlow read and set the whole variable behind ``handle`` without a copy, until single rows are updated.

    After the first update of single rows, TensorFlow copies a variable when it is read or set. If its memory is still
    referenced at the next such update, TensorFlow makes one copy then.
    """
    import tensorflow as tf

    if "CPU" in handle.device:
        tf.raw_ops.DisableCopyOnRead(resource=handle)


@contextmanager
def updates_last(optimizer: Any) -> Iterator[None]:
    """While a step is traced, make a Keras optimizer wait for all gradients before it updates the first variable.

    TensorFlow copies a variable that is updated while an operation still reads it. A layer's kernel is read once more
    for the gradient of the layer below, so without this most of a model is copied in every step.
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


@contextmanager
def without_updates(optimizer: Any) -> Iterator[None]:
    """While a step is traced only for what it returns, keep an optimizer from updating, for which it would be built."""
    optimizer.apply = lambda *_args, **_options: None
    try:
        yield
    finally:
        del optimizer.apply


@contextmanager
def read_only_touched_rows(model: Any) -> Iterator[None]:
    """While a step is traced, make a model read only those rows of an Embedding that the step touches.

    Keras reads the whole table and gathers rows from it. After the first update of single rows, TensorFlow copies a
    variable whenever it is read as a whole: then each step takes as long as a copy of the table. The result is the
    same.
    """
    import keras

    with ExitStack() as stack:
        for layer in model._flatten_layers():  # noqa: SLF001 - Keras has no public list of layers at every depth
            if type(layer) is keras.layers.Embedding and not layer.lora_enabled and layer.quantization_mode is None:
                stack.enter_context(_reading_rows(layer))
        yield


@contextmanager
def _reading_rows(layer: Any) -> Iterator[None]:
    import keras
    import tensorflow as tf

    call = layer.call

    def call_on_rows(inputs: Any) -> Any:
        variable = layer.embeddings.value
        if not isinstance(variable, tf.Variable) or not isinstance(inputs, tf.Tensor):
            return call(inputs)  # within a scope that casts it; sparse or ragged ids
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else keras.ops.cast(inputs, "int32")
        ids = tf.where(ids < 0, ids + tf.cast(variable.shape[0], ids.dtype), ids)  # negative: from the end
        return keras.ops.cast(tf.gather(variable, ids), layer.compute_dtype)

    layer.call = call_on_rows
    try:
        yield
    finally:
        del layer.call
