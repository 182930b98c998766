"""The plan of a job: everything that was asked for, made before any of it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distkeras.callbacks import Callback
from distkeras.data.columns import user_names
from distkeras.data.spec import DataSpec
from distkeras.keras_model.recipe import Recipe, layout_identity, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.tables import CutModel
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import Address
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkFacts
from distkeras.spark.kept_layout import Arrangement
from distkeras.training.bound_data import BoundData
from distkeras.training.task import Task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class JobPlan:
    """A job that has not begun.

    Args:
        data: the rows, and the columns that the model reads of them.
        training, server, worker: the settings of data and driver, of the server, of the workers.
        model_file, recipe: the model, and how to compile it.
        replica: the model, compiled like the workers'; with the tables that travel by rows at the end of its vector.
        cut: those tables, and the model without them.
        callbacks: those of the trainer and of the call.
        resume: continue the job in the server's checkpoint.
        facts: of Spark's session.
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
    def arrangement(self) -> Arrangement | None:
        """What determines `df`; None: its rows are not kept for a later job, as those of a micro-batch."""
        return None if self.micro_batch != NO_MICRO_BATCH else self.data.arrangement(self.worker.workers)

    @property
    def spec(self) -> DataSpec:
        """The columns, mini-batches and epochs."""
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
