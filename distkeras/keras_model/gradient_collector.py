"""A Keras optimizer that keeps the gradient instead of applying it.

It turns a model's own training step into a source of gradients on every Keras backend, so that compiled losses, sample
weights, metrics, moving statistics and mixed precision count exactly as they do in training. Importing this module
imports Keras: load it only once the backend is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


class GradientCollector(keras.optimizers.Optimizer):
    """Stores each gradient in a variable of its own and leaves the weights alone.

    ``apply`` is overridden as a whole, not only ``update_step``: Keras' own goes on to apply weight constraints, which
    move weights, and leaves out variables without a gradient, whose stored value would then be an old one.

    Args:
        like: optimizer whose gradient clipping and static loss scale are taken over. Both change the gradient itself;
            momentum, weight decay and whatever else moves weights is not taken over.
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
        """Makes one variable for the gradient of each of ``variables``."""
        if not self.built:
            super().build(variables)
            self.gradients = [self.add_variable_from_reference(v, name="gradient") for v in variables]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stores ``grads`` (one a variable, None where the loss does not depend on it, which is stored as zeros)."""
        if not self.built:
            self.build(list(trainable_variables or ()))
        scale = self.loss_scale_factor
        variables = self._trainable_variables
        dense = [_dense(gradient, variable) for gradient, variable in zip(grads, variables, strict=True)]
        if scale is not None:
            dense = [gradient / scale for gradient in dense]
        for store, gradient in zip(self.gradients, self._clip_gradients(dense), strict=True):
            self.assign(store, keras.ops.cast(gradient, store.dtype))
        self._iterations.assign_add(1)


def _dense(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return keras.ops.zeros(variable.shape, dtype=variable.dtype)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Embeddings: assigning index slices would overwrite, not add up, rows that occur twice.
        if isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
    return gradient
