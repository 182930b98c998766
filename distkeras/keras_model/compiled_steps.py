"""Many training steps of a Keras model in one call of TensorFlow.

Importing this module does not load TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.inputs import arrays_of, model_inputs
from distkeras.keras_model.tensorflow import stacked, updates_last
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from distkeras.data.batches import Batch

#: Most bytes of mini-batches that one call stacks; more are cut.
MOST_BYTES_A_CALL = 64 * 2**20

_CompiledLoop = Callable[..., Any]
"""Stacked arrays ``(steps, rows, ...)``, one an input, target or weight, to float64 ``(steps, metrics)``."""


class CompiledSteps:
    """A compiled loop over ``model.train_step``.

    It is traced once per kind of input (dtypes, shapes of a row, whether weighted), for any number of steps and any
    batch size.

    Args:
        model: built and compiled, on TensorFlow.
        while_tracing: a context in which the loop is traced.
    """

    def __init__(
        self, model: keras.Model, while_tracing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._model = model
        self._while_tracing = while_tracing
        self._loops: dict[Any, _CompiledLoop] = {}

    def run(self, batches: Sequence[Batch], metrics: Sequence[str]) -> np.ndarray:
        """One step per mini-batch, in order.

        Args:
            batches: at least one.
            metrics: names of what ``train_step`` returns, the same at every call.

        Returns:
            float64 array of shape ``(len(batches), len(metrics))``, of each step alone.

        Raises:
            ConfigurationError: ``train_step`` returns less than ``metrics``.
        """
        rows = [self._run_alike(alike, metrics) for alike in _runs(batches)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run_alike(self, batches: Sequence[Batch], metrics: Sequence[str]) -> np.ndarray:
        first = batches[0]
        weighted = first.weight is not None
        kind = (weighted, *((array.shape[1:], array.dtype) for array in arrays_of(first)))
        stacks = [stacked(arrays) for arrays in zip(*map(arrays_of, batches), strict=True)]
        loop = self._loops.get(kind)
        if loop is None:
            with self._while_tracing():
                loop = self._loops[kind] = self._trace(stacks, len(first.x), weighted, metrics)
        rows: np.ndarray = loop(*stacks).numpy()
        return rows

    def _trace(self, stacks: Sequence[tf.Tensor], inputs: int, weighted: bool, metrics: Sequence[str]) -> _CompiledLoop:
        """Compiles the loop for the dtypes and row shapes of ``stacks``, the number of steps and of rows left open."""
        import tensorflow as tf

        model = self._model

        def step(*arrays: Any) -> Any:
            model.reset_metrics()
            y = arrays[inputs : len(arrays) - weighted]
            with updates_last(model.optimizer):
                logs = model.train_step(model_inputs(model, arrays[:inputs], y, arrays[-1] if weighted else None))
            missing = [name for name in metrics if name not in logs]
            if missing:
                raise ConfigurationError(f"`train_step` must return every metric. Received: none of {missing}")
            return tf.stack([tf.cast(logs[name], tf.float64) for name in metrics])

        compiled = tf.function(step, jit_compile=True, autograph=False) if model.jit_compile else step

        def loop(*stacks: Any) -> Any:
            steps = tf.shape(stacks[0])[0]
            rows = tf.TensorArray(tf.float64, size=steps, element_shape=(len(metrics),))
            _, rows = tf.while_loop(
                lambda i, _: i < steps,
                lambda i, rows: (i + 1, rows.write(i, compiled(*(stack[i] for stack in stacks)))),
                (0, rows),
                parallel_iterations=1,
            )
            return rows.stack()

        specs = [tf.TensorSpec((None, None, *stack.shape[2:]), stack.dtype) for stack in stacks]
        traced: _CompiledLoop = tf.function(loop, autograph=False).get_concrete_function(*specs)
        return traced


def _runs(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Neighbors of one size together, as many as `MOST_BYTES_A_CALL` allows."""
    for _, group in itertools.groupby(batches, key=lambda b: (len(b.x[0]), b.weight is None)):
        run = list(group)
        most = max(1, MOST_BYTES_A_CALL // max(1, sum(array.nbytes for array in arrays_of(run[0]))))
        for start in range(0, len(run), most):
            yield run[start : start + most]
