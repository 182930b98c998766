"""Rows that cannot be used, found by what training and prediction do with them: a value that is null, for example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from distkeras.data.schema import map_in_arrow, quoted, ready_columns
from distkeras.data.source import checked_columns
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import BadValueError, ConfigurationError, ShapeError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The columns of `with_reasons` in which the values are as training reads them.
_READY, _REASON = "__distkeras_ready", "__distkeras_reason"
#: The column that tells why a row cannot be used, unless another name is given.
REASON = "reason"


def reasons(rows: int, convert: Callable[[int, int], Any]) -> list[str | None]:
    """Return, for each of so many rows, the error that its conversion raises; None for a row that can be used.

    Args:
        rows: number of rows.
        convert: converts the rows from a first one up to, not including, a last one. It raises BadValueError or
            ShapeError if one of them cannot be used.
    """
    found: list[str | None] = [None] * rows
    pending = [(0, rows)] if rows else []
    while pending:
        start, stop = pending.pop()
        try:
            convert(start, stop)
        except (BadValueError, ShapeError) as error:
            if stop - start == 1:
                found[start] = str(error)
            else:
                middle = (start + stop) // 2
                pending += [(start, middle), (middle, stop)]
    return found


def with_reasons(df: DataFrame, spec: DataSpec, name: str = REASON) -> DataFrame:
    """Return the rows with a further column of text: why the row cannot be trained on, or null.

    Args:
        df: the data.
        spec: the columns that training reads.
        name: of the new column.

    Raises:
        ConfigurationError: ``df`` has a column of that name.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    if name in df.columns:
        raise ConfigurationError(f"the reasons must have a new column. Received: {name!r}", column=name)
    names = [column.name for column in spec.columns]
    ready = F.struct(*ready_columns(df, names, spec.encoded, spec.whole)).alias(_READY)
    schema = StructType([*df.schema.fields, StructField(name, StringType())])
    return map_in_arrow(df.select("*", ready), _Validity(spec, name).run, schema)


def valid_rows(df: DataFrame, spec: DataSpec) -> DataFrame:
    """Return the rows that can be trained on."""
    from pyspark.sql import functions as F

    checked = with_reasons(df, spec, _REASON)
    return checked.where(F.col(_REASON).isNull()).drop(_REASON)


def invalid_rows(df: DataFrame, spec: DataSpec, name: str = REASON) -> DataFrame:
    """Return the rows that cannot be trained on, with the reason in a further column of text."""
    from pyspark.sql import functions as F

    return with_reasons(df, spec, name).where(F.col(quoted(name)).isNotNull())


@dataclass(frozen=True)
class _Validity:
    spec: DataSpec
    name: str

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function for ``mapInArrow``: the columns but the last, which has the values, and the reasons."""
        from pyspark import TaskContext

        context = TaskContext.get()
        worker, first_row = context.partitionId() if context else 0, 0
        for record in records:
            ready = pa.RecordBatch.from_struct_array(record.columns[-1])
            check = partial(self._check, ready, worker, first_row)
            texts = pa.array(reasons(record.num_rows, check), pa.string())
            names = [*record.schema.names[:-1], self.name]
            yield pa.RecordBatch.from_arrays([*record.columns[:-1], texts], names=names)
            first_row += record.num_rows

    def _check(self, rows: pa.RecordBatch, worker: int, first_row: int, start: int, stop: int) -> None:
        first = first_row + start
        step = first // self.spec.batch_size
        checked_columns(rows.slice(start, stop - start), self.spec, worker=worker, step=step, first_row=first)
