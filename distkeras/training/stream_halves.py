"""The two halves of a stream's checkpoint: what the server's snapshots cover, and what Spark has recorded as done.

Spark never sends a micro-batch again that it has recorded as done. So a snapshot must cover all of these: otherwise the
model lacks their rows, also if no further row ever arrives.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.errors import DifferentJobError, SnapshotError, headline
from distkeras.ps.server.start_report import ResumePoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NUMBER = re.compile(r"\d+")


class QueryState(NamedTuple):
    """What Spark has recorded of a stream's query.

    Args:
        folder: Spark's own checkpoint, as a path for Hadoop.
        stream: the query's id; empty if it has never begun.
        done: number of the last micro-batch that is recorded as done; -1: none.
        planned: numbers of the micro-batches that Spark can still send again.
    """

    folder: str
    stream: str = ""
    done: int = NO_MICRO_BATCH
    planned: frozenset[int] = frozenset()


def query_state(spark: SparkSession, folder: str) -> QueryState:
    """Return what Spark has recorded in the ``folder`` of a query; SnapshotError if it cannot be read."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to Hadoop's file systems
    root = jvm.org.apache.hadoop.fs.Path(folder)
    try:
        files = root.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())  # noqa: SLF001 - the same

        def numbers(name: str) -> frozenset[int]:
            path = jvm.org.apache.hadoop.fs.Path(root, name)
            names = [str(status.getPath().getName()) for status in files.listStatus(path)] if files.exists(path) else []
            return frozenset(int(name) for name in names if _NUMBER.fullmatch(name))

        metadata = jvm.org.apache.hadoop.fs.Path(root, "metadata")
        stream = ""
        if files.exists(metadata):
            opened = files.open(metadata)
            try:
                stream = json.loads(jvm.org.apache.commons.io.IOUtils.toString(opened, "UTF-8"))["id"]
            finally:
                opened.close()
        return QueryState(folder, stream, max(numbers("commits"), default=NO_MICRO_BATCH), numbers("offsets"))
    except (Py4JJavaError, PySparkException, ValueError, LookupError, TypeError) as error:
        reason = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else headline(str(error))
        raise SnapshotError(f"Spark's part of the checkpoint, {folder!r}, cannot be read: {reason}") from error


def covered_by(point: ResumePoint | None) -> int:
    """Return the number of the last micro-batch that a snapshot covers completely; -1: none."""
    if point is None:
        return NO_MICRO_BATCH
    return point.micro_batch if point.complete else max(NO_MICRO_BATCH, point.micro_batch - 1)


def require_same_halves(point: ResumePoint | None, query: QueryState, uri: str) -> None:
    """Raise DifferentJobError if the snapshots are of another stream, or have rows that Spark would send again.

    That they have all rows which Spark has recorded as done is required of every server that is started: see `missing`.
    """
    begun = NO_MICRO_BATCH if point is None else point.micro_batch
    if point is not None and begun != NO_MICRO_BATCH and query.stream != point.stream:
        found = f"that of stream {query.stream!r}" if query.stream else "none"
        raise DifferentJobError(
            f"the stream must be the one that the checkpoint covers, {point.stream!r}, with Spark's part of it in "
            f"{query.folder!r}. Received: {found}. {_RESTORE}"
        )
    if query.done + 1 < begun:
        raise DifferentJobError(
            f"`checkpoint` must have two parts of the same time. Received: {uri!r}, whose snapshots contain "
            f"{_named(query.done + 1, begun)}, which Spark has not recorded as done and would send again. {_RESTORE}"
        )


def missing(covered: int, query: QueryState, uri: str) -> DifferentJobError:
    """Return the error for snapshots that cover micro-batches up to ``covered``, fewer than Spark's records name."""
    first = covered + 1
    again = ""
    if first in query.planned:
        again = (
            f". Or let Spark send these rows again: in {query.folder!r}, remove the files of `commits` from number "
            f"{first} on, and those of `offsets` from number {first + 1} on"
        )
    return DifferentJobError(
        f"`checkpoint` must have two parts of the same time. Received: {uri!r}, in which no snapshot that can be read "
        f"has the rows of {_named(first, query.done)}, while Spark has recorded them as done. {_RESTORE}{again}"
    )


_RESTORE = (
    "Restore the folders `center` and `query` from one backup, or train again with an empty checkpoint (see the page "
    "on streams, What must stay the same)"
)


def _named(first: int, last: int) -> str:
    return f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
