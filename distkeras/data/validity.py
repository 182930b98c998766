"""Rows that cannot be used, for example because of a null, found by the checks of training and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from distkeras.data.batches import DataSpec
from distkeras.data.schema import map_in_arrow, quoted, ready_columns
from distkeras.data.source import checked_columns
from distkeras.ps.errors import BadValueError, ConfigurationError, ShapeError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The column of `with_reasons` that holds the values as training reads them.
_READY = "__distkeras_ready"
#: The column of reasons, unless another name is given.
REASON = "reason"


def reasons(rows: int, convert: Callable[[int, int], Any]) -> list[str | None]:
    """Return for each row the error that converting ``[start, stop)`` raises; None for a row that can be used."""
    texts: list[str | None] = [None] * rows
    pending = [(0, rows)] if rows else []
    while pending:
        start, stop = pending.pop()
        try:
            convert(start, stop)
        except (BadValueError, ShapeError) as error:
            if stop - start == 1:
                texts[start] = str(error)
            else:
                middle = (start + stop) // 2
                pending += [(start, middle), (middle, stop)]
    return texts


def with_reasons(df: DataFrame, spec: DataSpec, name: str) -> DataFrame:
    """Return the rows with a new column of text, ``name``: the reason why the row cannot be trained on, or null."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    if name in df.columns or (not exact and name.casefold() in map(str.casefold, df.columns)):
        raise ConfigurationError(f"the reasons must have a new column. Received: {name!r}", column=name)

    def checked(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        worker, first_row = context.partitionId() if context else 0, 0
        for record in records:
            ready = pa.RecordBatch.from_struct_array(record.columns[-1])

            def check(start: int, stop: int, ready: pa.RecordBatch = ready, first_row: int = first_row) -> None:
                first = first_row + start
                step = first // spec.batch_size
                checked_columns(ready.slice(start, stop - start), spec, worker=worker, step=step, first_row=first)

            texts = pa.array(reasons(record.num_rows, check), pa.string())
            yield pa.RecordBatch.from_arrays([*record.columns[:-1], texts], names=[*record.schema.names[:-1], name])
            first_row += record.num_rows

    ready = F.struct(*ready_columns(df.schema.fields, spec)).alias(_READY)
    schema = StructType([*df.schema.fields, StructField(name, StringType())])
    return map_in_arrow(df.select("*", ready), checked, schema)


def valid_rows(df: DataFrame, spec: DataSpec) -> DataFrame:
    """Return the rows that can be trained on."""
    from pyspark.sql import functions as F

    reason = "__distkeras_reason"
    return with_reasons(df, spec, reason).where(F.col(reason).isNull()).drop(reason)


def invalid_rows(df: DataFrame, spec: DataSpec, name: str = REASON) -> DataFrame:
    """Return the rows that cannot be trained on, with the reason in a further column of text."""
    from pyspark.sql import functions as F

    return with_reasons(df, spec, name).where(F.col(quoted(name)).isNotNull())
