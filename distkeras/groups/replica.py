"""Replicas that are trained on many groups: one that is reset before each, and a stack that takes several at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distkeras.data.batches import DataSpec, flat_weight
from distkeras.data.columns import ColumnRows
from distkeras.data.model_columns import example
from distkeras.data.ordering import EpochOrder, row_order
from distkeras.keras_model.archive import read_config
from distkeras.keras_model.compiled_steps import CALL_BYTES_MAX
from distkeras.keras_model.jax_stacks import JaxStack
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import fingerprint
from distkeras.keras_model.stacked_models import StackedModels
from distkeras.keras_model.variables import distinct_variables, numpy_value, trainable_variables
from distkeras.ps.errors import ConfigurationError, NonFiniteError
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

    def train(self, columns: ColumnRows, spec: DataSpec) -> tuple[KerasReplica, np.ndarray]:
        """Train on the rows of one group, as a single machine would.

        Epoch ``e`` has the rows in the order ``numpy.random.default_rng((seed, 0, e)).permutation(rows)``, or in the
        order of arrival if `DataSpec.shuffle` is off. Return the trained replica, which the next call changes, and
        float64 ``(1 + metrics,)``: loss and metrics, means over the rows of the last epoch.
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
            self._replica = replica
            self._initial = [(each, np.array(numpy_value(each))) for each in distinct_variables(replica.model)]
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


#: Models that train side by side, by Keras' backend.
STACKS: dict[str, type[JaxStack | StackedModels]] = {"jax": JaxStack, "tensorflow": StackedModels}
#: The most bytes of the variables of all models in a stack. A step needs several times as much.
_STACK_BYTES_MAX = 256 << 20


class CommonSteps(NamedTuple):
    """Mini-batches of one size that several groups of a stack take at once.

    Args:
        places: the groups' numbers, ascending.
        first: number of the first mini-batch within the epoch.
        steps: mini-batches of each group.
        size: rows of a mini-batch.
    """

    places: np.ndarray
    first: np.ndarray
    steps: int
    size: int


class GroupsSideBySide:
    """A stack of models that is trained on up to ``count`` groups at once, each time from the model's initial state."""

    def __init__(self, recipe: Recipe, model_file: bytes, spec: DataSpec, count: int) -> None:
        if recipe.backend not in STACKS:
            raise ConfigurationError(
                f"`side_by_side` needs Keras' backend to be one of {sorted(STACKS)}. Received: {recipe.backend!r}"
            )
        replica = new_replica(recipe, model_file, example(spec))
        model = replica.model
        if not all_state_is_in_variables(recipe, model_file, model):
            raise ConfigurationError(
                "`side_by_side` needs a model of Keras' own classes and functions: others may have state that is not "
                f"in their variables. Received: side_by_side={count} with model={model.name!r}"
            )
        if spec.is_open:
            raise ConfigurationError(
                "`side_by_side` needs rows of one length, since groups share arrays. "
                f"Received: side_by_side={count} with a model whose inputs are of any length"
            )
        if model.run_eagerly:
            raise ConfigurationError("`side_by_side` needs a compiled step. Received: a model with run_eagerly=True")
        require_small_stack(replica.nbytes, count)
        self._spec, self._count = spec, count
        stack = STACKS[recipe.backend]
        self._models = stack(model, example(spec), replica.reported, len(replica.metric_names), count)

    def train(self, groups: Sequence[ColumnRows]) -> list[tuple[bytes, np.ndarray] | NonFiniteError]:
        """Train on the rows of some groups, each as `ReplicaOfGroups.train` does up to rounding.

        Return for each group the weights of its model, as `packed_weights` makes them, and its loss and metrics; or an
        error if one of its losses is not finite.
        """
        counts = np.array([len(columns[0]) for columns in groups])
        columns = tuple(map(np.concatenate, zip(*groups, strict=True)))
        starts = np.cumsum(counts) - counts
        errors: dict[int, NonFiniteError] = {}
        sums = np.zeros(0)
        self._models.reset()
        for epoch in range(self._spec.epochs):
            orders = [
                start + row_order(self._spec, 0, epoch, count) for start, count in zip(starts, counts, strict=True)
            ]
            sums = self._train_epoch(columns, orders, epoch, errors)
        arrays = self._models.weights()
        means = sums / counts[:, None]
        for place in range(len(groups)):
            try:
                require_finite_weights([array[place] for array in arrays])
            except NonFiniteError as error:
                errors.setdefault(place, error)
        return [
            errors[place] if place in errors else (packed_weights([array[place] for array in arrays]), means[place])
            for place in range(len(groups))
        ]

    def _train_epoch(
        self, columns: ColumnRows, orders: Sequence[np.ndarray], epoch: int, errors: dict[int, NonFiniteError]
    ) -> np.ndarray:
        """Train an epoch; return float64 ``(groups, metrics)``: sums over rows. Groups with errors are left out."""
        sums: np.ndarray | None = None
        for common in self._common_steps([len(order) for order in orders]):
            healthy = [number for number, place in enumerate(common.places) if int(place) not in errors]
            if not healthy:
                continue
            places, first = common.places[healthy], common.first[healthy]
            rows = _rows_of(orders, common._replace(places=places, first=first), self._spec.batch_size)
            x, y, weight = self._spec.sides(tuple(column[rows] for column in columns))
            steps = self._models.train(places.astype(np.int32), [*x, *y, *flat_weight(weight)])
            sums = np.zeros((len(orders), steps.shape[2])) if sums is None else sums
            sums[places] += steps.sum(axis=0) * common.size
            for number, place in enumerate(places.tolist()):
                try:
                    require_finite(steps[:, number, 0], epoch, int(first[number]))
                except NonFiniteError as error:
                    errors[place] = error
        return np.zeros((len(orders), 1)) if sums is None else sums

    def _common_steps(self, counts: Sequence[int]) -> Iterator[CommonSteps]:
        """Yield the results of `common_steps`, cut so that each fits into one call."""
        for common in common_steps(counts, self._spec.batch_size):
            step_bytes = len(common.places) * common.size * self._spec.row_bytes
            most = max(1, min(CALL_STEPS_MAX, CALL_BYTES_MAX // step_bytes))
            for done in range(0, common.steps, most):
                yield common._replace(first=common.first + done, steps=min(most, common.steps - done))


def common_steps(counts: Sequence[int], batch_size: int) -> Iterator[CommonSteps]:
    """Cut an epoch of groups with ``counts`` rows: each group takes its own mini-batches in order, exactly once.

    Mini-batches are not padded: full ones come first, as long as a group has any; then the last, shorter ones, grouped
    by size.
    """
    rows = np.asarray(counts)
    whole, rest = rows // batch_size, rows % batch_size
    first = 0
    for last in np.unique(whole[whole > 0]).tolist():
        places = np.flatnonzero(whole >= last)
        yield CommonSteps(places, np.full(len(places), first), last - first, batch_size)
        first = last
    for size in np.unique(rest[rest > 0]).tolist():
        places = np.flatnonzero(rest == size)
        yield CommonSteps(places, whole[places], 1, size)


def _rows_of(orders: Sequence[np.ndarray], common: CommonSteps, batch_size: int) -> np.ndarray:
    """Return int64 ``(steps, groups, size)``: the numbers of the rows that ``common`` takes."""
    parts = []
    for place, first in zip(common.places, common.first * batch_size, strict=True):
        parts.append(orders[place][first : first + common.steps * common.size].reshape(common.steps, common.size))
    return np.stack(parts, axis=1)


def require_small_stack(model_bytes: int, count: int) -> None:
    """Raise ConfigurationError if the variables of ``count`` models, with their optimizers, take too much memory."""
    most = max(1, _STACK_BYTES_MAX // model_bytes)
    if count > most:
        raise ConfigurationError(
            f"`side_by_side` must be at most {most} for this model, whose variables take "
            f"{math.ceil(model_bytes / 1024)} KiB with the optimizer's: all of a stack's may take "
            f"{_STACK_BYTES_MAX >> 20} MiB. Received: side_by_side={count}"
        )
