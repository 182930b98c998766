"""The record batches that Spark sends to a task, and whether they are all that it meant to send.

An Arrow stream that is cut between two record batches reads like one that has ended. Spark cuts it whenever it gives up
on an attempt: when another attempt was faster, or when reading the input has failed. The task would see fewer rows, and
no error. Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import BinaryIO, cast

import pyarrow as pa

from distkeras.ps.errors import ConfigurationError


class CutStreamError(OSError):
    """Spark closed the connection to this task before it had sent all rows; it runs the task again if it needs to."""


class RecordStream:
    """Yields what Spark sends; raises `CutStreamError` in place of ending early.

    Args:
        records: what Spark hands the function of ``mapInArrow``.
        connection: what they are read from, from `connection_to_spark`.

    Attributes:
        broken: reading has failed. Spark knows why, and the parameter server need not.
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
            # After the last row Spark goes on to send the end of its own protocol, and keeps the connection open.
            if record is None and not self._connection.peek(1):  # type: ignore[attr-defined]  # it is buffered
                raise CutStreamError("Spark closed the connection before it had sent all rows of the partition.")
        except BaseException:
            self.broken = True
            raise
        if record is None:
            raise StopIteration
        return record


def connection_to_spark() -> BinaryIO:
    """Return what this Python worker reads from Spark; to be called in the thread that runs the task.

    PySpark has no public way to it. It is an argument of the worker's ``main``, which is on the stack.

    Raises:
        ConfigurationError: it is not there, so that lost rows could not be noticed.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only way to a caller's variables
    while frame is not None:
        if frame.f_code.co_name == "main" and hasattr(found := frame.f_locals.get("infile"), "peek"):
            return cast(BinaryIO, found)
        frame = frame.f_back
    import pyspark

    raise ConfigurationError(
        "PySpark must run tasks by `pyspark.worker.main(infile, outfile)`: without it, rows that are lost on the way "
        f"to a task could not be noticed. Received: PySpark {pyspark.__version__}"
    )
