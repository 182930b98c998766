"""Act 5: a trained model predicts all rows of a DataFrame."""

from __future__ import annotations

import time
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from distkeras.transformers import ModelPredictor
from quickstart import pictures
from quickstart.machine import WORKERS
from quickstart.stage import ActResult, Stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH_SIZE = 1024
#: Largest difference of two predictions of a row: both are float32, from products that are summed in different orders.
TOLERANCE = 1e-4


def scoring(stage: Stage) -> ActResult:
    """Predict all images from Parquet to Parquet, and as arrays; compare speeds and predictions."""
    images, model, spark, times = stage.images, stage.model, stage.spark, stage.size.scored
    assert model is not None, "act 1 has trained it"
    predictor = ModelPredictor(model, batch_size=BATCH_SIZE)
    scored = stage.out / "scored"

    def score(frame: DataFrame) -> float:
        began = time.monotonic()
        predictor.transform(frame).select("label", "prediction").write.mode("overwrite").parquet(str(scored))
        return time.monotonic() - began

    score(spark.read.parquet(str(images.test_folder)))  # Both Python workers load and trace the model.
    once = spark.read.parquet(str(images.train_folder), str(images.test_folder))
    seconds = score(reduce(type(once).union, [once] * times))

    model.predict(images.x_test, batch_size=BATCH_SIZE, verbose=0)
    began = time.monotonic()
    x = _matrix(once, "features")
    fetched = time.monotonic()
    expected = model.predict(x, batch_size=BATCH_SIZE, verbose=0)
    predicted = time.monotonic()

    rows = len(x)
    rates = {
        "model.predict, arrays in memory": rows / (predicted - fetched),
        "model.predict, after fetching the rows from Spark": rows / (predicted - began),
        f"{WORKERS} workers, from Parquet to Parquet": times * rows / seconds,
    }
    plain, _, ours = rates.values()
    found = difference(_matrix(spark.read.parquet(str(scored)), "prediction"), expected, times)
    return ActResult(
        title="Scoring all rows",
        line=f"model.predict {plain:,.0f} rows/s on arrays in memory; ModelPredictor {ours:,.0f} rows/s from Parquet "
        "to Parquet, with the same predictions",
        picture=pictures.speeds(rates, "rows scored per second", stage.picture("5-scoring")),
        alt="Rows scored per second by model.predict and by two workers",
        notes=[
            f"{times * rows:,} images, batches of {BATCH_SIZE}, the model of act 1. The predictions are in the folder "
            f"scored. The largest difference from those of model.predict is {found:.0e}.",
            "On one machine with the arrays in memory, model.predict is the faster way. ModelPredictor does not fetch "
            "the rows, and uses all executors.",
        ],
        read="docs/guide/inference.md",
        figures={"rows": times * rows, "rows_per_second": rates, "largest_difference": found},
        problems=problems(found),
    )


def difference(ours: np.ndarray, expected: np.ndarray, times: int) -> float:
    """Return the largest difference of the predictions of the same rows, whose order may differ.

    Each of those that are expected must occur ``times`` times in ours; infinity for another number of them.
    """
    if len(ours) != times * len(expected):
        return float("inf")
    return float(np.abs(np.sort(ours, axis=0) - np.sort(np.tile(expected, (times, 1)), axis=0)).max())


def problems(found: float) -> list[str]:
    """Return what is wrong with the largest difference of two predictions."""
    if found <= TOLERANCE:
        return []
    return [f"ModelPredictor must predict as model.predict, to {TOLERANCE:g}. Received: a difference of {found:g}"]


def _matrix(frame: DataFrame, column: str) -> np.ndarray:
    """Return a column of arrays as float32 ``(n, width)``."""
    lists = frame.select(column).toArrow()[column].combine_chunks()
    values: np.ndarray = lists.flatten().to_numpy().astype(np.float32, copy=False).reshape(len(lists), -1)
    return values
