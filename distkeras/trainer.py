"""The trainer: one class for every rule."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from distkeras.callbacks import Callback, TrainingSetup, monitored_metric
from distkeras.data.batches import DataSpec
from distkeras.data.binding import GivenEntries, listed
from distkeras.data.columns import described
from distkeras.data.model_columns import ASSEMBLED, example
from distkeras.data.rows import Padding
from distkeras.data.schema import require_dataframe
from distkeras.data.validity import REASON, invalid_rows, valid_rows
from distkeras.groups.job import GroupPlan, train_each_group
from distkeras.groups.keys import key_names
from distkeras.groups.replica import weights_of
from distkeras.groups.results import GroupResults
from distkeras.groups.store import TrainedGroup
from distkeras.keras_model import archive
from distkeras.keras_model.attributes import attributes_of_model, require_carried, set_attributes_of_model
from distkeras.keras_model.optimizers import require_independent
from distkeras.keras_model.recipe import recipe_of
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.same_step import GivenModel, require_same_step, require_same_values
from distkeras.keras_model.stored_rows import require_folder
from distkeras.keras_model.tables import CutModel, embedding_names, require_exact_embeddings
from distkeras.keras_model.variables import has_rows_at_server
from distkeras.metric_columns import columns_of as metric_columns_of
from distkeras.ps.checkpoint.checkpointer import Checkpoint, checkpoint_of
from distkeras.ps.checkpoint.versions import Versions
from distkeras.ps.errors import ConfigurationError, LocalProtocolError, headline
from distkeras.ps.rules import Rule
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.validate import refuse, require_boolean, require_integer, require_number
from distkeras.results import JobOutcome, JobResults
from distkeras.settings import (
    Executors,
    JobFacts,
    KerasNames,
    Monitoring,
    Network,
    TrainSettings,
    component_settings,
    default_rule,
    flattened,
    reported_options,
    rule_of,
    takes_keras_names,
    train_settings,
)
from distkeras.spark.cluster import SparkFacts
from distkeras.spark.failures import short_errors
from distkeras.training.bound_data import BoundData, columns_of
from distkeras.training.callback_runner import begin_callbacks, fail_callbacks, require_callbacks, require_no_epochs
from distkeras.training.plan import CenterCopy, JobPlan, Publication, TableChoice, report_tables
from distkeras.training.requirements import (
    may_lend,
    require_constant_rate,
    require_finite,
    require_fit,
    require_optimizer,
    require_shared,
    require_slots,
    require_together,
)
from distkeras.training.run import PreparedJob, early_server, run_job
from distkeras.training.stream import Publisher, StreamTraining, center_of, query_folder, require_stream, writer_of
from distkeras.training.validation import ValidationCurve, require_alone, split

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame


#: What to use for methods of a `keras.Model` that a trainer does not have.
_INSTEAD = {
    "fit": "`trainer.train(df)` trains on a DataFrame, and `KerasEstimator(model, ...).fit(df)` as a stage of Spark ML",
    "predict": "`KerasModel(trainer.model).transform(df)` predicts on rows, and `trainer.model.predict` on arrays",
    "evaluate": "`KerasModel(trainer.model).evaluate(df)` evaluates on rows, and `trainer.model.evaluate` on arrays",
    "compile": "loss, optimizer and metrics are arguments of the constructor, or those that the model is compiled with",
    "summary": "`trainer.epochs` has loss and metrics of each epoch, and `trainer.model.summary()` shows the model",
}


class Trainer(JobResults):
    """Train a Keras model on a Spark DataFrame, under any update rule.

    ::

        trainer = Trainer(model, "agn", worker_optimizer="adam", loss="sparse_categorical_crossentropy",
                          num_workers=4, batch_size=128, num_epoch=2)
        trained = trainer.train(df)            # a keras.Model with the center's weights
        trainer.history.show()                 # one row per mini-batch

    The DataFrame is distributed over `num_workers` partitions in a reproducible order, one for each worker. With more
    workers than slots, asynchronous rules train them in waves, and other rules refuse to start.

    Args:
        model: a built `keras.Model`. It is not changed.
        rule: a `Rule`, or the name of one; see ``python -m distkeras.ps rules``. Its `window` is the number of steps
            between two exchanges, "auto" or "by_speed". Default: `adag` with ``window="auto"`` and
            ``normalize=False``, with which up to four workers learn about as much in an epoch as `keras.Model.fit`
            does; for a model with an Embedding, and with another `wire_format`, `delay_adaptive` with
            ``window="auto"`` and ``threshold=4``, which may need a lower learning rate.
        worker_optimizer: a Keras optimizer for each worker, or its name. Gradient rules only use its clipping and, if
            `learning_rate` is not given, its learning rate. Default: the optimizer that the model is compiled with, in
            its current state, or "sgd". Optimizers that store weights or their averages (`use_ema`,
            ScheduleFreeAdamW), and combinations of several optimizers, are refused.
        loss, metrics, loss_weights, weighted_metrics: as in `keras.Model.compile`. Default: the model's own.
        features_col: column, or columns in the order of the model's inputs: numbers, arrays of numbers, or ML vectors,
            which are reshaped to the input. Several columns for a single input hold one number each, and fill it
            together. If the inputs are a dictionary, a mapping: {"user": "user_column", ...}.
        label_col: column or columns, in the order of the outputs; a mapping if these are a dictionary. Integer classes
            for the sparse cross-entropy, otherwise values that fill the output's shape; for the loss CTC, a loss of
            your own and your own `train_step`, arrays of any one length. A list in place of a column is of scalar
            columns that form an array together; None in place of one is for an output without a loss. None or [] alone:
            the model trains without labels, by `add_loss` or its own `train_step`.
        sample_weight_col: column with one weight per row, or an array with one for each time step; or such columns for
            each output, in the form of `label_col`, of which None has no weights.
        class_weight: weight of each class, for one label column of class numbers (of any type) or one-hot arrays; 1 for
            classes that are not named. "balanced": rows / (classes * rows of the class), counted in the rows to train
            on, as in scikit-learn; not for a stream.
        decode: function from the value of the features column to an array of the input's shape, or a dictionary from
            columns to such functions; for example, for encoded images. It runs on executors, in the thread that reads
            ahead.
        padding: `Padding` of the rows of inputs, labels and weights whose shape begins with None, such as those of
            ``Input((None,))``: of all of them, or a dictionary from columns to theirs. A mini-batch is padded to its
            longest row. Labels and weights of steps follow the inputs. Default: zeros after a row's steps.
        num_workers: workers, each of which trains on one partition. Default: Spark's default parallelism.
        batch_size: rows of one mini-batch of one worker.
        num_epoch: passes over the data.
        learning_rate: the server's learning rate, a number or one of `distkeras.schedules` over its clock; for gradient
            rules only. Default: the worker optimizer's.
        staleness_bound: largest number of iterations by which a worker may be ahead of the slowest one (stale
            synchronous). Default: no bound.
        seed: seed of the row order.
        shuffle: whether each epoch has a new row order.
        partitioned_already: whether `df` already has `num_workers` partitions whose rows always come in the same order.
        max_skipped: number of commits with a NaN or infinity that are skipped before the next one ends the job with a
            NonFiniteError that names worker, step and layer. The mini-batches of a skipped commit are marked in
            `ledger`, and its worker continues from a fresh center with a new optimizer. To clip gradients, give the
            worker optimizer ``clipnorm``, ``global_clipnorm`` or ``clipvalue``, which works under every rule.
        network: `Network`: where the parameter server runs, and how vectors travel.
        executors: `Executors`: threads, resources and memory of a worker.
        monitoring: `Monitoring`: progress, stalled workers, the gap.
        custom_objects: classes and functions of the model, by registered name, which `keras.saving` does not know.
        frozen_weights: path or URI of a ``.weights.h5`` or ``.keras`` file of the model or of a part of it, such as a
            frozen base, that each executor reads itself. Arrays that are equal to the file's, to the bit, are not sent
            with the model.
        tables: which `keras.layers.Embedding` layers of the model travel by rows: the server holds the whole table, and
            a worker receives and sends the rows that its window touches, so that time and memory do not grow with the
            table. "auto": tables with enough rows to benefit and with the same result, to the bit; the log names them,
            and why others stay dense. "dense": none. Names of layers: these tables; `train` raises an error if one
            cannot travel by rows.
        deadlines: `Deadlines`: the longest duration of each wait.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    inner = JobResults.inner | {
        "model_file", "observers", "recipe", "server_settings", "settings", "worker_settings",
    }  # fmt: skip

    @short_errors
    @takes_keras_names
    def __init__(  # noqa: PLR0913 - one keyword an option, each in the signature for `help` and for type checkers
        self,
        model: keras.Model,
        rule: Rule | str | None = None,
        *,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        loss_weights: Any = None,
        weighted_metrics: Sequence[Any] | None = None,
        features_col: str | Sequence[str] | Mapping[str, str] = "features",
        label_col: GivenEntries = "label",
        sample_weight_col: GivenEntries = None,
        class_weight: Mapping[int, float] | str | None = None,
        decode: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        padding: Padding | Mapping[str, Padding] | None = None,
        num_workers: int | None = None,
        batch_size: int = TrainSettings.batch_size,
        num_epoch: int = TrainSettings.num_epoch,
        learning_rate: float | Schedule | None = None,
        staleness_bound: int | None = None,
        seed: int = TrainSettings.seed,
        shuffle: bool = TrainSettings.shuffle,
        partitioned_already: bool = TrainSettings.partitioned_already,
        max_skipped: int = TrainSettings.max_skipped,
        network: Network | None = None,
        executors: Executors | None = None,
        monitoring: Monitoring | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        frozen_weights: str | None = None,
        tables: str | Sequence[str] = TrainSettings.tables,
        deadlines: Deadlines | None = None,
        **keras_names: Unpack[KerasNames],
    ) -> None:
        arguments = flattened(locals())  # each setting finds its option by name
        if deadlines is None:
            arguments["deadlines"] = Deadlines()
        super().__init__()
        self.model_file = archive.to_bytes(model)
        archive.require_inputs(model)
        self.rule = default_rule(network, has_tables=bool(embedding_names(model))) if rule is None else rule_of(rule)
        self.settings = train_settings(arguments)
        self.worker_settings = component_settings(WorkerSettings, self.rule, self.settings, arguments)
        self.recipe = recipe_of(
            model,
            self.model_file,
            optimizer=worker_optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            weighted_metrics=weighted_metrics,
            objects=custom_objects,
            labels=bool(listed(self.settings.label_col)),
        )
        # What cannot work fails here, not in `train`.
        replica = KerasReplica.of(self.recipe, self.model_file, to_train=True)
        require_optimizer(self.rule, replica.model)
        attributes = attributes_of_model(model, replica.model)
        self.model_file = archive.with_attributes(self.model_file, attributes)
        set_attributes_of_model(replica.model, attributes)
        require_carried(model, replica.model)
        require_same_values(model, replica.model)
        compiled = {"optimizer": worker_optimizer, "loss": loss, "metrics": metrics}
        compiled |= {"loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
        #: The user's own objects, until a step of theirs has been compared with a worker's.
        self._given: GivenModel | None = GivenModel(model, compiled) if self.settings.check_model else None
        require_independent(replica.model.optimizer)
        require_finite(replica)
        if learning_rate is None and self.rule.traits.gradient:
            require_constant_rate(self.rule, replica.model.optimizer)
            arguments["learning_rate"] = replica.learning_rate
        self.server_settings = component_settings(ServerSettings, self.rule, self.settings, arguments)
        #: Callbacks of every job of this trainer, in addition to those of `train`.
        self.observers: list[Callback] = []
        self._name = model.name
        self._training = threading.Lock()

    @short_errors
    def train(
        self,
        df: DataFrame,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | PathLike[str] | Checkpoint | None = None,
        resume: bool = False,
        validation_data: DataFrame | None = None,
        validation_split: float = 0.0,
    ) -> keras.Model:
        """Train on ``df``, and return a new model with the center's weights, compiled like the workers'.

        With a checkpoint, training survives the death of the parameter server, which is restarted from its latest
        snapshot. After the death of the driver, a new driver continues with ``resume=True``.

        A callback may end the job early. This is not a failure: the model is returned, `stopped` has the reason, and
        the committed mini-batches are the first ones of each partition, and of what was lent of it. A job with a
        checkpoint can be resumed later.

        Args:
            df: the data.
            callbacks: `EarlyStopping`, `TimeBudget`, `Dashboard`, `MLflowLogger`, Keras callbacks, or your own: see
                `distkeras.callbacks`.
            checkpoint: where the server saves its state: a directory, a URI that Arrow's filesystems open, or a
                `Checkpoint`, which also says how often. Only this job may use it.
            resume: continue the job that is saved there, if there is one. With the same number of workers it continues
                exactly where it stopped; with another number, at the beginning of the first epoch that was not
                completed, whose rows then count once more; `resumed` says which. A larger `num_epoch` trains further.
                Everything else must be the same: model, compilation, rule, columns, batches, order of rows, data. An
                earlier driver that still runs loses the job to this one.
            validation_data: other rows, with the same columns. After each epoch the center is evaluated on at most
                10,000 of them, on the driver: `validation` and `epochs` have its loss and metrics, and Keras callbacks
                get them as ``val_loss`` and so on.
            validation_split: share of the rows, in [0, 1), to leave out of training and to use in the same way, chosen
                by a hash of their values.

        Raises:
            DifferentJobError: `checkpoint` holds another job; raised before any work starts.
            OwnershipLostError: Another driver has resumed the job meanwhile.
            MissingColumnError, ColumnTypeError, ShapeError, ConfigurationError: A column or an argument is invalid;
                raised before any work starts.
            EmptyDataError: ``df`` has no rows.
            LocalProtocolError: Another thread trains with this trainer, which trains one job at a time.
            DistkerasError: A worker has failed; the error has its traceback. The Spark job is cancelled.
            Exception: A callback has raised it. The Spark job is cancelled.
            KeyboardInterrupt: The user has interrupted the job; `model` has the center's last weights.
        """
        began = time.monotonic()
        with self._alone(), early_server(self.settings) as ahead:
            place = checkpoint_of(checkpoint, resume)
            require_dataframe("df", df, stream=False)
            df, held_out = self._held_out(df, validation_data, validation_split)
            curves = [] if held_out is None else [ValidationCurve(held_out)]
            callbacks = [*require_callbacks(callbacks, held_out), *curves, *self.observers]
            job = self._begin(self._plan(df, callbacks, place, resume))
            for curve in curves:
                self.outcome.validation = curve.points
            try:
                run_job(job, self.outcome, ahead, began)
                for callback in callbacks:
                    callback.on_success(self)
            except BaseException as error:
                self._note_failure(callbacks, error)
                raise
            return self.model

    def _held_out(self, df: DataFrame, given: DataFrame | None, share: float) -> tuple[DataFrame, DataFrame | None]:
        """Return the rows to train on, and those to validate on, if any."""
        require_number("validation_split", share, inclusive=True, below=1)
        if given is not None:
            require_dataframe("validation_data", given, stream=False)
            require_alone(share)
            return df, given
        columns = [*listed(self.settings.features_col), *listed(self.settings.label_col)]
        return split(df, columns, None, share, self.settings.seed)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise LocalProtocolError where another thread trains: results and callbacks are those of one job."""
        if not self._training.acquire(blocking=False):
            raise LocalProtocolError(
                "a trainer must train one job at a time, whose model and records it has afterwards: make a trainer for "
                "each thread. Received: a call of `train` while another one has not returned"
            )
        try:
            yield
        finally:
            self._training.release()

    @short_errors
    def train_stream(
        self,
        stream: DataFrame,
        *,
        checkpoint: str | PathLike[str] | Checkpoint,
        trigger: Mapping[str, Any] | None = None,
        query_name: str | None = None,
        callbacks: Sequence[Callback] = (),
        publish: str | PathLike[str] | Versions | None = None,
    ) -> StreamTraining:
        """Train on a stream, each row once, and return a handle like Spark's `StreamingQuery`.

        ::

            training = trainer.train_stream(stream, checkpoint="/data/clicks", trigger={"processingTime": "10 seconds"})
            training.lastProgress                  # batch, rows, seconds, lag, loss
            training.model()                       # a keras.Model with the center's current weights
            training.stop()

        All workers train each micro-batch under the trainer's rule, for `num_epoch` epochs. One server serves the whole
        stream, so the next micro-batch continues with the same center and the same states of the workers' optimizers.
        A micro-batch is done when a snapshot covers it. It therefore counts once, even if Spark sends it again, and
        regardless of whether a worker, the server or the driver dies before or after Spark has recorded it as done. If
        the driver has died or the stream was stopped, the same call continues the stream.

        Commits that a rule buffers at the server reach the center at the end of each micro-batch. `history`, `commits`
        and `ledger` are those of the latest micro-batch; `model` is the last one of a stream that has ended.

        Callbacks live as long as the stream, and count commits and seconds over all its micro-batches. If a callback
        stops the stream, the current micro-batch is the last one, and `stopped` has the reason. If a callback raises an
        exception, the stream ends with it. If a callback restores weights at the end, `model` has them, but the
        checkpoint has the center's last weights.

        Args:
            stream: a streaming DataFrame, whose sources Spark can read again: files, Kafka, tables.
            checkpoint: a directory, a URI that Arrow's filesystems open, or a `Checkpoint`, for this stream only. It
                has two folders, one of the server and one of Spark's query. If the query keeps state, executors must be
                able to reach it as well.
            trigger: the keywords of ``DataStreamWriter.trigger``. Default: a micro-batch as soon as there are rows.
            query_name: name of Spark's query.
            callbacks: as in `train`, except those that count epochs, because each micro-batch has its own epochs.
            publish: a directory, a URI, or `Versions`. Only this stream may use it. The center at the end of a
                micro-batch is published there as a version, with which a `KerasStreamModel` predicts.

        Raises:
            DifferentJobError: `checkpoint` belongs to a stream with another model, compilation, rule, columns, batches
                or number of workers, or `publish` has versions of another model.
            MissingColumnError, ColumnTypeError, ShapeError, ConfigurationError: A column or an argument is invalid;
                raised before any work starts.
            Exception: A callback has raised it in `Callback.on_begin`.
        """
        callbacks = [*require_callbacks(callbacks), *self.observers]
        require_no_epochs(callbacks)
        require_dataframe("stream", stream)
        require_stream(stream, SparkFacts.of(stream.sparkSession))
        refuse("a stream", self.settings)
        place = checkpoint_of(checkpoint, resume=False)
        if place is None:
            raise ConfigurationError(
                "`checkpoint` must be given, because a stream continues from it after a failure. Received: None"
            )
        versions = Versions.of("publish", publish)
        plan = self._plan(stream, callbacks, center_of(place), resume=True)
        writer, folder = writer_of(plan.data.df, trigger, query_name), query_folder(stream.sparkSession, place)
        job = self._begin(plan)
        try:
            publisher = None if versions is None else Publisher(versions, job)
            return StreamTraining(job, self, place.uri, publisher).start(writer, folder)
        except BaseException as error:
            self._note_failure(callbacks, error)
            raise

    @short_errors
    def train_groups(
        self,
        df: DataFrame,
        by: str | Sequence[str],
        *,
        path: str | PathLike[str] | None = None,
        resume: bool = False,
        rows_max: int | None = None,
        side_by_side: int = 1,
    ) -> GroupResults:
        """Train a model for each group of rows, such as each shop, and return all of them as data.

        ::

            groups = trainer.train_groups(df, by="shop")
            groups.table.show()                    # shop, rows, seconds, loss, metrics, error
            groups.model("Berlin").predict(x)      # a keras.Model

        One task trains each group with the worker optimizer, starting from the trainer's model, as `keras.Model.fit`
        does on one machine; the rule and the parameter server are not used. A task trains one group after another, with
        the same compiled model, or `side_by_side` groups in one step. A group that cannot be trained, because of a null
        or a loss that is not finite, gets a row in the table with its error. Spark writes the groups of a task when the
        task ends, and repeats a task that dies.

        Rows are ordered by a hash of their values; epoch ``e`` permutes them by
        ``numpy.random.default_rng((seed, 0, e))``. A null in a column of the key counts as a value.

        Args:
            df: the data.
            by: the column or columns of the key, of types that Spark compares and sends to Python.
            path: folder or URI for the models, which the driver and every executor can reach. On a local master it may
                be left out; the models are then kept until this process ends.
            resume: continue the job in ``path``, which must be the same job, with the same rows of all finished groups.
            rows_max: largest number of rows of a group that one task trains. A larger group is trained by `train`, with
                all workers and under the trainer's rule. Default: as many as fit into `Executors.spool_bytes`.
            side_by_side: number of groups to train in one step, with stacked weights, instead of one after another.
                Weights differ only by rounding, about 1e-5, which may vary from run to run. This is faster for small
                models and mini-batches, whose steps take longer to start than to compute, and pays off for thousands of
                groups, because each Python worker traces a step for longer. It is slower for layers of 50,000 weights
                and more. Memory grows with the number. It needs TensorFlow or JAX, and a model of Keras' own classes
                and functions.

        Raises:
            DifferentJobError: ``path`` holds another job.
            MissingColumnError, ColumnTypeError, ShapeError, ConfigurationError: A column or an argument is invalid;
                raised before any work starts.
            EmptyDataError: ``df`` has no rows.
            LedgerError: A group that is finished, or that is trained as a job, has other rows than before.
            OwnershipLostError: Another driver has resumed the job meanwhile.
            SnapshotError: ``path`` cannot be written to, or is damaged.
            DeadlineError: The files of the job have not changed for `Deadlines.silence` seconds.
            DistkerasError: A task has failed.
        """
        require_dataframe("df", df, stream=False)
        replica = KerasReplica.of(self.recipe, self.model_file, to_train=True)
        if has_rows_at_server(replica.model):
            raise ConfigurationError(
                "`model` must have no WideEmbedding for `train_groups`, where no server keeps rows. Received: one"
            )
        data = self._bind(df, replica)
        fitting = max(1, self.settings.spool_bytes // data.spec.row_bytes)
        plan = GroupPlan(
            df=data.weighted(),
            by=key_names(by),
            spec=data.spec,
            settings=self.settings,
            threads=self.worker_settings.threads,
            recipe=self.recipe,
            model_file=self.model_file,
            replica=replica,
            path=None if path is None else str(path),
            resume=require_boolean("resume", resume),
            rule=self.rule,
            rows_max=require_integer("rows_max", fitting if rows_max is None else rows_max),
            side_by_side=require_integer("side_by_side", side_by_side),
            silence=self.worker_settings.deadlines.silence,
        )
        return train_each_group(plan, self._train_large_group)

    @short_errors
    def valid_rows(self, df: DataFrame) -> DataFrame:
        """Return the rows of ``df`` that can be trained on: ``trainer.train(trainer.valid_rows(df))``.

        A row is invalid if one of the trainer's columns has a null, NaN or infinity, an array of the wrong size, a
        label that is not a class, or a value on which ``decode`` fails. The check reads each row once more, in Python.

        Raises:
            MissingColumnError, ColumnTypeError, ShapeError, ConfigurationError: The columns do not fit the model.
        """
        return valid_rows(*self._checked_columns(df)).drop(ASSEMBLED)

    @short_errors
    def invalid_rows(self, df: DataFrame, reason_col: str = REASON) -> DataFrame:
        """Return the rows of ``df`` that `valid_rows` leaves out, with the reason in a new column of text.

        Args:
            reason_col: name of the new column.

        Raises:
            MissingColumnError, ColumnTypeError, ShapeError, ConfigurationError: The columns do not fit the model.
        """
        return invalid_rows(*self._checked_columns(df), reason_col).drop(ASSEMBLED)

    def _checked_columns(self, df: DataFrame) -> tuple[DataFrame, DataSpec]:
        require_dataframe("df", df)
        return columns_of(df, self.recipe.build(self.model_file), self.settings, self.recipe.settings)

    def _begin(self, plan: JobPlan) -> PreparedJob:
        """Begin the record and the callbacks of a job, and return it."""
        replica, cut, server = plan.replica, plan.cut, plan.server
        options = reported_options(server, plan.worker, self.settings, compilation=self.recipe.identity(replica.model))
        facts = JobFacts(
            rule=repr(server.rule),
            workers=server.workers,
            epochs=self.settings.num_epoch,
            batch_size=self.settings.batch_size,
            helpers=self.settings.helpers,
            rounds=server.rule.traits.synchronous,
            saved=server.checkpoint is not None,
            options=options,
            stream=plan.data.df.isStreaming,
            model=replica.model.name,
            parameters=replica.size + sum(table.rows * table.width for _, table in cut.partial),
            columns=plan.spec.names,
            monitor=monitored_metric(plan.callbacks),
        )
        self.outcome = outcome = JobOutcome(plan.data.df, facts=facts)
        report_tables(cut, outcome.events)
        job = PreparedJob(plan, Publication(plan), CenterCopy(plan))
        setup = TrainingSetup(
            replica.metric_names,
            job.center.build_replica,
            job.center.read_rows,
            facts,
            outcome.events,
            options,
            outcome,
            job.center.require_all_tables,
            tuple(table.name for table in cut.living),
        )
        begin_callbacks(plan.callbacks, setup)
        return job

    def _note_failure(self, callbacks: Sequence[Callback], error: BaseException) -> None:
        self.outcome.failure = headline(f"{type(error).__name__}: {error}")
        fail_callbacks(callbacks, error)

    def _plan(
        self, df: DataFrame, callbacks: Sequence[Callback], checkpoint: Checkpoint | None, resume: bool
    ) -> JobPlan:
        """Return the plan of a job on ``df``, whose rows it leaves as they are if it is a stream."""
        model = self.recipe.build(self.model_file)
        data = BoundData.of(df, model, self.settings, self.recipe.settings)
        cut = self._cut(model, data, checkpoint if resume else None)
        replica = self._fitting(KerasReplica(model, cut.order), data)
        goes_back = checkpoint is not None or cut.tables or self.rule.traits.peers or self.worker_settings.overlap
        if goes_back or self.settings.lends or self.settings.helpers:
            data = data.rewindable()  # earlier mini-batches may be needed again
        facts = SparkFacts.of(df.sparkSession)
        server, worker = self._placed(facts, checkpoint, cut, data.spec, stream=df.isStreaming)
        data = data.rewindable() if server.lends else data
        return JobPlan(
            data, self.settings, self.model_file, self.recipe, replica, cut, server, worker, callbacks, resume, facts
        )

    def _placed(
        self, facts: SparkFacts, checkpoint: Checkpoint | None, cut: CutModel, spec: DataSpec, *, stream: bool
    ) -> tuple[ServerSettings, WorkerSettings]:
        """Return the settings of a job's server and workers; ConfigurationError if this session cannot run them."""
        settings, in_cluster = self.settings, self.settings.server == "cluster"
        if in_cluster and not self.rule.traits.peers:
            require_shared(checkpoint)
        workers = settings.num_workers or facts.default_workers()
        host = facts.server_host() if in_cluster else settings.host or facts.driver_host()
        server = replace(self.server_settings, workers=workers, host=host, checkpoint=checkpoint, tables=cut.tables)
        require_together(server, settings, stream=stream)
        apart = in_cluster * (1 + (server.shards if server.shards > 1 else 0))
        require_slots(server, facts, facts.slots(settings.resources), settings.resources, apart=apart)
        worker = replace(self.worker_settings, rule=self.rule, workers=workers)
        lends = may_lend(server, worker, settings, spec, stream=stream)
        return replace(server, lends=lends), replace(worker, lends=lends)

    def _cut(self, model: keras.Model, data: BoundData, resumed: Checkpoint | None) -> CutModel:
        """Decide which tables travel by rows."""
        require_exact_embeddings(model)
        choice = TableChoice(
            training=self.settings,
            server=self.server_settings,
            worker=self.worker_settings,
            recipe=self.recipe,
            shapes=[column.longest_shape for column in data.spec.features],
            stream=data.df.isStreaming,
            resumed=None if resumed is None else resumed.uri,
        )
        cut = choice.cut(model, lambda: self.recipe.build(self.model_file, to_train=True))
        for _, table in cut.partial:
            require_folder(table.name, model.get_layer(table.name).folder)
        return cut

    def _fitting(self, replica: KerasReplica, data: BoundData) -> KerasReplica:
        """Return ``replica`` after the checks that it fits the data, and does the step of the user's model."""
        replica.settings = self.recipe.settings
        one_row = example(data.spec)
        require_fit(replica, one_row, [described(data.spec.columns)])
        if self._given is not None and not has_rows_at_server(replica.model):
            continues = self.recipe.continues
            rebuilt = self.recipe.build(self.model_file, to_train=True) if continues else replica.model
            gradient = self.rule.traits.gradient or self.rule.traits.plain_sgd
            require_same_step(self._given, rebuilt, data.spec, one_row, gradient=gradient)
            self._given = None
        return replica

    def _bind(self, df: DataFrame, replica: KerasReplica) -> BoundData:
        """Return the rows for models that are trained in one task each."""
        require_exact_embeddings(replica.model)
        data = BoundData.of(df, replica.model, self.settings, self.recipe.settings)
        self._fitting(replica, data)
        return data

    def _train_large_group(self, df: DataFrame) -> TrainedGroup:
        model = self.train(df)
        records = self._require(self.outcome.records, "history")
        *_, last = records.epochs().to_pylist()
        means = [(name, last[column]) for name, column in metric_columns_of(records.metrics).items()]
        return TrainedGroup(last["samples"], 0.0, means[0][1], tuple(means[1:]), weights=weights_of(model))

    def _facts(self) -> Mapping[str, Any]:
        """Return what is trained and how, and the last epoch of the last job."""
        settings = self.settings
        how = {"model": self._name, "rule": self.rule, "num_workers": settings.num_workers}
        return how | {"batch_size": settings.batch_size, "num_epoch": settings.num_epoch} | dict(super()._facts())

    if not TYPE_CHECKING:  # with it, type checkers would know no wrong name

        def __getattr__(self, name: str) -> Any:
            """Say what there is for the methods of a `keras.Model`."""
            instead = _INSTEAD.get(name)
            if instead is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(f"a trainer has no `{name}`: {instead}")
