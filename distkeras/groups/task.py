"""The task on an executor, which trains one partition's groups, one after another or several side by side."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from distkeras.data.batches import DataSpec, in_blocks
from distkeras.data.columns import ColumnRows
from distkeras.data.ordering import ROW_HASH
from distkeras.data.source import checked_columns
from distkeras.groups.replica import GroupsSideBySide, ReplicaOfGroups, weights_of
from distkeras.groups.store import TrainedGroup
from distkeras.keras_model.recipe import Recipe
from distkeras.ps.errors import ConfigurationError, DistkerasError, Origin, sorted_error
from distkeras.spark.failures import shortened
from distkeras.spark.record_stream import RecordStream, connection_to_spark
from distkeras.spark.task_process import prepare_task, task_context

log = logging.getLogger(__name__)

#: The column that is true in the first row of each group.
FIRST = "distkeras_first"
#: Bytes of weights from which trained groups are handed to Spark at once.
_RESULT_BYTES = 16 << 20

_T = TypeVar("_T")
_Outcome = tuple[bytes, np.ndarray] | DistkerasError
"""The weights of a trained group, and loss and metrics; or its error."""


class _Models:
    """The models that groups are trained with, each built and traced on first use."""

    def __init__(self, task: GroupTask) -> None:
        self._task, self._model_file = task, task.read_model()
        self._alone = ReplicaOfGroups(task.recipe, self._model_file)
        self._side_by_side: GroupsSideBySide | None = None

    def train_alone(self, columns: ColumnRows) -> _Outcome:
        def trained() -> tuple[bytes, np.ndarray]:
            replica, means = self._alone.train(columns, self._task.spec)
            return weights_of(replica.model), means

        return _result_or_error(trained)

    def train(self, groups: Sequence[ColumnRows]) -> Sequence[_Outcome]:
        """Train on the rows of some groups; return the outcome of each of them."""
        task = self._task
        if task.side_by_side == 1:
            return [self.train_alone(columns) for columns in groups]
        if self._side_by_side is None:
            self._side_by_side = GroupsSideBySide(task.recipe, self._model_file, task.spec, task.side_by_side)
        trained = _result_or_error(partial(self._side_by_side.train, groups))
        if isinstance(trained, DistkerasError):
            log.warning(
                "%d groups side by side have failed and are trained one after another: %s", len(groups), trained
            )
            return [self.train_alone(columns) for columns in groups]
        return trained


def _result_or_error(call: Callable[[], _T]) -> _T | DistkerasError:
    """Return the result, or the typed error if the group caused it; raise an error of the machine or the job."""
    try:
        return call()
    except Exception as error:
        typed = sorted_error(error)
        if typed.origin is not Origin.USER:
            raise
        typed.worker = None  # the group's key identifies the rows
        return typed


#: The models of the latest job in this process, in which Spark runs one task after another.
_MODELS: dict[str, _Models] = {}


@dataclass(frozen=True)
class GroupTask:
    """Everything a task needs, in Spark's own task closure.

    Args:
        run: a name for this run of the job.
        epoch: its number, which is part of the names of trained groups.
        key_names: the columns of the key in the results, which are the first columns of the rows.
        schema: of the other columns of the results.
        read_model: returns the archive of the model that each group starts from.
        metrics: names of loss and metrics, loss first.
        rows_max: the most rows of a group that a task trains, and of all groups in one step; a larger group is left to
            the driver.
        side_by_side: the most groups that are trained in one step.
        threads: compute threads; None: the cores that Spark gives to a task.
    """

    run: str
    epoch: int
    key_names: tuple[str, ...]
    schema: pa.Schema
    spec: DataSpec
    recipe: Recipe
    read_model: Callable[[], bytes]
    metrics: tuple[str, ...]
    rows_max: int
    side_by_side: int
    threads: int | None

    def train_partition(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Train a partition's rows, which are sorted by key; yield a row for each group; for ``mapInArrow``."""
        context = task_context()
        try:
            prepare_task(self.threads)
            yield from GroupPartition(self, context.partitionId()).train(RecordStream(records, connection_to_spark()))
        except DistkerasError as error:
            raise shortened(error) from error.__cause__


@dataclass
class _GroupRows:
    """The rows of one group that have arrived; ``key`` has one row."""

    key: list[pa.Array]
    records: list[pa.RecordBatch] = field(default_factory=list)
    rows_sum: int = 0
    rows: int = 0


class GroupPartition:
    """One attempt at one partition."""

    def __init__(self, task: GroupTask, number: int) -> None:
        self._task, self._number = task, number
        self._named = 0
        #: Groups to train in the next step.
        self._waiting: list[_GroupRows] = []
        #: Outcomes, and the keys of their groups, that Spark has not yet received.
        self._done: list[tuple[list[pa.Array], TrainedGroup]] = []

    def train(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Train each group, and yield the outcomes."""
        for group in self._groups(records):
            if group.rows > self._task.rows_max:
                large = TrainedGroup(group.rows, rows_sum=group.rows_sum, large=True)
                self._done.append((group.key, large))
                continue
            if sum(waiting.rows for waiting in self._waiting) + group.rows > self._task.rows_max:
                self._train_waiting()
            self._waiting.append(group)
            if len(self._waiting) == self._task.side_by_side:
                self._train_waiting()
            if sum(len(done.weights or b"") for _, done in self._done) >= _RESULT_BYTES:
                yield self._results()
        self._train_waiting()
        if self._done:
            yield self._results()

    def _groups(self, records: Iterator[pa.RecordBatch]) -> Iterator[_GroupRows]:
        group: _GroupRows | None = None
        for record in records:
            firsts = np.flatnonzero(record.column(FIRST).to_numpy(zero_copy_only=False))
            bounds = [0, *firsts.tolist(), record.num_rows]
            for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
                if number:
                    if group is not None:
                        yield group
                    # Copied, so that the key does not keep the whole record batch in memory.
                    group = _GroupRows([column.take([start]) for column in record.columns[: len(self._task.key_names)]])
                if start == stop:
                    continue
                if group is None:
                    raise ConfigurationError("the first row of a partition must begin a group. Received: another one")
                self._add(group, record.slice(start, stop - start))
        if group is not None:
            yield group

    def _add(self, group: _GroupRows, rows: pa.RecordBatch) -> None:
        group.rows += rows.num_rows
        hashes = rows.column(ROW_HASH).to_numpy()
        # Exact: a sum of 64-bit numbers overflows, and the sums of their halves do not.
        group.rows_sum += (int((hashes >> 32).sum()) << 32) + int((hashes & 0xFFFFFFFF).sum())
        group.records.append(rows)
        if group.rows > self._task.rows_max:
            group.records.clear()  # only their number and checksum are needed

    def _train_waiting(self) -> None:
        if not self._waiting:
            return
        began = time.monotonic()
        groups, self._waiting = self._waiting, []
        read = [_result_or_error(partial(self._columns, group)) for group in groups]
        columns = [each for each in read if not isinstance(each, DistkerasError)]
        trained = iter(_models(self._task).train(columns) if columns else ())
        outcomes = [each if isinstance(each, DistkerasError) else next(trained) for each in read]
        seconds = (time.monotonic() - began) / len(groups)
        for group, outcome in zip(groups, outcomes, strict=True):
            self._done.append((group.key, self._outcome(group, outcome, seconds)))

    def _outcome(self, group: _GroupRows, outcome: _Outcome, seconds: float) -> TrainedGroup:
        if isinstance(outcome, DistkerasError):
            error = f"{type(outcome).__name__}: {outcome}"
            return TrainedGroup(group.rows, seconds, error=error, rows_sum=group.rows_sum)
        weights, means = outcome
        metrics = tuple(zip(self._task.metrics[1:], means[1:].tolist(), strict=True))
        return TrainedGroup(group.rows, seconds, float(means[0]), metrics, None, group.rows_sum, weights)

    def _columns(self, group: _GroupRows) -> ColumnRows:
        """Return the group's rows as arrays, and discard its record batches, so that the rows are in memory once."""
        parts, rows = [], 0
        size = self._task.spec.batch_size
        for record in group.records:
            place = {"worker": self._number, "step": rows // size, "first_row": rows}
            parts.append(checked_columns(record, self._task.spec, **place))
            rows += record.num_rows
        group.records.clear()
        return next(in_blocks(parts, rows))

    def _results(self) -> pa.RecordBatch:
        """Return the outcomes that Spark has not received, as rows."""
        done, self._done = self._done, []
        task = self._task
        rows = []
        for _, outcome in done:
            rows.append(outcome.values(f"{task.epoch}-{self._number}-{self._named}"))
            self._named += 1
        keys = [pa.concat_arrays([key[number] for key, _ in done]) for number in range(len(task.key_names))]
        columns = [
            pa.array(values, part.type) for values, part in zip(zip(*rows, strict=True), task.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays([*keys, *columns], names=[*task.key_names, *task.schema.names])


def _models(task: GroupTask) -> _Models:
    """Return this process' models for the job of ``task``."""
    models = _MODELS.get(task.run)
    if models is None:
        task.recipe.begin_task()
        _MODELS.clear()
        models = _MODELS[task.run] = _Models(task)
    return models
