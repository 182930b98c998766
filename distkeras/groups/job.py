"""The driver's part of a job that trains a model for each group."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distkeras.data.ordering import ROW_HASH
from distkeras.data.schema import CLASS_WEIGHT, map_in_arrow, quoted, ready_columns
from distkeras.data.spec import DataSpec
from distkeras.groups.keys import Key, key_fields, key_text
from distkeras.groups.pieces import (
    MODEL,
    RESERVED,
    Manifest,
    Pieces,
    TrainedGroup,
    folder,
    packed_weights,
    piece_name,
    piece_schema,
    write_whole,
)
from distkeras.groups.results import GroupResults, GroupTable
from distkeras.groups.side_by_side import GroupsSideBySide
from distkeras.groups.task import GroupTask
from distkeras.keras_model.recipe import Recipe, model_identity
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import numpy_value
from distkeras.ps.checkpoint.snapshots import rule_json
from distkeras.ps.checkpoint.store import require_same_job
from distkeras.ps.errors import ConfigurationError, DeadlineError, DistkerasError, EmptyDataError, Origin
from distkeras.ps.rules import Rule
from distkeras.settings import TrainSettings
from distkeras.spark.actions import SparkAction
from distkeras.spark.cluster import SparkFacts
from distkeras.spark.failures import typed_error
from distkeras.spark.record_stream import in_sized_batches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

log = logging.getLogger(__name__)

#: Partitions for each slot: groups differ in size, and free slots take the next partition.
_PARTITIONS_A_SLOT = 4
#: The least seconds between two writes of finished groups.
_WRITE_SECONDS = 1.0
#: Seconds from one check of the Spark job to the next, and that Spark may take to end a cancelled job.
_LOOK_SECONDS, _CANCEL_SECONDS = 1.0, 60.0
#: The number that stands for a partition in the pieces of groups that were trained as jobs of their own.
_LARGE = 99_999

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
        silence: seconds within which some task must save a group.
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
        DeadlineError: no task has saved a group for too long.
        DistkerasError: the job's tasks failed.
    """
    fields = key_fields(plan.df.schema, plan.by, RESERVED)
    if plan.side_by_side > 1:
        GroupsSideBySide(plan.recipe, plan.model_file, plan.spec, plan.side_by_side)  # raises here if it cannot work
    facts = SparkFacts.of(plan.df.sparkSession)
    partitions = (plan.settings.num_workers or facts.default_workers()) * _PARTITIONS_A_SLOT
    uri = _folder_of(plan, facts)
    task = GroupTask(
        uri=uri,
        schema=piece_schema(_arrow_schema(fields)),
        run=uuid.uuid4().hex,
        spec=plan.spec,
        recipe=plan.recipe,
        metrics=plan.replica.metric_names,
        rows_max=plan.rows_max,
        side_by_side=plan.side_by_side,
        threads=plan.threads,
        write_seconds=_WRITE_SECONDS,
    )
    manifest = _begin(plan, uri, partitions)
    rows = _run(plan, task, partitions)
    names = [row["distkeras_piece"] for row in rows if row["distkeras_piece"] is not None]
    large = [tuple(row[name] for name in plan.by) for row in rows if row["distkeras_piece"] is None]
    names += _train_large(plan, task, large, train_large)
    if not names:
        raise EmptyDataError("`df` must have rows. Received: none")
    _finish(task, manifest, names)
    table = GroupTable(uri, task.schema, tuple(names))
    return GroupResults(plan.df.sparkSession, table, plan.recipe, plan.model_file)


def _arrow_schema(fields: Sequence[StructField]) -> pa.Schema:
    """Return the Arrow schema of a key's columns in pieces; timestamps are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    schema: pa.Schema = to_arrow_schema(StructType(list(fields)), **zone)
    return schema


def _folder_of(plan: GroupPlan, facts: SparkFacts) -> str:
    if plan.path is not None:
        return plan.path
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


def _begin(plan: GroupPlan, uri: str, partitions: int) -> Manifest:
    """Write the job's manifest to its folder, which must be empty or hold the same job."""
    files = folder(uri)
    manifest = Manifest(plan.identity(partitions), plan.by)
    saved = Manifest.load(files)
    if saved is not None and plan.resume:
        require_same_job(manifest.identity, saved.identity, uri)
    elif files.names():
        needed = "an empty folder, or `resume` must be true to continue the job in it"
        raise ConfigurationError(f"`path` must be {needed}. Received: {uri!r} with {len(files.names())} files")
    else:
        write_whole(files, MODEL, plan.model_file)
    manifest.save(files)
    return manifest


def _run(plan: GroupPlan, task: GroupTask, partitions: int) -> list[dict[str, Any]]:
    """Run ``task`` on the rows in the order of their keys; return the results of the attempts that Spark accepted."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_schema

    session, resources = plan.df.sparkSession, plan.settings.resources
    grouped = _rows_by_key(plan, partitions)

    sized = in_sized_batches(grouped, plan.spec.row_bytes)
    trained = map_in_arrow(sized, task.train_partition, from_arrow_schema(task.result_schema), resources)
    # Collected as Arrow, in which pieces are read, too: a timestamp in a `Row` has no time zone.
    action = SparkAction(session, lambda: trained.toArrow().to_pylist(), "distkeras-groups")
    try:
        _wait(action, task.uri, plan.silence)
        return action.rows()
    except PySparkException as error:
        raise typed_error(error, session) from None
    except BaseException:
        action.cancel(_CANCEL_SECONDS)
        raise


def _wait(action: SparkAction, uri: str, silence: float) -> None:
    """Wait for the end of the Spark job while its tasks save groups in ``uri``; DeadlineError if they stop."""
    files = folder(uri)
    while True:
        saved, deadline = set(files.names()), time.monotonic() + silence
        while time.monotonic() < deadline:
            if action.ended(_LOOK_SECONDS):  # short waits, so that Ctrl-C is handled
                return
        if saved.issuperset(files.names()):
            raise DeadlineError(
                f"waited {silence:g} s (`Deadlines.silence`) for a task to save another group in {uri}; "
                f"{sum(name.startswith('piece-') for name in saved)} pieces are saved so far"
            )


def _rows_by_key(plan: GroupPlan, partitions: int) -> DataFrame:
    """Return the rows such that those of each key are adjacent in one partition, in the order of a hash of values."""
    from pyspark.sql import functions as F

    keys = [f"distkeras_key_{number}" for number in range(len(plan.by))]
    names = [column.name for column in plan.spec.columns]
    ready = plan.df.select(
        *(F.col(quoted(name)).alias(key) for name, key in zip(plan.by, keys, strict=True)),
        *ready_columns(plan.df.schema.fields, plan.spec),
    )
    values = [F.col(quoted(name)) for name in names]
    hashed = ready.withColumn(ROW_HASH, F.xxhash64(F.lit(plan.spec.seed), *values))
    return hashed.repartition(partitions, *keys).sortWithinPartitions(*keys, ROW_HASH, *values)


def _train_large(plan: GroupPlan, task: GroupTask, keys: Sequence[Key], train_large: TrainLarge) -> list[str]:
    """Train each large group as a separate job; return the names of their pieces."""
    if not keys:
        return []
    pieces = Pieces(task.uri, task.schema)
    names, finished = pieces.finished(_LARGE)
    for number, key in enumerate(keys):
        if key in finished:
            continue
        text = key_text(key, plan.by)
        log.info("group %s has more than %d rows and is trained as a job of its own", text, task.rows_max)
        began = time.monotonic()
        try:
            group = train_large(plan.df.where(_has_key(plan.by, key)).drop(CLASS_WEIGHT))  # it adds that column again
        except DistkerasError as error:
            if error.origin is not Origin.USER:
                raise
            group = TrainedGroup((), 0, 0.0, error=f"{type(error).__name__}: {error}")
        name = piece_name(_LARGE, task.run, 0, number)
        pieces.write(name, [replace(group, key=key, seconds=time.monotonic() - began)])
        names.append(name)
    return names


def _has_key(by: Sequence[str], key: Key) -> Column:
    from pyspark.sql import functions as F

    condition = F.lit(True)
    for name, value in zip(by, key, strict=True):
        condition = condition & F.col(quoted(name)).eqNullSafe(F.lit(value))
    return condition


def _finish(task: GroupTask, manifest: Manifest, names: Sequence[str]) -> None:
    """Record the valid pieces in the manifest, and delete those of attempts that Spark gave up on."""
    files = folder(task.uri)
    replace(manifest, pieces=tuple(names)).save(files)
    valid = set(names)
    for name in files.names():
        if name.startswith("piece-") and name not in valid:
            files.delete(name)
