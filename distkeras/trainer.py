"""The trainer: one class for every rule."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CenterWeights, TrainingSetup
from distkeras.data.local import collect
from distkeras.data.ordering import partitioned
from distkeras.data.schema import data_spec, example, names_of, weighted
from distkeras.data.spec import DataSpec
from distkeras.job.callback_runner import begin_callbacks
from distkeras.job.cluster import default_workers, driver_host
from distkeras.job.progress import Progress
from distkeras.job.spark_job import SparkJob
from distkeras.job.stalls import StallDetector
from distkeras.job.supervisor import Supervisor
from distkeras.job.task import Task
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps import rules
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError, DistkerasError, EmptyDataError
from distkeras.ps.protocol.compression import require_format
from distkeras.ps.rules import Rule
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.tls import make_certificate
from distkeras.ps.worker.auto_window import AutoWindow
from distkeras.results.outcome import Outcome
from distkeras.results.tables import JobRecords, Resumed

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch

log = logging.getLogger(__name__)


class Trainer(Outcome):
    """Trains a Keras model on a Spark DataFrame, under any update rule.

    ::

        trainer = Trainer(model, "agn", worker_optimizer="adam", loss="sparse_categorical_crossentropy",
                          num_workers=4, batch_size=128, num_epoch=2)
        trained = trainer.train(df)            # a keras.Model with the center's weights
        trainer.history.show()                 # one row a mini-batch

    The DataFrame is spread over `num_workers` partitions in a reproducible order; each is one worker. With more
    workers than slots, asynchronous rules train them in waves, and the others refuse.

    Args:
        model: a built `keras.Model`. It is not changed.
        rule: a `Rule`, or the name of one; see ``python -m distkeras.ps rules``.
        worker_optimizer: of each worker: a Keras optimizer or its name. Gradient rules take only its clipping and, if
            `learning_rate` is not given, its learning rate. Default: the one that the model is compiled with, or "sgd".
        loss, metrics, loss_weights, weighted_metrics: as in `keras.Model.compile`. Default: the model's own.
        features_col: column, or columns in the order of the model's inputs: numbers, arrays of them, or ML vectors;
            reshaped to the input.
        label_col: column or columns, in the order of the outputs. Integer classes for the sparse cross-entropy, else
            values that fill the output's shape.
        sample_weight_col: column with one weight a row.
        class_weight: weight of each class, where the one label column holds integer classes.
        num_workers: partitions. Default: Spark's default parallelism.
        batch_size: rows of one mini-batch of one worker.
        num_epoch: passes over the data.
        learning_rate: the server's, a number or a `ps.schedules.Schedule` over its clock; for gradient rules only.
        staleness_bound: iterations that a worker may be ahead of the slowest (stale synchronous). Default: no bound.
        seed: of the row order.
        shuffle: a new row order for each epoch.
        partitioned_already: `df` has `num_workers` partitions whose rows always come in the same order.
        spool_bytes: memory in which a worker may keep rows for later epochs, before a file takes them.
        bad_numbers: what a commit with a NaN or infinity does: "raise" ends the job with a NonFiniteError that names
            worker, step and layer; "skip" leaves the commit out. Its mini-batches are marked in `ledger`, its worker
            goes on from a fresh center with a new optimizer. To clip gradients, give the worker optimizer ``clipnorm``,
            ``global_clipnorm`` or ``clipvalue``: that holds under every rule.
        max_skipped: commits that may be skipped; one more ends the job.
        measure_gap: fill the column `gap` of `commits`, for one more pass over the vector at each commit. The gap is
            to the vector that was sent before `wire_format` rounded it.
        wire_format: what vectors look like between workers and server: "float32", as they are; "bfloat16", rounded to
            half the bytes; "int8", to a quarter: a commit also carries what was rounded off those before it, a reply
            the change of the center, so that roundings do not add up. The center itself stays float32. Rules that rely
            on what exactly was sent take float32 only: elastic ones, ADAG, DANA-DC and DC-ASGD.
        overlap: compute the next window while a commit and its reply travel, where a link is slow. What a worker is
            sent is then one window older, and its staleness says so; each worker keeps its own moving statistics. For
            `downpour`, `agn` and `asgd`.
        communication_window: steps between two exchanges, instead of the rule's `window`; "auto" has each worker
            measure its first exchanges and choose: `events` says what. Rules that need a fixed window refuse "auto".
        communication_share: of a worker's time, that "auto" lets communication take; with `overlap`, it chooses the
            smallest window that hides an exchange.
        progress: show a progress bar. Default: on a terminal and in a notebook.
        host: address of the driver that executors can reach. Default: loopback for a local master, else Spark's
            ``spark.driver.host``.
        port: of the parameter server; 0 for one that is free.
        tls: encrypt what travels between workers, driver and server; needs the package cryptography on the driver.
        threads: compute threads of one worker. Default: the cores that Spark gives to a task.
        custom_objects: classes and functions of the model, by registered name, beside what `keras.saving` knows.
        deadlines: of every wait.
        stall_after: seconds without a commit after which a worker is named in the log and in `events`, once; None:
            never. Nothing else follows from it.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        model: keras.Model,
        rule: Rule | str,
        *,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        loss_weights: Any = None,
        weighted_metrics: Sequence[Any] | None = None,
        features_col: str | Sequence[str] = "features",
        label_col: str | Sequence[str] = "label",
        sample_weight_col: str | None = None,
        class_weight: Mapping[int, float] | None = None,
        num_workers: int | None = None,
        batch_size: int = 32,
        num_epoch: int = 1,
        learning_rate: float | Schedule | None = None,
        staleness_bound: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        partitioned_already: bool = False,
        spool_bytes: int = 256 << 20,
        bad_numbers: str = "raise",
        max_skipped: int = 100,
        measure_gap: bool = False,
        wire_format: str = "float32",
        overlap: bool = False,
        communication_window: int | str | None = None,
        communication_share: float = 0.1,
        progress: bool | None = None,
        host: str | None = None,
        port: int = 0,
        tls: bool = False,
        threads: int | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        deadlines: Deadlines | None = None,
        stall_after: float | None = 300.0,
    ) -> None:
        super().__init__()
        self.rule = rules.make(rule) if isinstance(rule, str) else rule
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise ConfigurationError(f"`num_workers` must be a positive integer. Received: num_workers={num_workers!r}")
        if learning_rate is not None and not self.rule.traits.gradient:
            raise ConfigurationError(
                f"`learning_rate` is the server's, for gradient rules; rule {self.rule.name!r} steps at the workers: "
                f"set it in `worker_optimizer`. Received: learning_rate={learning_rate}"
            )
        if bad_numbers not in ("raise", "skip"):
            raise ConfigurationError(f"`bad_numbers` must be 'raise' or 'skip'. Received: bad_numbers={bad_numbers!r}")
        if type(max_skipped) is not int or max_skipped < 1:
            raise ConfigurationError(f"`max_skipped` must be a positive integer. Received: max_skipped={max_skipped!r}")
        require_format(wire_format, self.rule)
        if overlap and not self.rule.traits.overlaps:
            raise ConfigurationError(
                f"`overlap` is for rules that go on while a commit travels; {self.rule.name!r} does not. "
                "Received: overlap=True"
            )
        automatic = communication_window == "auto"
        if automatic:
            AutoWindow(self.rule, communication_share)  # finds out now whether it can
        elif communication_window is not None:
            self.rule = replace(self.rule, window=communication_window)  # type: ignore[arg-type]  # checks it
        if stall_after is not None and not stall_after > 0:
            raise ConfigurationError(f"`stall_after` must be above 0. Received: stall_after={stall_after!r}")
        self.model_file = archive.to_bytes(model)
        self.recipe = recipe_of(
            model,
            self.model_file,
            optimizer=worker_optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            weighted_metrics=weighted_metrics,
            objects=custom_objects,
        )
        self.features = names_of(features_col, "features_col")
        self.labels = names_of(label_col, "label_col")
        self.sample_weight_col = sample_weight_col
        self.class_weight = dict(class_weight) if class_weight is not None else None
        self.num_workers = num_workers
        self.batch_size = batch_size
        self.num_epoch = num_epoch
        self.learning_rate = learning_rate
        self.staleness_bound = staleness_bound
        self.seed = seed
        self.shuffle = shuffle
        self.partitioned_already = partitioned_already
        self.spool_bytes = spool_bytes
        self.bad_numbers = bad_numbers
        self.max_skipped = max_skipped
        self.measure_gap = measure_gap
        self.wire_format = wire_format
        self.overlap = overlap
        self.communication_share = communication_share if automatic else None
        self.progress = progress
        self.host = host
        self.port = port
        self.tls = tls
        if tls:
            make_certificate()  # finds out now whether it can
        self.threads = threads
        self.deadlines = deadlines or Deadlines()
        self.stall_after = stall_after
        self._replica()  # what cannot work fails here, not in `train`

    def train(
        self,
        df: DataFrame,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | PathLike[str] | Checkpoint | None = None,
        resume: bool = False,
    ) -> keras.Model:
        """Trains on ``df`` and returns a new model with the center's weights, compiled like the workers'.

        With a checkpoint, training outlives the death of the parameter server, which is started again from its latest
        snapshot, and that of the driver, after which ``resume=True`` goes on in a new one.

        A callback may end the job early. That is no failure: the model comes back, `stopped` says why, and the
        mini-batches committed are the first ones of each partition. A job with a checkpoint can be resumed after it.

        Args:
            df: the data.
            callbacks: `EarlyStopping`, `TimeBudget`, or your own: see `callbacks`.
            checkpoint: where the server saves its state: a directory, a URI that Arrow's filesystems open, or a
                `Checkpoint` that says how often as well. Of this job alone.
            resume: go on with the job that is saved there, if one is: with the same number of workers exactly where it
                stopped, with another number from the beginning of the first epoch that was not ended, whose rows then
                count once more; `resumed` says which. A larger `num_epoch` than before trains on.

        Raises:
            MissingColumnError, ShapeError, ConfigurationError: before any work starts.
            EmptyDataError: ``df`` has no rows.
            DistkerasError: what a worker found, with its traceback; the Spark job is cancelled and the port free.
            Exception: what a callback raised; likewise.
            KeyboardInterrupt: likewise; `model` has the center's last weights.
        """
        began = time.monotonic()
        saved = _checkpoint_of(checkpoint, resume)
        replica = self._replica()
        df, weight_col = weighted(df, self.labels, self.class_weight, self.sample_weight_col)
        spec = replace(self._spec(replica.model, df, weight_col), rewindable=saved is not None or self.overlap)
        _prepare(replica, spec)
        workers = self.num_workers or default_workers(df)
        self._forget(df)
        begin_callbacks(callbacks, TrainingSetup(replica.metric_names, self._replica, self._collected))
        start = np.empty(replica.size, np.float32)
        replica.read(start)
        moving = np.empty(replica.moving_statistics.size, np.float32)
        replica.read_moving_statistics(moving)
        layouts = (replica.layout, replica.moving_statistics)

        def publish(driver: DriverClient) -> None:
            driver.publish(start, moving, self.model_file, layouts)

        laid_out = partitioned(df, spec, workers, partitioned_already=self.partitioned_already)
        with (
            ServerProcess(
                ServerSettings(
                    self.rule,
                    workers=workers,
                    learning_rate=self._server_learning_rate(replica),
                    staleness_bound=self.staleness_bound,
                    measure_gap=self.measure_gap,
                    max_skipped=self.max_skipped if self.bad_numbers == "skip" else 0,
                    host=self.host or driver_host(df),
                    port=self.port,
                    deadlines=self.deadlines,
                    checkpoint=saved,
                ),
                resume=resume,
                job=self._facts(),
                epochs=self.num_epoch,
                tls=self.tls,
                events=self._events,
            ) as process,
            Supervisor(process, publish, self._events) as server,
            Progress(self.progress) as progress,
        ):
            self.resumed = Resumed.of(process.resumed)
            task = Task(
                address=process.address,
                rule=self.rule,
                spec=spec,
                recipe=self.recipe,
                size=replica.size,
                moving_statistics=replica.moving_statistics.size,
                metrics=replica.metric_names,
                workers=workers,
                threads=self.threads,
                deadlines=self.deadlines,
                wire_format=self.wire_format,
                overlap=self.overlap,
                share=self.communication_share,
            )
            job = SparkJob(
                laid_out,
                task,
                supervisor=server,
                progress=progress,
                callbacks=callbacks,
                build_replica=self._replica,
                events=self._events,
                stalls=None if self.stall_after is None else StallDetector(self.stall_after, self._events),
            )
            started = time.monotonic()
            try:
                rows = job.run()
                ended = time.monotonic()
            except BaseException:
                if server.alive():
                    # No commit may come between the center that is collected and its records.
                    server.ask(lambda driver: driver.stop("the driver ended the job"))
                    server.ask(lambda driver: self._collect(driver, replica))
                raise
            center = server.ask(lambda driver: self._collect(driver, replica))
        self.stopped, records = job.stopped, self._records
        if records is None or not (len(records.commits_array) or self.stopped):
            raise EmptyDataError("`df` must have rows to train on. Received: none")
        for row in rows:
            if row["window"] is not None:
                text = "worker %d exchanges every %d steps"
                self._events.report(log, "window", text, row["worker"], row["window"], level=logging.INFO)
        batches = {row["worker"]: row["batches"] for row in rows}
        records.check_exactly_once(batches, self.num_epoch, self.resumed, stopped=self.stopped is not None)
        job.callbacks.end(center).load(replica)
        finished = time.monotonic()
        self.timings = {
            "start": started - began,
            "spark": ended - started,
            "finish": finished - ended,
            "total": finished - began,
        }
        return self.model

    def _facts(self) -> dict[str, Any]:
        """What decides which rows a mini-batch has: a job that is resumed must have them the same."""
        return {
            "features": list(self.features),
            "labels": list(self.labels),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _collect(self, driver: DriverClient, replica: KerasReplica) -> CenterWeights:
        """The center and the records, also of a job that failed: what was learned is not lost."""
        center = CenterWeights.fetch(driver)
        center.load(replica)
        self._model = replica.model
        self._records = JobRecords.drain(driver)
        return center

    def _collected(self, df: DataFrame, most: int) -> Batch | None:
        """Rows of a validation DataFrame, with the columns that the trainer is told of."""
        spec = self._spec(self._replica().model, df, self.sample_weight_col)
        return collect(df, replace(spec, epochs=1, shuffle=False), most)

    def _replica(self) -> KerasReplica:
        """A copy of the model, compiled like the workers', on the driver.

        Raises:
            ConfigurationError: the rule cannot work with the worker optimizer.
        """
        replica = KerasReplica(self.recipe.build(self.model_file))
        traits = self.rule.traits
        optimizer = replica.model.optimizer
        if (traits.plain_sgd or traits.gradient) and not _is_plain_sgd(optimizer):
            why = "takes its steps at the server" if traits.gradient else "needs the plain step"
            raise ConfigurationError(
                f"`worker_optimizer` must be SGD without momentum or weight decay: rule {self.rule.name!r} {why}. "
                f"Received: worker_optimizer={optimizer.name!r} with {optimizer.get_config()}"
            )
        return replica

    def _server_learning_rate(self, replica: KerasReplica) -> float | Schedule | None:
        if not self.rule.traits.gradient:
            return None
        return replica.learning_rate if self.learning_rate is None else self.learning_rate

    def _spec(self, model: keras.Model, df: DataFrame, weight_col: str | None) -> DataSpec:
        return data_spec(
            model,
            df,
            features=self.features,
            labels=self.labels,
            weight=weight_col,
            batch_size=self.batch_size,
            epochs=self.num_epoch,
            seed=self.seed,
            shuffle=self.shuffle,
            spool_bytes=self.spool_bytes,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rule={self.rule}, num_workers={self.num_workers}, batch_size={self.batch_size})"


def _checkpoint_of(checkpoint: str | PathLike[str] | Checkpoint | None, resume: bool) -> Checkpoint | None:
    if checkpoint is None and resume:
        raise ConfigurationError("`resume` needs to be told from where. Received: resume=True, checkpoint=None")
    return checkpoint if checkpoint is None or isinstance(checkpoint, Checkpoint) else Checkpoint(fspath(checkpoint))


def _prepare(replica: KerasReplica, spec: DataSpec) -> None:
    try:
        replica.prepare(example(spec))
    except DistkerasError:
        raise
    except Exception as error:  # a backend has errors of its own, and loss and metrics may be the user's
        raise ConfigurationError(
            "`model` must have inputs, loss and metrics that fit the data. "
            f"Received: {[*spec.features, *spec.labels]}: {type(error).__name__}: {error}"
        ) from error


def _is_plain_sgd(optimizer: Any) -> bool:
    import keras

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return isinstance(inner, keras.optimizers.SGD) and not inner.momentum and not inner.weight_decay
