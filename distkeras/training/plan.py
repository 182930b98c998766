"""The plan of a job, made before any of it starts, and the checks that it can work."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CenterWeights
from distkeras.data.batches import Batch
from distkeras.data.binding import listed
from distkeras.data.columns import user_names
from distkeras.data.schema import CLASS_WEIGHT
from distkeras.data.source import collect
from distkeras.data.spec import DataSpec
from distkeras.keras_model.optimizers import inner_optimizer, takes_plain_steps
from distkeras.keras_model.recipe import Recipe, layout_identity, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.stored_rows import SavedRows, load_rows, save_rows
from distkeras.keras_model.tables import CutModel
from distkeras.keras_model.weights_file import without_weights_of
from distkeras.keras_model.window_rows import WindowRows
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.errors import ConfigurationError, DistkerasError
from distkeras.ps.protocol.framing import KEY_BYTES, encode
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.messages import Ack, Publish
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape
from distkeras.ps.rules import Rule
from distkeras.ps.rules.base import Vector
from distkeras.ps.rules.daso import Daso
from distkeras.ps.server.start import StartRequest
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.ps.transport.tls import make_certificate
from distkeras.ps.world.files import remove_folder
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkFacts
from distkeras.spark.kept_layout import Arrangement, KeptRows
from distkeras.training.server_task import ServerTask
from distkeras.training.task import Task

if TYPE_CHECKING:
    import keras
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

#: Bytes for the names of a model's arrays, in addition to the model.
_FRAME_ROOM = 1 << 20
#: The most bytes of validation rows that the driver keeps for the next job.
_KEPT_BYTES_MAX = 256 << 20
_VALIDATION: KeptRows[Batch] = KeptRows()


@dataclass(frozen=True)
class JobPlan:
    """A job that has not begun.

    Args:
        df: one partition a worker.
        arrangement: identifies how ``df`` was computed; None: its rows are not kept for a later job.
        spec: columns, mini-batches, epochs.
        training, server, worker: the settings of data and driver, of the server, of the workers.
        model_file, recipe: the model, and how to compile it.
        replica: the model, compiled like the workers'; with the tables that travel by rows at the end of its vector.
        cut: those tables, and the model without them.
        callbacks: those of the trainer and of the call.
        resume: continue the job in the server's checkpoint.
        facts: of Spark's session.
        micro_batch: the number of the stream's micro-batch in ``df``; -1: its rows are not a stream's.
        written: the folders of rows that `save_rows` has written.
        evaluated: by a table's number, the rows that callbacks evaluate on, of tables that the driver does not hold.

    Raises:
        ConfigurationError: the model is too large for a server, or the file of its frozen weights cannot be read.
    """

    df: DataFrame
    arrangement: Arrangement | None
    spec: DataSpec
    training: TrainSettings
    model_file: bytes
    recipe: Recipe
    replica: KerasReplica
    cut: CutModel
    server: ServerSettings
    worker: WorkerSettings
    callbacks: Sequence[Callback]
    resume: bool
    facts: SparkFacts
    micro_batch: int = NO_MICRO_BATCH
    evaluated: dict[int, Ids] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_size(self.server, self.dense_size + self.replica.moving_statistics.size, self.sent_file)

    @cached_property
    def sent_file(self) -> bytes:
        """The model file that workers are sent, without weights that they read from another file."""
        if self.cut.tables:
            return self.cut.model_file
        uri = self.training.frozen_weights
        return self.model_file if uri is None else without_weights_of(self.model_file, uri)

    @property
    def dense_size(self) -> int:
        """The elements of the vector in front of the tables."""
        return self.replica.size - sum(table.rows * table.width for table in self.cut.whole)

    def task(self, address: Address) -> Task:
        """Return the task that Spark runs on each partition, with the server at ``address``."""
        return Task(
            address=address,
            settings=self.worker,
            spec=self.spec,
            recipe=self.recipe if self.cut.worker is None else self.cut.worker.recipe,
            size=self.dense_size,
            moving_statistics=self.replica.moving_statistics.size,
            metrics=self.replica.metric_names,
            rows=self.cut.worker,
            micro_batch=self.micro_batch,
            saved=self.server.checkpoint is not None,
        )

    def build_replica(self) -> KerasReplica:
        """Return another copy of the model, compiled like the workers'.

        Raises:
            ConfigurationError: the driver does not have all tables.
        """
        self.require_all_tables()
        return self.build_evaluator()

    def build_evaluator(self) -> KerasReplica:
        """Return such a copy. Of a table at the server it has only the rows in `wants`, which are zeros at first."""
        replica = KerasReplica(self.recipe.build(self.model_file), self.cut.order)
        replica.settings = self.recipe.settings
        for number, table in self.cut.partial:
            ids = self.evaluated.get(number, NO_IDS)
            replica.model.get_layer(table.name).lend(ids, np.zeros((len(ids), table.width), np.float32))
        return replica

    def require_all_tables(self) -> None:
        """Raise ConfigurationError unless the driver has all tables, which some callbacks need."""
        if self.cut.partial:
            raise ConfigurationError(
                "a callback that restores a center, or uses `context.model` or a copy of the model, must not be given "
                f"for a model with a WideEmbedding: the rows of {self.cut.partial[0][1].name!r} stay at the server. "
                "Evaluate validation rows, which reads the rows that these touch, or use the model that comes back"
            )

    def note_evaluated(self, batch: Batch, spec: DataSpec) -> None:
        """Add the rows that ``batch`` touches, of tables that the driver does not hold, to those fetched with a center.

        Raises:
            BadValueError: an id is not a row of its table.
        """
        if not self.cut.partial or self.cut.worker is None:
            return
        touched = next(WindowRows([batch], self.cut.worker, replace(spec, shuffle=False), 1)).rows
        for number, _ in self.cut.partial:
            self.evaluated[number] = np.union1d(self.evaluated.get(number, NO_IDS), touched[number])

    @property
    def wants(self) -> tuple[Ids, ...]:
        """The rows to fetch with the center, of each table; empty if no callback evaluates a table at the server."""
        if not self.evaluated:
            return ()
        return tuple(self.evaluated.get(number, NO_IDS) for number in range(len(self.cut.tables)))

    def fetch_center(self, driver: DriverClient) -> CenterWeights:
        """Return the server's current center, in the order of `replica`."""
        return CenterWeights.fetch(driver, self.cut.tables, self.wants)

    def identity(self) -> dict[str, Any]:
        """Return the identity, JSON-ready, without the rule: a job that resumes this one must have the same."""
        replica, columns = self.replica, self.spec.features + self.spec.targets
        return {
            "tables": [table.name for table in self.cut.tables] or None,
            **self._row_settings(),
            "shapes": {user_names(column.name, column.parts): list(column.shape) for column in columns},
            "model": model_identity(self.model_file),
            "layout": layout_identity(replica.layout),
            "moving_statistics": layout_identity(replica.moving_statistics),
            "compilation": self.recipe.identity(replica.model),
            **({"seeds": [table.seed for _, table in self.cut.partial]} if self.cut.partial else {}),
        }

    def _row_settings(self) -> dict[str, Any]:
        """Return `TrainSettings.row_settings` with the user's own columns, in order, where one is made of several."""
        made_of = {column.name: [part.name for part in column.parts] for column in self.spec.columns if column.parts}
        settings = self.training.row_settings
        for side in ("features", "labels"):
            given = settings[side]
            if isinstance(given, list):
                settings[side] = [made_of.get(name, name) if isinstance(name, str) else name for name in given]
        return settings

    def publisher(self) -> Callable[[DriverClient], object]:
        """Return a function that publishes the model's current state to a server, any number of times."""
        start = self._start()
        message, tables = self._publication(start), self._tables_of(start)

        def publish(driver: DriverClient) -> None:
            driver.publish_rows(tables)
            for number, table, saved in self._trained_rows():
                driver.publish_touched(number, table, load_rows(saved, table))
            driver.request(message, Ack)

        return publish

    def _trained_rows(self) -> Iterator[tuple[int, TableShape, SavedRows]]:
        """Yield the tables that continue from trained rows, and where these are."""
        for number, table in self.cut.partial:
            saved = self.replica.model.get_layer(table.name).saved_rows
            if saved is not None:
                yield number, table, saved

    def save_rows(self, driver: DriverClient) -> None:
        """Write the touched rows of tables that the driver does not hold to folders, to which the model refers then.

        Raises:
            ConfigurationError: a folder cannot be written to.
        """
        while self.written:  # by a call that is repeated; no model refers to it any more
            with contextlib.suppress(OSError):
                remove_folder(self.written.pop())
        for number, table in self.cut.partial:
            layer = self.replica.model.get_layer(table.name)
            layer.rows, layer.rows_checksum = save_rows(layer.folder, driver.touched(number, table))
            self.written.append(layer.rows)

    def server_task(self) -> ServerTask:
        """Return the server as a task in the cluster, with a fresh random key.

        Raises:
            ConfigurationError: a table continues from trained rows, which only the driver sends.
        """
        trained = next(self._trained_rows(), None)
        if trained is not None:
            raise ConfigurationError(
                f"`server` must be 'driver' if a WideEmbedding continues from trained rows, as "
                f"{trained[1].name!r} does: the driver sends them. Received: server='cluster'"
            )
        request = StartRequest(
            settings=self.server,
            key=secrets.token_bytes(KEY_BYTES),
            certificate=make_certificate() if self.training.tls else None,
            mode=StartMode(fresh=not self.resume, same_attempts=False, epochs=self.training.num_epoch),
            job=self.identity(),
        )
        start = self._start()
        frame = b"".join(encode(self._publication(start)))
        return ServerTask(request, frame, self._tables_of(start), driver=self.facts.driver_address)

    def _start(self) -> Vector:
        """Return the model's current weights."""
        start = self.replica.layout.empty()
        self.replica.read(start)
        return start

    def _publication(self, start: Vector) -> Publish:
        replica, tables = self.replica, len(self.cut.whole)
        moving_statistics = replica.moving_statistics.empty()
        replica.read_moving_statistics(moving_statistics)
        names, shapes = replica.layout.names, replica.layout.shapes
        dense = Layout(names[: len(names) - tables], shapes[: len(shapes) - tables])
        layouts = (dense, replica.moving_statistics)
        return publication(start[: self.dense_size], moving_statistics, self.sent_file, layouts)

    def _tables_of(self, start: Vector) -> list[tuple[TableShape, np.ndarray]]:
        """Return each table that travels by rows, and its part of the weights, ``(rows, width)``."""
        arrays = self.replica.layout.views(start)[len(self.replica.layout.shapes) - len(self.cut.whole) :]
        return list(zip(self.cut.whole, arrays, strict=True))


def require_fit(replica: KerasReplica, batch: Batch, received: Sequence[object]) -> None:
    """Try the model, its loss and its metrics on a mini-batch of the data's shapes and dtypes.

    Args:
        received: the data, as the error names them.

    Raises:
        ConfigurationError: they do not fit.
    """
    try:
        replica.prepare(batch)
    except DistkerasError:
        raise
    except Exception as error:  # backends, losses and metrics raise errors of any class
        raise ConfigurationError(
            "`model` must have inputs, loss and metrics that fit the data. "
            f"Received: {list(received)}: {type(error).__name__}: {error}"
        ) from error


def require_size(server: ServerSettings, size: int, sent_file: bytes) -> None:
    """Raise ConfigurationError unless a server, which is not started yet, accepts a model of ``size`` elements."""
    nbytes = len(sent_file) + 4 * size
    most = server.max_body - _FRAME_ROOM
    if nbytes > most:
        raise ConfigurationError(
            f"`model` must have at most {most >> 20} MiB, trainable weights counted twice. Executors can read large "
            f"frozen weights from a file: see `frozen_weights`. Received: {-(-nbytes >> 20)} MiB"
        )


def require_finite(replica: KerasReplica) -> None:
    """Raise ConfigurationError unless the model's weights are finite, so that no worker is blamed for them later."""
    import keras

    # An infinity in a weight that is not trained may be intended, such as a mask's.
    published = {*replica.layout.names, *replica.moving_statistics.names}
    for variable in replica.model.weights:
        if not keras.backend.is_float_dtype(variable.dtype):
            continue
        with np.errstate(over="ignore"):  # a value too large for float32 is not finite either
            value = np.asarray(keras.ops.convert_to_numpy(variable)).astype(np.float32).ravel()
        bad = np.flatnonzero(~np.isfinite(value) if variable.path in published else np.isnan(value))
        if bad.size:
            raise ConfigurationError(
                f"`model` must have finite weights. Received: {value[bad[0]]} in element {bad[0]} of "
                f"{variable.path!r} ({bad.size} such)"
            )


def require_optimizer(rule: Rule, model: keras.Model) -> None:
    """Raise ConfigurationError unless the rule works with the workers' optimizer and with constraints of weights."""
    traits, optimizer = rule.traits, model.optimizer
    if not (traits.plain_sgd or traits.gradient):
        return
    why = "takes its steps at the server" if traits.gradient else "needs the plain step"
    if not takes_plain_steps(optimizer):
        raise ConfigurationError(
            "`worker_optimizer` must be SGD without momentum, weight decay, accumulation or steps of its own: "
            f"rule {rule.name!r} {why}. "
            f"Received: worker_optimizer={optimizer.name!r} with {optimizer.get_config()}"
        )
    bound = [variable for variable in model.trainable_variables if variable.constraint is not None]
    if bound:
        raise ConfigurationError(
            f"`model` must have no constraints of trainable weights: rule {rule.name!r} {why}, after which nothing "
            "applies them. Take a rule whose workers take steps of their optimizers, such as 'downpour' or 'dynsgd'. "
            f"Received: {bound[0].path!r} with {type(bound[0].constraint).__name__}"
        )


def require_constant_rate(rule: Rule, optimizer: Any) -> None:
    """Raise ConfigurationError if the server would take the rate of an optimizer with a schedule for a constant."""
    import keras

    rate = inner_optimizer(optimizer)._learning_rate  # noqa: SLF001 - the property evaluates it
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) or callable(rate):
        raise ConfigurationError(
            f"`worker_optimizer` must have a number as its learning rate: rule {rule.name!r} takes its steps at the "
            "server. Give `learning_rate` one of `distkeras.schedules`, which run over the server's commits. "
            f"Received: learning_rate={type(rate).__name__}"
        )


def require_shared(checkpoint: Checkpoint | None) -> None:
    """Raise ConfigurationError without a folder in which executors can read the address of a server in the cluster."""
    if checkpoint is None:
        raise ConfigurationError(
            "`checkpoint` must be a folder that every executor reaches, with server='cluster': the server says there "
            "where it is. Received: None"
        )


def arrangement_of(df: DataFrame, spec: DataSpec, settings: TrainSettings, workers: int) -> Arrangement | None:
    """Return what determines the layout of the rows of ``df``; None if Spark does not move them."""
    if settings.partitioned_already:
        return None
    weights = settings.class_weight or {}
    names = [name for column in spec.columns for name in column.sources if not (weights and name == CLASS_WEIGHT)]
    if weights:
        names += [*listed(settings.label_col), *settings.weight_columns]
    made_by = (spec.columns, spec.seed, workers, tuple(weights.items()), settings.weight_columns)
    return Arrangement(df, tuple(dict.fromkeys(names)), made_by)


def validation_rows(df: DataFrame, spec: DataSpec, count_max: int) -> Batch:
    """Return rows of a validation DataFrame, at most ``count_max``.

    Rows that Spark keeps are read once for all jobs of a search, unless a user's function decodes them.

    Raises:
        EmptyDataError: there are no rows.
        BadValueError, ShapeError, MissingColumnError, WorkerError: as `collect` says.
    """
    spec = replace(spec, epochs=1, shuffle=False, batch_size=count_max)
    checks = tuple(column.checks for column in spec.columns)  # the columns' equality leaves these out
    names = tuple(name for column in spec.columns for name in column.sources)
    arrangement = None if spec.encoded else Arrangement(df, names, (spec, checks))
    return _VALIDATION.of(arrangement, lambda: collect(df, spec, count_max), _is_small).copy()


def _is_small(batch: Batch) -> bool:
    return batch.nbytes <= _KEPT_BYTES_MAX


def require_slots(
    server: ServerSettings, facts: SparkFacts, known: int | None, resources: ResourceProfile | None, *, apart: bool
) -> None:
    """Check that Spark can run all workers at once if the rule or the bound needs it, as far as that is known.

    Args:
        facts: of Spark's session.
        known: how many tasks Spark runs at once; None if that is unknown.
        resources: the `ResourceProfile` of the workers' tasks, or None.
        apart: the server takes a slot of its own.

    Raises:
        ConfigurationError: Spark cannot.
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
    if scheduler_for(server.rule, server.workers, server.staleness_bound, gather=server.relays is not None).gather:
        needs = f"rule {server.rule.name!r}" if server.staleness_bound is None else "`staleness_bound`"
        needs = needs if server.relays is None else "`relays`"
        raise ConfigurationError(
            f"`num_workers` must be at most {slots}, which is how many tasks Spark runs at once"
            f"{' next to the server' if apart else ''} "
            f"(spark.master={facts.master}): {needs} needs all workers at the same time. "
            f"Received: num_workers={server.workers}"
        )


def require_relays(server: ServerSettings, training: TrainSettings, *, stream: bool) -> None:
    """Raise ConfigurationError if a job with relays has options that exclude them."""
    if server.relays is None:
        return
    if isinstance(server.relays, int) and server.relays > server.workers:
        raise ConfigurationError(
            f"`relays` must be at most `num_workers`, {server.workers}. Received: relays={server.relays}"
        )
    reasons = {
        "`tls` must be False: connections between workers are authenticated, and not encrypted": training.tls,
        "`df` must not be a stream: the workers of a micro-batch begin one by one": stream,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(f"{reason}. Received: another value, with relays={server.relays!r}")


def require_members(server: ServerSettings, training: TrainSettings, *, stream: bool) -> None:
    """Raise ConfigurationError if a job whose workers exchange with each other has options that exclude this."""
    rule = server.rule
    if not isinstance(rule, Daso):
        return
    rule.require_epochs("num_epoch", training.num_epoch)
    if rule.nodes is not None and server.workers % rule.nodes:
        raise ConfigurationError(
            f"`num_workers` must be a multiple of the rule's `nodes`, {rule.nodes}. "
            f"Received: num_workers={server.workers}"
        )
    reasons = {
        "`server` must be 'driver': a server that moves is not supported with members": training.server == "cluster",
        "`max_skipped` must be 0: what one worker skips is in the parameters of all": server.max_skipped > 0,
        "`tls` must be False: connections between workers are authenticated, and not encrypted": training.tls,
        "`df` must not be a stream: the steps of an epoch must be known before the first one": stream,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(f"{reason}. Received: another value, with rule {rule.name!r}")


def _require_known(resources: ResourceProfile, facts: SparkFacts) -> None:
    """Raise ConfigurationError unless Spark schedules by ``resources``; under Connect, register them."""
    if facts.local:
        raise ConfigurationError(
            "`resources` must be None on a local master: Spark schedules stages by their resources on a standalone "
            f"master, YARN and Kubernetes. Received: spark.master={facts.master}"
        )
    if not facts.connect:
        return
    try:
        _ = resources.id  # the server assigns it
    except RuntimeError as error:
        raise ConfigurationError(
            "`resources` must be known to Spark Connect: ask for its `id` in the thread that made the session, before "
            f"another one trains. Received: {error}"
        ) from error
