"""The driver's copies of the center: what callbacks evaluate, and what a job returns."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distkeras.callbacks import CenterWeights
from distkeras.data.schema import require_dataframe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.stored_rows import save_rows
from distkeras.keras_model.table_replica import WindowRows
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import NO_IDS, Ids
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.files import remove_folder
from distkeras.training.bound_data import columns_of, validation_rows
from distkeras.training.plan import JobPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch, DataSpec


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

    def require_all_tables(self) -> None:
        """Raise ConfigurationError unless the driver has all tables, which some callbacks need."""
        if self._partial:
            raise ConfigurationError(
                "a callback that restores a center, or uses `context.model` or a copy of the model, must not be given "
                f"for a model with a WideEmbedding: the rows of {self._partial[0][1].name!r} stay at the server. "
                "Evaluate validation rows, which reads the rows that these touch, or use the model that comes back"
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

    def save_rows(self, driver: DriverClient) -> None:
        """Write the touched rows of tables that the driver does not hold to folders, to which the model refers then."""
        while self._written:  # by a call that is repeated; no model refers to it any more
            with contextlib.suppress(OSError):
                remove_folder(self._written.pop())
        for number, table in self._partial:
            layer = self._plan.replica.model.get_layer(table.name)
            layer.rows, layer.rows_checksum = save_rows(layer.folder, driver.touched(number, table))
            self._written.append(layer.rows)
