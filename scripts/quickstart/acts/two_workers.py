"""Act 1: the same small model by `fit` and by two workers."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from quickstart import pictures
from quickstart.machine import WORKERS
from quickstart.plain_keras import FitRate, best_of, epoch_ends, rates
from quickstart.stage import ActResult, Stage, steady_rate, steps_of

if TYPE_CHECKING:
    import keras
    import pandas as pd

    from distkeras.ps.rules import Rule

BATCH_SIZE = 32
LEARNING_RATE = 0.1
#: Rows of the epochs in which the speed of `fit` is measured.
_MEASURED_ROWS = 20_000


def build(steps_per_execution: int = 1, decay_steps: int = 10_000) -> keras.Model:
    """Return the compiled model: 784-128-128-10, SGD whose rate falls to 0 within ``decay_steps``.

    A rate that falls to 0 makes the accuracy at the end that of a mean of the last weights, not of one random point.
    """
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
    model = keras.Sequential(
        [keras.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")], name="act_1_two_workers"
    )
    rate = keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, decay_steps, end_learning_rate=0.0)
    options = {"metrics": ["accuracy"], "steps_per_execution": steps_per_execution}
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", **options)
    return model


def two_workers(stage: Stage) -> ActResult:
    """Train by `fit` and by two workers; compare rows per second and accuracy."""
    size, images = stage.size, stage.images
    x, y = images.x[: size.rows], images.y[: size.rows]
    tried = rates(build, x[:_MEASURED_ROWS], y[:_MEASURED_ROWS], BATCH_SIZE)
    best = best_of(tried)
    here = best_of([each for each in tried if each.backend == tried[0].backend])
    fit = _by_fit(here, x, y, size.epochs)

    trainer = stage.trainer(build(decay_steps=_steps(len(x), size.epochs, WORKERS)), BATCH_SIZE, size.epochs)
    began = time.time()
    stage.model = trainer.train(stage.spark.read.parquet(str(images.train_folder)))
    seconds = time.time() - began
    stage.trainers.append(trainer)
    steps = steps_of(trainer)
    rate, curve = steady_rate(steps), _curve(steps, began)

    test = images.x_test, images.y_test
    accuracy = {name: _accuracy(model, test) for name, model in (("fit", fit["model"]), ("workers", stage.model))}
    picture = pictures.two_workers(
        {**{f"fit, {each.label}": each.rows_per_second for each in tried}, f"{WORKERS} workers": rate},
        {"fit": fit["curve"], f"{WORKERS} workers": curve},
        stage.picture("1-two-workers"),
    )
    figures = {"fit": [vars(each) for each in tried], "fit_seconds": fit["seconds"], "accuracy": accuracy}
    figures |= {"workers_rows_per_second": rate, "workers_seconds": seconds}
    return ActResult(
        title="One model, by fit and by two workers",
        line=f"fit at its best {best.rows_per_second:,.0f} rows/s ({best.label}), accuracy {accuracy['fit']:.1%}; "
        f"two workers {rate:,.0f} rows/s, accuracy {accuracy['workers']:.1%}",
        picture=picture,
        alt="Rows per second of fit and of two workers, and training accuracy over time",
        notes=_notes(trainer.worker_settings.rule, size.epochs, len(x), fit["seconds"], seconds),
        read="docs/guide/one-machine.md",
        figures=figures,
        problems=accuracy_problems(accuracy["workers"], accuracy["fit"], size.tolerance),
    )


def accuracy_problems(ours: float, fit: float, tolerance: float) -> list[str]:
    """Return what is wrong with the accuracy of two workers, which may be ``tolerance`` below that of `fit`."""
    if fit - ours <= tolerance:
        return []
    return [
        f"two workers must end within {100 * tolerance:g} points of fit. "
        f"Received: {ours:.1%}, which is {100 * (fit - ours):.1f} points below"
    ]


def _notes(rule: Rule, epochs: int, rows: int, fit_seconds: float, seconds: float) -> list[str]:
    return [
        f"Fashion-MNIST, {epochs} epochs of {rows:,} rows, layers of 128, 128 and 10, mini-batches of {BATCH_SIZE}. "
        "The test accuracy is that of 10,000 other images. "
        f"Rule of the workers: {rule.info.title}, window {rule.window}.",
        "Rows per second are those of a job that already runs; the start is in the lower picture. From the call to the "
        f"return, the workers took {seconds:.1f} s and fit {fit_seconds:.1f} s: for a job as short as this, and for "
        "rows that fit into one machine, plain Keras is the better choice.",
    ]


def _steps(rows: int, epochs: int, workers: int) -> int:
    """Return the number of steps that each of ``workers`` takes."""
    return epochs * math.ceil(rows / workers / BATCH_SIZE)


def _by_fit(best: FitRate, x: np.ndarray, y: np.ndarray, epochs: int) -> dict[str, Any]:
    """Return the model that `fit` trains, its seconds, and its accuracy by time."""
    model = build(best.steps, _steps(len(x), epochs, 1))
    began = time.time()
    ends, history = epoch_ends(model, x, y, batch_size=BATCH_SIZE, epochs=epochs)
    curve = [end - began for end in ends], history["accuracy"]
    return {"model": model, "seconds": time.time() - began, "curve": curve}


def _curve(steps: pd.DataFrame, began: float) -> tuple[list[float], list[float]]:
    """Return the end of each epoch, in seconds since ``began``, and its mean training accuracy."""
    epochs = steps.assign(right=steps["accuracy"] * steps["samples"]).groupby("epoch")
    accuracy = epochs["right"].sum() / epochs["samples"].sum()
    return (epochs["at"].max() - began).tolist(), accuracy.tolist()


def _accuracy(model: keras.Model, test: tuple[Any, Any]) -> float:
    return float(model.evaluate(*test, batch_size=1000, verbose=0, return_dict=True)["accuracy"])
