"""Asynchronous distributed training of Keras 3 models on Spark DataFrames.

The public names below load on first use (PEP 562), so that ``import distkeras.ps`` needs neither Spark nor Keras.
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
