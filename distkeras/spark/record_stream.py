"""The record batches that Spark sends to a task, and the check that none is missing.

An Arrow stream that is cut between two record batches looks like one that has ended. Spark cuts it whenever it gives up
on an attempt: when another attempt was faster, or when reading the input has failed. The task would receive fewer rows,
and no error. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import pyarrow as pa

from distkeras.ps.errors import ConfigurationError
from distkeras.spark.cluster import context_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: Spark's setting, which it reads when it plans a job, and again when it plans the rest of a job after a shuffle.
ROWS_SETTING = "spark.sql.execution.arrow.maxRecordsPerBatch"
#: The approximate size of a record batch at which the transfer from the JVM to Python is fastest.
_BATCH_BYTES = 4 << 20
_LEAST_ROWS, _SPARKS_ROWS = 16, 10_000


def rows_of_batch(row_bytes: int) -> int:
    """Return the number of rows of ``row_bytes`` in a record batch: at most Spark's default."""
    return max(_LEAST_ROWS, min(_SPARKS_ROWS, _BATCH_BYTES // row_bytes))


def in_sized_batches(df: DataFrame, row_bytes: int) -> DataFrame:
    """Return the same rows as a DataFrame that Spark sends to Python in batches of `rows_of_batch`.

    It belongs to a copy of its session with another setting: the user's session and its other jobs are not affected.
    ``df`` is returned unchanged if the user has set a size, and under Spark Connect, which has no such copy.
    """
    context = context_of(df.sparkSession)
    if context is None:
        return df
    session: Any = df.sparkSession._jsparkSession  # noqa: SLF001 - PySpark returns a setting's value, not whether it was set
    if session.sessionState().conf().contains(ROWS_SETTING):
        return df
    return in_session(df, copied_session(df.sparkSession, {ROWS_SETTING: str(rows_of_batch(row_bytes))}))


def copied_session(session: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """Return a copy of a classic session with other settings."""
    from pyspark.sql import SparkSession

    copy: Any = session._jsparkSession.cloneSession()  # noqa: SLF001 - PySpark has no public way to copy a session
    for name, value in settings.items():
        copy.conf().set(name, value)
    return SparkSession(session.sparkContext, copy)


def in_session(df: DataFrame, session: SparkSession) -> DataFrame:
    """Return the same rows as a DataFrame of another classic session of the same context."""
    from pyspark.sql import DataFrame

    jvm: Any = session.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to another session's DataFrame
    plan = df._jdf.logicalPlan()  # noqa: SLF001 - the same
    rows = jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan)  # noqa: SLF001 - the same
    return DataFrame(rows, session)


class MicroBatchSession:
    """A copy of the session of a stream, in which all of its micro-batches are planned.

    Its record batches have a good size, and Spark does not plan adaptively: the number of partitions is given, and
    adaptive planning would run another job for each shuffle.
    """

    def __init__(self) -> None:
        self._copy: SparkSession | None = None

    def take(self, df: DataFrame, row_bytes: int) -> DataFrame:
        """Return a micro-batch as a DataFrame of the copy; its rows have ``row_bytes`` each."""
        if self._copy is None:
            settings = {"spark.sql.adaptive.enabled": "false"}
            session: Any = df.sparkSession._jsparkSession  # noqa: SLF001 - whether a setting is set, as above
            if not session.sessionState().conf().contains(ROWS_SETTING):
                settings[ROWS_SETTING] = str(rows_of_batch(row_bytes))
            self._copy = copied_session(df.sparkSession, settings)
        return in_session(df, self._copy)


class CutStreamError(OSError):
    """Spark closed the connection to this task before it had sent all rows; it runs the task again if it needs to."""


class RecordStream:
    """Yields the record batches that Spark sends; raises `CutStreamError` if the stream was cut.

    After a failure it is ``broken``: Spark knows why, and the error is not reported to the parameter server.
    """

    def __init__(self, records: Iterator[pa.RecordBatch], connection: BinaryIO) -> None:
        self._records = records
        self._connection = connection
        self.broken = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            record = next(self._records, None)
            # After the last row Spark still sends the end of its own protocol, and keeps the connection open.
            if record is None and not self._connection.peek(1):  # type: ignore[attr-defined]  # it is buffered
                raise CutStreamError("Spark closed the connection before it had sent all rows of the partition.")
        except BaseException:
            self.broken = True
            raise
        if record is None:
            raise StopIteration
        return record


def connection_to_spark() -> BinaryIO:
    """Return this Python worker's connection to Spark. Call it in the thread that runs the task.

    PySpark has no public access to it. It is an argument of the worker's ``main``, which is on the stack.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only way to a caller's variables
    while frame is not None:
        if frame.f_code.co_name == "main" and hasattr(stream := frame.f_locals.get("infile"), "peek"):
            return cast("BinaryIO", stream)
        frame = frame.f_back
    import pyspark

    raise ConfigurationError(
        "PySpark must run tasks by `pyspark.worker.main(infile, outfile)`: without it, rows that are lost on the way "
        f"to a task could not be noticed. Received: PySpark {pyspark.__version__}"
    )
