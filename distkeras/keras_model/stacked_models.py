"""Many models of one architecture, trained side by side: one step of TensorFlow is a step of each of them.

Importing this module does not load TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import as_weight
from distkeras.keras_model.compiled_steps import arrays_of, model_inputs, row_of_logs
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.variables import distinct_variables, trainable_variables
from distkeras.private_keras import counted_loss, stateless_methods
from distkeras.ps.errors import ConfigurationError, headline

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch


class StackedModels:
    """Copies of a model whose variables are stacked: each TensorFlow variable has a leading axis of models.

    One model's step, a function of its variables and its mini-batch, is vectorized over that axis by
    `tf.vectorized_map`. Each model has its own optimizer, seeds and moving averages. Its step equals that of a single
    model up to rounding: a product of stacked matrices may sum in another order.

    Args:
        model: built and compiled, on TensorFlow, with a built optimizer. It must not be used for anything else.
        example: a mini-batch of the shapes and dtypes to come, for which loss and metrics are built.
        metrics: names of loss and metrics, loss first.
        width: how many numbers they have together.
        count: the number of copies.

    Raises:
        ConfigurationError: the step cannot be vectorized; the text states TensorFlow's reason.
    """

    def __init__(self, model: keras.Model, example: Batch, metrics: Sequence[str], width: int, count: int) -> None:
        import keras
        import tensorflow as tf

        self._model, self._metrics, self._width = model, tuple(metrics), width
        _make_stateless(model.optimizer)
        self._variables = distinct_variables(model)
        self._initial = [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._variables]
        self._stacked = [tf.Variable(_repeated(value, count), trainable=False) for value in self._initial]
        self._inputs, self._targets = len(example.x), len(example.y)
        self._loop: Any
        try:
            self._loop = self._traced(example)
        except Exception as error:
            raise ConfigurationError(
                "`side_by_side` must be 1 for this model, since TensorFlow cannot vectorize its step: "
                f"{headline(f'{type(error).__name__}: {error}')}"
            ) from error
        self._require_no_other_state()

    def reset(self) -> None:
        """Reset every copy to the model's initial state."""
        for stacked, value in zip(self._stacked, self._initial, strict=True):
            stacked.assign(_repeated(value, stacked.shape[0]))

    def train(self, places: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Take steps with some copies; the others do not change.

        Args:
            places: int32 ``(copies,)``: the numbers of these copies, which are unique.
            arrays: inputs, targets and, if there are any, sample weights, each an array
                ``(steps, copies, rows, *column.shape)``.

        Returns:
            float64 ``(steps, copies, width)``: loss and metrics of each step alone.
        """
        rows: np.ndarray = self._loop(places, *arrays).numpy()
        return rows

    def weights(self) -> list[np.ndarray]:
        """Return for each of `keras.Model.weights` an array ``(count, *shape)``."""
        by_variable = {id(variable): stacked for variable, stacked in zip(self._variables, self._stacked, strict=True)}
        return [by_variable[id(weight)].numpy() for weight in self._model.weights]

    def _traced(self, example: Batch) -> Any:
        """Compile the loop for any number of steps, of copies and of rows."""
        import tensorflow as tf

        def loop(places: Any, *stacks: Any) -> Any:
            values = [tf.gather(stacked, places) for stacked in self._stacked]
            steps = tf.shape(stacks[0])[0]
            rows = tf.TensorArray(tf.float64, size=steps, element_shape=(None, self._width))

            def body(step: Any, values: list[Any], rows: Any) -> tuple[Any, list[Any], Any]:
                elements = values, [stack[step] for stack in stacks]
                moved, logs = tf.vectorized_map(self._step, elements, warn=False)
                for before, after in zip(values, moved, strict=True):
                    after.set_shape(before.shape)
                return step + 1, moved, rows.write(step, logs)

            _, values, rows = tf.while_loop(
                lambda step, *_: step < steps, body, (0, values, rows), parallel_iterations=1
            )
            for stacked, value in zip(self._stacked, values, strict=True):
                stacked.scatter_update(tf.IndexedSlices(value, places))
            return rows.stack()

        kinds = [(array.shape[1:], array.dtype) for array in arrays_of(example)]
        specs = [tf.TensorSpec((None, None, None, *shape), dtype) for shape, dtype in kinds]
        return tf.function(loop, autograph=False).get_concrete_function(tf.TensorSpec((None,), tf.int32), *specs)

    def _step(self, elements: Any) -> tuple[list[Any], Any]:
        """Return one model's variables after a step, and loss and metrics, computed as Keras' own trainers do."""
        import keras
        import tensorflow as tf

        values, arrays = elements
        model, optimizer = self._model, self._model.optimizer
        inputs, end = self._inputs, self._inputs + self._targets
        x, y, weight = model_inputs(model, arrays[:inputs], arrays[inputs:end], as_weight(arrays[end:]))
        trainable = trainable_variables(model)
        scope = keras.StatelessScope(list(zip(self._variables, values, strict=True)), collect_losses=True)
        with scope, tf.GradientTape(watch_accessed_variables=False) as tape:
            before = [scope.get_current_value(variable) for variable in trainable]
            tape.watch(before)
            model.reset_metrics()
            predicted = model(x, training=True)
            scaled = optimizer.scale_loss(counted_loss(model, x, y, predicted, weight, tf.shape(arrays[0])[0]))
        gradients = tape.gradient(scaled, before)
        with scope:
            logs = model.compute_metrics(x, y, predicted, sample_weight=weight)
        state = [scope.get_current_value(variable) for variable in optimizer.variables]
        moved, state = optimizer.stateless_apply(state, gradients, before)
        after = {id(variable): scope.get_current_value(variable) for variable in self._variables}
        after.update((id(variable), value) for variable, value in zip(trainable, moved, strict=True))
        after.update((id(variable), value) for variable, value in zip(optimizer.variables, state, strict=True))
        return [after[id(variable)] for variable in self._variables], row_of_logs(logs, self._metrics)

    def _require_no_other_state(self) -> None:
        """Raise ConfigurationError if the step uses state that is not stacked, which all copies would share."""
        own = {id(stacked.handle) for stacked in self._stacked}
        others = [
            tensor for tensor in self._loop.captured_inputs if tensor.dtype.name == "resource" and id(tensor) not in own
        ]
        if others:
            raise ConfigurationError(
                "`side_by_side` must be 1 for a model with state outside of its layers' and its optimizer's variables. "
                f"Received: {len(others)} variables or tables that its step uses"
            )


def _repeated(value: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(value, (count, *value.shape))


def _make_stateless(optimizer: Any) -> None:
    """Replace the TensorFlow methods by which a built optimizer, or its inner one, updates variables by Keras' own.

    They are replaced in a base class, so that the optimizer's own class can still override them.
    """
    inner = inner_optimizer(optimizer)
    in_tensorflow, methods = stateless_methods()
    own = {"assign": _assign, "assign_add": _assign_add, "assign_sub": _assign_sub}
    base = type("StatelessOptimizer", (in_tensorflow,), methods | own)
    inner.__class__ = type(type(inner).__name__, (type(inner), base), {})


def _assign(self: Any, variable: keras.Variable, value: Any) -> None:
    import tensorflow as tf

    if isinstance(value, tf.IndexedSlices):
        raise NotImplementedError(f"{type(self).__name__} sets rows of {variable.name}")
    variable.assign(tf.cast(value, variable.dtype))


def _assign_add(self: Any, variable: keras.Variable, value: Any) -> None:
    variable.assign_add(_dense(value, variable.dtype))


def _assign_sub(self: Any, variable: keras.Variable, value: Any) -> None:
    variable.assign_sub(_dense(value, variable.dtype))


def _dense(value: Any, dtype: str) -> Any:
    """Return ``value`` as a dense tensor; the gradient of a table consists of rows."""
    import tensorflow as tf

    return tf.cast(tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value, dtype)
