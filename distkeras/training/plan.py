"""A job before it starts: what was asked for, the tables that travel, what it publishes, its copies of the center."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CenterWeights
from distkeras.data.batches import DataSpec
from distkeras.data.columns import user_names
from distkeras.data.schema import require_dataframe
from distkeras.keras_model.recipe import Recipe, layout_identity, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.stored_rows import SavedRows, load_rows, save_rows
from distkeras.keras_model.table_replica import WindowRows
from distkeras.keras_model.tables import CutModel, cut, embedding_names
from distkeras.keras_model.variables import has_rows_at_server
from distkeras.keras_model.weights_file import without_weights_of
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.checkpoint.snapshots import saved_job
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.events import Events
from distkeras.ps.protocol.framing import KEY_BYTES, encode
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape
from distkeras.ps.server.process import StartRequest
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import Address, make_certificate
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.ps.validate import reason_against
from distkeras.ps.world.files import remove_folder
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkFacts
from distkeras.training.bound_data import BoundData, columns_of, validation_rows
from distkeras.training.requirements import require_size
from distkeras.training.server_task import ServerTask
from distkeras.training.task import Task

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableChoice:
    """Chooses the tables of a job that travel by rows, by its options, its model and the job that it resumes."""

    training: TrainSettings
    server: ServerSettings
    worker: WorkerSettings
    recipe: Recipe
    shapes: Sequence[tuple[int | None, ...]]
    stream: bool
    resumed: str | None

    def cut(self, model: keras.Model, build: Callable[[], keras.Model]) -> CutModel:
        """Return the tables of ``model`` that travel by rows, and the reason why each other one stays dense.

        The recipe builds ``model``, and ``build`` returns one with the state of its optimizer.
        """
        chosen = self._chosen(model, build)
        return chosen.tracked() if self.stream else chosen

    def _chosen(self, model: keras.Model, build: Callable[[], keras.Model]) -> CutModel:
        chosen: str | Sequence[str] | None = self.training.tables
        wide, names = has_rows_at_server(model), embedding_names(model)
        if (not names and chosen == "auto") or (chosen == "dense" and not wide):
            return CutModel({})
        reason = reason_against("tables by rows", self.server, self.worker, self.training)
        if not self.worker.rule.traits.rows:
            reason = f"rule {self.worker.rule.name!r} may move rows that a commit does not name"
        if reason is not None and wide:
            raise ConfigurationError(f"the rows of a WideEmbedding cannot travel: {reason}")
        if chosen not in ("auto", "dense"):
            _require_none(reason, '`tables` must be "auto" or "dense"', f"tables={chosen!r}")
            return self._cut(model, build, chosen)
        saved = None if chosen == "dense" else self._saved_tables()
        if saved:
            _require_none(reason, "`checkpoint` must hold a job with dense tables", f"one whose {saved} travel by rows")
            return self._cut(model, build, saved)
        reason = reason or (self._reason_to_leave_all(saved) if chosen == "auto" else "it was chosen")
        if wide:
            return self._cut(model, build, "auto" if reason is None else None)
        if reason is None:
            try:
                return self._cut(model, build, "auto")
            except (ValueError, TypeError, NotImplementedError) as error:  # layers may be the user's
                reason = f"the model cannot be cut: {type(error).__name__}: {error}"
        return CutModel(dict.fromkeys(names, reason))

    def _cut(
        self, model: keras.Model, build: Callable[[], keras.Model], choose: str | Sequence[str] | None
    ) -> CutModel:
        model = build() if self.recipe.optimizer_state else model
        state = random.getstate()  # Keras takes seeds from it for layers that the user builds next
        try:
            return cut(
                model,
                self.recipe,
                window=self.worker.rule.window,
                batch_size=self.training.batch_size,
                choose=choose,
                shapes=self.shapes,
            )
        finally:
            random.setstate(state)

    def _saved_tables(self) -> list[str] | None:
        """Return the tables by rows of the resumed job, which must stay the same; None: no job is resumed."""
        saved = None if self.resumed is None else saved_job(self.resumed)
        return None if saved is None else list(saved.get("tables") or ())

    def _reason_to_leave_all(self, saved: Sequence[str] | None) -> str | None:
        """Return why all tables that were not named stay dense; None if they may travel."""
        reasons = {
            "they are dense in the job that is resumed": saved is not None and not saved,
            f"{self.recipe.backend} may add up their rows in another order": self.recipe.backend != "tensorflow",
        }
        return next((reason for reason, applies in reasons.items() if applies), None)


def _require_none(reason: str | None, expected: str, received: str) -> None:
    if reason is not None:
        raise ConfigurationError(f"{expected}. Received: {received}; {reason}")


def report_tables(cut: CutModel, events: Events) -> None:
    """Log which tables of a model travel by rows, and why the others stay dense."""
    if not (cut.tables or cut.kept_dense):
        return
    travel = ", ".join(f"{table.name!r} ({table.rows} rows of {table.width})" for table in cut.tables)
    parts = [f"by rows: {travel}"] if travel else []
    parts += [f"{name!r} stays dense: {reason}" for name, reason in cut.kept_dense.items()]
    events.report(log, "tables", "tables of the model: %s", "; ".join(parts), level=logging.INFO)


@dataclass(frozen=True)
class JobPlan:
    """A job that has not begun.

    Args:
        training, server, worker: the settings of data and driver, of the server, of the workers.
        replica: the model, compiled like the workers'; with the tables that travel by rows at the end of its vector.
        cut: those tables, and the model without them.
        callbacks: those of the trainer and of the call.
        resume: continue the job in the server's checkpoint.
        micro_batch: the number of the stream's micro-batch in ``data``; -1: its rows are not a stream's.
    """

    data: BoundData
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

    @cached_property
    def df(self) -> DataFrame:
        """The rows as workers read them: one partition each."""
        return self.data.partitioned(self.worker.workers)

    @property
    def spec(self) -> DataSpec:
        return self.data.spec

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

    def identity(self) -> dict[str, Any]:
        """Return the identity, JSON-ready, without the rule: a job that resumes this one must have the same."""
        replica, columns = self.replica, self.spec.features + self.spec.targets
        names = ("admit", "expire_commits", "expire_seconds")
        living = {table.name: {name: getattr(table, name) for name in names} for table in self.cut.living}
        return {
            "tables": [table.name for table in self.cut.tables] or None,
            **self._row_settings(),
            "shapes": {user_names(column.name, column.parts): list(column.shape) for column in columns},
            "model": model_identity(self.model_file),
            "layout": layout_identity(replica.layout),
            "moving_statistics": layout_identity(replica.moving_statistics),
            "compilation": self.recipe.identity(replica.model),
            **({"seeds": [table.seed for _, table in self.cut.partial]} if self.cut.partial else {}),
            **({"living": living} if living else {}),  # how rows are admitted and expire
        }

    def _row_settings(self) -> dict[str, Any]:
        """Return `TrainSettings.row_settings` with the user's own columns, in order, where one is made of several."""
        made_of = {column.name: [part.name for part in column.parts] for column in self.spec.columns if column.parts}
        settings = self.training.row_settings
        if isinstance(settings["features"], list):
            settings["features"] = [made_of.get(column.name, column.name) for column in self.spec.features]
        if isinstance(given := settings["labels"], list):
            settings["labels"] = [made_of.get(name, name) if isinstance(name, str) else name for name in given]
        return settings


class Publication:
    """The state from which a job begins, as it is when this object is made."""

    def __init__(self, plan: JobPlan) -> None:
        replica, whole = plan.replica, plan.cut.whole
        self._plan, file = plan, _sent_file(plan)
        require_size(plan.server, plan.dense_size + replica.moving_statistics.size, file)
        start, moving_statistics = replica.layout.empty(), replica.moving_statistics.empty()
        replica.read(start)
        replica.read_moving_statistics(moving_statistics)
        names, shapes = replica.layout.names, replica.layout.shapes
        dense = Layout(names[: len(names) - len(whole)], shapes[: len(shapes) - len(whole)])
        layouts = (dense, replica.moving_statistics)
        self._message = publication(start[: plan.dense_size], moving_statistics, file, layouts)
        #: Each table that travels by rows, and its part of the weights, ``(rows, width)``.
        self._tables = list(zip(whole, replica.layout.views(start)[len(dense.names) :], strict=True))

    def send(self, driver: DriverClient) -> None:
        """Publish to a server; any number of times, such as after a restart."""
        driver.publish_rows(self._tables)
        for number, table, saved in self._trained_rows():
            driver.publish_touched(number, table, load_rows(saved, table))
        driver.send_publication(self._message)

    def server_task(self) -> ServerTask:
        """Return the server as a task in the cluster, with a fresh random key."""
        plan, trained = self._plan, next(self._trained_rows(), None)
        if trained is not None:
            raise ConfigurationError(
                f"`server` must be 'driver' if a WideEmbedding continues from trained rows, as "
                f"{trained[1].name!r} does: the driver sends them. Received: server='cluster'"
            )
        request = StartRequest(
            settings=plan.server,
            key=secrets.token_bytes(KEY_BYTES),
            certificate=make_certificate() if plan.training.tls else None,
            mode=StartMode(fresh=not plan.resume, same_attempts=False, epochs=plan.training.num_epoch),
            job=plan.identity(),
        )
        frame = b"".join(encode(self._message))
        return ServerTask(request, frame, self._tables, driver=plan.facts.driver_address)

    def _trained_rows(self) -> Iterator[tuple[int, TableShape, SavedRows]]:
        """Yield the tables that continue from trained rows, and where these are."""
        for number, table in self._plan.cut.partial:
            saved = self._plan.replica.model.get_layer(table.name).saved_rows
            if saved is not None:
                yield number, table, saved


def _sent_file(plan: JobPlan) -> bytes:
    """Return the model file that workers are sent, without weights that they read from another file."""
    if plan.cut.tables:
        return plan.cut.model_file
    uri = plan.training.frozen_weights
    return plan.model_file if uri is None else without_weights_of(plan.model_file, uri)


#: What is refused for a model whose rows are at the server, and what to do instead.
_INSTEAD_OF_A_MODEL = (
    "a callback that restores a center, or uses `context.model` or a copy of the model, must not be given",
    "Evaluate validation rows, which reads the rows that these touch, or use the model that comes back",
)


class CenterCopy:
    """Fetches the center of one job, and loads it into models.

    Of a table that the driver does not hold, it fetches the rows that validation rows touch.
    """

    def __init__(self, plan: JobPlan) -> None:
        self._plan, self._partial = plan, plan.cut.partial
        #: By a table's number, the rows that callbacks evaluate on, of tables that the driver does not hold.
        self._evaluated: dict[int, Ids] = {}
        #: The folders of rows that `save_rows` has written.
        self._written: list[str] = []

    def build_replica(self) -> KerasReplica:
        """Return another copy of the model, compiled like the workers'."""
        self.require_all_tables()
        return self.build_evaluator()

    def build_evaluator(self) -> KerasReplica:
        """Return such a copy. Of a table at the server it has only the rows that are evaluated, zeros at first."""
        plan = self._plan
        replica = KerasReplica.of(plan.recipe, plan.model_file, plan.cut.order)
        for number, table in self._partial:
            ids = self._evaluated.get(number, NO_IDS)
            replica.model.get_layer(table.name).lend(ids, np.zeros((len(ids), table.width), np.float32))
        return replica

    def build_trained(self) -> KerasReplica:
        """Return another copy of the model, whose tables at the server have the rows that `save_rows` has written."""
        replica = KerasReplica.of(self._plan.recipe, self._plan.model_file, self._plan.cut.order)
        for _, table in self._partial:
            layer, trained = (model.get_layer(table.name) for model in (replica.model, self._plan.replica.model))
            layer.rows, layer.rows_checksum = trained.rows, trained.rows_checksum
        return replica

    def require_all_tables(self, instead: tuple[str, str] = _INSTEAD_OF_A_MODEL) -> None:
        """Raise ConfigurationError, with what is refused and what to do, unless the driver has all tables."""
        if self._partial:
            name = self._partial[0][1].name
            refused, advice = instead
            raise ConfigurationError(
                f"{refused} for a model with a WideEmbedding: the rows of {name!r} stay at the server. {advice}"
            )

    def read_rows(self, df: DataFrame, count_max: int) -> Batch:
        """Return rows to validate on, with the model's columns; `fetch` brings what they touch from then on."""
        require_dataframe("df", df, stream=False)
        plan = self._plan
        df, spec = columns_of(df, plan.replica.model, plan.training, plan.recipe.settings)
        batch = validation_rows(df, spec, count_max)
        self._note_evaluated(batch, spec)
        return batch

    def _note_evaluated(self, batch: Batch, spec: DataSpec) -> None:
        worker = self._plan.cut.worker
        if not self._partial or worker is None:
            return
        touched = next(WindowRows([batch], worker, replace(spec, shuffle=False), 1)).rows
        for number, _ in self._partial:
            self._evaluated[number] = np.union1d(self._evaluated.get(number, NO_IDS), touched[number])

    def fetch(self, driver: DriverClient) -> CenterWeights:
        """Return the server's current center, in the order of the plan's replica."""
        tables = self._plan.cut.tables
        wants = tuple(self._evaluated.get(number, NO_IDS) for number in range(len(tables))) if self._evaluated else ()
        return CenterWeights.fetch(driver, tables, wants)

    def collect(self, driver: DriverClient, events: Events) -> CenterWeights:
        """Return the last center, save its rows, and log how many were admitted, have expired and were removed."""
        center, living = self.fetch(driver), self._plan.cut.living
        self.save_rows(driver)
        for table, counts in zip(living, driver.ping().tables.tolist() if living else (), strict=True):
            text = "rows of %r: %d are kept; %d were admitted, %d have expired, %d were removed"
            events.report(log, "rows", text, table.name, *map(int, counts), level=logging.INFO)
        return center

    def save_rows(self, driver: DriverClient) -> None:
        """Write the touched rows of tables that the driver does not hold to folders, to which the model refers then."""
        while self._written:  # by a call that is repeated; no model refers to it any more
            with contextlib.suppress(OSError):
                remove_folder(self._written.pop())
        for number, table in self._partial:
            layer = self._plan.replica.model.get_layer(table.name)
            layer.rows, layer.rows_checksum = save_rows(layer.folder, driver.touched(number, table))
            self._written.append(layer.rows)
