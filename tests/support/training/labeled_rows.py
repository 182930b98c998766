"""Rows with valid and invalid labels, and a training on them."""

from __future__ import annotations

from typing import Any

import keras
from pyspark.sql import DataFrame, SparkSession

from distkeras import Trainer
from support.training.spark_jobs import wrong_model

SPARSE = "sparse_categorical_crossentropy"
SCHEMA = "features array<float>, label int"
BATCH = 4
#: The rows have two classes.
GOOD = [([float(number), 1.0], number % 2) for number in range(20)]


def train(df: DataFrame, model: keras.Model | None = None, rule: str = "downpour", **options: Any) -> keras.Model:
    defaults: dict[str, Any] = {"loss": SPARSE, "num_workers": 2, "batch_size": BATCH}
    return Trainer(model or wrong_model(), rule, **defaults | options).train(df)


def frame(spark: SparkSession, rows: list[Any], schema: str = SCHEMA) -> Any:
    return spark.createDataFrame(rows, schema)
