"""Asynchronous distributed training of Keras 3 models on Spark DataFrames.

The public names below load on first use (PEP 562), so that ``import distkeras.ps`` needs neither Spark nor Keras. Each
folder imports only from those above it, and from ``ps``::

    data         columns of a DataFrame to mini-batches, in a reproducible order
    keras_model  a Keras model as bytes, as a recipe, and as a replica that steps
    callbacks    stop conditions and the user's own hooks
    results      tables of history, commits and events
    job          one training job on Spark
    trainer      the trainer: one class for every rule
    trainers     dist-keras' names over it
    analysis     metrics and plots of those tables, gradients for the simulator
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "distkeras.trainer",
    "Callback": "distkeras.callbacks",
    "EarlyStopping": "distkeras.callbacks",
    "TimeBudget": "distkeras.callbacks",
    "DOWNPOUR": "distkeras.trainers",
    "AGN": "distkeras.trainers",
    "ADAG": "distkeras.trainers",
    "DynSGD": "distkeras.trainers",
    "AEASGD": "distkeras.trainers",
    "EASGD": "distkeras.trainers",
    "EAMSGD": "distkeras.trainers",
    "SingleTrainer": "distkeras.trainers",
    "AveragingTrainer": "distkeras.trainers",
    "EnsembleTrainer": "distkeras.trainers",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distkeras' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
