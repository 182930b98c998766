"""One traced replica for many groups, which is reset before each of them, and the weights of a group as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import DataSpec
from distkeras.data.columns import ColumnArrays
from distkeras.data.ordering import EpochOrder
from distkeras.keras_model.archive import read_config
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import fingerprint
from distkeras.keras_model.variables import distinct_variables, trainable_variables
from distkeras.ps.errors import NonFiniteError
from distkeras.ps.rules.base import CALL_STEPS_MAX

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch


class ReplicaOfGroups:
    """A model that is trained on one group after another, each time from its initial state.

    A model with a user's classes or functions is built again for each group: it may have state that is not in its
    variables.
    """

    def __init__(self, recipe: Recipe, model_file: bytes) -> None:
        self._recipe, self._model_file = recipe, model_file
        self._replica: KerasReplica | None = None
        self._initial: list[tuple[keras.Variable, np.ndarray]] = []

    def train(self, columns: ColumnArrays, spec: DataSpec) -> tuple[KerasReplica, np.ndarray]:
        """Train on the rows of one group, as a single machine would.

        Epoch ``e`` has the rows in the order ``numpy.random.default_rng((seed, 0, e)).permutation(rows)``, or in the
        order of arrival if `DataSpec.shuffle` is off.

        Args:
            columns: an array for each of ``spec.columns``, with all rows of the group.

        Returns:
            The trained replica, which the next call changes, and float64 ``(1 + metrics,)``: loss and metrics, means
            over the rows of the last epoch.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
            ConfigurationError: loss and metrics do not fit the data.
        """
        order = EpochOrder(spec, 0, CALL_STEPS_MAX)
        replica: KerasReplica | None = None
        means = np.zeros(0)
        for epoch in range(spec.epochs):
            cuts = list(order.cut(columns, 0, epoch))
            sums: Any = 0.0
            for first in range(0, len(cuts), CALL_STEPS_MAX):
                part = cuts[first : first + CALL_STEPS_MAX]
                batches = [
                    cut.batch(epoch, index, index + 1 == len(cuts)) for index, cut in enumerate(part, start=first)
                ]
                replica = self._reset_replica(batches[0]) if replica is None else replica
                steps = replica.train(batches)
                require_finite(steps[:, 0], epoch, first)
                sums = sums + (steps * [[batch.size] for batch in batches]).sum(axis=0)
            means = sums / len(columns[0])
        assert replica is not None
        return replica, means

    def _reset_replica(self, batch: Batch) -> KerasReplica:
        """Return a replica in the model's initial state."""
        if self._replica is not None and self._initial:
            for variable, value in self._initial:
                variable.assign(value.copy())  # a backend may keep a reference to the array, and write to it
            return self._replica
        replica = new_replica(self._recipe, self._model_file, batch)
        if all_state_is_in_variables(self._recipe, self._model_file, replica.model):
            self._replica, self._initial = replica, _values(replica.model)
        return replica


def new_replica(recipe: Recipe, model_file: bytes, batch: Batch) -> KerasReplica:
    """Return a replica in the model's initial state, prepared for ``batch``, with a built optimizer."""
    replica = KerasReplica(recipe.build(model_file, to_train=True))
    replica.prepare(batch)
    if not replica.model.optimizer.built:
        replica.model.optimizer.build(trainable_variables(replica.model))
    return replica


def all_state_is_in_variables(recipe: Recipe, model_file: bytes, model: keras.Model) -> bool:
    """Return whether a model that the recipe built consists only of Keras' own classes and functions."""
    return not recipe.objects and fingerprint(recipe, read_config(model_file), model) is not None


def _values(model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
    import keras

    return [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in distinct_variables(model)]


def require_finite(losses: np.ndarray, epoch: int, first: int) -> None:
    """Raise NonFiniteError unless the losses of consecutive steps are finite; ``first`` is the first step's number."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise NonFiniteError(
            f"the loss is {losses[bad[0]]} in epoch {epoch}. Lower the learning rate or clip gradients",
            step=first + int(bad[0]),
        )


def packed_weights(arrays: Sequence[np.ndarray]) -> bytes:
    """Return arrays as one byte string, each in C order and in its own dtype."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpacked_weights(data: bytes, kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray]:
    """Reverse `packed_weights`: return the arrays, read-only, given the shape and the dtype of each."""
    arrays, start = [], 0
    for shape, dtype in kinds:
        count = math.prod(shape)
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return arrays


def weights_of(model: keras.Model) -> bytes:
    """Return all weights of a model as one byte string, in the order of `keras.Model.weights`.

    Raises:
        NonFiniteError: a weight is NaN or infinite, as after a last step that diverged.
    """
    import keras

    arrays = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    require_finite_weights(arrays)
    return packed_weights(arrays)


def require_finite_weights(arrays: Sequence[np.ndarray]) -> None:
    """Raise NonFiniteError unless all weights of a model are finite."""
    for array in arrays:
        is_float = np.issubdtype(array.dtype, np.floating) or array.dtype.name.startswith(("bfloat", "float"))
        if is_float and not np.isfinite(array).all():
            raise NonFiniteError(
                "the weights are not finite after the last step. Lower the learning rate or clip gradients"
            )


def load_weights(model: keras.Model, data: bytes) -> None:
    """Set the weights of a model from what `weights_of` returned."""
    kinds = [(tuple(weight.shape), np.dtype(weight.dtype)) for weight in model.weights]
    for weight, value in zip(model.weights, unpacked_weights(data, kinds), strict=True):
        weight.assign(value.copy())  # a backend may keep a reference to the array
