"""How many rows Spark hands a worker at a time.

Spark's own default is a number of rows, however large they are, and from 4.1 on at most 64 MiB: ten thousand small
images are 31 MB, which a worker waits for before its first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distkeras.cluster.session import context_of
from distkeras.data.spec import DataSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's setting, which it reads when it plans a job, and again where it plans the rest of one after a shuffle.
ROWS_SETTING = "spark.sql.execution.arrow.maxRecordsPerBatch"
#: The approximate size of one record batch that passes fastest from the JVM to Python.
_BATCH_BYTES = 4 << 20
_LEAST_ROWS, _SPARKS_ROWS = 16, 10_000


def rows_of_batch(spec: DataSpec) -> int:
    """Return how many rows a record batch has for the columns of ``spec``: at most Spark's default."""
    row_bytes = sum(column.row_bytes for column in spec.columns)
    return max(_LEAST_ROWS, min(_SPARKS_ROWS, _BATCH_BYTES // row_bytes))


def in_sized_batches(df: DataFrame, spec: DataSpec) -> DataFrame:
    """Return the same rows as a DataFrame that Spark hands to Python in batches of `rows_of_batch`.

    It belongs to a copy of its session with another setting: the user's session and its other jobs stay as they are.
    ``df`` comes back as it is where the user has set a size, and under Spark Connect, which has no such copy.
    """
    context = context_of(df.sparkSession)
    if context is None:
        return df
    session: Any = df.sparkSession._jsparkSession  # noqa: SLF001 - PySpark tells the value of a setting, not whether it was set
    if session.sessionState().conf().contains(ROWS_SETTING):
        return df
    from pyspark.sql import DataFrame, SparkSession

    copy = session.cloneSession()
    copy.conf().set(ROWS_SETTING, str(rows_of_batch(spec)))
    jvm: Any = context._jvm  # noqa: SLF001 - PySpark has no public way to another session's DataFrame
    plan = df._jdf.logicalPlan()  # noqa: SLF001 - the same
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(copy, plan), SparkSession(context, copy))
