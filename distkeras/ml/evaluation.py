"""The loss and the metrics of a model over a DataFrame, as `keras.Model.evaluate` computes them, on executors.

The states of Keras' metrics are sums and counts, which add up over mini-batches. Where the loss of a mini-batch is a
mean over its rows, they add up over any parts of the rows, and one pass suffices. A sum, a mean over weights, a mask or
the user's own code makes the result depend on which rows share a mini-batch: these are then those of Keras, cut from
the rows in the order of the DataFrame, for which Spark moves the rows.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F

from distkeras.data.batches import Batch, DataSpec
from distkeras.data.columns import described
from distkeras.data.losses import has_own_step, kind_of
from distkeras.data.model_columns import example
from distkeras.data.schema import map_in_arrow, quoted, ready_columns
from distkeras.data.source import BatchSource
from distkeras.keras_model.compiled_steps import evaluate_batch, is_own, model_inputs
from distkeras.keras_model.jax_evaluation import JaxEvaluation, can_evaluate
from distkeras.keras_model.mapped_tables import MappedModel
from distkeras.keras_model.variables import layer_states, numpy_value
from distkeras.private_keras import losses_of_outputs, mask_of
from distkeras.ps.errors import ConfigurationError, EmptyDataError, headline
from distkeras.spark.task_process import prepare_task
from distkeras.transformers import expressions

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

_Load = Callable[[], "keras.Model | MappedModel"]
#: Of the latest evaluation in this process, in which Spark runs one task after another.
_SUMS: dict[str, MetricSums] = {}


def evaluated(model: keras.Model, df: DataFrame, spec: DataSpec, load: _Load) -> dict[str, Any]:
    """Return loss and metrics of ``df``, by name: floats, or an array for a metric of one number for each class.

    Args:
        model: compiled; its metrics are used for the results.
        spec: with the size of a mini-batch.
        load: returns the same model in a task.

    Raises:
        ConfigurationError: a metric is of the user's own class.
        EmptyDataError: there are no rows.
    """
    batch = example(spec)
    try:
        metric_states(model, batch)  # makes the metrics
    except Exception as error:  # backends, losses and metrics raise errors of any class
        raise ConfigurationError(
            "`keras_model` must have a loss and metrics that fit the data. "
            f"Received: {described(spec.columns)}: {headline(f'{type(error).__name__}: {error}')}"
        ) from error
    _require_additive(model)
    with expressions.typed_errors():
        ready = df.select(*ready_columns(df.schema.fields, spec))
        if _adds_up_by_rows(model, batch):
            states = _summed_states(ready, spec, load)
        else:
            with _by_batches(ready, spec.batch_size) as rows:
                states = _summed_states(rows, spec, load)
    if not states:
        raise EmptyDataError("`dataset` must have rows to evaluate on. Received: none")
    left = np.sum(states, axis=0)
    for variable in _metric_variables(model):
        size = int(np.prod(variable.shape))
        variable.assign(left[:size].reshape(variable.shape))
        left = left[size:]
    results = {name: np.asarray(value) for name, value in model.get_metrics_result().items()}
    return {name: value if value.ndim else float(value) for name, value in results.items()}


def metric_states(model: keras.Model, batch: Batch) -> np.ndarray:
    """Return the states of a compiled model's loss and metrics over one mini-batch, float64, flat.

    The mean of the loss of one of several outputs counts rows, so that states add up; in TensorFlow's graphs, it counts
    batches.
    """
    x, y, weight = model_inputs(model, batch.x, batch.y, batch.weight)
    model.reset_metrics()
    evaluate_batch(model, x, y, weight)
    rows = {id(v): len(batch.x[0]) / float(mean.count) for mean in losses_of_outputs(model) for v in mean.variables}
    states = [np.ravel(variable) * rows.get(id(variable), 1.0) for variable in _metric_variables(model)]
    return np.concatenate(states, dtype=np.float64)


def _metric_variables(model: keras.Model) -> list[Any]:
    """Return the states of loss and metrics, in an order that is the same for each copy of the model."""
    return [variable for metric in model.metrics for variable in metric.variables]


def _require_additive(model: keras.Model) -> None:
    """Raise unless the states of all metrics add up: those of Keras' own do, being sums and counts."""
    for metric in _single_metrics(model.metrics):
        if type(metric).__module__.split(".")[0] != "keras":
            raise ConfigurationError(
                "metrics must be Keras' own, or functions, to be evaluated on executors: the states of a class of your "
                f"own may not add up. Received: {metric.name!r} of {type(metric)}"
            )


def _single_metrics(metrics: Any) -> Iterator[Any]:
    for metric in metrics:
        if isinstance(getattr(metric, "metrics", None), list):
            yield from _single_metrics(metric.metrics)
        else:
            yield metric


def _adds_up_by_rows(model: keras.Model, batch: Batch) -> bool:
    """Return whether the loss of a mini-batch is a mean over its rows, of terms that depend on one row each."""
    import keras

    if batch.is_open:  # which rows share a mini-batch decides how far each is padded
        return False
    if has_own_step(model) or is_own(model, "test_step") or not all(map(_is_mean, keras.tree.flatten(model.loss))):
        return False
    x, _, _ = model_inputs(model, batch.x, (), None)
    outputs = keras.tree.flatten(model(x, training=False))
    regularized = [weight for weight in model.trainable_weights if getattr(weight, "regularizer", None) is not None]
    # The losses that layers add may be anything.
    return len(model.losses) == len(regularized) and all(mask_of(one) is None for one in outputs)


def _is_mean(loss: Any) -> bool:
    """Return whether a loss of a mini-batch is the mean of one that Keras computes for each row."""
    kind = kind_of(loss, ())
    means = ("sum_over_batch_size", "mean")  # what Keras makes of a name or a function is the first
    return kind.by_keras and kind.ignore_class is None and getattr(loss, "reduction", means[0]) in means


class MetricSums:
    """The sums of the states of a model's loss and metrics over mini-batches.

    Args:
        model: compiled.
    """

    def __init__(self, model: keras.Model | MappedModel) -> None:
        self._mapped = model if isinstance(model, MappedModel) else None
        self._model = model.rest if isinstance(model, MappedModel) else model
        self._compiles = can_evaluate(self._model)
        self._compiled: JaxEvaluation | None = None  # made of the first mini-batch
        self._sums: np.ndarray | None = None
        self._pending: Any = None  # the states of the last mini-batch, which may still be computed
        states = layer_states(self._model)
        self._states = [(variable, np.array(numpy_value(variable))) for variable in states]

    def begin(self) -> None:
        """Begin with no mini-batches, and with the layers' states as they were at first."""
        self._sums = self._pending = None
        for variable, value in self._states:
            variable.assign(value)

    def add(self, batch: Batch) -> None:
        """Add the states over one mini-batch."""
        if self._mapped is not None:
            batch = replace(batch, x=tuple(self._mapped.rest_inputs(batch.x)))
        if not self._compiles:
            self._add(metric_states(self._model, batch))
            return
        self._compiled = self._compiled or JaxEvaluation(self._model, batch)
        states = self._compiled.states(batch)
        self._add(self._pending)
        self._pending = states

    def total(self) -> np.ndarray | None:
        """Return the sums, float64, flat; None without mini-batches."""
        self._add(self._pending)
        self._pending = None
        return self._sums

    def _add(self, states: Any) -> None:
        if states is not None:
            found = np.asarray(states, np.float64)
            self._sums = found if self._sums is None else self._sums + found


def _summed_states(df: DataFrame, spec: DataSpec, load: _Load) -> list[np.ndarray]:
    """Return the sums of the states of each partition's mini-batches, computed by executors."""
    name = uuid.uuid4().hex

    def states_of(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_task()
        context = TaskContext.get()
        sums: MetricSums | None = None
        with BatchSource(records, spec, worker=context.partitionId() if context else 0) as source:
            for batch in source:
                sums = sums or sums_of(name, load)
                sums.add(batch)
        states = None if sums is None else sums.total()
        if states is not None:
            yield pa.RecordBatch.from_arrays([pa.array([states.tolist()], pa.list_(pa.float64()))], ["states"])

    return [np.array(row["states"]) for row in map_in_arrow(df, states_of, "states array<double>").collect()]


def sums_of(name: str, load: _Load) -> MetricSums:
    """Return this process' sums for an evaluation, empty: its tasks share a model, and what is compiled for it."""
    sums = _SUMS.get(name)
    if sums is None:
        _SUMS.clear()
        sums = _SUMS[name] = MetricSums(load())
    sums.begin()
    return sums


@contextmanager
def _by_batches(df: DataFrame, size: int) -> Iterator[DataFrame]:
    """Yield the rows in partitions of whole mini-batches, which are cut from all rows in the order of ``df``.

    The last mini-batch may be shorter. It is the last one of its partition, since it has the last rows. The rows are
    cached while they are counted and evaluated: partitions that are computed again may be others.
    """
    numbered = df.select(
        F.struct(*(F.col(quoted(name)) for name in df.columns)).alias("row"),
        F.spark_partition_id().alias("partition"),
        F.monotonically_increasing_id().alias("place"),  # 2 ** 33 times the partition, plus the row in it
    ).cache()
    try:
        counts = {row["partition"]: row["count"] for row in numbered.groupBy("partition").count().collect()}
        before = itertools.accumulate((counts.get(number, 0) for number in range(max(counts, default=0))), initial=0)
        first = F.lit(list(before))[F.col("partition")] - F.shiftleft(F.col("partition").cast("long"), 33)
        batches = numbered.withColumn("place", F.col("place") + first).withColumn(
            "batch", F.floor(F.col("place") / size)
        )
        yield batches.repartition("batch").sortWithinPartitions("place").select("row.*")
    finally:
        numbered.unpersist()
