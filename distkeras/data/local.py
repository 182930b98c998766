"""Rows of a DataFrame on the driver, read and checked as the workers read theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distkeras.data.batches import Batch
from distkeras.data.ordering import partitioned
from distkeras.data.source import BatchSource
from distkeras.data.spec import DataSpec
from distkeras.spark.cluster import tasks_python
from distkeras.spark.failures import typed_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def collect(df: DataFrame, spec: DataSpec, most: int) -> Batch | None:
    """The columns of ``spec``, as one mini-batch; None for no rows.

    Of more than ``most`` rows it has as many, chosen as good as at random by their values and ``spec.seed``: the same
    ones each time.

    Args:
        df: any DataFrame.
        spec: of one epoch, without shuffling.
        most: rows, at least 1.

    Raises:
        BadValueError, ShapeError, MissingColumnError: as `source.BatchSource`.
        WorkerError: Spark cannot compute the rows.
    """
    from pyspark.errors import PySparkException

    ready = partitioned(df, spec, 1).limit(most)
    try:
        table = ready.toArrow()
    except PySparkException as error:
        raise typed_error(error, tasks_python(df.sparkSession)) from None
    with BatchSource(iter(table.to_batches()), spec, worker=0) as source:
        batches = list(source)
    if not batches:
        return None
    weights = [batch.weight for batch in batches if batch.weight is not None]
    return Batch(
        0,
        0,
        True,
        x=tuple(np.concatenate(parts) for parts in zip(*(batch.x for batch in batches), strict=True)),
        y=tuple(np.concatenate(parts) for parts in zip(*(batch.y for batch in batches), strict=True)),
        weight=np.concatenate(weights) if weights else None,
    )
