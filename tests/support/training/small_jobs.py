"""Trainers of small models for the tests of the trainer."""

from __future__ import annotations

from typing import Any

import keras

from distkeras import Trainer
from distkeras.ps.rules import Rule
from distkeras.settings import grouped
from support.training.spark_jobs import counting_model, total

ROWS, BATCH, EPOCHS = 61, 8, 3
SPARSE = "sparse_categorical_crossentropy"


def sgd(rate: float = 1.0, **options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, **options)


def counter(rule: str | Rule = "downpour", *, workers: int | None = 2, rows: int = ROWS, **options: Any) -> Trainer:
    # Comparing the steps of this model would take longer than most jobs with it.
    options = {"batch_size": BATCH, "num_epoch": EPOCHS, "check_model": False} | options
    return Trainer(
        counting_model(rows), rule, worker_optimizer=sgd(), loss=total, num_workers=workers, **grouped(options)
    )


def deep_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2, activation="softmax")]
    )


def wide_model() -> keras.Model:
    """Return a model of three blocks, so that up to three shards have elements."""
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(400, activation="tanh"), keras.layers.Dense(400, activation="tanh")]
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(2, activation="softmax")])
