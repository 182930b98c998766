"""How many rows Spark hands a worker at a time.

Spark's own default is a number of rows, whatever they weigh, and from 4.1 on at most 64 MiB: ten thousand small images
are 31 MB, which a worker waits for before its first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distkeras.cluster.session import context_of
from distkeras.data.spec import DataSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The setting of Spark's, read when it plans a job, and again wherever it plans the rest anew.
ROWS_SETTING = "spark.sql.execution.arrow.maxRecordsPerBatch"
#: Of one record batch, about: as much as passes fastest from the JVM to Python.
_BATCH_BYTES = 4 << 20
_LEAST_ROWS, _SPARKS_ROWS = 16, 10_000


def rows_of_batch(spec: DataSpec) -> int:
    """Rows of a record batch for the columns of ``spec``, at most Spark's default."""
    row_bytes = sum(column.row_bytes for column in spec.columns)
    return max(_LEAST_ROWS, min(_SPARKS_ROWS, _BATCH_BYTES // row_bytes))


@contextlib.contextmanager
def sized_batches(session: SparkSession, spec: DataSpec) -> Iterator[None]:
    """Has Spark cut record batches of `rows_of_batch` for the jobs that begin within, where nobody has said how many.

    Other jobs of the session that begin meanwhile have them, too: more batches, of the same rows. A session of Spark
    Connect, which may refuse the setting, stays as it is.
    """
    context = context_of(session)
    if context is None or _is_set(session):
        yield
        return
    rows = str(rows_of_batch(spec))
    session.conf.set(ROWS_SETTING, rows)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # a session that has ended has no settings
            if session.conf.get(ROWS_SETTING) == rows:
                session.conf.unset(ROWS_SETTING)


def _is_set(session: SparkSession) -> bool:
    return bool(session._jsparkSession.sessionState().conf().contains(ROWS_SETTING))  # noqa: SLF001 - PySpark tells values, not whose they are
