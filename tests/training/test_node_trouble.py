"""A machine without memory or disk space: the attempt ends, and the job only when Spark has no attempt left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import pytest
from pyspark.sql import SparkSession
from support.training.spark_jobs import (
    assert_nothing_left,
    counting_model,
    counting_rows,
    counts,
    once_at_step,
    step_callback_layer,
    total,
)

from distkeras import Trainer
from distkeras.ps.errors import NodeError

pytestmark = pytest.mark.timeout(120)

ROWS, BATCH, EPOCHS = 41, 4, 2


@pytest.fixture(autouse=True)
def nothing_left(spark: SparkSession) -> Iterator[None]:
    yield
    assert_nothing_left()


def fill_a_disk() -> None:
    Path("/dev/full").write_text("a metric")


def fill_the_memory() -> None:
    bytearray(1 << 62)


# Functions of `__main__`, like those of a notebook, travel by value.
fill_a_disk.__module__ = fill_the_memory.__module__ = "__main__"


def trainer(action: Callable[[int], None]) -> Trainer:
    return Trainer(
        counting_model(ROWS, step_callback_layer(action)),
        "downpour",
        worker_optimizer=keras.optimizers.SGD(1.0),
        loss=total,
        num_workers=2,
        batch_size=BATCH,
        num_epoch=EPOCHS,
    )


# `ps/test_errors` tests which errors are a node's.
@pytest.mark.parametrize("trouble", [fill_a_disk, pytest.param(fill_the_memory, marks=pytest.mark.slow)])
def test_an_error_of_the_node_ends_only_the_attempt(
    spark: SparkSession, tmp_path: Path, trouble: Callable[[], None]
) -> None:
    job = trainer(once_at_step(tmp_path / "done", 4, trouble))
    model = job.train(counting_rows(spark, ROWS))
    assert (tmp_path / "done").exists()
    assert counts(model) == [EPOCHS] * ROWS
    (event,) = job.events.where("kind = 'node'").collect()
    assert event["worker"] in (0, 1)
    assert event["attempt"] is not None


@pytest.mark.slow
def test_an_error_of_the_node_in_the_last_attempt_ends_the_job(spark: SparkSession) -> None:
    def always(step: int) -> None:
        if step == 3:
            fill_a_disk()

    with pytest.raises(NodeError, match=r"Errno 28.*last attempt") as caught:
        trainer(always).train(counting_rows(spark, ROWS))
    assert caught.value.worker in (0, 1)
    # It is the fourth step of the last attempt, which continues where the earlier one had ended.
    assert caught.value.step in range(6)
