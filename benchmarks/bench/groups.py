"""A model for each of many small groups, trained side by side, in `applyInPandas`, or in a loop of jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from bench.measure import Case, Factory
from bench.whole_job import WORKERS
from bench.workload import session, silent_trainer

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

    options = {"worker_optimizer": keras.optimizers.get(OPTIMIZER), "loss": "binary_crossentropy"}
    return silent_trainer(network, "agn", WORKERS, BATCH, EPOCHS, metrics=["accuracy"], **options)


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
    ours, naive = (partial(_rate, trainer, many, groups, **each) for each in ({"side_by_side": SIDE_BY_SIDE}, {}))
    name = f"{groups} groups of {ROWS} rows, {SIDE_BY_SIDE} side by side"
    note = f"{count} groups {MANY} times; naive: one after another; both with tracing in each Python worker"
    return Case(SECTION, name, "groups/s", ours, None, naive, once=True, note=note)


@contextmanager
def _small_groups(count: int) -> Iterator[list[Case]]:
    import keras

    # Spark sends local functions to executors by value; this module is not available there.
    def network() -> Any:
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

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
        name, ours = f"{count} groups of {ROWS} rows", partial(_rate, trainer, df, count)
        case_of = partial(Case, SECTION, unit="groups/s", ours=ours, limit=None, turns=2, once=True)
        note = f"naive: keras.fit in applyInPandas on {min(SAMPLE, count)} of the groups; both warm"
        loop_note = f"naive: `train` on the rows of one group after another, {JOBS - 1} of them; both warm"
        yield [
            case_of(name=name, naive=naive, target_naive=10.0, note=note),
            case_of(name=f"{name}, and a loop of jobs", naive=partial(_loop_of_jobs, trainer, df), note=loop_note),
            _side_by_side(trainer, df, count),
        ]
