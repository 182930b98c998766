"""Record streams: a stream that is cut between two record batches must not be mistaken for a complete one."""

from __future__ import annotations

import socket
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from distkeras.ps.errors import ConfigurationError
from distkeras.spark.record_stream import CutStreamError, RecordStream, connection_to_spark

RECORDS = [pa.record_batch({"x": list(range(start, start + 4))}) for start in (0, 4, 8)]


def stream_of(ended: bool, *, spark_follows: bool) -> RecordStream:
    """Return a stream over a socket, with Arrow's end marker if ``ended`` and Spark's protocol if ``spark_follows``."""
    ours, sparks = socket.socketpair()
    with sparks, sparks.makefile("wb") as out:
        writer = pa.ipc.new_stream(out, RECORDS[0].schema)
        for record in RECORDS:
            writer.write_batch(record)
        if ended:
            writer.close()
        if spark_follows:
            out.write(b"\xff\xff\xff\xfc")
    connection = ours.makefile("rb")
    return RecordStream(iter(pa.ipc.open_stream(connection)), connection)


def test_a_complete_stream_is_read_to_its_end() -> None:
    stream = stream_of(True, spark_follows=True)
    assert [record.num_rows for record in stream] == [4, 4, 4]
    assert not stream.broken


@pytest.mark.parametrize("ended", [False, True])
def test_a_cut_stream_raises_after_the_rows_that_it_contains(ended: bool) -> None:
    stream = stream_of(ended, spark_follows=False)
    rows = [next(stream).num_rows for _ in RECORDS]
    with pytest.raises(CutStreamError, match="before it had sent all rows"):
        next(stream)
    assert rows == [4, 4, 4]
    assert stream.broken


def test_a_connection_to_spark_is_an_error_outside_a_task() -> None:
    with pytest.raises(ConfigurationError, match="PySpark 4"):
        connection_to_spark()


def test_spark_cuts_the_stream_if_reading_the_input_fails(spark: SparkSession, tmp_path: Path) -> None:
    """This is Spark's behavior: the function of ``mapInArrow`` sees fewer rows, and its input raises no error."""
    seen = tmp_path / "seen"

    def count(records: object) -> object:
        stream = RecordStream(iter(records), connection_to_spark())  # type: ignore[call-overload]  # Spark's iterator
        rows = 0
        try:
            for record in stream:
                rows += record.num_rows
        except CutStreamError:
            seen.write_text(str(rows))
            raise
        yield pa.record_batch({"rows": [rows]})

    def rows_of(df: DataFrame) -> int:
        return df.mapInArrow(count, "rows long").collect()[0]["rows"]

    whole = spark.range(0, 30_000, 1, 1)
    assert rows_of(whole) == 30_000
    assert not seen.exists()
    late = F.when(F.col("id") == 25_000, F.raise_error(F.lit("unreadable")).cast("long")).otherwise(F.col("id"))
    with pytest.raises(Exception, match="unreadable"):
        rows_of(whole.select(late.alias("x")))
    assert seen.read_text() == "20000"
