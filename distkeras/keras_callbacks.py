"""Keras' own callbacks, on the driver: an epoch is one of the data, or so many commits.

::

    kept = KerasCallbacks(
        [keras.callbacks.EarlyStopping("val_loss", patience=3), keras.callbacks.TensorBoard("logs")], validation_df
    )
    trained = trainer.train(df, callbacks=[kept])

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup, monitored_metric
from distkeras.keras_model.settable import CopyState
from distkeras.private_keras import FIRST_PROFILED
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_integer

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch

log = logging.getLogger(__name__)

#: What there is for those of Keras' callbacks that cannot work on the driver, and why.
REFUSED = {
    "BackupAndRestore": "the server saves the job: `train(checkpoint=…)`, and `resume=True` later",
    "History": "`trainer.history` is the history, a DataFrame",
    "MlflowCallback": "a run of MLflow is active in one thread, and callbacks have their own: use "
    "`distkeras.MLflowLogger`",
    "OrbaxCheckpoint": "the server saves the job: `train(checkpoint=…)`",
    "ProgbarLogger": "`Trainer(monitoring=Monitoring(progress=True))` shows the progress",
    "SwapEMAWeights": "the workers have the optimizers, and their averages",
    "TerminateOnNaN": "every commit is checked: `Trainer(max_skipped=0)`, the default",
}
#: Callbacks of Keras whose hooks for batches do nothing under one setting: argument, attribute, value.
_OF_EPOCHS: dict[str, list[tuple[str, str, Any]]] = {
    "ModelCheckpoint": [("save_freq", "save_freq", "epoch")],
    "TensorBoard": [
        ("update_freq", "update_freq", "epoch"),
        ("profile_batch", FIRST_PROFILED, 0),
        ("write_steps_per_second", "write_steps_per_second", False),
    ],
}
#: Hooks that nothing here calls.
_BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
)
#: Whose classes are known by name.
_KNOWN_LIBRARIES = ("keras", "mlflow")


class KerasCallbacks(Callback):
    """Call Keras' callbacks at the end of each epoch, with a copy of the model that has the center's weights.

    ::

        best = keras.callbacks.ModelCheckpoint("best.keras", "val_loss", save_best_only=True)
        trainer.train(df, callbacks=[KerasCallbacks([best], validation)])

    An epoch ends when the partitions have completed it on average; if two end at once, the later one is reported. The
    report has ``loss``, the mean over the latest commits. With ``validation`` rows, it also has ``val_loss`` and
    ``val_`` with the name of each metric, of the center on these rows; ``on_test_begin`` is called before this
    evaluation and ``on_test_end`` after it. ``EarlyStopping`` ends the job; if it restores the best weights,
    `Trainer.train` returns those. Hooks for batches are not called, because the batches are in the workers.

    A callback may set the learning rate (``LearningRateScheduler``, ``ReduceLROnPlateau``) and variables that are not
    trained: each worker continues with them after its next exchange, and the server saves them. ``on_train_begin`` and
    the first ``on_epoch_begin`` are called before any worker begins. Any other change of the model is an error.

    Args:
        callbacks: a list of Keras callbacks.
        validation: rows to evaluate on, with the trainer's columns; None: no evaluation.
        every_commits: commits that count as an epoch; None: the epochs are those of the data.
        max_rows: largest number of validation rows; of more, a sample is used, which is the same each time.

    Raises:
        ConfigurationError: A callback has hooks for batches or changes the workers' optimizers (the text names the
            alternative), it monitors a value that is not reported, or has changed what cannot reach the workers.
        EmptyDataError: ``validation`` has no rows.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        validation: DataFrame | None = None,
        *,
        every_commits: int | None = None,
        max_rows: int = 10_000,
    ) -> None:
        super().__init__(every_commits=1)
        self.commits_an_epoch = None if every_commits is None else require_integer("every_commits", every_commits)
        self.max_rows = require_integer("max_rows", max_rows)
        self.keras_callbacks = [_usable(callback) for callback in callbacks]
        self._validation = validation
        self._batch: Batch | None = None
        self._epoch, self._latest = 0, b""
        self._model: Any = None
        self._setup: TrainingSetup | None = None

    @property
    def monitor(self) -> str:
        """Return the metric that the first of Keras' callbacks monitors; empty if none does."""
        return monitored_metric(self.keras_callbacks)

    @property
    def acts_at_start(self) -> bool:
        """Return whether a callback acts at the beginning of an epoch, as one that sets the learning rate does."""
        return any(map(_acts_at_start, self.keras_callbacks))

    @property
    def needs_epochs(self) -> bool:
        """Return whether epochs are those of the data, and not a number of commits."""
        return self.commits_an_epoch is None

    def __copy__(self) -> KerasCallbacks:
        """Copy Keras' callbacks too."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.keras_callbacks = [copy.copy(callback) for callback in self.keras_callbacks]
        return copied

    def with_callbacks(self, callbacks: Sequence[keras.callbacks.Callback]) -> KerasCallbacks:
        """Return what calls other callbacks with the same epochs and rows."""
        return KerasCallbacks(callbacks, self._validation, every_commits=self.commits_an_epoch, max_rows=self.max_rows)

    def on_begin(self, setup: TrainingSetup) -> None:
        """Read the rows."""
        self._epoch, self._latest, self._model, self._setup = 0, b"", None, setup
        setup.require_whole()
        names = ["loss"] + ([] if self._validation is None else [f"val_{name}" for name in setup.metrics])
        for callback in self.keras_callbacks:
            monitor = getattr(callback, "monitor", None) if getattr(callback, "save_best_only", True) else None
            if monitor is not None and monitor not in names:
                more = "" if self._validation is not None else "; `KerasCallbacks(…, validation=df)` tells more"
                raise ConfigurationError(
                    f"`monitor` of {type(callback).__name__} must be one of {names}{more}. "
                    f"Received: monitor={monitor!r}"
                )
        if self._validation is not None:
            self._batch = setup.read_rows(self._validation, self.max_rows)

    def on_start(self, context: CallbackContext) -> None:
        """Report the beginning of training."""
        self._begin(context)

    def on_center(self, context: CallbackContext) -> None:
        """Report the epochs that have ended."""
        if self._model is None:
            self._begin(context)
        if (passed := int(self._epochs(context))) > self._epoch:
            self._end_epoch(passed - 1, context)

    def on_end(self, context: CallbackContext) -> None:
        """Report the last epoch, complete or not, and the end of training; restore weights that a callback has set."""
        if self._model is None:
            self._begin(context)
        last = math.ceil(self._epochs(context)) - 1
        if context.center.digest() != self._latest or last >= self._epoch:
            self._end_epoch(max(self._epoch, last), context)
        model = self._load(context)
        before = [np.array(weights) for weights in model.get_weights()]
        for callback in self.keras_callbacks:
            callback.on_train_end({})
        if not all(map(np.array_equal, before, model.get_weights())):
            context.restore_model()

    def _epochs(self, context: CallbackContext) -> float:
        """Return the epochs that have passed."""
        return context.status.epochs if self.commits_an_epoch is None else context.clock / self.commits_an_epoch

    def _begin(self, context: CallbackContext) -> None:
        self._model = self._load(context)
        self._model.stop_training = False
        if self._setup is not None and self._setup.outcome is not None and self._setup.outcome.resumed is not None:
            self._epoch = int(self._epochs(context))
        for callback in self.keras_callbacks:
            callback.set_params({"epochs": None, "steps": None, "verbose": 0})
            callback.set_model(self._model)
        for callback in self.keras_callbacks:
            self._hook(context, callback, "on_train_begin", {})
        for callback in self.keras_callbacks:
            self._hook(context, callback, "on_epoch_begin", self._epoch, {})

    def _end_epoch(self, epoch: int, context: CallbackContext) -> None:
        model = self._load(context)
        logs = {"loss": context.status.loss}
        if self._batch is not None:
            self._call(context, "on_test_begin", {})
            values = context.evaluate(self._batch)
            self._call(context, "on_test_end", dict(values))
            logs |= {f"val_{name}": value for name, value in values.items()}
        for callback in self.keras_callbacks:
            self._hook(context, callback, "on_epoch_end", epoch, dict(logs))
        self._epoch, self._latest = epoch + 1, context.center.digest()
        if model.stop_training and not context.final:
            context.stop(f"a callback of Keras has stopped the training after epoch {self._epoch}")
        elif not context.final:
            for callback in self.keras_callbacks:
                self._hook(context, callback, "on_epoch_begin", epoch + 1, {})

    def _load(self, context: CallbackContext) -> Any:
        """Return the copy of the model, with the current weights and the learning rate with which steps are taken."""
        model, rate = context.model, context.center.learning_rate
        first = context.settable[0]
        if rate and first.variable is not None:  # else the workers take the steps, with the rate of the copy
            first.assign(np.array([rate]))
        return model

    def _hook(self, context: CallbackContext, callback: Any, hook: str, *arguments: Any) -> None:
        """Call a hook, and tell the workers what it has changed."""
        if getattr(getattr(callback, hook), "__func__", None) is getattr(_base(), hook):
            return
        before = CopyState(self._model, context.settable)
        getattr(callback, hook)(*arguments)
        author = f"{type(callback).__name__}.{hook}"
        values, names = before.changes(author)
        if not len(values) or context.final:
            return
        assert context.link is not None, "a running job has a connection"
        clock = context.link.set_values(values)
        if self._setup is not None:
            text = "%s has set %s from commit %d on; each worker has it after its next exchange"
            self._setup.events.report(log, "values", text, author, ", ".join(names), clock, level=logging.INFO)

    def _call(self, context: CallbackContext, hook: str, logs: dict[str, float]) -> None:
        for callback in self.keras_callbacks:
            # It would write them at the steps of the optimizer, which are the workers'; it has them as `val_`, too.
            if "TensorBoard" not in (kind.__name__ for kind in _known_kinds(callback)):
                self._hook(context, callback, hook, logs)


def _base() -> Any:
    import keras

    return keras.callbacks.Callback


def _acts_at_start(callback: Any) -> bool:
    """Return whether a callback has a hook for the beginning of an epoch or, if it is not Keras', of training."""
    hooks = ["on_epoch_begin"] + ([] if type(callback).__module__.startswith("keras.") else ["on_train_begin"])
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(_base(), hook) for hook in hooks)


def with_keras_callbacks(callbacks: Iterable[Any], validation: DataFrame | None = None) -> list[Any]:
    """Return the callbacks with Keras' in one `KerasCallbacks`; ConfigurationError for one that cannot work here.

    Next to a `KerasCallbacks` they get its epochs and its rows, unless there are rows for them.
    """
    all_callbacks = list(callbacks)
    if all(isinstance(callback, Callback) for callback in all_callbacks):
        return all_callbacks
    import keras

    theirs = [callback for callback in all_callbacks if isinstance(callback, keras.callbacks.Callback)]
    ours = [callback for callback in all_callbacks if not isinstance(callback, keras.callbacks.Callback)]
    if not theirs:
        return ours
    given = [callback for callback in ours if isinstance(callback, KerasCallbacks)]
    alone = validation is not None or len(given) != 1
    return [*ours, KerasCallbacks(theirs, validation) if alone else given[0].with_callbacks(theirs)]


def _known_kinds(callback: Any) -> list[type]:
    """Return Keras' and MLflow's own classes that a callback is of, the nearest one first."""
    return [kind for kind in type(callback).__mro__ if kind.__module__.split(".")[0] in _KNOWN_LIBRARIES]


def _usable(callback: Any) -> Any:
    """Return ``callback`` if it is one of Keras that can work on the driver; else raise ConfigurationError."""
    import keras

    base = keras.callbacks.Callback
    if not isinstance(callback, base):
        raise ConfigurationError(f"`callbacks` must be a list of Keras callbacks. Received: {callback!r}")
    name = type(callback).__name__
    for kind in _known_kinds(callback):
        if kind.__name__ in REFUSED:
            raise ConfigurationError(
                f"`callbacks` must be able to work on the driver: {REFUSED[kind.__name__]}. Received: {name}"
            )
        for argument, attribute, wanted in _OF_EPOCHS.get(kind.__name__, []):
            if (value := getattr(callback, attribute, wanted)) != wanted:
                raise ConfigurationError(
                    f"`{argument}` of {name} must be {wanted!r}, as batches are in the workers. Received: {value!r}"
                )
        if kind.__name__ in _OF_EPOCHS:
            base = kind  # whose own hooks of batches do nothing then
            break
    hooks = [
        hook for hook in _BATCH_HOOKS if getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
    ]
    if hooks:
        raise ConfigurationError(
            f"`callbacks` must not have hooks for batches, which are in the workers. Received: {name} with "
            f"{', '.join(hooks)}"
        )
    return callback
