"""The task on an executor, which trains one partition's groups, one after another or several side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from distkeras.data.batches import in_blocks
from distkeras.data.columns import ColumnArrays
from distkeras.data.ordering import RowChecksum
from distkeras.data.source import checked_columns
from distkeras.data.spec import DataSpec
from distkeras.groups.keys import Key, key_text, keyed_runs
from distkeras.groups.pieces import MODEL, Pieces, TrainedGroup, folder, key_columns, piece_name, read_whole
from distkeras.groups.replica import ReplicaOfGroups, weights_of
from distkeras.groups.side_by_side import GroupsSideBySide
from distkeras.keras_model.archive import ensure_backend
from distkeras.keras_model.recipe import Recipe
from distkeras.ps.errors import ConfigurationError, DistkerasError, LedgerError, Origin, SnapshotError, sorted_error
from distkeras.spark.failures import shortened
from distkeras.spark.first_import import import_keras
from distkeras.spark.record_stream import RecordStream, connection_to_spark
from distkeras.training.task import prepare_process

log = logging.getLogger(__name__)

#: Finished groups are written again after this share of the task's run time, but not before `write_seconds`.
_WRITE_SHARE = 0.01
#: Bytes of pending weights from which groups are written at once.
_WRITE_BYTES = 64 << 20
#: More rows than any partition has.
_ALL_ROWS = 1 << 62

_Outcome = tuple[bytes, np.ndarray] | DistkerasError
"""The weights of a trained group, and loss and metrics; or its error."""


class _Models:
    """The models that groups are trained with, each built and traced on first use."""

    def __init__(self, task: GroupTask, model_file: bytes) -> None:
        self._task, self._model_file = task, model_file
        self._alone = ReplicaOfGroups(task.recipe, model_file)
        self._side_by_side: GroupsSideBySide | None = None

    def train_alone(self, columns: ColumnArrays) -> _Outcome:
        """Train on the rows of one group."""
        try:
            replica, means = self._alone.train(columns, self._task.spec)
            return weights_of(replica.model), means
        except Exception as error:
            cause = _error_of_group(error)
            if cause is None:
                raise
            return cause

    def train(self, groups: Sequence[ColumnArrays]) -> Sequence[_Outcome]:
        """Train on the rows of some groups; return the outcome of each of them."""
        task = self._task
        if task.side_by_side == 1:
            return [self.train_alone(columns) for columns in groups]
        if self._side_by_side is None:
            self._side_by_side = GroupsSideBySide(task.recipe, self._model_file, task.spec, task.side_by_side)
        try:
            return self._side_by_side.train(groups)
        except Exception as error:
            cause = _error_of_group(error)
            if cause is None:
                raise
            log.warning("%d groups side by side have failed and are trained one after another: %s", len(groups), cause)
            return [self.train_alone(columns) for columns in groups]


def _error_of_group(error: Exception) -> DistkerasError | None:
    """Return the typed error if the group caused it; None for an error of the machine or the job."""
    typed = sorted_error(error)
    if typed.origin is not Origin.USER:
        return None
    typed.worker = None  # the group's key identifies the rows
    return typed


#: The models of the latest job in this process, in which Spark runs one task after another.
_MODELS: dict[str, _Models] = {}


@dataclass(frozen=True)
class GroupTask:
    """Everything a task needs, in Spark's own task closure; the model is in the folder.

    Args:
        run: a name for this run of the job, which is part of its pieces' names.
        metrics: names of loss and metrics, loss first.
        rows_max: the most rows of a group that a task trains, and of all groups in one step; a larger group is left to
            the driver.
        side_by_side: the most groups that are trained in one step.
        threads: compute threads; None: the cores that Spark gives to a task.
        write_seconds: the least seconds between two writes of finished groups.
    """

    uri: str
    schema: pa.Schema
    run: str
    spec: DataSpec
    recipe: Recipe
    metrics: tuple[str, ...]
    rows_max: int
    side_by_side: int
    threads: int | None
    write_seconds: float

    @property
    def result_schema(self) -> pa.Schema:
        """The columns of `train_partition`'s results: the key of a group that is too large, or a piece's name."""
        keys = list(self.schema)[: len(key_columns(self.schema))]
        return pa.schema([*keys, pa.field("distkeras_piece", pa.string())])

    def train_partition(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Train a partition's rows, in the order of keys; yield pieces' names and large keys; for ``mapInArrow``."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise ConfigurationError("a task must run inside Spark. Received: no task context")
        gpus = context.resources().get("gpu")
        prepare_process(self.threads or context.cpus(), gpus.addresses if gpus else None)
        partition = GroupPartition(self, context.partitionId(), context.taskAttemptId())
        try:
            large = partition.train(RecordStream(records, connection_to_spark()))
        except DistkerasError as error:
            raise shortened(error) from error.__cause__
        names, keys = partition.names, range(len(self.result_schema) - 1)
        columns = [[*(key[number] for key in large), *(None for _ in names)] for number in keys]
        columns.append([*(None for _ in large), *names])
        arrays = [pa.array(values, part.type) for values, part in zip(columns, self.result_schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=self.result_schema)


@dataclass
class _GroupRows:
    """The rows of one group that have arrived."""

    key: Key
    records: list[pa.RecordBatch] = field(default_factory=list)
    checksum: RowChecksum = field(default_factory=lambda: RowChecksum(_ALL_ROWS))
    rows: int = 0


class GroupPartition:
    """One attempt at one partition."""

    def __init__(self, task: GroupTask, number: int, attempt: int) -> None:
        self._task, self._number, self._attempt = task, number, attempt
        self._pieces = Pieces(task.uri, task.schema)
        self.names, self._finished = self._pieces.finished(number)
        #: Groups to train in the next step, and trained groups to write.
        self._waiting: list[_GroupRows] = []
        self._pending: list[TrainedGroup] = []
        self._began = self._written = time.monotonic()

    def train(self, records: Iterator[pa.RecordBatch]) -> list[Key]:
        """Train each group that no earlier attempt has finished; return the keys of those that are too large."""
        large = []
        for group in self._groups(records):
            if group.key in self._finished:
                self._require_same_rows(group)
            elif group.rows > self._task.rows_max:
                large.append(group.key)
            else:
                if sum(waiting.rows for waiting in self._waiting) + group.rows > self._task.rows_max:
                    self._train_waiting()
                self._waiting.append(group)
                if len(self._waiting) == self._task.side_by_side:
                    self._train_waiting()
        self._train_waiting()
        self._write()
        return large

    def _groups(self, records: Iterator[pa.RecordBatch]) -> Iterator[_GroupRows]:
        group: _GroupRows | None = None
        for key, record in keyed_runs(records, self._pieces.key_count):
            if group is None or group.key != key:
                if group is not None:
                    yield group
                group = _GroupRows(key)
            group.rows += record.num_rows
            group.checksum.update(record)
            group.records.append(record)
            if group.rows > self._task.rows_max or key in self._finished:
                group.records.clear()  # only their number and checksum are needed
        if group is not None:
            yield group

    def _require_same_rows(self, group: _GroupRows) -> None:
        now, before = (group.rows, group.checksum.before(group.rows)), self._finished[group.key]
        if now != before:
            raise LedgerError(
                f"the input has not returned the same rows as before: {now[0]} rows with checksum {now[1]:#018x} of "
                f"group {key_text(group.key, key_columns(self._task.schema))}, which was trained with {before[0]} rows "
                f"and checksum {before[1]:#018x}",
                worker=self._number,
            )

    def _train_waiting(self) -> None:
        """Train the waiting groups. They are written together, so that no later attempt trains a part of them."""
        if not self._waiting:
            return
        began = time.monotonic()
        groups, self._waiting = self._waiting, []
        columns: list[ColumnArrays] = []
        errors: dict[Key, DistkerasError] = {}
        for group in groups:
            try:
                columns.append(self._columns(group))
            except Exception as error:
                cause = _error_of_group(error)
                if cause is None:
                    raise
                errors[group.key] = cause
        trained = iter(_models(self._task).train(columns) if columns else ())
        outcomes = [errors[group.key] if group.key in errors else next(trained) for group in groups]
        seconds = (time.monotonic() - began) / len(groups)
        self._pending += [self._result(*pair, seconds) for pair in zip(groups, outcomes, strict=True)]
        self._write_if_due()

    def _result(self, group: _GroupRows, outcome: _Outcome, seconds: float) -> TrainedGroup:
        checksum = group.checksum.before(group.rows)
        if isinstance(outcome, DistkerasError):
            error = f"{type(outcome).__name__}: {outcome}"
            return TrainedGroup(group.key, group.rows, seconds, error=error, checksum=checksum)
        weights, means = outcome
        metrics = tuple(zip(self._task.metrics[1:], means[1:].tolist(), strict=True))
        return TrainedGroup(group.key, group.rows, seconds, float(means[0]), metrics, None, checksum, weights)

    def _columns(self, group: _GroupRows) -> ColumnArrays:
        """Return the group's rows as arrays, and discard its record batches, so that the rows are in memory once."""
        parts, rows = [], 0
        size = self._task.spec.batch_size
        for record in group.records:
            place = {"worker": self._number, "step": rows // size, "first_row": rows}
            parts.append(checked_columns(record, self._task.spec, **place))
            rows += record.num_rows
        group.records.clear()
        return next(in_blocks(parts, rows))

    def _write_if_due(self) -> None:
        now = time.monotonic()
        wait = max(self._task.write_seconds, _WRITE_SHARE * (now - self._began))
        if now - self._written >= wait or sum(len(group.weights or b"") for group in self._pending) >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        if self._pending:
            name = piece_name(self._number, self._task.run, self._attempt, len(self.names))
            self._pieces.write(name, self._pending)
            self.names.append(name)
            self._pending = []
        self._written = time.monotonic()


def _models(task: GroupTask) -> _Models:
    """Return this process' models for the job of ``task``."""
    models = _MODELS.get(task.run)
    if models is None:
        ensure_backend(task.recipe.backend)
        import_keras()
        task.recipe.begin_task()
        model_file = read_whole(folder(task.uri), MODEL)
        if model_file is None:
            raise SnapshotError(f"{task.uri!r} must hold the model of the job. Received: no file {MODEL}")
        _MODELS.clear()
        models = _MODELS[task.run] = _Models(task, model_file)
    return models
