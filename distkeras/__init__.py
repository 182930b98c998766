"""Asynchronous distributed training of Keras 3 models on Spark DataFrames.

The public names below load on first use (PEP 562), so that ``import distkeras.ps`` needs neither Spark nor Keras. Each
folder imports only from those above it, and from ``ps``::

    chatter      what TensorFlow, Spark and the JVM print without being asked
    private_keras  every use of a private name of Keras
    spark        Spark's sessions, slots, Python workers and errors
    data         columns of a DataFrame to mini-batches, in a reproducible order
    shown        what `repr`, notebooks and Tab completion show
    metric_columns  the columns of metrics next to fixed ones
    keras_model  a Keras model as bytes, as a recipe, and as a replica that steps
    layers       layers of this package
    optimizers   optimizers of this package
    settings     the options of a trainer: each declared and checked once
    results      tables of history, commits and events
    callbacks    stop conditions and the user's own hooks
    keras_callbacks  Keras' own callbacks, called on the driver
    mlflow_logger  a job as a run of MLflow
    prometheus   a job's numbers for Prometheus
    dashboard    the live page of a job
    training     one training job on Spark
    groups       a model for each group of rows
    trainer      the trainer: one class for every rule
    search       which trials of a search train on
    compat       what dist-keras had otherwise
    trainers     dist-keras' trainers, and its other modules by their names:
    evaluators   its evaluators
    predictors   its predictors
    utils        its functions
    job_deployment  its job server, refused
    flags        a trainer's keywords as flags, and a TOML file of them
    ml           the trainer as a Spark ML estimator, which stands on `transformers` too
    job_server   the job server, its client, and the command line of both
    analysis     metrics and plots of those tables, gradients for the simulator
    commands     the command `distkeras`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distkeras import chatter

if TYPE_CHECKING:
    from distkeras.analysis import metrics as metrics
    from distkeras.analysis import plots as plots
    from distkeras.analysis.keras_gradient import KerasGradient as KerasGradient
    from distkeras.callbacks import Callback as Callback
    from distkeras.callbacks import CallbackContext as CallbackContext
    from distkeras.callbacks import EarlyStopping as EarlyStopping
    from distkeras.callbacks import Pruning as Pruning
    from distkeras.callbacks import TimeBudget as TimeBudget
    from distkeras.dashboard.dashboard import Dashboard as Dashboard
    from distkeras.data import datasets as datasets
    from distkeras.data.rows import Padding as Padding
    from distkeras.keras_callbacks import KerasCallbacks as KerasCallbacks
    from distkeras.ml.estimator import KerasEstimator as KerasEstimator
    from distkeras.ml.functions import register_function as register_function
    from distkeras.ml.groups import KerasGroupModel as KerasGroupModel
    from distkeras.ml.model import KerasModel as KerasModel
    from distkeras.ml.versions import KerasStreamModel as KerasStreamModel
    from distkeras.mlflow_logger import MLflowLogger as MLflowLogger
    from distkeras.prometheus import PrometheusMetrics as PrometheusMetrics
    from distkeras.ps import errors as errors
    from distkeras.ps import rules as rules
    from distkeras.ps.checkpoint.checkpointer import Checkpoint as Checkpoint
    from distkeras.ps.checkpoint.versions import Versions as Versions
    from distkeras.ps.rules import schedules as schedules
    from distkeras.ps.simulation import timing as timing
    from distkeras.ps.simulation.simulate import simulate as simulate
    from distkeras.ps.transport.deadlines import Deadlines as Deadlines
    from distkeras.search import SuccessiveHalving as SuccessiveHalving
    from distkeras.settings import Executors as Executors
    from distkeras.settings import Monitoring as Monitoring
    from distkeras.settings import Network as Network
    from distkeras.trainer import Trainer as Trainer
    from distkeras.trainers import ADAG as ADAG
    from distkeras.trainers import AEASGD as AEASGD
    from distkeras.trainers import AGN as AGN
    from distkeras.trainers import DOWNPOUR as DOWNPOUR
    from distkeras.trainers import EAMSGD as EAMSGD
    from distkeras.trainers import EASGD as EASGD
    from distkeras.trainers import AveragingTrainer as AveragingTrainer
    from distkeras.trainers import DynSGD as DynSGD
    from distkeras.trainers import EnsembleTrainer as EnsembleTrainer
    from distkeras.trainers import SingleTrainer as SingleTrainer

__version__ = "0.4.0"

chatter.begin()  # before anything imports TensorFlow or starts Spark

#: Public names by the module that has them; a test compares with the imports above, which type checkers read.
_NAMES = {
    "distkeras.analysis": ("metrics", "plots"),
    "distkeras.analysis.keras_gradient": ("KerasGradient",),
    "distkeras.callbacks": ("Callback", "CallbackContext", "EarlyStopping", "Pruning", "TimeBudget"),
    "distkeras.dashboard.dashboard": ("Dashboard",),
    "distkeras.data": ("datasets",),
    "distkeras.data.rows": ("Padding",),
    "distkeras.keras_callbacks": ("KerasCallbacks",),
    "distkeras.ml.estimator": ("KerasEstimator",),
    "distkeras.ml.functions": ("register_function",),
    "distkeras.ml.groups": ("KerasGroupModel",),
    "distkeras.ml.model": ("KerasModel",),
    "distkeras.ml.versions": ("KerasStreamModel",),
    "distkeras.mlflow_logger": ("MLflowLogger",),
    "distkeras.prometheus": ("PrometheusMetrics",),
    "distkeras.ps": ("errors", "rules"),
    "distkeras.ps.checkpoint.checkpointer": ("Checkpoint",),
    "distkeras.ps.checkpoint.versions": ("Versions",),
    "distkeras.ps.rules": ("schedules",),
    "distkeras.ps.simulation": ("timing",),
    "distkeras.ps.simulation.simulate": ("simulate",),
    "distkeras.ps.transport.deadlines": ("Deadlines",),
    "distkeras.search": ("SuccessiveHalving",),
    "distkeras.settings": ("Executors", "Monitoring", "Network"),
    "distkeras.trainer": ("Trainer",),
    "distkeras.trainers": (
        "ADAG",
        "AEASGD",
        "AGN",
        "DOWNPOUR",
        "EAMSGD",
        "EASGD",
        "AveragingTrainer",
        "DynSGD",
        "EnsembleTrainer",
        "SingleTrainer",
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'distkeras' has no attribute {name!r}")
    module = importlib.import_module(home)
    # A public name may be a module that is not imported yet.
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{home}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
