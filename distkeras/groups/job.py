"""The driver's part of a job that trains a model for each group."""

from __future__ import annotations

import atexit
import hashlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from distkeras.data.batches import DataSpec
from distkeras.data.ordering import ROW_HASH
from distkeras.data.schema import CLASS_WEIGHT, map_in_arrow, quoted, ready_columns
from distkeras.groups.keys import key_as_text, key_fields, same_key
from distkeras.groups.replica import GroupsSideBySide, packed_weights
from distkeras.groups.results import GroupResults
from distkeras.groups.store import (
    ID,
    RESERVED,
    ROWS_SUM,
    GroupFolder,
    Manifest,
    StoredGroups,
    TrainedGroup,
    load_model_file,
    spark_path,
    table_schema,
    write_groups,
)
from distkeras.groups.task import FIRST, GroupTask
from distkeras.keras_model.recipe import Recipe, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import numpy_value
from distkeras.ps.checkpoint.state import rule_json
from distkeras.ps.errors import ConfigurationError, DeadlineError, DistkerasError, EmptyDataError, LedgerError, Origin
from distkeras.ps.rules import Rule
from distkeras.ps.world.files import absolute, below
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkAction, SparkFacts, require_no_pattern
from distkeras.spark.failures import typed_error
from distkeras.spark.record_stream import in_sized_batches

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

log = logging.getLogger(__name__)

#: Partitions for each slot: groups differ in size, and free slots take the next partition.
_PARTITIONS_A_SLOT = 4
#: Seconds from one check of the Spark job to the next, and that Spark may take to end a cancelled job.
_LOOK_SECONDS, _CANCEL_SECONDS = 1.0, 60.0
#: The most groups that an error about changed rows names.
_NAMED_MAX = 5

#: Trains the rows of one group as a job of its own.
TrainLarge = Callable[["DataFrame"], TrainedGroup]


@dataclass(frozen=True)
class GroupPlan:
    """A job that has not begun.

    Args:
        df: the rows, with the columns of ``spec`` and of the key.
        threads: compute threads of a task; None: the cores that Spark gives to it.
        replica: the model, compiled like the workers', for its metrics' names.
        path: the folder of the result; None: a temporary one, which this process removes when it ends.
        resume: continue the job in the folder.
        rule: the update rule of large groups.
        rows_max: the most rows of a group that a single task trains.
        side_by_side: the most groups that a task trains in one step.
        silence: seconds within which the files of the job must change.
    """

    df: DataFrame
    by: tuple[str, ...]
    spec: DataSpec
    settings: TrainSettings
    threads: int | None
    recipe: Recipe
    model_file: bytes
    replica: KerasReplica
    path: str | None
    resume: bool
    rule: Rule
    rows_max: int
    side_by_side: int
    silence: float

    def identity(self, partitions: int) -> dict[str, Any]:
        """Return the identity, JSON-ready: a job that resumes this one must have the same."""
        model = self.replica.model
        state = packed_weights([numpy_value(variable) for variable in [*model.weights, *model.optimizer.variables]])
        return {
            **self.settings.row_settings,
            "num_epoch": self.spec.epochs,
            "by": list(self.by),
            "partitions": partitions,
            "model": model_identity(self.model_file),
            "state": hashlib.sha256(state).hexdigest(),
            "rows_max": self.rows_max,
            "side_by_side": self.side_by_side,
            "rule": rule_json(self.rule),
            "compilation": self.recipe.identity(self.replica.model),
        }


def train_each_group(plan: GroupPlan, train_large: TrainLarge) -> GroupResults:
    """Train a model for each group.

    Args:
        train_large: trains the rows of a group that is too large for one task.

    Raises:
        ConfigurationError, MissingColumnError, ColumnTypeError: before any work starts.
        DifferentJobError: the folder holds another job.
        EmptyDataError: there are no rows.
        DeadlineError: the files of the job have not changed for too long.
        LedgerError: a group that an earlier run has trained has other rows now.
        OwnershipLostError: a later run has claimed the folder, and continues the job.
        SnapshotError: the folder cannot be written to, or what is in it is damaged.
        DistkerasError: the job's tasks failed.
    """
    from pyspark.errors import PySparkException

    try:
        return GroupJob(plan).run(train_large)
    except (PySparkException, Py4JError) as error:
        raise typed_error(error, plan.df.sparkSession) from None


class GroupJob:
    """One run of a job."""

    def __init__(self, plan: GroupPlan) -> None:
        from pyspark.sql.types import StructType

        self._plan, self._session = plan, plan.df.sparkSession
        self._fields = key_fields(plan.df.schema, plan.by, RESERVED)
        #: Names of the key's columns next to those of the data, which may have the same.
        self._aliases = [f"distkeras_key_{number}" for number in range(len(plan.by))]
        if plan.side_by_side > 1:
            GroupsSideBySide(
                plan.recipe, plan.model_file, plan.spec, plan.side_by_side
            )  # raises here if it cannot work
        facts = SparkFacts.of(self._session)
        self._partitions = (plan.settings.num_workers or facts.default_workers()) * _PARTITIONS_A_SLOT
        self._folder = GroupFolder(_folder_of(plan, facts))
        self._keys = StructType(self._fields).json()
        digest = hashlib.sha256(plan.model_file).hexdigest()
        self._manifest = Manifest(plan.identity(self._partitions), self._keys, digest)

    def run(self, train_large: TrainLarge) -> GroupResults:
        """Train the groups that no earlier run has finished."""
        plan, folder = self._plan, self._folder
        self._manifest, finished = folder.begin(self._manifest, plan.model_file, resume=plan.resume)
        ready = self._ready_rows()
        if finished.files:
            done = self._aliased(finished.read(self._session))
            self._require_same_rows(ready, done)
            ready = ready.join(done, same_key(ready, done, self._aliases), "left_anti")
        self.write(self._trained(ready), "groups")
        files = {*finished.files, *folder.files_of(folder.run)}
        files |= self._train_large(StoredGroups(folder.uri, self._keys, tuple(sorted(files))), train_large)
        stored = StoredGroups(folder.uri, self._keys, tuple(sorted(files)))
        count = stored.read(self._session).count()
        if not count:
            raise EmptyDataError("`df` must have rows. Received: none")
        stored = folder.finish(self._manifest, stored.files, count)
        return GroupResults(self._session, stored, plan.recipe, plan.model_file)

    def _ready_rows(self) -> DataFrame:
        """Return the columns of the key, by other names, those of the data as numbers, and the hash of each row."""
        from pyspark.sql import functions as F

        plan = self._plan
        keys = [F.col(quoted(name)).alias(alias) for name, alias in zip(plan.by, self._aliases, strict=True)]
        ready = plan.df.select(*keys, *ready_columns(plan.df.schema.fields, plan.spec))
        return ready.withColumn(ROW_HASH, F.xxhash64(F.lit(plan.spec.seed), *self._values()))

    def _values(self) -> list[Column]:
        from pyspark.sql import functions as F

        return [F.col(quoted(column.name)) for column in self._plan.spec.columns]

    def _aliased(self, stored: DataFrame) -> DataFrame:
        """Return trained groups with the names of the key's columns in `_ready_rows`."""
        return stored.withColumnsRenamed(dict(zip(self._plan.by, self._aliases, strict=True)))

    def _require_same_rows(self, ready: DataFrame, done: DataFrame) -> None:
        """Raise LedgerError if a group that has been trained has other rows now, or none."""
        from pyspark.sql import functions as F

        hashes = F.sum(F.col(ROW_HASH).cast("decimal(20,0)"))
        now = ready.groupBy(*self._aliases).agg(F.count(F.lit(1)).alias("now_rows"), hashes.alias("now_sum"))
        pairs = done.join(now, same_key(done, now, self._aliases), "left")
        same = F.col("now_rows").eqNullSafe(F.col("rows")) & F.col("now_sum").eqNullSafe(F.col(ROWS_SUM))
        before = [done[alias].alias(name) for name, alias in zip(self._plan.by, self._aliases, strict=True)]
        changed = pairs.where(~same).select(*before, "rows", "now_rows")
        found = changed.select(key_as_text(self._plan.by).alias("key"), "rows", "now_rows").take(_NAMED_MAX + 1)
        if found:
            texts = [f"{row['key']} ({row['rows']} rows before, {row['now_rows'] or 0} now)" for row in found]
            more = ", and more" if len(texts) > _NAMED_MAX else ""
            raise LedgerError(
                "the input must have the same rows as before of each group that is trained already. Received other "
                f"rows of {'; '.join(texts[:_NAMED_MAX])}{more}"
            )

    def _trained(self, ready: DataFrame) -> DataFrame:
        """Return a row for each group, which tasks train: Spark sends them the rows of each key one after the other."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F
        from pyspark.sql.pandas.types import to_arrow_schema

        plan, schema = self._plan, table_schema(self._fields)
        order = Window.partitionBy(*self._aliases).orderBy(ROW_HASH, *self._values())
        rows = ready.repartition(self._partitions, *self._aliases).withColumn(FIRST, F.row_number().over(order) == 1)
        task = GroupTask(
            run=uuid.uuid4().hex,
            epoch=self._folder.epoch,
            key_names=plan.by,
            schema=to_arrow_schema(table_schema([])),
            spec=plan.spec,
            recipe=plan.recipe,
            read_model=partial(load_model_file, self._folder.uri, self._manifest),
            metrics=plan.replica.metric_names,
            rows_max=plan.rows_max,
            side_by_side=plan.side_by_side,
            threads=plan.threads,
        )
        sized = in_sized_batches(rows, plan.spec.row_bytes)
        return map_in_arrow(sized, task.train_partition, schema, plan.settings.resources)

    def write(self, groups: DataFrame, name: str) -> None:
        """Write trained groups as files of this run; raise DeadlineError if the files do not change for too long."""
        from pyspark.errors import PySparkException

        folder = self._folder
        place = spark_path(self._session, below(folder.uri, f"{folder.run}/{name}"))

        def write() -> list[Any]:
            write_groups(groups, self._plan.by, place)
            return []

        action = SparkAction(self._session, write, "distkeras-groups")
        try:
            self._wait(action)
            action.rows()
        except (PySparkException, Py4JError) as error:
            raise typed_error(error, self._session) from None
        except BaseException:
            action.cancel(_CANCEL_SECONDS)
            raise

    def _wait(self, action: SparkAction) -> None:
        folder, silence = self._folder, self._plan.silence
        while True:
            before, deadline = folder.listing(folder.run), time.monotonic() + silence
            while time.monotonic() < deadline:
                if action.ended(_LOOK_SECONDS):  # short waits, so that Ctrl-C is handled
                    return
            if folder.listing(folder.run) == before:
                raise DeadlineError(
                    f"waited {silence:g} s (`Deadlines.silence`) for a task to save groups in {folder.uri}; "
                    f"{len(folder.files_of(folder.run))} tasks have ended so far"
                )

    def _train_large(self, stored: StoredGroups, train_large: TrainLarge) -> set[str]:
        """Train each large group as a job of its own; return the paths of this run's files."""
        from pyspark.sql import functions as F

        # Those of earlier runs have come again as groups of this run, unless they were finished.
        of_run = F.col(ID).startswith(f"{self._folder.epoch}-")
        large = self._aliased(stored.read(self._session, large=True)).where(of_run)
        names = [row[ID] for row in large.select(ID).collect()]
        for number, name in enumerate(sorted(names)):
            key = large.where(large[ID] == name)
            self.write(self._trained_large(key, name, train_large), f"large-{number:05d}")
        return set(self._folder.files_of(self._folder.run))

    def _trained_large(self, large: DataFrame, name: str, train_large: TrainLarge) -> DataFrame:
        """Return the outcome of one large group, given its row."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        plan = self._plan
        row = large.select("rows", ROWS_SUM, key_as_text(self._aliases).alias("key")).first()
        assert row is not None, name
        log.info("group %s has more than %d rows and is trained as a job of its own", row["key"], plan.rows_max)
        began = time.monotonic()
        key = F.broadcast(large.select(*self._aliases))
        columns = {alias: F.col(quoted(by)) for by, alias in zip(plan.by, self._aliases, strict=True)}
        keyed = plan.df.withColumns(columns)
        rows = keyed.join(key, same_key(keyed, key, self._aliases), "left_semi").drop(*self._aliases)
        try:
            group = train_large(rows.drop(CLASS_WEIGHT))  # it adds that column again
            if group.rows != row["rows"]:
                raise LedgerError(f"group {row['key']} must have its {row['rows']} rows. Received: {group.rows}")
        except DistkerasError as error:
            if error.origin is not Origin.USER:
                raise
            group = TrainedGroup(row["rows"], error=f"{type(error).__name__}: {error}")
        group = replace(group, rows=row["rows"], seconds=time.monotonic() - began)
        schema = table_schema(self._fields)
        values = dict(zip(schema.names[len(plan.by) :], group.values(f"{name}-trained"), strict=True))
        values |= {"metrics": None if group.metrics is None else dict(group.metrics), ROWS_SUM: row[ROWS_SUM]}
        outcome = self._session.createDataFrame([tuple(values.values())], StructType(schema.fields[len(plan.by) :]))
        names = dict(zip(self._aliases, plan.by, strict=True))
        return large.select(*self._aliases).withColumnsRenamed(names).crossJoin(outcome)


def _folder_of(plan: GroupPlan, facts: SparkFacts) -> str:
    if plan.path is not None:
        return require_no_pattern(absolute(plan.path))
    if not facts.local:
        raise ConfigurationError(
            "`path` must be a folder that the driver and every executor reach, since executors write the models there; "
            f"only a local master needs none. Received: path=None with master={facts.master!r}"
        )
    if plan.resume:
        raise ConfigurationError("`resume` needs `path`, the folder of the job to continue. Received: path=None")
    uri = tempfile.mkdtemp(prefix="distkeras-groups-")
    atexit.register(shutil.rmtree, uri, ignore_errors=True)
    return uri
