"""A task whose input fails in the middle sees fewer rows and no error; even then, no row may be lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import Row, SparkSession
from support.training.small_jobs import EPOCHS, ROWS, counter
from support.training.spark_jobs import counting_rows, counts

from distkeras.spark.record_stream import ROWS_SETTING


@pytest.mark.slow
def test_no_row_is_lost_if_reading_the_input_fails_once(spark: SparkSession, tmp_path: Path) -> None:
    rows, failed = counting_rows(spark, ROWS).coalesce(1), tmp_path / "failed"

    def unreliable(part: Iterable[Row]) -> Iterator[Row]:
        for number, row in enumerate(part):
            if number == ROWS // 2 and not failed.exists():
                failed.touch()
                raise OSError("this input fails once")
            yield row

    frame: Any = spark.createDataFrame(rows.rdd.mapPartitions(unreliable), rows.schema)
    spark.conf.set(ROWS_SETTING, "10")  # the stream is cut between two record batches
    try:
        model = counter(workers=1, partitioned_already=True).train(frame)
    finally:
        spark.conf.unset(ROWS_SETTING)
    assert failed.exists()
    np.testing.assert_array_equal(counts(model), np.full(ROWS, EPOCHS))
