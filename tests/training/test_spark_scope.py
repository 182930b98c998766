"""Spark jobs of a training run in its caller's job group and pool, with the caller's description."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.patience import patience, until
from support.training.small_jobs import ROWS, counter
from support.training.spark_jobs import assert_nothing_left, counting_rows

from distkeras.callbacks import Callback, CallbackContext
from distkeras.ps.errors import DistkerasError


class RecordsItsJobGroup(Callback):
    """A callback that records the job group of its thread, and then ends the job."""

    every_commits = 1

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.found: set[str | None] = set()

    def on_center(self, context: CallbackContext) -> None:
        self.found.add(self._spark.sparkContext.getLocalProperty("spark.jobGroup.id"))
        context.stop("seen")


@contextlib.contextmanager
def job_group(spark: SparkSession, name: str, **properties: str) -> Any:
    context = spark.sparkContext
    context.setJobGroup(name, "what the user calls it")
    for key, value in properties.items():
        context.setLocalProperty(key, value)
    try:
        yield
    finally:
        for key in (*properties, "spark.jobGroup.id", "spark.job.description"):
            context.setLocalProperty(key, None)  # type: ignore[arg-type]  # None removes the property


@pytest.mark.slow
def test_the_jobs_of_a_training_have_its_callers_group(spark: SparkSession) -> None:
    callback = RecordsItsJobGroup(spark)
    rows = counting_rows(spark, ROWS)
    with job_group(spark, "the user's group"):
        counter(num_epoch=100_000).train(rows, callbacks=[callback])
    tracker = spark.sparkContext.statusTracker()
    until(lambda: len(tracker.getJobIdsForGroup("the user's group")) >= 1)  # another thread updates it
    assert callback.found == {"the user's group"}
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None


@pytest.mark.slow
def test_a_cancelled_group_ends_the_training(spark: SparkSession) -> None:
    rows = counting_rows(spark, ROWS)
    begun = threading.Event()

    class SetsBegun(Callback):
        every_commits = 1

        def on_center(self, context: CallbackContext) -> None:
            begun.set()

    def cancel() -> None:
        if begun.wait(patience(120)):
            spark.sparkContext.cancelJobGroup("to be cancelled")

    canceler = threading.Thread(target=cancel)
    canceler.start()
    with job_group(spark, "to be cancelled"), pytest.raises(DistkerasError, match="cancel"):
        counter(num_epoch=100_000).train(rows, callbacks=[SetsBegun()])
    canceler.join(patience(60))
    assert_nothing_left()
