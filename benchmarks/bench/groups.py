"""A model for each of many small groups, trained side by side, in `applyInPandas`, or in a loop of jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from bench.measure import Case, Factory
from bench.workload import WORKERS, session

SECTION = "groups"
#: Rows of a group, numbers of a row, rows of a mini-batch, epochs; the model has 161 numbers.
ROWS, FEATURES, BATCH, EPOCHS = 200, 8, 32, 5
#: The number of groups that `applyInPandas` trains: all of them would take several minutes.
SAMPLE = 200
#: Jobs of the loop, the first of which is not timed.
JOBS = 6
#: For the comparison of groups side by side: a factor on the number of groups, and the groups in one step.
MANY, SIDE_BY_SIDE = 4, 64
OPTIMIZER = {"class_name": "Adam", "config": {"learning_rate": 1e-2}}


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_small_groups, 40 if quick else 1000)]


def _rows(count: int) -> pd.DataFrame:
    """Return the rows of ``count`` groups, each with its own separating plane."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count * ROWS, FEATURES)).astype(np.float32)
    shop = np.repeat(np.arange(count), ROWS)
    label = ((x * rng.normal(size=(count, FEATURES))[shop]).sum(axis=1) > 0).astype(np.int64)
    return pd.DataFrame({"shop": shop, "features": x.tolist(), "label": label})


def _trainer(network: Any) -> Any:
    import keras

    from distkeras import Monitoring, Trainer

    return Trainer(
        network,
        "agn",
        worker_optimizer=keras.optimizers.get(OPTIMIZER),
        loss="binary_crossentropy",
        metrics=["accuracy"],
        num_workers=WORKERS,
        batch_size=BATCH,
        num_epoch=EPOCHS,
        monitoring=Monitoring(progress=False),
    )


def _loop_of_jobs(trainer: Any, df: Any) -> float:
    """Train on one group after another; return groups a second, without the first one."""
    seconds = []
    for shop in range(JOBS):
        began = time.perf_counter()
        trainer.train(df.where(df.shop == shop))
        seconds.append(time.perf_counter() - began)
    return (JOBS - 1) / sum(seconds[1:])


def _rate(trainer: Any, df: Any, count: int, **options: Any) -> float:
    """Train a model for each of ``count`` groups; return groups a second."""
    began = time.perf_counter()
    trainer.train_groups(df, by="shop", **options).weights.write.format("noop").mode("overwrite").save()
    return count / (time.perf_counter() - began)


def _side_by_side(trainer: Any, df: Any, count: int) -> Case:
    """Return the case of more groups, with stacked weights and without."""
    from pyspark.sql import functions as F

    copies = df.withColumn("copy", F.explode(F.array(*map(F.lit, range(MANY)))))
    many = copies.withColumn("shop", F.col("shop") * MANY + F.col("copy")).drop("copy").repartition(WORKERS).cache()
    groups = many.select("shop").distinct().count()
    return Case(
        SECTION,
        f"{groups} groups of {ROWS} rows, {SIDE_BY_SIDE} side by side",
        "groups/s",
        partial(_rate, trainer, many, groups, side_by_side=SIDE_BY_SIDE),
        None,
        partial(_rate, trainer, many, groups),
        once=True,
        note=f"{count} groups {MANY} times; naive: one after another; both with tracing in each Python worker",
    )


@contextmanager
def _small_groups(count: int) -> Iterator[list[Case]]:
    import keras

    # Spark sends local functions to executors by value; this module is not available there.
    def network() -> Any:
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
        return keras.Sequential(layers)

    def fit_group(group: pd.DataFrame) -> pd.DataFrame:
        model = network()
        model.compile(keras.optimizers.get(OPTIMIZER), "binary_crossentropy", metrics=["accuracy"])
        x, y = np.stack(group["features"].to_numpy()), group["label"].to_numpy()
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        data = b"".join(array.tobytes() for array in model.get_weights())
        return pd.DataFrame({"shop": [group["shop"].iloc[0]], "weights": [data]})

    with session() as spark:
        df = spark.createDataFrame(_rows(count), "shop long, features array<float>, label long")
        df = df.repartition(WORKERS).cache()
        df.count()
        trainer = _trainer(network())

        def naive(groups: int = min(SAMPLE, count)) -> float:
            began = time.perf_counter()
            rows = df.where(df.shop < groups).repartition(4 * WORKERS, "shop")
            result = rows.groupBy("shop").applyInPandas(fit_group, "shop long, weights binary")
            result.write.format("noop").mode("overwrite").save()
            return groups / (time.perf_counter() - began)

        # The start of the Python workers would count more for fewer groups, so neither side is timed with it.
        _rate(trainer, df.where(df.shop < 4 * WORKERS), 4 * WORKERS)
        naive(min(4 * WORKERS, count))
        case = Case(
            SECTION,
            f"{count} groups of {ROWS} rows",
            "groups/s",
            partial(_rate, trainer, df, count),
            None,
            naive,
            target_naive=10.0,
            turns=2,
            once=True,
            note=f"naive: keras.fit in applyInPandas on {min(SAMPLE, count)} of the groups; both warm",
        )
        note = f"naive: `train` on the rows of one group after another, {JOBS - 1} of them; both warm"
        loop = replace(
            case,
            name=f"{case.name}, and a loop of jobs",
            naive=partial(_loop_of_jobs, trainer, df),
            target_naive=None,
            note=note,
        )
        yield [case, loop, _side_by_side(trainer, df, count)]
