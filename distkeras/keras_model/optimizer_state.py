"""The state of a Keras optimizer as bytes, and back: all its variables, exactly.

They are momenta and moments, accumulators of gradients, a loss scale, and `iterations`, at which a learning rate
schedule stands.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import zlib
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.variables import numpy_value
from distkeras.ps.protocol.messages import OptimizerState

if TYPE_CHECKING:
    import keras


def has_state(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether a built optimizer's steps depend on the steps before.

    Plain SGD with a constant learning rate has no such state: only its count of steps, which nothing reads.
    """
    import keras

    if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
        return True
    settings = {id(getattr(optimizer, name, None)) for name in ("_iterations", "_learning_rate")}
    return any(id(variable) not in settings for variable in optimizer.variables)


def read_state(optimizer: keras.optimizers.Optimizer, unsent: Container[int] = ()) -> OptimizerState | None:
    """Return the state of a built optimizer; None if it has none, or if a number in it is not finite.

    Args:
        unsent: the identities of variables that are not part of it.
    """
    import keras

    if not has_state(optimizer):
        return None
    variables = _sent(optimizer, unsent)
    content, at = np.empty(sum(map(_bytes_of, variables)), np.uint8), 0
    for variable in variables:
        value = np.ascontiguousarray(numpy_value(variable))
        if keras.backend.is_float_dtype(variable.dtype) and not np.isfinite(value).all():
            return None
        content[at : at + value.nbytes] = value.reshape(-1).view(np.uint8)
        at += value.nbytes
    return OptimizerState(layout_of(optimizer, unsent), content, zlib.crc32(content.data))


def load_state(
    optimizer: keras.optimizers.Optimizer, state: OptimizerState | None, unsent: Container[int] = ()
) -> str | None:
    """Set the state of a built optimizer.

    Args:
        optimizer: all of its variables are set, or none is.
        state: from `read_state`, of an optimizer of the same kind for a model of the same kind; None: there is none.
        unsent: the identities of variables that are not part of the state, and stay as they are.

    Returns:
        None if the optimizer has no state; "" if it has the given one now; else why not.
    """
    import keras

    if not has_state(optimizer):
        return None
    if state is None:
        return "none is kept"
    variables = _sent(optimizer, unsent)
    layout, size = layout_of(optimizer, unsent), state_bytes(optimizer, unsent)
    if state.layout != layout:
        return f"it must be of {layout}. Received: one of {state.layout}"
    if state.content.nbytes != size:
        return f"it must have {size} bytes. Received: {state.content.nbytes}"
    if state.damaged:
        return f"its {size} bytes have another checksum than {state.checksum:#010x}"
    values, at = list[np.ndarray](), 0
    for variable in variables:
        dtype, end = numpy_value(variable).dtype, at + _bytes_of(variable)
        values.append(state.content[at:end].copy().view(dtype).reshape(tuple(variable.shape)))
        at = end
        if keras.backend.is_float_dtype(variable.dtype) and not np.isfinite(values[-1]).all():
            return f"its variable {variable.name!r} is not finite"
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return ""


def state_bytes(optimizer: keras.optimizers.Optimizer, unsent: Container[int] = ()) -> int:
    """Return the bytes of a built optimizer's state, without the variables ``unsent``."""
    return sum(map(_bytes_of, _sent(optimizer, unsent)))


def layout_of(optimizer: keras.optimizers.Optimizer, unsent: Container[int] = ()) -> str:
    """Return a text that two built optimizers share if one can go on from the other's state."""
    kinds = [type(part).__name__ for part in _nested(optimizer)]
    variables = [(str(variable.dtype), list(variable.shape)) for variable in _sent(optimizer, unsent)]
    digest = hashlib.sha256(json.dumps([kinds, variables, sys.byteorder]).encode()).hexdigest()[:16]
    elements = sum(math.prod(shape) for _, shape in variables)
    dtypes = "/".join(sorted({dtype for dtype, _ in variables}))
    return f"{'.'.join(kinds)} with {len(variables)} variables of {elements} elements, {dtypes} ({digest})"


def _sent(optimizer: Any, unsent: Container[int]) -> list[keras.Variable]:
    return [variable for variable in optimizer.variables if id(variable) not in unsent]


def _nested(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those within it."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _bytes_of(variable: keras.Variable) -> int:
    return int(math.prod(variable.shape) * numpy_value(variable).dtype.itemsize)
