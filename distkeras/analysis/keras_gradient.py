"""A Keras model and its data as the gradient of a vector: what the simulator's virtual workers train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch, flat_weight
from distkeras.data.binding import GivenColumns, GivenEntries
from distkeras.data.column_kinds import float_dtype
from distkeras.data.model_columns import data_spec
from distkeras.data.schema import require_dataframe
from distkeras.data.source import collect
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import BadValueError, ConfigurationError, EmptyDataError, ShapeError
from distkeras.ps.validate import require_boolean, require_integer
from distkeras.spark.failures import short_errors
from distkeras.training.requirements import require_fit

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

ModelArrays = np.ndarray | Sequence[np.ndarray]

#: Rows that `KerasGradient.from_dataframe` reads, and `evaluate` predicts, at a time.
_ROWS = 2000


class KerasGradient:
    """Compute mini-batch gradients of a Keras model, as ``gradient(theta, worker)`` for `distkeras.simulate`.

    ::

        gradient = KerasGradient(model, x, y, loss="sparse_categorical_crossentropy", batch_size=64, workers=8)
        trace = simulate("dana_slim", gradient.theta0, gradient, workers=8, learning_rate=0.02,
                         timing=Gamma(), steps=2000, dtype=np.float32)
        gradient.evaluate(trace.theta, x_test, y_test)    # {"loss": 0.41, ...}
        trained = gradient.model_with(trace.theta)        # a keras.Model

    Every worker has its own sequence of mini-batches, with a permutation of its rows for each epoch, which depends only
    on the seed and the worker. Each call uses the worker's next mini-batch, so an object serves one simulation, and
    another one after `restart`. One replica of the model serves all workers, so memory does not grow with their number,
    except for 4 bytes per row and worker (per row, with ``split``). Parameters are computed in the model's precision.

    Moving statistics (BatchNormalization) are updated by the mini-batches of all workers in the order of the calls.
    Random layers (Dropout) draw from the seed, with one stream for all workers. Under PyTorch this holds only for
    layers with a seed of their own: Keras lets the others draw from its global generator.

    Args:
        model: a built `keras.Model`. It is not changed.
        x: the inputs, one array or one for each, each of shape ``(rows, ...)``.
        y: the targets, in the same form; class numbers for the sparse cross-entropy.
        loss, metrics: as in `keras.Model.compile`. Default: the model's own.
        batch_size: rows of a mini-batch; the last one of an epoch may be shorter.
        workers: number of virtual workers.
        seed: seed of the mini-batches and of random layers, not negative.
        sample_weight: one number per row that scales its loss, shape ``(rows,)``, or one for each time step.
        split: whether each row belongs to one worker, as in a Spark job. Default: each worker trains on all rows.
        custom_objects: classes and functions of the model, by registered name.

    Raises:
        ConfigurationError: An argument is invalid, or model, loss and data do not fit.
        ShapeError: The arrays differ in their numbers of rows.
        EmptyDataError: There are no rows.
        BadValueError: ``x`` has a NaN or infinity.
    """

    @short_errors
    def __init__(  # noqa: PLR0913 - the arguments of `compile` and of a job, by their keywords
        self,
        model: keras.Model,
        x: ModelArrays,
        y: ModelArrays,
        *,
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        seed: int = 0,
        sample_weight: np.ndarray | None = None,
        split: bool = False,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        batch_size, workers = require_integer("batch_size", batch_size), require_integer("workers", workers)
        seed, split = require_integer("seed", seed, 0), require_boolean("split", split)
        self.x, self.y = _as_fit(x), _as_fit(y)
        self.sample_weight = None if sample_weight is None else np.asarray(sample_weight, float_dtype())
        self.batch_size, self.workers, self.seed, self.split = batch_size, workers, seed, split
        self.rows = _count_rows(self.x, self.y, self.sample_weight)
        if split and workers > self.rows:
            raise ConfigurationError(f"`workers` must be at most the rows. Received: {workers} for {self.rows} rows")
        for number, array in enumerate(self.x):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadValueError(f"`x` must be finite. Received: a NaN or infinity in input {number}")
        self._file = archive.to_bytes(model)
        # Plain SGD: the rule, or the simulator, takes the steps.
        self._recipe = recipe_of(model, self._file, optimizer="sgd", loss=loss, metrics=metrics, objects=custom_objects)
        self._replica = KerasReplica(self._recipe.build(self._file))
        self._replica.settings = self._recipe.settings
        self._vector = self._replica.layout.empty()
        self._gradient = self._replica.layout.empty()
        self.theta0 = self._replica.layout.empty()
        """The model's weights, float32 of shape ``(size,)``."""
        self._replica.read(self.theta0)
        self._initial_states = [self._initial_state(*v) for v in enumerate(self._replica.model.non_trainable_variables)]
        self._batches_taken = [0] * workers
        self.restart()
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        require_fit(self._replica, self.batch(0, 0), [array.shape for array in (*self.x, *self.y)])

    @classmethod
    @short_errors
    def from_dataframe(
        cls,
        model: keras.Model,
        df: DataFrame,
        *,
        features_col: GivenColumns = "features",
        label_col: GivenEntries = "label",
        sample_weight_col: GivenEntries = None,
        max_bytes: int = 1 << 30,
        **options: Any,
    ) -> KerasGradient:
        """Create a gradient from columns of a Spark DataFrame, which are read, checked and ordered as by the trainer.

        All rows are collected on the driver, in an order that depends only on their values and ``seed``.

        Args:
            model: as for the class.
            df: any DataFrame.
            features_col, label_col, sample_weight_col: as for `Trainer`.
            max_bytes: largest size of the arrays; the driver holds them up to three times for a while.
            options: the class's other keywords: ``loss``, ``batch_size``, ``workers`` and so on.

        Raises:
            ConfigurationError: The arrays are larger than ``max_bytes``, or an argument of the class is invalid.
        """
        require_dataframe("df", df)
        max_bytes = require_integer("max_bytes", max_bytes)
        model_file = archive.to_bytes(model)
        given: dict[str, Any] = {"loss": options.get("loss"), "metrics": options.get("metrics")}
        recipe = recipe_of(model, model_file, optimizer="sgd", objects=options.get("custom_objects"), **given)
        spec = data_spec(
            recipe.build(model_file),
            df.schema,
            rows=df,
            features=features_col,
            labels=label_col,
            weight=sample_weight_col,
            batch_size=_ROWS,
            seed=options.get("seed", 0),
            shuffle=False,
        )
        if isinstance(spec.sample_weight, tuple) or len(spec.targets) < len(model.outputs):
            raise ConfigurationError(
                "a `KerasGradient` needs labels of each output, and one column of weights at most. "
                f"Received: label_col={label_col}, sample_weight_col={sample_weight_col}"
            )
        most = max_bytes // spec.row_bytes
        rows = collect(df, spec, most + 1)
        if rows.size > most:
            raise ConfigurationError(
                f"`df` must fit into max_bytes={max_bytes}, which is {most} rows of these columns. Received: more"
            )
        (weight,) = flat_weight(rows.weight) or (None,)
        return cls(model, list(rows.x), list(rows.y), sample_weight=weight, **options)

    @property
    def size(self) -> int:
        """The number of elements of the flat weight vector."""
        return self._replica.size

    @property
    def batches_per_epoch(self) -> int:
        """The number of mini-batches per epoch of worker 0; another worker may have one fewer."""
        return self._batches_of(0)

    def __call__(self, theta: np.ndarray, worker: int) -> np.ndarray:
        """Return the gradient of ``worker``'s next mini-batch: the mean over its rows, as the loss is compiled.

        Args:
            theta: float32 or float64 of shape ``(size,)``; neither changed nor kept.
            worker: in [0, workers).

        Returns:
            A new array like ``theta``.
        """
        if not 0 <= worker < self.workers:
            raise ConfigurationError(f"`worker` must be in [0, {self.workers}). Received: worker={worker}")
        self._load(theta)
        self._replica.gradient(self.batch(worker, self._batches_taken[worker]), self._gradient)
        self._batches_taken[worker] += 1
        return self._gradient.astype(theta.dtype)

    def batch(self, worker: int, number: int) -> Batch:
        """Return mini-batch ``number`` of ``worker``, both from 0, which depends only on these and the seed."""
        count = self._batches_of(worker)
        epoch, index = divmod(number, count)
        if self._orders.get(worker, (-1,))[0] != epoch:
            order = np.random.default_rng((self.seed, worker, epoch)).permutation(self._rows_of(worker))
            if self.split:
                order = order * self.workers + worker
            self._orders[worker] = (epoch, order.astype(np.uint32 if self.rows < 2**32 else np.int64))
        rows = self._orders[worker][1][index * self.batch_size : (index + 1) * self.batch_size]
        return Batch(
            epoch,
            index,
            index == count - 1,
            x=tuple(array[rows] for array in self.x),
            y=tuple(array[rows] for array in self.y),
            weight=None if self.sample_weight is None else self.sample_weight[rows],
        )

    def restart(self) -> None:
        """Reset every worker's mini-batches, the random states and the moving statistics to the beginning."""
        self._batches_taken = [0] * self.workers
        for variable, value in zip(self._replica.model.non_trainable_variables, self._initial_states, strict=True):
            variable.assign(value)

    def model_with(self, theta: np.ndarray) -> keras.Model:
        """Return a new compiled model with these weights, and the moving statistics as they are now."""
        self._load(theta)
        replica = KerasReplica(self._recipe.build(self._file))
        replica.load(self._vector)
        moving = self._replica.moving_statistics.empty()
        self._replica.read_moving_statistics(moving)
        replica.load_moving_statistics(moving)
        return replica.model

    def loss(self, theta: np.ndarray) -> float:
        """Return the loss at ``theta`` in inference mode, mean over all rows (regularization included)."""
        return self.evaluate(theta)["loss"]

    def evaluate(
        self,
        theta: np.ndarray,
        x: ModelArrays | None = None,
        y: ModelArrays | None = None,
        sample_weight: np.ndarray | None = None,
    ) -> dict[str, float]:
        """Return loss and metrics at ``theta`` in inference mode, by name.

        Args:
            theta: float32 or float64 of shape ``(size,)``.
            x, y, sample_weight: data as for the class. Default: the data of this object.
        """
        if (x is None) != (y is None):
            raise ConfigurationError("`x` and `y` must be given both or not at all. Received: one of them")
        if x is None or y is None:
            x, y, sample_weight = self.x, self.y, self.sample_weight
        self._load(theta)
        arrays = _as_fit(x), _as_fit(y)
        weight = None if sample_weight is None else np.asarray(sample_weight, float_dtype())
        _count_rows(*arrays, weight)
        return self._replica.evaluate(Batch(0, 0, True, *arrays, weight), _ROWS)

    def _initial_state(self, number: int, variable: Any) -> np.ndarray:
        value = np.array(variable)
        if variable.name == "seed_generator_state":  # files of models do not hold it
            value[...] = np.random.default_rng((self.seed, number)).integers(0, 2**31, value.shape)
        return value

    def _load(self, theta: np.ndarray) -> None:
        if theta.shape != self._vector.shape:
            raise ConfigurationError(f"`theta` must have shape {self._vector.shape}. Received: {theta.shape}")
        self._vector[...] = theta
        self._replica.load(self._vector)

    def _rows_of(self, worker: int) -> int:
        return len(range(worker, self.rows, self.workers)) if self.split else self.rows

    def _batches_of(self, worker: int) -> int:
        return -(-self._rows_of(worker) // self.batch_size)


def _as_fit(arrays: ModelArrays) -> tuple[np.ndarray, ...]:
    """Return a tuple, with floats in the dtype of `float_dtype`."""
    several = (arrays,) if isinstance(arrays, np.ndarray) else tuple(map(np.asarray, arrays))
    return tuple(array.astype(float_dtype()) if array.dtype.kind == "f" else array for array in several)


def _count_rows(x: Sequence[np.ndarray], y: Sequence[np.ndarray], weight: np.ndarray | None) -> int:
    shapes = [array.shape for array in (*x, *y, *(() if weight is None else (weight,)))]
    if not x or not all(shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ShapeError(f"`x`, `y` and `sample_weight` must have equally many rows. Received: shapes {shapes}")
    if not shapes[0][0]:
        raise EmptyDataError("`x` must have rows. Received: none")
    return int(shapes[0][0])
