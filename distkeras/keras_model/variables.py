"""Keras variables as one flat float32 vector, without needless copies between NumPy and TensorFlow.

Importing this module does not load TensorFlow.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from distkeras.data.rows import aligned, is_aligned
from distkeras.private_keras import all_layers, created_variables, set_values, value_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.layout import Layout

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


T = TypeVar("T")
#: From this size in bytes on, a copy of a variable takes longer than another call of TensorFlow.
_LARGE = 1 << 18


class VariableOrder(NamedTuple):
    """The order of variables in the vectors of a replica.

    Args:
        trainable: for each place in the vector of the weights, the number of the variable among the model's own.
        statistics: the same for the moving statistics.
    """

    trainable: tuple[int, ...]
    statistics: tuple[int, ...]


def select(variables: Sequence[T], numbers: Sequence[int]) -> list[T]:
    """Return ``variables[number]`` for each of ``numbers``, in this order."""
    return [variables[number] for number in numbers]


def in_own_order(vector: np.ndarray, layout: Layout, numbers: Sequence[int]) -> np.ndarray:
    """Return a vector of variables in the model's own order.

    Args:
        vector: of shape ``(size,)``, whose variables lie as ``layout`` says.
        numbers: for each place in it, the number of the variable among the model's own.
    """
    views = list(layout.views(vector))
    return np.concatenate([np.empty(0, vector.dtype), *(views[place].ravel() for place in np.argsort(numbers))])


class VariableVector:
    """Variables as one vector, float32 for any precision of theirs: they are cast on the way in and out.

    Args:
        variables: float variables, in the order of the vector.

    Its methods raise ConfigurationError for vectors of another shape.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self.variables = tuple(variables)
        #: Where each variable lies in the vector.
        self.layout = Layout(tuple(v.path for v in variables), tuple(tuple(v.shape) for v in variables))
        # Looked up once: for a small model, Keras' own bookkeeping takes longer than the copy.
        self._handles = [_float32_handle(variable) for variable in variables]
        self._readers = [_memory_on_jax(variable) or _reader(variable) for variable in variables]
        self._load = _loader_on_jax(self.layout, variables) or _loader_on_torch(self.layout, variables)
        self._joined = _joined_on_torch(variables)

    def load(self, vector: np.ndarray) -> None:
        """Set the variables from a float32 vector of shape ``(size,)``, without keeping a reference to it."""
        if self._load is not None:
            self._load(vector)
            return
        for variable, handle, view in zip(self.variables, self._handles, self.layout.views(vector), strict=True):
            if handle is not None:
                assign_float32(handle, view)
            else:
                variable.assign(view.copy())

    def read(self, out: np.ndarray) -> None:
        """Fill ``out``, float32 of shape ``(size,)``, with the variables."""
        for value, view in zip(self._values(), self.layout.views(out), strict=True):
            view[...] = value

    def moved(self, since: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out`` with the variables minus ``since``, both float32 of shape ``(size,)``."""
        views = zip(self._values(), self.layout.views(since), self.layout.views(out), strict=True)
        for value, before, difference in views:
            np.subtract(value, before, out=difference, dtype=np.float32)

    def _values(self) -> Iterator[np.ndarray]:
        if self._joined is not None:
            return iter(self.layout.views(self._joined()))
        # Each value must be used before the next one: it may be the variable's own memory.
        return (read() for read in self._readers)


def _reader(variable: keras.Variable) -> Callable[[], np.ndarray]:
    """Return a function that returns a variable's value, which may be the variable's own memory."""
    import keras

    handle = _float32_handle(variable)
    if handle is not None:
        return partial(variable_memory, handle, math.prod(variable.shape))
    if variable.dtype == "float32" and _is_on_one_device_of_jax():
        import jax

        if jax.default_backend() == "cpu":
            return lambda: np.from_dlpack(variable.value)  # takes half the time of NumPy's conversion
    return lambda: np.asarray(keras.ops.convert_to_numpy(variable))


def _is_on_one_device_of_jax() -> bool:
    import keras

    own = keras.distribution.distribution() is None and not keras.config.is_nnx_enabled()
    return keras.backend.backend() == "jax" and own


def _memory_on_jax(variable: keras.Variable) -> Callable[[], np.ndarray] | None:
    """Return a function that returns a variable's own memory on a processor, in a quarter of the time of DLPack.

    It is valid until the variable gets another value.
    """
    elements = math.prod(variable.shape)
    if not elements or variable.dtype != "float32" or not _is_on_one_device_of_jax():
        return None
    import jax

    if jax.default_backend() != "cpu":
        return None
    memory, shape = ctypes.c_float * elements, tuple(variable.shape)

    def read() -> np.ndarray:
        value = value_of(variable).block_until_ready()
        return np.frombuffer(memory.from_address(value.unsafe_buffer_pointer()), np.float32).reshape(shape)

    return read


def _loader_on_jax(layout: Layout, variables: Sequence[keras.Variable]) -> Callable[[np.ndarray], None] | None:
    """Return a function that sets variables from a vector: one copy to the device, and one call that splits it."""
    if not variables or not _is_on_one_device_of_jax():
        return None
    import jax

    dtypes = [variable.dtype for variable in variables]

    def parts(vector: Any) -> list[Any]:
        return [view.astype(dtype) for view, dtype in zip(layout.views(vector), dtypes, strict=True)]

    compiled = jax.jit(parts)

    def load(vector: np.ndarray) -> None:
        own = aligned(vector.shape, vector.dtype)  # JAX keeps it
        own[...] = vector
        # `jax.device_put` would take longer than both copies.
        set_values(variables, compiled(own))

    return load


def _is_on_torch(variables: Sequence[keras.Variable]) -> bool:
    import keras

    return keras.backend.backend() == "torch" and len({variable.value.device for variable in variables}) == 1


def _loader_on_torch(layout: Layout, variables: Sequence[keras.Variable]) -> Callable[[np.ndarray], None] | None:
    """Return a function that copies a vector to the variables' device, at once, and sets them from it there."""
    if not _is_on_torch(variables):
        return None
    import keras

    def load(vector: np.ndarray) -> None:
        for variable, value in zip(variables, layout.views(keras.ops.convert_to_tensor(vector)), strict=True):
            variable.assign(value)

    return load


def _joined_on_torch(variables: Sequence[keras.Variable]) -> Callable[[], np.ndarray] | None:
    """Return a function that joins the variables on their device, and copies the vector from there at once."""
    if not _is_on_torch(variables):
        return None
    import torch

    def joined() -> np.ndarray:
        parts = [variable.value.detach().reshape(-1) for variable in variables]
        vector: np.ndarray = torch.cat(parts).to(torch.float32).cpu().numpy()
        return vector

    return joined


def numpy_value(variable: keras.Variable) -> np.ndarray:
    """Return a variable's value, to be read before the variable changes: it may be the variable's own memory."""
    return _reader(variable)()


def assign_without_copy(variable: keras.Variable, values: np.ndarray) -> None:
    """Set a variable to a float32 array that is not used afterwards; an `aligned` one is not copied."""
    handle = _float32_handle(variable)
    if handle is None:
        variable.assign(values)
    else:
        (assign_own_float32 if is_aligned(values) else assign_float32)(handle, values)


def copied(source: Sequence[keras.Variable], target: Sequence[keras.Variable]) -> bool:
    """Copy ``source`` to ``target``; return False, and copy nothing, unless names, shapes and dtypes are the same."""
    import keras

    if [_kind(variable) for variable in source] != [_kind(variable) for variable in target]:
        return False
    for variable, copy in zip(source, target, strict=True):
        copy.assign(np.array(keras.ops.convert_to_numpy(variable)))
    return True


def scalar(value: Any) -> float:
    """Return the number that a Keras variable or a tensor of shape ``()`` holds."""
    import keras

    handle = _float32_handle(value) if isinstance(value, keras.Variable) else None
    return float(value_of(value) if handle is None else variable_memory(handle))


def trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that update rules work on.

    Raises:
        ConfigurationError: the model has nothing to train, or holds variables whose "gradient" is their next value
            (float8 scales), which no rule can add up.
    """
    variables = list(model.trainable_variables)
    refused = [v.path for v in variables if not _is_float(v) or getattr(v, "overwrite_with_gradient", False)]
    if refused or not (variables or has_rows_at_server(model)):
        raise ConfigurationError(
            "`model` must have trainable weights, each a float that moves by its gradient. "
            f"Received: model={model.name!r}, refused weights={refused}, weights in all={len(variables)}"
        )
    return variables


def layers_with_rows_at_server(model: keras.Model) -> list[Any]:
    """Return each `distkeras.layers.WideEmbedding` of a model, at any depth."""
    return [layer for layer in all_layers(model) if is_wide(layer)]


def has_rows_at_server(model: keras.Model) -> bool:
    """Return whether a model has a `distkeras.layers.WideEmbedding`, at any depth."""
    return bool(layers_with_rows_at_server(model))


def is_wide(layer: Any) -> bool:
    """Return whether a layer is a `WideEmbedding`: it has no weights, and only touched rows of its table exist."""
    return bool(getattr(layer, "keeps_rows_at_server", False))


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return float variables that training moves without a gradient, such as BatchNormalization's moving averages.

    These are not included: variables that were created trainable and frozen later (a layer lists them apart), those of
    a frozen BatchNormalization (it runs in inference mode, as no other frozen layer does), the states of a stateful
    recurrent layer (they belong to one worker's sequence of batches), and Normalization's constants, which only
    ``adapt`` sets.
    """
    layers = all_layers(model)
    frozen = _made_trainable(layers)
    by_id: dict[int, keras.Variable] = {}
    for layer in layers:
        if not _is_constant(layer):
            _, own = created_variables(layer)  # the public list holds frozen weights as well
            by_id.update((id(v), v) for v in own if _is_float(v) and id(v) not in frozen)
    return list(by_id.values())


def _made_trainable(layers: Sequence[keras.Layer]) -> set[int]:
    """Return the identities of variables that were created trainable; a wrapper may list them, too, once frozen."""
    return {id(v) for layer in layers for v in created_variables(layer)[0]}


def _is_constant(layer: keras.Layer) -> bool:
    """Return whether training leaves a layer's state as it is, or each worker has a state of its own."""
    import keras

    if isinstance(layer, keras.layers.BatchNormalization):
        return not layer.trainable
    return isinstance(layer, keras.layers.Normalization) or getattr(layer, "stateful", False)


def layer_states(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that layers change when they are called: seeds, counters, averages, recurrent states.

    Variables that were created trainable and frozen later are not included: they may be large.
    """
    import keras

    layers = all_layers(model)
    frozen = _made_trainable(layers)
    recurrent = [layer.states for layer in layers if getattr(layer, "stateful", False) and hasattr(layer, "states")]
    states = [*model.non_trainable_variables, *keras.tree.flatten(recurrent)]  # a model does not list recurrent states
    return [variable for variable in states if isinstance(variable, keras.Variable) and id(variable) not in frozen]


def distinct_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the unique variables of a model with a built optimizer, without those of its metrics."""
    variables = [*model.variables, *layer_states(model), *model.optimizer.variables]
    return list({id(variable): variable for variable in variables}.values())


def _float32_handle(variable: keras.Variable) -> Any:
    """Return TensorFlow's handle to a variable whose memory is float32; None for any other."""
    import keras

    plain = keras.backend.backend() == "tensorflow" and variable.dtype == "float32"
    return variable.value.handle if plain else None


def _kind(variable: keras.Variable) -> Any:
    return variable.name, tuple(variable.shape), variable.dtype, variable.trainable


def _is_float(variable: keras.Variable) -> bool:
    import keras

    return bool(keras.backend.is_float_dtype(variable.dtype))


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
