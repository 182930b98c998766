"""The trainer: one class for every rule."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras import models
from distkeras.history import Records
from distkeras.job import Job
from distkeras.plan import DataSpec, partitioned
from distkeras.progress import Progress
from distkeras.ps import rules
from distkeras.ps.channel import Deadlines
from distkeras.ps.client import DriverClient
from distkeras.ps.errors import ConfigurationError, DistkerasError, EmptyDataError, LocalProtocolError, ShapeError
from distkeras.ps.process import ServerProcess
from distkeras.ps.rules import Rule
from distkeras.ps.schedules import Schedule
from distkeras.recipe import recipe_of
from distkeras.replica import KerasReplica
from distkeras.schema import data_spec, example, names_of
from distkeras.task import Task

if TYPE_CHECKING:
    import keras
    import pyarrow as pa
    from pyspark.sql import DataFrame


class Trainer:
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
        measure_gap: fill the column `gap` of `commits`, for one more pass over the vector at each commit.
        progress: show a progress bar. Default: on a terminal and in a notebook.
        host: address of the driver that executors can reach. Default: loopback for a local master, else Spark's
            ``spark.driver.host``.
        port: of the parameter server; 0 for one that is free.
        threads: compute threads of one worker. Default: the cores that Spark gives to a task.
        custom_objects: classes and functions of the model, by registered name, beside what `keras.saving` knows.
        deadlines: of every wait.

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
        measure_gap: bool = False,
        progress: bool | None = None,
        host: str | None = None,
        port: int = 0,
        threads: int | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.rule = rules.make(rule) if isinstance(rule, str) else rule
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise ConfigurationError(f"`num_workers` must be a positive integer. Received: num_workers={num_workers!r}")
        if learning_rate is not None and not self.rule.traits.gradient:
            raise ConfigurationError(
                f"`learning_rate` is the server's, for gradient rules; rule {self.rule.name!r} steps at the workers: "
                f"set it in `worker_optimizer`. Received: learning_rate={learning_rate}"
            )
        self.model_file = models.to_bytes(model)
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
        self.measure_gap = measure_gap
        self.progress = progress
        self.host = host
        self.port = port
        self.threads = threads
        self.deadlines = deadlines or Deadlines()
        self._replica()  # what cannot work fails here, not in `train`
        self._frame: DataFrame | None = None
        self._records: Records | None = None
        self._model: keras.Model | None = None
        #: Seconds of the parts of the last `train`: start, spark, finish, total.
        self.timings: dict[str, float] = {}

    # ---- what a job leaves behind

    @property
    def model(self) -> keras.Model:
        """The model with the center's last known weights; also after a job that failed or was interrupted.

        Raises:
            LocalProtocolError: nothing has been trained.
        """
        return self._left(self._model, "model")

    @property
    def history(self) -> DataFrame:
        """One row a mini-batch: worker, epoch, iteration (from 0, of the worker), timestamp, loss, metrics, samples."""
        return self._table(self._left(self._records, "history").history())

    @property
    def commits(self) -> DataFrame:
        """One row a commit, by clock: worker, timestamp, staleness, gap (null unless measured), mean scale factor,
        bytes, wait (seconds that the worker had waited for the reply before), and what stood behind it."""
        return self._table(self._left(self._records, "commits").commits())

    @property
    def ledger(self) -> DataFrame:
        """One row a commit: partition, task attempt, sequence, epoch, first and last mini-batch, clock, incarnation."""
        return self._table(self._left(self._records, "ledger").ledger())

    def _left(self, value: Any, name: str) -> Any:
        if value is None:
            raise LocalProtocolError(f"`{name}` must be asked for after `train`. Received: no training yet")
        return value

    def _table(self, table: pa.Table) -> DataFrame:
        assert self._frame is not None
        return self._frame.sparkSession.createDataFrame(table)

    # ---- training

    def train(self, df: DataFrame) -> keras.Model:
        """Trains on ``df`` and returns a new model with the center's weights, compiled like the workers'.

        Raises:
            MissingColumnError, ShapeError, ConfigurationError: before any work starts.
            EmptyDataError: ``df`` has no rows.
            DistkerasError: what a worker found, with its traceback; the Spark job is cancelled and the port free.
            KeyboardInterrupt: likewise; `model` has the center's last weights.
        """
        began = time.monotonic()
        replica = self._replica()
        df, weight_col = self._weighted(df)
        spec = self._spec(replica.model, df, weight_col)
        _prepare(replica, spec)
        workers = self.num_workers or _default_workers(df)
        self._frame, self._records, self._model = df, None, None
        start = np.empty(replica.size, np.float32)
        replica.read(start)
        moving = np.empty(replica.statistics.size, np.float32)
        replica.read_statistics(moving)
        laid_out = partitioned(df, spec, workers, partitioned_already=self.partitioned_already)
        with (
            ServerProcess(
                self.rule,
                workers=workers,
                learning_rate=self._server_learning_rate(replica),
                staleness_bound=self.staleness_bound,
                measure_gap=self.measure_gap,
                host=self.host or _driver_host(df),
                port=self.port,
                deadlines=self.deadlines,
            ) as process,
            Progress(self.progress) as progress,
        ):
            driver = DriverClient(process.address, self.deadlines)
            try:
                driver.publish(start, moving, self.model_file)
                task = Task(
                    address=process.address,
                    rule=self.rule,
                    spec=spec,
                    recipe=self.recipe,
                    size=replica.size,
                    statistics=replica.statistics.size,
                    metrics=replica.metric_names,
                    workers=workers,
                    threads=self.threads,
                    deadlines=self.deadlines,
                )
                started = time.monotonic()
                try:
                    rows = Job(laid_out, task, process.address, alive=process.alive, progress=progress).run()
                except BaseException:
                    if process.alive():  # no commit between the center that is collected and its records
                        driver.stop("the driver ended the job")
                    raise
                finally:
                    ended = time.monotonic()
                    if process.alive():
                        self._collect(driver, replica)
            finally:
                driver.close()
        records = self._records
        if records is None or not len(records.commits_array):
            raise EmptyDataError("`df` must have rows to train on. Received: none")
        records.check_exactly_once({row["worker"]: row["batches"] for row in rows}, self.num_epoch)
        finished = time.monotonic()
        self.timings = {
            "start": started - began,
            "spark": ended - started,
            "finish": finished - ended,
            "total": finished - began,
        }
        return self.model

    def _collect(self, driver: DriverClient, replica: KerasReplica) -> None:
        """The center and the records, also of a job that failed: what was learned is not lost."""
        reply = driver.center()
        replica.load(reply.center)
        replica.load_statistics(reply.statistics)
        self._model = replica.model
        self._records = Records.drain(driver)

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

    def _weighted(self, df: DataFrame) -> tuple[DataFrame, str | None]:
        """Class weights become sample weights, in the JVM."""
        if self.class_weight is None:
            return df, self.sample_weight_col
        from pyspark.sql import functions as F
        from pyspark.sql.types import IntegralType

        kinds = {field.name: field.dataType for field in df.schema.fields}
        if len(self.labels) != 1 or not isinstance(kinds.get(self.labels[0]), IntegralType):
            raise ShapeError(
                "`class_weight` needs one label column of integer classes. "
                f"Received: label_col={list(self.labels)} of {[str(kinds.get(name)) for name in self.labels]}"
            )
        label = F.col(f"`{self.labels[0]}`")
        weight = F.lit(1.0) if self.sample_weight_col is None else F.col(f"`{self.sample_weight_col}`").cast("double")
        factor = F.lit(1.0)
        for number, value in self.class_weight.items():
            factor = F.when(label == F.lit(int(number)), F.lit(float(value))).otherwise(factor)
        return df.withColumn(_CLASS_WEIGHT, weight * factor), _CLASS_WEIGHT

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rule={self.rule}, num_workers={self.num_workers}, batch_size={self.batch_size})"


_CLASS_WEIGHT = "distkeras_class_weight"


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


def _default_workers(df: DataFrame) -> int:
    from pyspark.errors import PySparkException

    try:
        return df.sparkSession.sparkContext.defaultParallelism
    except PySparkException:  # Spark Connect hides it
        raise ConfigurationError("`num_workers` must be given under Spark Connect. Received: None") from None


def _driver_host(df: DataFrame) -> str:
    conf = df.sparkSession.conf
    master = str(conf.get("spark.master", "local"))
    if master.startswith("local") and not master.startswith("local-cluster"):
        return "127.0.0.1"
    return str(conf.get("spark.driver.host", "127.0.0.1"))
