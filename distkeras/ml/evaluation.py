"""Loss and metrics of a model over a DataFrame, in one pass of the executors: as `keras.Model.evaluate` has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distkeras.data.batches import Batch
from distkeras.data.columns import arrow_ready, map_in_arrow
from distkeras.data.source import BatchSource
from distkeras.data.spec import DataSpec
from distkeras.keras_model.inputs import model_inputs
from distkeras.keras_model.recipe import Recipe
from distkeras.ps.errors import ConfigurationError, EmptyDataError
from distkeras.transformers import expressions
from distkeras.transformers.serving import Archive

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

#: What a partition sends: the states of all metrics, one after the other.
_SCHEMA = "states array<double>"


@dataclass(frozen=True)
class EvaluationTask:
    """What an executor needs.

    Args:
        archive: where the model is.
        recipe: how it is compiled.
        spec: columns and batch size.
    """

    archive: Archive
    recipe: Recipe
    spec: DataSpec

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function for ``mapInArrow``: the states of one partition's metrics, or nothing for no rows."""
        from pyspark import TaskContext

        context = TaskContext.get()
        model: keras.Model | None = None
        states = np.zeros(())
        with BatchSource(records, self.spec, worker=context.partitionId() if context else 0) as source:
            for batch in source:
                if model is None:
                    model = self.recipe.build(self.archive.read())
                states = states + metric_states(model, batch)
        if model is not None:
            yield pa.RecordBatch.from_arrays([pa.array([states.tolist()], pa.list_(pa.float64()))], ["states"])


def metric_states(model: keras.Model, batch: Batch) -> np.ndarray:
    """The states of a compiled model's loss and metrics over one mini-batch in inference mode, float64, flat."""
    x, y, weight = model_inputs(model, batch.x, batch.y, batch.weight)
    model.reset_metrics()
    model.test_on_batch(x, y, sample_weight=weight)
    return np.concatenate([np.ravel(variable) for variable in metric_variables(model)]).astype(np.float64)


def metric_variables(model: keras.Model) -> list[Any]:
    """The states of loss and metrics, in an order that is the same for each copy of the model."""
    return [variable for metric in model.metrics for variable in metric.variables]


def require_additive(model: keras.Model) -> None:
    """Checks that the states of all metrics add up: those of Keras' own do, being sums and counts.

    Args:
        model: compiled, and called on data once, before which Keras does not make the metrics.

    Raises:
        ConfigurationError: a metric of the user's own class, of which nobody can know.
    """
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


def evaluate(df: DataFrame, task: EvaluationTask, model: keras.Model) -> dict[str, float]:
    """Loss and metrics over ``df``, by name.

    Args:
        df: the data, with the columns of ``task.spec``.
        task: for the executors.
        model: compiled by the task's recipe, its metrics made and reset.

    Raises:
        EmptyDataError: no rows.
        BadValueError, ShapeError: a row that cannot be evaluated.
    """
    ready = arrow_ready(df, (column.name for column in task.spec.columns), task.spec.encoded, task.spec.whole)
    with expressions.typed_errors():
        rows = map_in_arrow(ready, task.run, _SCHEMA).collect()
    if not rows:
        raise EmptyDataError("`dataset` must have rows to evaluate on. Received: none")
    total = np.sum([row["states"] for row in rows], axis=0)
    for variable in metric_variables(model):
        size = int(np.prod(variable.shape))
        variable.assign(total[:size].reshape(variable.shape))
        total = total[size:]
    return {name: float(value) for name, value in model.get_metrics_result().items()}
