"""Act 4: a model for each of many groups of rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from quickstart import pictures
from quickstart.machine import WORKERS
from quickstart.stage import ActResult, Stage

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

BATCH_SIZE, EPOCHS, FEATURES = 32, 5, 8
LEARNING_RATE = 1e-2
#: Steps of one execution of `fit`: an epoch of a group has fewer.
_STEPS = 10

#: Rows of a group: float32 ``(n, FEATURES)``, int64 ``(n,)``.
Group = tuple[np.ndarray, np.ndarray]


def build(steps_per_execution: int = 1) -> keras.Model:
    """Return a compiled model of 161 weights."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    options = {"metrics": ["accuracy"], "steps_per_execution": steps_per_execution}
    model.compile(keras.optimizers.Adam(LEARNING_RATE), "binary_crossentropy", **options)
    return model


def draw(groups: int, rows: int) -> list[Group]:
    """Return the rows of each group, which has a separating plane of its own."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(groups):
        x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
        drawn.append((x, (x @ rng.normal(size=FEATURES) > 0).astype(np.int64)))
    return drawn


def many_groups(stage: Stage) -> ActResult:
    """Train a model for each group by `train_groups`, and some of them by `fit`."""
    size = stage.size
    drawn = draw(size.groups, size.group_rows)
    afresh, reset = seconds_of_new_models(drawn[: size.fits]), seconds_of_one_model(drawn[: 2 * size.fits])

    frame = _frame(stage.spark, drawn)
    trainer = stage.trainer(build(), BATCH_SIZE, EPOCHS)
    began = time.monotonic()
    table = trainer.train_groups(frame, by="shop").table.toPandas()
    seconds = time.monotonic() - began

    accuracies = table["metrics"].map(lambda metrics: metrics["accuracy"] if metrics else 0.0).tolist()
    bars = {"a model built for each": size.groups * afresh, "one model, reset for each": size.groups * reset}
    bars = {f"fit, {name}": value for name, value in bars.items()} | {"train_groups": seconds}
    picture = pictures.many_groups(bars, 2, accuracies, stage.picture("4-many-groups"))
    trained = int(table["error"].isna().sum())
    figures = {"fit_new_model_seconds_a_group": afresh, "fit_one_model_seconds_a_group": reset}
    figures |= {"train_groups_seconds": seconds, "trained": trained, "mean_accuracy": float(np.mean(accuracies))}
    return ActResult(
        title=f"A model for each of {size.groups} groups",
        line=f"a loop of fit {size.groups * reset:,.0f} s at its best (extrapolated from {2 * size.fits} groups); "
        f"train_groups {seconds:.1f} s for all {size.groups}, mean accuracy {np.mean(accuracies):.1%}",
        picture=picture,
        alt="Seconds for all groups by fit and by train_groups, and the accuracies of the models",
        notes=_notes(size.groups, size.group_rows, afresh, reset),
        read="docs/guide/groups.md",
        figures=figures,
        problems=problems(trained, size.groups),
    )


def problems(trained: int, groups: int) -> list[str]:
    """Return what is wrong with the number of groups that have a model."""
    return [] if trained == groups else [f"each of {groups} groups must have a model. Received: {trained}"]


def _notes(groups: int, rows: int, afresh: float, reset: float) -> list[str]:
    return [
        f"{groups} groups of {rows} rows with {FEATURES} numbers, {EPOCHS} epochs, Adam, mini-batches of {BATCH_SIZE}. "
        "train_groups has two Python workers, which build the model once; its time is from the call to the result.",
        f"fit takes {afresh:.2f} s for a group with a new model, and {reset:.2f} s with one model whose weights and "
        f"optimizer are reset, both with {_STEPS} steps per execution.",
    ]


def seconds_of_new_models(groups: list[Group]) -> float:
    """Return the mean seconds of `fit` for a group, with a model that is built and compiled for it."""
    began = time.monotonic()
    for x, y in groups:
        build(_STEPS).fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
    return (time.monotonic() - began) / len(groups)


def seconds_of_one_model(groups: list[Group]) -> float:
    """Return the mean seconds of `fit` for a group, with one compiled model; the first call, which traces, is free."""
    model = build(_STEPS)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    initial = [variable.numpy() for variable in variables]

    def train(x: np.ndarray, y: np.ndarray) -> Any:
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)

    train(*groups[0])
    began = time.monotonic()
    for group in groups:
        train(*group)
    return (time.monotonic() - began) / len(groups)


def _frame(spark: SparkSession, drawn: list[Group]) -> DataFrame:
    """Return a DataFrame of ``shop bigint, features array<float>, label bigint``."""
    import pandas as pd

    x, y = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
    shop = np.repeat(np.arange(len(drawn)), [len(labels) for _, labels in drawn])
    data = pd.DataFrame({"shop": shop, "features": list(x), "label": y})
    return spark.createDataFrame(data, "shop bigint, features array<float>, label bigint").repartition(WORKERS)
