"""Spark jobs with vectors that are rounded on the wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.training.spark_jobs import (
    accuracy,
    assert_nothing_left,
    counting_model,
    counting_rows,
    counts,
    image_classifier,
    total,
)

from distkeras import Network, Trainer
from distkeras.data import datasets
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.settings import grouped

ROWS = 61
BATCH, EPOCHS, WORKERS, SEEDS = 64, 3, 2, (0, 1)
SPARSE = "sparse_categorical_crossentropy"
#: The accuracy by which a mean over `SEEDS` may be below that of float32.
POINTS = 0.005


def counter(rule: str, **options: Any) -> Trainer:
    sgd = keras.optimizers.SGD(1.0)
    return Trainer(
        counting_model(ROWS), rule, worker_optimizer=sgd, loss=total, num_workers=2, batch_size=8, **grouped(options)
    )


@pytest.mark.slow
def test_every_row_counts_once_per_epoch(spark: SparkSession) -> None:
    """A payload of 1 is sent as 127 steps of 1/127, with float32 rounding in between."""
    trainer = counter("downpour", num_epoch=3, wire_format="int8")
    np.testing.assert_allclose(counts(trainer.train(counting_rows(spark, ROWS))), 3, rtol=0, atol=1e-4)
    assert {row["bytes"] for row in trainer.commits.collect()} == {ROWS + 4}
    assert_nothing_left()


@pytest.mark.parametrize(("rule", "wire_format"), [("aeasgd", "bfloat16"), ("adag", "int8"), ("agn", "float16")])
def test_a_wire_format_that_a_rule_excludes_is_refused_before_any_work(rule: str, wire_format: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`wire_format` must be .*wire_format='{wire_format}'"):
        counter(rule, wire_format=wire_format)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "window", "rate"), [("agn", 10, 0.3), ("downpour", 1, 0.1)])
def test_a_rounded_job_is_as_accurate_as_float32(
    name: str,
    window: int,
    rate: float,
    spark: SparkSession,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The learning rate falls to zero, so that the comparison does not depend on the noise of the last steps."""
    (x, y), (x_test, y_test) = datasets.fashion_mnist()
    x_test = x_test.astype(np.float32) / 255
    train = spark.read.parquet(datasets.write_parquet(tmp_path / "train", x, y, files=WORKERS))
    found: dict[str, list[float]] = {"float32": [], "bfloat16": [], "int8": []}
    for seed in SEEDS:
        for wire_format, accuracies in found.items():
            falling = keras.optimizers.schedules.CosineDecay(rate, EPOCHS * len(x) // (WORKERS * BATCH))
            trainer = Trainer(
                image_classifier(),
                make(name, window=window),
                worker_optimizer=keras.optimizers.SGD(falling),
                loss=SPARSE,
                num_workers=WORKERS,
                batch_size=BATCH,
                num_epoch=EPOCHS,
                seed=seed,
                network=Network(wire_format=wire_format),
            )
            accuracies.append(accuracy(trainer.train(train), x_test, y_test))
            assert_nothing_left()
    for wire_format, accuracies in found.items():
        record_property(wire_format, accuracies)
    plain = np.mean(found.pop("float32"))
    for wire_format, accuracies in found.items():
        assert np.mean(accuracies) > plain - POINTS, wire_format
