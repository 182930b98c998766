"""Many training steps of a Keras model in one call of JAX.

Importing this module does not load JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Stack, as_weight, flat_weight
from distkeras.data.rows import aligned
from distkeras.keras_model.compiled_steps import CALL_BYTES_MAX, arrays_of, as_fit_packs, flat_logs, model_inputs, spans
from distkeras.keras_model.variables import layer_states
from distkeras.private_keras import all_layers, set_values, value_of

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch

#: So many sizes of the memory of a call are those of stacks, which need no copy then; further ones are powers of two,
#: so that few are compiled.
_EXACT = 3
#: The least mini-batches that a call has room for if their rows have any length.
_LEAST_OPEN = 16

State = tuple[list[Any], list[Any], list[Any]]
"""Trainable variables, others, and the optimizer's; or their values."""
Step = Callable[[State, Sequence[Any]], tuple[State, Any]]


def can_loop(model: keras.Model) -> bool:
    """Return whether a model's steps on JAX can be one compiled loop: else each step is a ``train_on_batch``.

    They cannot unless a step `can_compile`. Convolutions are several times slower within a loop of XLA on processors
    than in a step of their own.
    """
    import jax

    on_processor = jax.default_backend() == "cpu"
    convolves = any(isinstance(layer, _convolutions()) for layer in all_layers(model))
    return can_compile(model) and not (on_processor and convolves)


def can_compile(model: keras.Model) -> bool:
    """Return whether a model's step on JAX can be compiled as a function of the states that Keras hands to it.

    It cannot if the user has turned compilation off, if arrays are distributed over devices, or if layers have other
    states, such as a stateful recurrent layer's.
    """
    import keras

    if model.run_eagerly or not model.jit_compile or keras.distribution.distribution() is not None:
        return False
    if keras.config.is_nnx_enabled():
        return False
    known = {id(variable) for variable in model.variables}
    return all(id(variable) in known for variable in layer_states(model))


def _convolutions() -> tuple[type, ...]:
    import keras

    names = ("Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
    separable = ("SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D")
    return tuple(getattr(keras.layers, name) for name in (*names, *separable))


class JaxSteps:
    """A compiled loop over ``model.train_step``, with the interface of `CompiledSteps`.

    It is compiled once per size of a mini-batch and kind of input (dtypes, shapes of a row, whether weighted), for any
    number of steps.

    Args:
        model: built and compiled, on JAX, with a built optimizer, loss and metrics.
        installed: a context in which the steps are taken.
    """

    def __init__(self, model: keras.Model, installed: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._model, self._installed = model, installed
        self._loops: dict[Any, Callable[..., Any]] = {}
        self._capacities: dict[Any, list[int]] = {}
        #: How often a loop was traced, and so compiled.
        self.traces = 0

    def run(self, batches: Sequence[Batch], metrics: Sequence[str], width: int) -> np.ndarray:
        """Take one step per mini-batch, in order; arguments, results and errors are those of `CompiledSteps.run`."""
        with self._installed():
            rows = [self._run_span(*span, metrics, width) for span in spans(batches)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run_span(self, stack: Stack, first: int, steps: int, metrics: Sequence[str], width: int) -> np.ndarray:
        if stack.tensors is None:
            stack.tensors = self._on_device(stack)
        kind, arrays = stack.tensors
        loop = self._loops.get(kind)
        if loop is None:
            loop = self._loops[kind] = self._compile(stack, metrics, width)
        state = state_of(self._model)
        new, rows = loop([_own(variables) for variables in state], np.int32(first), np.int32(first + steps), arrays)
        for variables, values in zip(state, new, strict=True):
            set_values(variables, values)
        return np.asarray(rows)[first : first + steps].astype(np.float64)

    def _on_device(self, stack: Stack) -> tuple[Any, list[Any]]:
        """Return the kind of a stack and its arrays; the last mini-batches of a shorter stack are not initialized."""
        import jax

        arrays = arrays_of(stack)
        kind = (len(flat_weight(stack.weight)), *((array.shape[1:], array.dtype) for array in arrays))
        known, count = self._capacities.setdefault(kind, []), len(stack)
        capacity = min((each for each in known if each >= count), default=0)
        if stack.lengths is not None:  # runs of one length have any number of mini-batches
            most = CALL_BYTES_MAX * count // max(1, sum(array.nbytes for array in arrays))
            capacity = max(count, min(max(_LEAST_OPEN, 1 << (count - 1).bit_length()), most))
        elif not capacity:
            capacity = count if len(known) < _EXACT else 1 << (count - 1).bit_length()
            known.append(capacity)
        if capacity > count:
            arrays = [_grown(array, capacity) for array in arrays]
        # On processors, a call reads aligned arrays where they are, and `jax.device_put` takes longer than that.
        if jax.default_backend() != "cpu":
            arrays = [jax.device_put(array) for array in arrays]
        return (capacity, *kind), arrays

    def _compile(self, stack: Stack, metrics: Sequence[str], width: int) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp

        step = step_of(self._model, len(stack.x), len(stack.y), metrics)

        def loop(state: State, first: Any, end: Any, stacks: Sequence[Any]) -> tuple[State, Any]:
            def body(place: Any, carry: tuple[State, Any]) -> tuple[State, Any]:
                state, rows = carry
                state, row = step(state, [jax.lax.dynamic_index_in_dim(one, place, keepdims=False) for one in stacks])
                return state, jax.lax.dynamic_update_index_in_dim(rows, row, place, 0)

            self.traces += 1  # at the time of the trace only
            rows = jnp.zeros((len(stacks[0]), width), jnp.float32)
            return jax.lax.fori_loop(first, end, body, (state, rows))  # type: ignore[no-any-return]  # JAX's are Any

        return jax.jit(loop, donate_argnums=0)  # type: ignore[no-any-return]  # the same


def state_of(model: keras.Model) -> State:
    """Return the variables that a step of a model changes."""
    return model.trainable_variables, model.non_trainable_variables, model.optimizer.variables


def step_of(model: keras.Model, inputs: int, targets: int, metrics: Sequence[str]) -> Step:
    """Return a function of a state and of the arrays of a mini-batch: the state after a step, and its ``metrics``.

    The metrics are float32, one after the other, and of this step alone.
    """
    import jax
    import jax.numpy as jnp

    model.reset_metrics()
    fresh = [variable.value for variable in model.metrics_variables]  # each step begins with these

    def step(state: State, arrays: Sequence[Any]) -> tuple[State, Any]:
        y, weight = arrays[inputs : inputs + targets], as_weight(arrays[inputs + targets :])
        data = as_fit_packs(*model_inputs(model, arrays[:inputs], y, weight))
        logs, (*changed, _) = model.train_step((*state, fresh), data)
        logs = flat_logs(logs, metrics)
        row = jnp.concatenate([jnp.ravel(logs[name]).astype(jnp.float32) for name in metrics])
        # A step may return other dtypes than it was given, or weak ones, which a loop refuses.
        kept = jax.tree.map(lambda new, old: jax.lax.convert_element_type(new, old.dtype), changed, list(state))
        return kept, row

    return step


def _grown(array: np.ndarray, capacity: int) -> np.ndarray:
    grown = aligned((capacity, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def _own(variables: Sequence[keras.Variable]) -> list[Any]:
    """Return the values of variables, none of them twice: the loop takes over their memory."""
    import jax.numpy as jnp

    seen: set[int] = set()
    values = []
    for variable in variables:
        value = value_of(variable)
        values.append(jnp.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return values
