"""Many models of one architecture, trained side by side on JAX, with the interface of `StackedModels`.

Importing this module does not load JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.rows import aligned
from distkeras.keras_model.jax_steps import can_compile, state_of, step_of
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch


class JaxStack:
    """Copies of a model whose variables are stacked: ``train_step``, vectorized by `jax.vmap`, in one compiled loop.

    It is compiled once per size of a mini-batch, for all copies or a quarter of them, and for steps up to a power of
    four.

    The arguments are those of `StackedModels`; the model is on JAX.

    Raises:
        ConfigurationError: the step is not a function of the states that Keras hands to it.
    """

    def __init__(self, model: keras.Model, example: Batch, metrics: Sequence[str], width: int, count: int) -> None:
        import jax

        if not can_compile(model):
            raise ConfigurationError(
                "`side_by_side` must be 1 for a model whose step is not compiled, or with state outside of its layers' "
                f"and its optimizer's variables. Received: {model.name!r}"
            )
        self._model, self._width, self._count = model, width, count
        self._step = jax.vmap(step_of(model, len(example.x), len(example.y), metrics))
        self._initial = [[np.array(variable.value) for variable in variables] for variables in state_of(model)]
        self._loop = jax.jit(self._steps, donate_argnums=0)
        self._stacked: Any
        self.reset()

    def reset(self) -> None:
        """Reset every copy to the model's initial state."""
        import jax
        import jax.numpy as jnp

        self._stacked = jax.tree.map(lambda value: jnp.repeat(value[None], self._count, 0), self._initial)

    def train(self, places: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Take steps with some copies; arguments and result are those of `StackedModels.train`."""
        import jax

        steps, copies = arrays[0].shape[:2]
        quarter = -(-self._count // 4)
        # Two numbers of copies are compiled; those that do not exist are trained, and dropped.
        sizes = _capacity(steps), quarter if copies <= quarter else self._count
        numbers = np.full(sizes[1], self._count, np.int32)
        numbers[:copies] = places
        padded = [jax.device_put(_padded(array, sizes)) for array in arrays]
        self._stacked, rows = self._loop(self._stacked, numbers, np.int32(steps), padded)
        return np.asarray(rows)[:steps, :copies].astype(np.float64)

    def weights(self) -> list[np.ndarray]:
        """Return for each of `keras.Model.weights` an array ``(count, *shape)``."""
        variables = [variable for part in state_of(self._model) for variable in part]
        values = [value for part in self._stacked for value in part]
        by_variable = {id(variable): value for variable, value in zip(variables, values, strict=True)}
        return [np.asarray(by_variable[id(weight)]) for weight in self._model.weights]

    def _steps(self, stacked: Any, places: Any, steps: Any, stacks: Sequence[Any]) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        def body(number: Any, carry: Any) -> Any:
            values, rows = carry
            arrays = [jax.lax.dynamic_index_in_dim(stack, number, keepdims=False) for stack in stacks]
            values, row = self._step(values, arrays)
            return values, jax.lax.dynamic_update_index_in_dim(rows, row, number, 0)

        values = jax.tree.map(lambda value: value.at[places].get(mode="clip"), stacked)
        rows = jnp.zeros((*stacks[0].shape[:2], self._width), jnp.float32)
        values, rows = jax.lax.fori_loop(0, steps, body, (values, rows))
        return jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), stacked, values), rows


def _capacity(number: int) -> int:
    """Return the smallest power of four that is at least ``number``: few sizes are compiled then."""
    return 1 << ((number - 1).bit_length() + 1) // 2 * 2


def _padded(array: np.ndarray, sizes: tuple[int, int]) -> np.ndarray:
    steps, copies = array.shape[:2]
    padded = aligned((*sizes, *array.shape[2:]), array.dtype)
    padded[:steps, :copies] = array
    return padded
