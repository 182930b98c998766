"""Gradients from a model's own training step, by an optimizer that keeps them instead of applying them.

So compiled losses, sample weights, metrics, moving statistics and mixed precision act exactly as they do in training,
on every Keras backend. Importing this module imports Keras: choose the backend before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.variables import VariableVector, select
from distkeras.private_keras import clipped, moved_variables, step_count


class GradientCollector(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras' classes have no types
    """Stores each gradient in a variable of its own and leaves the weights alone.

    ``apply`` is overridden as a whole, not only ``update_step``: Keras' own also applies weight constraints, which
    move weights, and skips variables without a gradient, whose stored value would then be stale.

    Args:
        like: optimizer whose gradient clipping and static loss scale are taken over. Both change the gradient itself;
            momentum, weight decay and all else that moves weights are not taken over.
    """

    gradients: list[Any]

    def __init__(self, like: keras.optimizers.Optimizer) -> None:
        super().__init__(
            learning_rate=0.0,
            clipnorm=like.clipnorm,
            clipvalue=like.clipvalue,
            global_clipnorm=like.global_clipnorm,
            loss_scale_factor=like.loss_scale_factor,
            name="gradient_collector",
        )

    def build(self, variables: Sequence[Any]) -> None:
        """Make one variable for the gradient of each of ``variables``."""
        if not self.built:
            super().build(variables)
            self.gradients = [self.add_variable_from_reference(v, name="gradient") for v in variables]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Store ``grads``, one for each variable; None, where the loss does not depend on it, is stored as zeros."""
        if not self.built:
            self.build(list(trainable_variables or ()))
        scale = self.loss_scale_factor
        dense = [_dense(gradient, variable) for gradient, variable in zip(grads, moved_variables(self), strict=True)]
        if scale is not None:
            dense = [gradient / scale for gradient in dense]
        for store, gradient in zip(self.gradients, clipped(self, dense), strict=True):
            self.assign(store, keras.ops.cast(gradient, store.dtype))
        step_count(self).assign_add(1)


class CollectingOptimizer:
    """An optimizer that replaces a model's own for a step, and stores the gradient in variables.

    It takes the memory of a vector of the model's size.

    Args:
        model: compiled.
        variables: the model's trainable variables, in its own order.
        order: for each place in the gradient's vector, the number of the variable; None: all, in the same order.
    """

    def __init__(
        self, model: keras.Model, variables: Sequence[keras.Variable], order: Sequence[int] | None = None
    ) -> None:
        own = model.optimizer
        self._model = model
        self._scales_loss = isinstance(own, keras.optimizers.LossScaleOptimizer)
        self._collector = GradientCollector(inner_optimizer(own))
        self._optimizer = (
            keras.optimizers.LossScaleOptimizer(
                self._collector, initial_scale=own.initial_scale, dynamic_growth_steps=own.dynamic_growth_steps
            )
            if self._scales_loss
            else self._collector
        )
        self._optimizer.build(variables)
        self._train_function: Any = None  # Keras compiles one for each optimizer
        gradients = self._collector.gradients
        #: The gradient of the last step that was not skipped.
        self.gradient = VariableVector(gradients if order is None else select(gradients, order))

    @property
    def variables(self) -> list[keras.Variable]:
        """Return its variables: step counts, the loss scale, the gradient."""
        return list(self._optimizer.variables)

    @property
    def steps(self) -> int | None:
        """Return the number of steps that did not overflow; None without loss scaling, where no step is skipped."""
        return int(self._collector.iterations) if self._scales_loss else None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install this optimizer in the model for the duration of the context."""
        model = self._model
        own = model.optimizer, model.train_function
        model.optimizer, model.train_function = self._optimizer, self._train_function
        try:
            yield
        finally:
            self._train_function = model.train_function
            model.optimizer, model.train_function = own


def _dense(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return keras.ops.zeros(variable.shape, dtype=variable.dtype)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # The gradient of an Embedding: assigning index slices would overwrite duplicate rows instead of adding them up.
        if isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
    return gradient
