"""A job from its plan, which is settled before any of it starts, to its end: a server while Spark runs the tasks."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CenterWeights
from distkeras.data.binding import listed
from distkeras.data.ordering import require_rows
from distkeras.data.schema import CLASS_WEIGHT, example
from distkeras.data.spec import DataSpec
from distkeras.keras_model.recipe import Recipe, layout_identity, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.weights_file import without_weights_of
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.errors import ConfigurationError, DistkerasError, EmptyDataError
from distkeras.ps.events import Events
from distkeras.ps.protocol.framing import KEY_BYTES, encode
from distkeras.ps.protocol.messages import Ack, Publish
from distkeras.ps.rules import Rule
from distkeras.ps.server.process import ServerProcess, spawn_server
from distkeras.ps.server.start import ResumePoint, StartRequest
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.ps.transport.tls import make_certificate
from distkeras.ps.world.processes import Child
from distkeras.results.job_results import JobOutcome
from distkeras.results.tables import JobRecords, Resumed
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkFacts, has_console_bar
from distkeras.spark.kept_layout import Arrangement
from distkeras.training.cluster_server import ClusterServer
from distkeras.training.progress import Progress, StallDetector
from distkeras.training.server_task import ServerTask
from distkeras.training.spark_job import SparkJob, WorkerStage
from distkeras.training.supervisor import ServerHandle, Supervisor
from distkeras.training.task import Task

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row


log = logging.getLogger(__name__)

#: Seconds for a process that was killed to be gone.
_KILLED = 10.0
#: Bytes for the names of a model's arrays, in addition to the model.
_FRAME_ROOM = 1 << 20


@dataclass(frozen=True)
class JobPlan:
    """A job that has not begun.

    Args:
        df: one partition a worker.
        arrangement: what ``df`` was computed from; None: its rows are not kept for a later job.
        spec: columns, mini-batches, epochs.
        training: the settings of data and driver.
        model_file: the model.
        recipe: how to compile it.
        replica: the model, compiled like the workers'.
        server: the settings of the server.
        worker: the settings of the workers.
        callbacks: begun.
        resume: go on with the job that the server's checkpoint holds.

    Raises:
        ConfigurationError: no server takes the model, or the file of its frozen weights cannot be read.
    """

    df: DataFrame
    arrangement: Arrangement | None
    spec: DataSpec
    training: TrainSettings
    model_file: bytes
    recipe: Recipe
    replica: KerasReplica
    server: ServerSettings
    worker: WorkerSettings
    callbacks: Sequence[Callback]
    resume: bool

    def __post_init__(self) -> None:
        require_size(self.server, self.replica, self.sent_file)

    @cached_property
    def sent_file(self) -> bytes:
        """The model as workers are sent it: without weights that they read elsewhere."""
        uri = self.training.frozen_weights
        return self.model_file if uri is None else without_weights_of(self.model_file, uri)

    def task(self, address: Address) -> Task:
        """What Spark runs on each partition, with the server at ``address``."""
        return Task(
            address=address,
            settings=self.worker,
            spec=self.spec,
            recipe=self.recipe,
            size=self.replica.size,
            moving_statistics=self.replica.moving_statistics.size,
            metrics=self.replica.metric_names,
        )

    def build_replica(self) -> KerasReplica:
        """Another copy of the model, compiled like the workers'."""
        return KerasReplica(self.recipe.build(self.model_file))

    def identity(self) -> dict[str, Any]:
        """What a job that goes on from this one's checkpoint must share, in addition to the rule; JSON-ready."""
        replica, columns = self.replica, self.spec.features + self.spec.labels
        return {
            **self.training.row_settings,
            "shapes": {column.name: list(column.shape) for column in columns},
            "model": model_identity(self.model_file),
            "layout": layout_identity(replica.layout),
            "moving_statistics": layout_identity(replica.moving_statistics),
            "compilation": self.recipe.identity(replica.model),
        }

    def publisher(self, resumed: ResumePoint | None = None) -> Callable[[DriverClient], None]:
        """Hands the model as it is now over to a server, any number of times.

        Args:
            resumed: where the server goes on from.

        Raises:
            LedgerError: the rows are not those of the job that it goes on with, as far as that is known.
        """
        if resumed is not None and resumed.row_sum is not None:
            require_rows(self.df, resumed.row_sum)
        message = self._publication()

        def publish(driver: DriverClient) -> None:
            driver.request(message, Ack)

        return publish

    def server_task(self) -> ServerTask:
        """The server as a task in the cluster, with a fresh random key."""
        request = StartRequest(
            settings=self.server,
            key=secrets.token_bytes(KEY_BYTES),
            certificate=make_certificate() if self.training.tls else None,
            mode=StartMode(fresh=not self.resume, same_attempts=False, epochs=self.training.num_epoch),
            job=self.identity(),
        )
        driver = SparkFacts.of(self.df.sparkSession).driver_address
        return ServerTask(request, b"".join(encode(self._publication())), driver=driver)

    def _publication(self) -> Publish:
        """The model as it is now."""
        replica = self.replica
        start = np.empty(replica.size, np.float32)
        replica.read(start)
        moving_statistics = np.empty(replica.moving_statistics.size, np.float32)
        replica.read_moving_statistics(moving_statistics)
        layouts = (replica.layout, replica.moving_statistics)
        return publication(start, moving_statistics, self.sent_file, layouts)


@dataclass(frozen=True)
class EndedJob:
    """A job whose tasks have all ended well.

    Args:
        job: Spark's.
        rows: a summary of each task.
        center: the last one.
        spark_began, spark_ended: when, in seconds of the monotonic clock.
    """

    job: SparkJob
    rows: Sequence[Row]
    center: CenterWeights
    spark_began: float
    spark_ended: float

    def timings(self, began: float, finished: float) -> dict[str, float]:
        """Seconds of each part of a call that ``began`` and has ``finished``, on the same clock."""
        return {
            "start": self.spark_began - began,
            "spark": self.spark_ended - self.spark_began,
            "finish": finished - self.spark_ended,
            "total": finished - began,
        }


def require_fit(replica: KerasReplica, spec: DataSpec) -> None:
    """Tries the model, its loss and its metrics on a mini-batch as the data have them.

    Raises:
        ConfigurationError: they do not fit.
    """
    try:
        replica.prepare(example(spec))
    except DistkerasError:
        raise
    except Exception as error:  # a backend has errors of its own, and loss and metrics may be the user's
        raise ConfigurationError(
            "`model` must have inputs, loss and metrics that fit the data. "
            f"Received: {[*spec.features, *spec.labels]}: {type(error).__name__}: {error}"
        ) from error


def require_size(server: ServerSettings, replica: KerasReplica, sent_file: bytes) -> None:
    """Check that a server accepts a model of this size, before it is started.

    Raises:
        ConfigurationError: it does not.
    """
    nbytes = len(sent_file) + 4 * (replica.size + replica.moving_statistics.size)
    most = server.max_body - _FRAME_ROOM
    if nbytes > most:
        raise ConfigurationError(
            f"`model` must have at most {most >> 20} MiB, what trains counted twice: executors can read "
            f"weights that are frozen for themselves, by `frozen_weights`. Received: {-(-nbytes >> 20)} MiB"
        )


def require_finite(replica: KerasReplica) -> None:
    """Check that the model's weights are finite, so that no worker is blamed for them later.

    An infinity in a weight that is not trained may be meant, such as a mask's.

    Raises:
        ConfigurationError: one is not.
    """
    import keras

    published = {*replica.layout.names, *replica.moving_statistics.names}
    for variable in replica.model.weights:
        if not keras.backend.is_float_dtype(variable.dtype):
            continue
        with np.errstate(over="ignore"):  # too large for float32 is as bad
            value = np.asarray(keras.ops.convert_to_numpy(variable)).astype(np.float32).ravel()
        bad = np.flatnonzero(~np.isfinite(value) if variable.path in published else np.isnan(value))
        if bad.size:
            raise ConfigurationError(
                f"`model` must have finite weights. Received: {value[bad[0]]} in element {bad[0]} of "
                f"{variable.path!r} ({bad.size} such)"
            )


def require_optimizer(rule: Rule, optimizer: Any) -> None:
    """Check that the rule works with the workers' optimizer.

    Raises:
        ConfigurationError: it cannot.
    """
    traits = rule.traits
    if (traits.plain_sgd or traits.gradient) and not _is_plain_sgd(optimizer):
        why = "takes its steps at the server" if traits.gradient else "needs the plain step"
        raise ConfigurationError(
            f"`worker_optimizer` must be SGD without momentum, weight decay or accumulation: rule {rule.name!r} {why}. "
            f"Received: worker_optimizer={optimizer.name!r} with {optimizer.get_config()}"
        )


def require_shared(checkpoint: Checkpoint | None) -> None:
    """Check that a server in the cluster has a shared place for its address, as far as the path shows.

    Raises:
        ConfigurationError: it has not.
    """
    needs = "must be a folder that every executor reaches, with server='cluster': the server says there where it is"
    if checkpoint is None:
        raise ConfigurationError(f"`checkpoint` {needs}. Received: None")
    uri = checkpoint.uri
    if "://" not in uri and not uri.startswith("file:") and not Path(uri).is_absolute():
        raise ConfigurationError(f"`checkpoint` {needs}; a URI, or an absolute path. Received: {uri!r}")


def arrangement_of(df: DataFrame, spec: DataSpec, settings: TrainSettings, workers: int) -> Arrangement | None:
    """Return what decides how the rows of ``df`` are laid out; None where Spark does not move them."""
    if settings.partitioned_already:
        return None
    weights = settings.class_weight or {}
    names = [column.name for column in spec.columns if not (weights and column.name == CLASS_WEIGHT)]
    if weights:
        names += [listed(settings.label_col)[0], *filter(None, [settings.sample_weight_col])]
    made_by = (spec.columns, spec.seed, workers, tuple(weights.items()), settings.sample_weight_col)
    return Arrangement(df, tuple(dict.fromkeys(names)), made_by)


def require_slots(
    server: ServerSettings, facts: SparkFacts, known: int | None, resources: ResourceProfile | None, *, apart: bool
) -> None:
    """Check that Spark can run all workers at once where the rule or the bound needs it, as far as that is known.

    Args:
        server: its settings.
        facts: of Spark's session.
        known: how many tasks Spark runs at once; None where that is not known.
        resources: the `ResourceProfile` of the workers' tasks, or None.
        apart: the server takes a slot of its own.

    Raises:
        ConfigurationError: it cannot.
    """
    if resources is not None:
        _require_known(resources, facts)
    if known is None or known >= server.workers + apart:
        return
    slots = known - apart
    if slots < 1:
        raise ConfigurationError(
            "`server='cluster'` needs a slot for the server and one for a worker at least. "
            f"Received: {known} at once (spark.master={facts.master})"
        )
    if scheduler_for(server.rule, server.workers, server.staleness_bound).gather:
        needs = f"rule {server.rule.name!r}" if server.staleness_bound is None else "`staleness_bound`"
        raise ConfigurationError(
            f"`num_workers` must be at most {slots}, which is how many tasks Spark runs at once"
            f"{' next to the server' if apart else ''} "
            f"(spark.master={facts.master}): {needs} needs all workers at the same time. "
            f"Received: num_workers={server.workers}"
        )


def _require_known(resources: ResourceProfile, facts: SparkFacts) -> None:
    """Raise ConfigurationError unless Spark schedules by them. Under Connect, register them with the server."""
    if facts.local:
        raise ConfigurationError(
            "`resources` must be None on a local master: Spark schedules stages by their resources on a standalone "
            f"master, YARN and Kubernetes. Received: spark.master={facts.master}"
        )
    if not facts.connect:
        return
    try:
        _ = resources.id  # it is the server that gives it
    except RuntimeError as error:
        raise ConfigurationError(
            "`resources` must be known to Spark Connect: ask for its `id` in the thread that made the session, before "
            f"another one trains. Received: {error}"
        ) from error


def _is_plain_sgd(optimizer: Any) -> bool:
    import keras

    from distkeras.keras_model.gradient_collector import inner_optimizer

    inner = inner_optimizer(optimizer)
    if not isinstance(inner, keras.optimizers.SGD):
        return False
    return not (inner.momentum or inner.weight_decay or inner.gradient_accumulation_steps)


@contextmanager
def server_ahead(settings: TrainSettings) -> Iterator[Child | None]:
    """The server's process, which comes up while the driver settles the job; None where the server is elsewhere."""
    if settings.server == "cluster":
        yield None
        return
    child = spawn_server()
    try:
        yield child
    finally:
        child.kill()  # one that was put to use has ended
        child.wait(_KILLED)
        child.close()


def run_job(plan: JobPlan, outcome: JobOutcome, ahead: Child | None = None) -> EndedJob:
    """Trains; what becomes known on the way is in ``outcome``, also of a job that fails.

    Args:
        plan: of the job.
        outcome: filled.
        ahead: of `server_ahead`.

    Raises:
        DistkerasError: why the job cannot go on.
        Exception: what a callback raised.
    """
    settings, events = plan.training, outcome.events
    held: AbstractContextManager[ServerHandle] = _beside_driver(plan, events, ahead)
    if settings.server == "cluster":
        held = ClusterServer(plan.df, plan.server_task(), events)
    with held as server, _progress_of(plan) as progress:
        stalls = None if settings.stall_after is None else StallDetector(settings.stall_after, events)
        outcome.resumed = Resumed.from_point(server.resumed)
        task = plan.task(server.address)
        job = SparkJob(
            WorkerStage(plan.df, settings.resources, plan.arrangement),
            task,
            supervisor=server,
            progress=progress,
            callbacks=plan.callbacks,
            build_replica=plan.build_replica,
            events=events,
            stalls=stalls,
        )
        began = time.monotonic()
        try:
            rows = job.run()
            ended = time.monotonic()
        except BaseException:
            _salvage(server, plan, outcome)
            raise
        center = server.ask(lambda driver: _collect(driver, plan, outcome))
    return EndedJob(job, rows, center, began, ended)


@contextmanager
def _beside_driver(plan: JobPlan, events: Events, ahead: Child | None) -> Iterator[ServerHandle]:
    """A server in a process of the driver's."""
    process = ServerProcess(
        plan.server,
        resume=plan.resume,
        job=plan.identity(),
        epochs=plan.training.num_epoch,
        tls=plan.training.tls,
        events=events,
        ahead=ahead,
    )
    with process, Supervisor(process, plan.publisher(process.resumed), events) as server:
        yield server


def finish_job(plan: JobPlan, ended: EndedJob, outcome: JobOutcome) -> None:
    """Checks that every mini-batch counts once, and gives the model the weights that it is to have.

    Raises:
        EmptyDataError: there were no rows.
        LedgerError: a mini-batch is missing, or counted twice.
    """
    job, records = ended.job, outcome.records
    outcome.stopped = job.stopped
    if records is None or not (len(records.commits_array) or job.stopped):
        raise EmptyDataError("`df` must have rows to train on. Received: none")
    for row in ended.rows:
        if row["window"] is not None:
            text = "worker %d exchanges every %d steps"
            outcome.events.report(log, "window", text, row["worker"], row["window"], level=logging.INFO)
    batches = {row["worker"]: row["batches"] for row in ended.rows}
    records.check_exactly_once(batches, plan.training.num_epoch, outcome.resumed, stopped=job.stopped is not None)
    job.callbacks.end(ended.center).load(plan.replica)


def _salvage(server: ServerHandle, plan: JobPlan, outcome: JobOutcome) -> None:
    """Collects what a job that failed has learned, if that is to be had; the job's own error is the one to tell."""
    if not server.alive():
        return
    try:
        # No commit may come between the center that is collected and its records.
        server.try_to_ask(lambda driver: driver.stop("the driver ended the job"))
        server.try_to_ask(lambda driver: _collect(driver, plan, outcome))
    except DistkerasError as error:
        outcome.events.report(log, "lost", "what the job had learned is not to be had: %s", error.message)
        server.abandon(error)


def _progress_of(plan: JobPlan) -> Progress:
    settings = plan.training
    return Progress(
        settings.num_epoch,
        plan.worker.workers,
        settings.progress,
        every=settings.log_every,
        below=has_console_bar(plan.df.sparkSession),
    )


def _collect(driver: DriverClient, plan: JobPlan, outcome: JobOutcome) -> CenterWeights:
    """The center and the records, also of a job that failed: what was learned is not lost."""
    center = CenterWeights.fetch(driver)
    center.load(plan.replica)
    outcome.model = plan.replica.model
    outcome.records = JobRecords.drain(driver)
    return center
