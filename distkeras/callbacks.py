"""Callbacks on the driver: stop conditions, and the user's own code, which see the center during training.

::

    class Keep(Callback):
        def on_center(self, context):                               # in a thread of the callback's own
            context.model.save(f"center-{context.clock}.keras")

    trained = trainer.train(df, callbacks=[Keep(every_commits=500), TimeBudget(3600)])
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from distkeras.keras_model.variables import has_rows_at_server
from distkeras.metric_columns import in_columns, with_arrays
from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.events import Events
from distkeras.ps.protocol.driver_messages import Records, Status
from distkeras.ps.protocol.loop import NO_ROWS
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.validate import require_boolean, require_choice, require_integer, require_number, require_text
from distkeras.settings import JobFacts

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch
    from distkeras.keras_model.replica import KerasReplica
    from distkeras.keras_model.settable import Settable
    from distkeras.ps.transport.driver_client import DriverClient
    from distkeras.results import JobOutcome, JobResults, MicroBatchProgress

#: Seconds between two calls of a callback that does not say.
_DEFAULT_SECONDS = 10.0


class CenterWeights(NamedTuple):
    """A copy of the center: float32 ``(size,)``, the moving statistics, and the clock of both.

    Tables that travel by rows come last in the vector. Of those that the driver does not hold, ``rows`` has the name,
    the ids, ascending, and float32 ``(ids, width)``: what the validation rows of callbacks touch.

    ``learning_rate`` is the server's; 0 for rules whose workers take the steps. ``values`` are the numbers that
    callbacks have set for the workers: see `keras_model.settable`.
    """

    clock: int
    vector: np.ndarray
    moving_statistics: np.ndarray
    rows: tuple[tuple[str, Ids, np.ndarray], ...] = ()
    learning_rate: float = 0.0
    values: np.ndarray = NO_ROWS

    @classmethod
    def fetch(
        cls, driver: DriverClient, tables: Sequence[TableShape] = (), wants: tuple[Ids, ...] = ()
    ) -> CenterWeights:
        """Return the center as the server has it now.

        Args:
            driver: asks the server.
            tables: all that travel by rows, of which those come as a whole that the driver holds.
            wants: the rows that come of the others; see `driver_messages.Inspect`.
        """
        whole = [shape for shape in tables if not shape.partial]
        if whole:
            reply, vector = driver.whole_center(whole, wants)
        else:
            reply = driver.center(wants=wants)
            vector = reply.center
        rows = tuple(
            (shape.name, ids, flat.reshape(len(ids), shape.width))
            for shape, ids, flat in zip(tables, wants, reply.rows, strict=False)
            if shape.partial
        )
        return cls(reply.clock, vector, reply.moving_statistics, rows, reply.learning_rate, reply.values)

    def digest(self) -> bytes:
        """Return a digest of the numbers.

        The clock does not say whether the center has moved: within a round, or while a rule collects commits, it goes
        on and the center stays; and at the end of a job, a drain moves the center and counts no commit.
        """
        digest = hashlib.blake2b(self.vector.data, digest_size=16)
        digest.update(self.moving_statistics.data)
        for _, _, rows in self.rows:
            digest.update(rows.data)
        return digest.digest()

    def load(self, replica: KerasReplica) -> None:
        """Set a model's weights, and what callbacks have set for the workers."""
        replica.load(self.vector)
        replica.set_values(self.values)
        replica.load_moving_statistics(self.moving_statistics)

    def lend_rows(self, replica: KerasReplica) -> None:
        """Let a model that is evaluated look up the rows of tables that the driver does not hold."""
        for name, ids, rows in self.rows:
            replica.model.get_layer(name).lend(ids, rows)


@dataclass(frozen=True)
class TrainingSetup:
    """The facts about a job that a callback can use before the job starts.

    Args:
        metrics: names of loss and metrics, loss first.
        build_replica: makes a copy of the model, compiled like the workers'.
        read_rows: returns the rows of a validation DataFrame, at most so many, as one mini-batch; raises an
            EmptyDataError for no rows.
        facts: what is known of the job; None: nothing.
        events: where the job's events are collected.
        options: the trainer's options, by name: numbers, texts, and None.
        outcome: what is known of the job so far; it fills while the job runs. None: nothing.
        require_whole: raises a ConfigurationError unless the driver has the whole model while it trains, as a callback
            needs that restores a center or uses `CallbackContext.model`.
        living: names of the tables whose touches are counted, in the order of `Status.tables`.
    """

    metrics: tuple[str, ...]
    build_replica: Callable[[], KerasReplica]
    read_rows: Callable[[DataFrame, int], Batch]
    facts: JobFacts | None = None
    events: Events = field(default_factory=Events)
    options: Mapping[str, Any] = field(default_factory=dict)
    outcome: JobOutcome | None = None
    require_whole: Callable[[], None] = lambda: None
    living: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the center by a callback: its loss and metrics.

    Args:
        timestamp: seconds since the epoch.
        clock: of the center.
        source: whose callback it was: its class.
        values: by the metric's name.
    """

    timestamp: float
    clock: int
    source: str
    values: dict[str, float]


class JobOver(Exception):
    """The job is over, and its server does not answer any more. This ends the call of the callback that asks."""


#: Numbers of the requests of this process to set values, which rise: see `driver_messages.SetValues`.
_REQUESTS = itertools.count(1)


@dataclass(frozen=True)
class JobLink:
    """Further requests about a running job.

    Args:
        ask: calls with the driver's connection, until there is an answer.
        evaluations: of all callbacks, as they came.
        source: the callback's class.

    Raises:
        JobOver: when asked once the job is over.
    """

    ask: Callable[[Callable[[DriverClient], Any]], Any]
    evaluations: list[Evaluation]
    source: str = ""

    def drain(self, start: int, count: int) -> Records:
        """Return rows of the commit log with their history, from number ``start`` on: `DriverClient.drain`."""
        records: Records = self.ask(lambda driver: driver.drain(start, count))
        return records

    def list_workers(self) -> np.ndarray:
        """Return the workers, with the seconds since their last commits: `DriverClient.list_workers`."""
        table: np.ndarray = self.ask(lambda driver: driver.list_workers())
        return table

    def set_values(self, values: np.ndarray) -> int:
        """Set numbers for all workers, and return the clock of the first commit after it: `DriverClient.set_values`."""
        number = next(_REQUESTS)
        clock: int = self.ask(lambda driver: driver.set_values(values, number))
        return clock


class CallbackContext:
    """The state of the job for a callback; valid only during the call.

    Attributes:
        status: the server's latest status: `clock`, `batches`, `samples`, `loss`, `staleness`, `joined`, `finished`,
            and `epochs`, the mean of the epochs that the partitions have completed.
        seconds: seconds since the job began.
        final: whether the job is over, so that no more commits follow.
        link: the connection to the server, with further records of the job; None if there is none.
    """

    def __init__(
        self,
        status: Status,
        seconds: float,
        fetch_center: Callable[[], CenterWeights],
        replica: Callable[[], KerasReplica],
        stop: Callable[[str], None],
        *,
        final: bool = False,
        link: JobLink | None = None,
        micro_batch: Callable[[], MicroBatchProgress | None] = lambda: None,
    ) -> None:
        self.status = status
        self._micro_batch = micro_batch
        self.link = link
        self.seconds = seconds
        self.final = final
        self.restored: CenterWeights | None = None
        self._fetch_center, self._replica, self._stop = fetch_center, replica, stop
        self._center: CenterWeights | None = None

    @property
    def clock(self) -> int:
        """The number of commits applied: those in `center`, once it has been read."""
        return self.status.clock if self._center is None else self._center.clock

    @property
    def micro_batch(self) -> MicroBatchProgress | None:
        """The progress of a stream's latest micro-batch; None before the first one, and without a stream."""
        return self._micro_batch()

    @property
    def center(self) -> CenterWeights:
        """The center, fetched from the server at the first access; the callback may change its arrays."""
        if self._center is None:
            self._center = self._fetch_center()
        return self._center

    @property
    def model(self) -> keras.Model:
        """The callback's own copy of the model, with the center's weights; the next call overwrites them.

        Raises:
            ConfigurationError: The model has a WideEmbedding, whose rows stay at the server.
        """
        model = self._loaded_replica().model
        _require_no_rows_at_server(model)
        return model

    @property
    def settable(self) -> list[Settable]:
        """What a callback may change of `model` for the workers: see `JobLink.set_values`."""
        return self._replica().settable

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return loss and metrics of the center, by name, in inference mode.

        Args:
            batch: the rows to evaluate on. For a model with a WideEmbedding, it must come from
                `TrainingSetup.read_rows`: the rows of the table that it touches are fetched with the center.
        """
        values = self._loaded_replica().evaluate(batch)
        if self.link is not None:
            self.link.evaluations.append(Evaluation(time(), self.clock, self.link.source, values))
        return values

    def stop(self, reason: str) -> None:
        """End the job early and successfully: every worker commits the steps that it has computed, and ends."""
        self._stop(reason)

    def restore(self, center: CenterWeights) -> None:
        """Let `Trainer.train` return a model with these weights; call it only in `Callback.on_end`.

        Raises:
            LocalProtocolError: The job is not over.
        """
        if not self.final:
            raise LocalProtocolError("`restore` must be called in `on_end`. Received: a call before")
        self.restored = center

    def restore_model(self) -> None:
        """Let `Trainer.train` return a model with the weights of `model`; call it only in `Callback.on_end`.

        Raises:
            LocalProtocolError: The job is not over.
            ConfigurationError: The model has a WideEmbedding, whose rows stay at the server.
        """
        replica = self._replica()
        _require_no_rows_at_server(replica.model)
        vector, statistics = replica.layout.empty(), replica.moving_statistics.empty()
        replica.read(vector)
        replica.read_moving_statistics(statistics)
        self.restore(CenterWeights(self.clock, vector, statistics))

    def _loaded_replica(self) -> KerasReplica:
        replica = self._replica()
        self.center.load(replica)
        self.center.lend_rows(replica)
        return replica


def _require_no_rows_at_server(model: keras.Model) -> None:
    if has_rows_at_server(model):
        raise ConfigurationError(
            "`context.model` and `context.restore_model` must not be used for a model with a WideEmbedding, whose rows "
            "stay at the server. Use `context.evaluate`, or the model that comes back"
        )


class Callback:
    """The base class of callbacks, which run on the driver during training.

    An exception that a callback raises ends the job and is raised by `Trainer.train`.

    Args:
        every_commits: commits from one call of `on_center` to the next, at least 1; None: calls do not depend on them.
        every_seconds: seconds from the beginning to the first call, and from one call to the next, more than 0. None
            means 10 seconds, or that calls do not depend on time if another interval is given. All three intervals can
            also be attributes of the class.
        every_epochs: epochs from one call to the next, more than 0, as the mean over the partitions; None: calls do
            not depend on them.

    Raises:
        ConfigurationError: An interval is not a positive number.
    """

    every_commits: int | None = None
    every_seconds: float | None = None
    every_epochs: float | None = None

    def __init__(
        self, *, every_commits: int | None = None, every_seconds: float | None = None, every_epochs: float | None = None
    ) -> None:
        if (every_commits, every_seconds, every_epochs) != (None, None, None):
            self.every_commits, self.every_seconds, self.every_epochs = every_commits, every_seconds, every_epochs
        self.check_intervals()

    @property
    def needs_epochs(self) -> bool:
        """Return whether the callback counts epochs, which a stream does not have: each micro-batch has its own."""
        return self.every_epochs is not None

    def check_intervals(self) -> None:
        """Check the intervals and set the missing ones, even if a subclass's constructor did not call this one's."""
        if (self.every_commits, self.every_seconds, self.every_epochs) == (None, None, None):
            self.every_seconds = _DEFAULT_SECONDS
        if self.every_commits is not None:
            self.every_commits = require_integer("every_commits", self.every_commits)
        if self.every_seconds is not None:
            self.every_seconds = require_number("every_seconds", self.every_seconds)
        if self.every_epochs is not None:
            self.every_epochs = require_number("every_epochs", self.every_epochs)

    def on_begin(self, setup: TrainingSetup) -> None:
        """Prepare for a job, before any work starts; raise errors of configuration here. Spark's slots are free."""

    def warm_up(self, replica: Callable[[], KerasReplica]) -> None:
        """Do what takes long the first time. It is called while Spark starts the tasks, in the callback's thread.

        Args:
            replica: returns the callback's copy of the model, whose weights are those of a new model until `on_center`.
        """

    @property
    def acts_at_start(self) -> bool:
        """Return whether `on_start` must be called: no worker begins before it returns."""
        return False

    def on_start(self, context: CallbackContext) -> None:
        """Look at the initial center, before any worker begins, in the thread that called `Trainer.train`."""

    def on_center(self, context: CallbackContext) -> None:
        """Look at the center. It is called during training, at the callback's intervals."""

    def on_end(self, context: CallbackContext) -> None:
        """Look at the final center of a job that has not failed, in the thread that called `Trainer.train`.

        At the end of a stream, this method, `on_success` and `on_failure` are called in a thread of the stream.
        """

    def on_success(self, results: JobResults) -> None:
        """Use the trainer's results. It is called after `on_end` of all callbacks; `Trainer.train` then returns."""

    def on_failure(self, error: BaseException) -> None:
        """Handle a job's failure or interruption, after `on_begin`; `Trainer.train` then raises ``error``."""


class TimeBudget(Callback):
    """End the job after a number of seconds.

    The time begins when Spark receives the job, so the start of the tasks is part of it. A worker completes its
    current window before it ends.

    Args:
        seconds: the time in seconds, more than 0.

    Raises:
        ConfigurationError: ``seconds`` is not a number above 0.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(every_seconds=require_number("seconds", seconds))

    def on_center(self, context: CallbackContext) -> None:
        """End the job, because the first call comes when the time is over."""
        context.stop(f"the time budget of {self.every_seconds:g} s is spent")


class EarlyStopping(Callback):
    """Evaluate the center on validation rows during training, and end the job when the metric no longer improves.

    ::

        stopping = EarlyStopping(validation, "accuracy", patience=5, restore_best_weights=True, every_seconds=10)
        trained = trainer.train(df, callbacks=[stopping])
        trainer.stopped, stopping.best

    The job ends when the metric has reached ``target``, or has not improved on its best value by more than
    ``min_delta`` in ``patience`` evaluations in a row.

    The rows are read once, before training, and evaluated on the driver, because a distributed evaluation would have
    to wait until the workers release Spark's slots. They take ``max_rows`` times a row's bytes of the driver's memory.

    Args:
        df: validation data, with the trainer's columns.
        monitor: "loss", or a metric's name in Keras; a leading "val_" is dropped. "f1_score[2]" is the third number of
            a metric of one number for each class.
        patience: evaluations without an improvement after which the job ends, at least 1; None: only the target counts.
        min_delta: least change that counts as an improvement, at least 0.
        mode: "min", "max", or "auto", which follows from the metric's name.
        target: value at which the job ends; None: no target.
        restore_best_weights: whether `Trainer.train` returns the best center that was evaluated, and not the last one,
            regardless of how the job ends.
        every_commits, every_seconds, every_epochs: interval between two evaluations; see `Callback`. A center that has
            not changed is not evaluated again, for example within a round or while `fedbuff` collects commits.
        max_rows: largest number of rows; of more, a sample is used, which is the same each time.

    Attributes:
        evaluations: one dict per evaluation: clock, seconds since the beginning, loss and metrics, named as in the
            history.
        best: the best value, NaN before the first evaluation; ``best_clock`` is its clock.
        validation_batch: the rows, once they have been read.

    Raises:
        ConfigurationError: An argument is invalid, or the model has no such metric.
        EmptyDataError: ``df`` has no rows.
        BadValueError, ShapeError, MissingColumnError: ``df`` cannot be evaluated; raised before any work starts.
    """

    def __init__(  # noqa: PLR0913 - one keyword an option, as in Keras' class of this name
        self,
        df: DataFrame,
        monitor: str = "loss",
        *,
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: str = "auto",
        target: float | None = None,
        restore_best_weights: bool = False,
        every_commits: int | None = None,
        every_seconds: float | None = None,
        every_epochs: float | None = None,
        max_rows: int = 10_000,
    ) -> None:
        super().__init__(every_commits=every_commits, every_seconds=every_seconds, every_epochs=every_epochs)
        self.monitor = require_text("monitor", monitor, "the name of a metric").removeprefix("val_")
        self.patience = None if patience is None else require_integer("patience", patience)
        self.min_delta = require_number("min_delta", min_delta, inclusive=True)
        self.target = None if target is None else require_number("target", target, -math.inf)
        self.sign = _better_sign(self.monitor, mode)
        self.restore_best_weights = require_boolean("restore_best_weights", restore_best_weights)
        self.max_rows = require_integer("max_rows", max_rows)
        self._df = df
        self.validation_batch: Batch | None = None
        self.evaluations: list[dict[str, Any]] = []
        self._value = math.nan
        self.best, self.best_clock = math.nan, -1
        self._best_center: CenterWeights | None = None
        self._latest, self._wait = b"", 0

    def on_begin(self, setup: TrainingSetup) -> None:
        """Read the rows, and forget what an earlier job has left."""
        self.evaluations = []
        self.best, self.best_clock, self._best_center, self._latest, self._wait = math.nan, -1, None, b"", 0
        if self.monitor not in setup.metrics:
            raise ConfigurationError(
                f"`monitor` must be one of {list(setup.metrics)}. Received: monitor={self.monitor!r}"
            )
        if self.restore_best_weights:
            setup.require_whole()
        self.validation_batch = setup.read_rows(self._df, self.max_rows)

    def warm_up(self, replica: Callable[[], KerasReplica]) -> None:
        """Trace the evaluation, so that the first one takes no longer than the others."""
        assert self.validation_batch is not None, "`on_begin` comes first"
        replica().evaluate(self.validation_batch)

    def on_center(self, context: CallbackContext) -> None:
        """Evaluate the center, unless it has not changed."""
        assert self.validation_batch is not None, "`on_begin` comes first"
        latest, self._latest = self._latest, context.center.digest()
        if self._latest == latest:
            return
        values = context.evaluate(self.validation_batch)
        self.evaluations.append({"clock": context.clock, "seconds": context.seconds, **in_columns(with_arrays(values))})
        value = self._value = values[self.monitor]
        if self.sign * (self.best - value) > self.min_delta or (math.isnan(self.best) and not math.isnan(value)):
            self.best, self.best_clock, self._wait = value, context.clock, 0
            if self.restore_best_weights:
                self._best_center = context.center
        else:
            self._wait += 1
        if self.target is not None and self.sign * (value - self.target) <= 0:
            context.stop(f"{self.monitor} {value:.6g} has reached {self.target:g}")
        elif self.patience is not None and self._wait >= self.patience:
            context.stop(
                f"{self.monitor} has not become better than {self.best:.6g} in {self._wait} evaluations in a row"
            )

    def on_end(self, context: CallbackContext) -> None:
        """Evaluate the last center, and restore the best one."""
        self.on_center(context)
        if self._best_center is not None and self._best_center is not context.center:
            context.restore(self._best_center)


class Trial(Protocol):
    """One setting of a search, as `Pruning` uses it: `optuna.Trial`, or a class of your own."""

    def report(self, value: float, step: int) -> None:
        """Receive the value of the metric at a step of training."""

    def should_prune(self) -> bool:
        """Return whether the search drops this setting, according to the last value that was reported."""


class Pruning(EarlyStopping):
    """Report each evaluation to a trial of a search, and end the job early when the trial is pruned.

    ::

        trial = study.ask()                                        # of an `optuna.Study`
        pruning = Pruning(trial, validation, "accuracy")
        trainer.train(df, callbacks=[pruning])
        pruning.pruned                                             # True: `trainer.stopped` says at which step

    The step that is reported is the number of completed intervals of ``every_epochs``, and each step is reported once.
    If an evaluation takes longer than an interval, steps are left out. The last center of a job that no callback has
    ended is reported, too; if the trial is pruned then, `trainer.stopped` is None.

    Args:
        trial: an `optuna.Trial`, or another object with the methods `report` and `should_prune`. They are called in a
            thread of the job.
        df, monitor: as in `EarlyStopping`.
        every_epochs: epochs from one evaluation to the next, more than 0.
        options: further keywords of `EarlyStopping`, whose conditions end the job too, if they are set.

    Attributes:
        pruned: whether the trial was pruned, according to the last value that was reported.
        evaluations, best, best_clock: as in `EarlyStopping`.

    Raises:
        ConfigurationError: An argument is invalid.
        Exception: The trial has raised it; it ends the job.
    """

    every_epochs: float

    def __init__(
        self, trial: Trial, df: DataFrame, monitor: str = "loss", *, every_epochs: float = 1.0, **options: Any
    ) -> None:
        super().__init__(df, monitor, every_epochs=require_number("every_epochs", every_epochs), **options)
        missing = [name for name in ("report", "should_prune") if not callable(getattr(trial, name, None))]
        if missing:
            raise ConfigurationError(f"`trial` must have the methods `report` and `should_prune`. Received: {trial!r}")
        self.trial = trial
        self.pruned = False
        self._step = 0

    def on_begin(self, setup: TrainingSetup) -> None:
        """Read the rows, and forget what an earlier job has left."""
        super().on_begin(setup)
        self.pruned, self._step = False, 0

    def on_center(self, context: CallbackContext) -> None:
        """Evaluate the center, and report the value if another step has been completed."""
        super().on_center(context)
        step = int(context.status.epochs / self.every_epochs)
        if step <= self._step or self.pruned:
            return
        self._step = step
        self.trial.report(self._value, step)
        self.pruned = bool(self.trial.should_prune())
        if self.pruned:
            context.stop(f"the search has pruned the trial at step {step}, with {self.monitor} {self._value:.6g}")


_LARGER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2")
_SMALLER_IS_BETTER = ("loss", "error", "entropy", "mse", "mae", "rmse", "divergence", "hinge", "log_cosh", "poisson")


def monitored_metric(callbacks: Iterable[Any]) -> str:
    """Return the metric that the first callback with an attribute ``monitor`` monitors; empty if there is none."""
    names = [getattr(callback, "monitor", None) for callback in callbacks]
    return next((name.removeprefix("val_") for name in names if isinstance(name, str) and name), "")


def _better_sign(monitor: str, mode: str) -> int:
    """Return 1 where smaller is better, -1 where larger is."""
    require_choice("mode", mode, ("min", "max", "auto"))
    if mode == "auto":
        name = monitor.lower()
        smaller, larger = (any(part in name for part in parts) for parts in (_SMALLER_IS_BETTER, _LARGER_IS_BETTER))
        if smaller == larger:
            raise ConfigurationError(
                f"`mode` must be given: 'min' or 'max' does not show in the name. Received: monitor={monitor!r}"
            )
        return 1 if smaller else -1
    return 1 if mode == "min" else -1
