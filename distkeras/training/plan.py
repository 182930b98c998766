"""A job before any of it starts: the plan, which is everything that was asked for, and what the job publishes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distkeras.callbacks import Callback
from distkeras.data.batches import DataSpec
from distkeras.data.columns import user_names
from distkeras.keras_model.recipe import Recipe, layout_identity, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.stored_rows import SavedRows, load_rows
from distkeras.keras_model.tables import CutModel
from distkeras.keras_model.weights_file import without_weights_of
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.framing import KEY_BYTES, encode
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.server.process import StartRequest
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import Address, make_certificate
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkFacts
from distkeras.training.bound_data import BoundData
from distkeras.training.requirements import require_size
from distkeras.training.server_task import ServerTask
from distkeras.training.task import Task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
        driver.request(self._message, Ack)

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
