"""Act 3: an Embedding of a million rows, of which two workers exchange only the rows that they touch."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quickstart import pictures
from quickstart.machine import WORKERS
from quickstart.plain_keras import best_of, rates
from quickstart.stage import ActResult, Stage, steady_rate, steps_of

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

BATCH_SIZE = 512
#: Ids of a row, and the width of the table.
IDS, WIDTH = 4, 16
EPOCHS = 4
#: Rows that no training sees.
_TEST_ROWS = 20_000
#: Mini-batches of an epoch in which `fit` is measured: with a million rows, each takes a tenth of a second.
_MEASURED_BATCHES = 6


def build(rows: int, steps_per_execution: int = 1) -> keras.Model:
    """Return a compiled classifier over rows of ids, with one table."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    ids = keras.Input((IDS,), dtype="int32", name="features")
    vectors = layers.Flatten()(layers.Embedding(rows, WIDTH, name="ids")(ids))
    score = layers.Dense(1, activation="sigmoid")(layers.Dense(32, activation="relu")(vectors))
    model = keras.Model(ids, score, name="act_3_wide_table")
    optimizer = keras.optimizers.Adagrad(0.02, initial_accumulator_value=1e-5)
    options = {"metrics": ["accuracy"], "steps_per_execution": steps_per_execution}
    model.compile(optimizer, "binary_crossentropy", **options)
    return model


def draw(table_rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 ids ``(count, IDS)``, few of which are frequent and most rare, and float32 labels ``(count,)``.

    Each id has a number, drawn once; the sum of a row's four decides how probable the label 1 is.
    """
    rng = np.random.default_rng(0)
    ids = (table_rows * rng.random((count, IDS)) ** 8).astype(np.int32)
    scores = rng.normal(size=table_rows)[ids].sum(axis=1)
    return ids, (rng.random(count) < 1 / (1 + np.exp(-2 * scores))).astype(np.float32)


def wide_table(stage: Stage) -> ActResult:
    """Measure `fit` for some mini-batches, and train with two workers."""
    size = stage.size
    ids, labels = draw(size.table_rows, size.events + _TEST_ROWS)
    x, y = ids[: size.events], labels[: size.events]
    measured = _MEASURED_BATCHES * BATCH_SIZE
    tried = rates(partial(build, size.table_rows), x[:measured], y[:measured], BATCH_SIZE)
    best = best_of(tried)

    trainer = stage.trainer(build(size.table_rows), BATCH_SIZE, EPOCHS)
    began = time.monotonic()
    model = trainer.train(_frame(stage.spark, x, y))
    seconds = time.monotonic() - began
    stage.trainers.append(trainer)
    rate = steady_rate(steps_of(trainer))
    test = ids[size.events :], labels[size.events :]
    accuracy = float(model.evaluate(*test, batch_size=BATCH_SIZE, verbose=0, return_dict=True)["accuracy"])
    traveled = trainer.commits.selectExpr("avg(table_rows) AS rows").toPandas()["rows"][0]

    megabytes = 4e-6 * size.table_rows * WIDTH
    table = f"a table of {size.table_rows:,} rows ({megabytes:.0f} MB)"
    picture = pictures.speeds(
        {**{f"fit, {each.label}": each.rows_per_second for each in tried}, f"{WORKERS} workers": rate},
        f"rows per second with a table of {size.table_rows:,} rows",
        stage.picture("3-wide-table"),
    )
    return ActResult(
        title="A table of a million rows",
        line=f"fit at its best {best.rows_per_second:,.0f} rows/s ({best.label}); two workers {rate:,.0f} rows/s: an "
        f"exchange has {traveled:,.0f} of {size.table_rows:,} rows",
        picture=picture,
        alt="Rows per second of fit and of two workers with the table",
        notes=[
            f"An Embedding of {size.table_rows:,} rows of {WIDTH} numbers, Adagrad, mini-batches of {BATCH_SIZE} rows "
            f"with {IDS} ids each. Plain Keras copies {table} at every step; it was measured for {measured:,} rows.",
            f"The workers trained {EPOCHS} epochs of {len(x):,} rows in {seconds:.1f} s with the start. At its rate, "
            f"fit would take {EPOCHS * len(x) / best.rows_per_second:,.0f} s. Accuracy on {_TEST_ROWS:,} new rows: "
            f"{accuracy:.1%}, with half of the labels 1.",
        ],
        read="docs/guide/wide-tables.md",
        figures={
            "fit": [vars(each) for each in tried],
            "workers_rows_per_second": rate,
            "workers_seconds": seconds,
            "accuracy": accuracy,
            "table_rows_in_a_commit": traveled,
        },
        problems=[] if traveled else ["the table must travel by rows. Received: commits without rows of a table"],
    )


def _frame(spark: SparkSession, x: np.ndarray, y: np.ndarray) -> DataFrame:
    """Return a DataFrame of ``features array<int>, label float``."""
    import pyarrow as pa

    starts = pa.array(np.arange(len(x) + 1, dtype=np.int32) * np.int32(x.shape[1]))
    features = pa.ListArray.from_arrays(starts, pa.array(x.ravel()))
    return spark.createDataFrame(pa.table({"features": features, "label": pa.array(y)}))
