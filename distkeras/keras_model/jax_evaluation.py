"""The states of loss and metrics of a mini-batch, from one compiled call of JAX.

``model.evaluate`` prepares an epoch each time it is called, which takes longer than a mini-batch of a small model.
Importing this module does not load JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import as_weight, flat_weight
from distkeras.keras_model.compiled_steps import as_fit_packs, is_own, model_inputs
from distkeras.keras_model.jax_steps import can_compile
from distkeras.private_keras import make_metrics

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch


def can_evaluate(model: keras.Model) -> bool:
    """Return whether `JaxEvaluation` can evaluate a model: on JAX, by Keras' own ``test_step``, compiled."""
    import keras

    return keras.backend.backend() == "jax" and not is_own(model, "test_step") and can_compile(model)


class JaxEvaluation:
    """A compiled ``model.test_step``, once per size of a mini-batch and kind of input.

    Args:
        model: one that `can_evaluate`.
        example: any mini-batch, from which the model makes its metrics.
    """

    def __init__(self, model: keras.Model, example: Batch) -> None:
        import jax

        data = model_inputs(model, example.x, example.y, example.weight)
        make_metrics(model, data)
        model.reset_metrics()
        self._model = model
        #: Each mini-batch begins with these.
        self._fresh = [np.array(variable) for variable in model.metrics_variables]
        self._changed: list[int] = []
        #: How often the step was traced, and so compiled.
        self.traces = 0
        self._step = jax.jit(self._states_of)

    def states(self, batch: Batch) -> Any:
        """Return the states of all metrics over one mini-batch, float32, flat; the call returns before they are there.

        As in ``evaluate``, random layers advance their seeds.
        """
        trainable, others = self._model.trainable_variables, self._model.non_trainable_variables
        values = [[variable.value for variable in variables] for variables in (trainable, others)]
        states, changed = self._step(*values, batch.x, batch.y, flat_weight(batch.weight))
        for place, value in zip(self._changed, changed, strict=True):
            others[place].assign(value)
        return states

    def _states_of(
        self, trainable: Sequence[Any], others: Sequence[Any], x: Sequence[Any], y: Sequence[Any], weight: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Return the states, and those of ``others`` that the step changes; traced."""
        import jax.numpy as jnp

        self.traces += 1
        data = as_fit_packs(*model_inputs(self._model, x, y, as_weight(weight)))
        fresh = [jnp.asarray(value) for value in self._fresh]
        _, (_, new, metrics) = self._model.test_step((list(trainable), list(others), fresh), data)
        self._changed = [place for place, (one, other) in enumerate(zip(new, others, strict=True)) if one is not other]
        states = [jnp.ravel(metric).astype(jnp.float32) for metric in metrics]
        return jnp.concatenate(states), [new[place] for place in self._changed]
