"""The task on an executor: one partition's worker, from Arrow batches to commits.

The prefetch thread of `source.BatchSource` reads and cuts mini-batches while this thread trains and talks to the
parameter server. The task's output is a summary of one row; history travels with the commits.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from distkeras.data.batches import Batch, DataSpec
from distkeras.data.ordering import SAVE_ROWS, RowChecksum
from distkeras.data.source import BatchSource
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.replica_cache import ReplicaCache
from distkeras.keras_model.table_replica import WindowRows
from distkeras.keras_model.tables import RowModel
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.errors import (
    ConfigurationError,
    DistkerasError,
    EmptyDataError,
    LeaseLostError,
    LedgerError,
    NodeError,
    Origin,
    sorted_error,
)
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.rules.base import AUTO, CALL_STEPS_MAX
from distkeras.ps.rules.daso import Daso
from distkeras.ps.settings import WorkerSettings
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.members import MemberLinks
from distkeras.ps.transport.relay_group import RelayGroup
from distkeras.ps.transport.row_links import RawBatch
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.daso import run_member
from distkeras.ps.worker.helping import Helping, LoanTask, bounded
from distkeras.ps.worker.loop import AutoWindow, run_worker, work
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, SaveInterval, is_kept
from distkeras.ps.worker.tables import TableWindows
from distkeras.spark.failures import shortened
from distkeras.spark.notice import Notice, given_by_signals
from distkeras.spark.record_stream import RecordStream, connection_to_spark
from distkeras.spark.task_process import prepare_task, task_context
from distkeras.training.lent_rows import OfferedRows, as_batch, fetched_ahead
from distkeras.training.server_task import own_address

#: The task's output: columns with their types, as Spark and as Arrow spell them.
_SUMMARY = (
    ("worker", "int", pa.int32()),
    ("attempt", "long", pa.int64()),
    ("host", "string", pa.string()),
    ("rows", "long", pa.int64()),
    ("batches", "long", pa.int64()),
    ("commits", "long", pa.int64()),
    ("ready", "double", pa.float64()),
    ("seconds", "double", pa.float64()),
    ("window", "int", pa.int32()),
    ("padding", "double", pa.float64()),
)
SUMMARY = ", ".join(f"{name} {kind}" for name, kind, _ in _SUMMARY)

#: The cache of this process, in which Spark runs one task after another.
_REPLICAS = ReplicaCache()


@dataclass(frozen=True)
class Task:
    """Everything a worker needs, in Spark's own task closure; weights come from the server.

    Args:
        address: the parameter server's, with the job's key.
        size: elements of the parameter vector, as the driver counted them; without those of ``rows``.
        moving_statistics: elements of the moving statistics.
        metrics: history columns, loss first.
        rows: the tables that travel by rows, for which the model of ``recipe`` has small ones; None: there are none.
        micro_batch: the number of the stream's micro-batch in the rows; -1: they are not a stream's.
        saved: the server saves its state, from which a later job may continue, with more epochs or rows.
    """

    address: Address
    settings: WorkerSettings
    spec: DataSpec
    recipe: Recipe
    size: int
    moving_statistics: int
    metrics: tuple[str, ...]
    rows: RowModel | None = None
    micro_batch: int = NO_MICRO_BATCH
    saved: bool = False

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Train, and yield the summary; the function for ``mapInArrow``."""
        context = task_context()
        worker, attempt = context.partitionId(), context.taskAttemptId()
        if worker >= self.settings.workers:
            raise ConfigurationError(
                f"`df` must have {self.settings.workers} partitions, one per worker. Received: partition {worker}",
                worker=worker,
            )
        yield self.attempt(TaskAttempt, worker, attempt, records)

    def attempt(
        self, kind: type[TaskAttempt], worker: int, attempt: int, records: Iterator[pa.RecordBatch]
    ) -> pa.RecordBatch:
        """Run an attempt of this kind in the process of a Spark task, and return its summary."""
        try:
            prepare_task(self.settings.threads)
            rows = RecordStream(records, connection_to_spark())
            with given_by_signals() as notice:
                return kind(self, worker, attempt, rows, notice).run()
        except DistkerasError as error:  # the driver has the full error already; Spark logs this text several times
            raise shortened(error) from error.__cause__


class TaskAttempt:
    """One attempt at one partition: its rows, its connection to the server, and the worker's loop."""

    def __init__(self, task: Task, worker: int, attempt: int, records: RecordStream, notice: Notice) -> None:
        settings = task.settings
        self._task, self._notice = task, notice
        #: The worker's place among the workers of its host, if a relay sends their commits.
        self._group: RelayGroup | None = None
        if settings.relays is not None:
            self._group = RelayGroup(
                lambda: members_host(task.address.locate()[0]),
                node_name(),
                settings.workers,
                shared=settings.shared_memory,
            )
        self._records = records
        #: The current mini-batch and its partition, for error texts, and the epoch and number of the next own one.
        self._step: int | None = None
        self._partition = worker
        self._next = (0, 0)
        self._attempt = attempt
        self._client = self._client_for(worker, group=self._group)
        self._helping: Helping | None = None
        if settings.lends:
            self._helping = Helping(
                task.address,
                settings.deadlines,
                worker=worker,
                attempt=attempt,
                epochs=task.spec.epochs,
                host=lambda: members_host(task.address.locate()[0]),
                workers=settings.workers,
                task=LoanTask(self._client_for, self._begin_loan, fetched_ahead),
            )
        self._auto_window: AutoWindow | None = None
        if settings.rule.window == AUTO:
            self._auto_window = AutoWindow(settings.rule, overlap=settings.overlap)
        self._optimizer_due = SaveInterval.of(settings.rule, settings.workers)
        self._source: BatchSource | None = None
        #: The replica of the latest loop, which trains loans, too.
        self._replica: KerasReplica | None = None
        self._model_file = b""
        self._began = time.monotonic()
        self._ready: float | None = None

    def _client_for(self, lease: int, connection: int = 0, group: RelayGroup | None = None) -> WorkerClient:
        """Return the client for a lease, that of the partition or of a loan, after its latest ``connection``."""
        task, settings = self._task, self._task.settings
        kind = WorkerClient if settings.shards == 1 else SpreadWorkerClient
        return kind(
            task.address,
            worker=lease,
            attempt=self._attempt,
            size=task.size,
            moving_statistics=task.moving_statistics,
            metrics=task.metrics,
            deadlines=settings.deadlines,
            wire_format=settings.wire_format,
            tables=() if task.rows is None else task.rows.tables,
            shared_parts=settings.rule.traits.parts if settings.shared_memory else 0,
            micro_batch=task.micro_batch,
            group=group,
            connection=connection,
        )

    def run(self) -> pa.RecordBatch:
        """Train on the partition, and return the summary; report an error of the user or the machine, then raise it."""
        try:
            rows, batches = self._train()
        except Exception as error:
            if self._records.broken and not isinstance(error, DistkerasError):
                raise
            typed = self._report_error(error)
            if typed is error:
                raise
            raise typed from error
        finally:
            if self._group is not None:
                self._group.close()
            if self._helping is not None:
                self._helping.close()
            self._client.close()
        return self._summary(rows, batches)

    def _report_error(self, error: Exception) -> DistkerasError:
        """Report ``error`` to the server if the user or the machine caused it; return it as a typed error."""
        typed = sorted_error(error)
        if typed.origin in (Origin.USER, Origin.NODE):
            typed.worker = self._partition if typed.worker is None else typed.worker
            typed.step = self._step if typed.step is None else typed.step
            typed.remote_traceback = traceback.format_exc()
            self._client.report(typed)
        return typed

    def _train(self) -> tuple[int, int]:
        """Return the number of the partition's rows, and of its mini-batches per epoch (-1 if the job ended early)."""
        client = self._client
        welcome = client.join()
        if welcome.finished and welcome.stopping:
            return 0, -1
        if welcome.finished and not welcome.owes:
            # Spark lost the summary of an earlier attempt. The rows are counted again for the driver's check.
            rows = self._require_same_rows(welcome)
            self._help()
            return rows, -(-rows // self._task.spec.batch_size)
        with ExitStack() as stack:
            if welcome.owes:  # an earlier attempt has trained this share, and has died before it had sent all rows
                self._source_from(stack, replace(welcome, epoch=self._task.spec.epochs, batch=0)).read_to_end()
            else:
                run_worker(client, welcome, partial(self._begin_loop, stack))
            if self._source is not None and not client.stopping:
                self._source.read_to_end()
                self._offer(self._source)
                self._help()
            if self._source is None or client.stopping:
                return 0 if self._source is None else self._source.rows, -1
            self._source.read_to_end()  # an earlier attempt or incarnation may have trained on the rest
            return self._source.rows, self._source.batches_per_epoch

    def _offer(self, source: BatchSource) -> None:
        """Offer the rows of this partition to other workers, once they are read."""
        if self._helping is not None and source.complete:
            self._helping.offer(lambda: OfferedRows(source), self._client.incarnation)

    def _help(self) -> None:
        """Train mini-batches of other workers until there are none."""
        if self._helping is not None:
            self._helping.help(lambda: self._client.stopping)

    def _begin_loan(self, stack: ExitStack, client: WorkerClient, partition: int, rows: Iterator[RawBatch]) -> Loop:
        """Return the loop that trains the mini-batches of a loan, with the optimizer of this partition's if it has one.

        It is not kept: the partition's own state is that of its own mini-batches.
        """
        self._partition, replica = partition, self._replica
        if replica is None:
            self._model_file = self._model_file or client.fetch_model()
            self._task.recipe.begin_task()
            replica = stack.enter_context(_REPLICAS.lent(self._task.recipe, self._model_file, self._task.rows))
        batches = (as_batch(raw, self._task.spec) for raw in rows)
        return self._loop_over(client, replica, batches, keeper=None)

    def _require_same_rows(self, welcome: Welcome) -> int:
        """Check that the rows of a finished partition are those that were trained on, and return their number."""
        rows, checksum = 0, RowChecksum(block_rows=1 << 62)
        for record in self._records:
            rows += record.num_rows
            checksum.update(record)
        task = self._task
        stream = task.micro_batch != NO_MICRO_BATCH
        require_same_rows(
            welcome, rows, checksum.before(rows), epochs=task.spec.epochs, stream=stream, worker=self._client.worker
        )
        return rows

    def _begin_loop(self, stack: ExitStack, welcome: Welcome) -> Loop:
        """Return the worker's loop from the partition's position in ``welcome``, at the start or after a rewind."""
        task, settings = self._task, self._task.settings
        source = self._source_from(stack, welcome)
        self._next = (welcome.epoch, welcome.batch)
        task.recipe.begin_task()
        # After a rewind, the optimizer's state includes discarded steps: a new replica begins with the saved state.
        replica = self._replica = stack.enter_context(_REPLICAS.lent(task.recipe, self._model_file, task.rows))
        if self._ready is None:
            self._ready = time.monotonic() - self._began
        if settings.rule.traits.peers:
            return member_loop(
                self._client,
                settings,
                replica,
                self._tracked(self._client, source, self._read(source)),
                source=source,
                welcome=welcome,
                epochs=task.spec.epochs,
                moving_statistics=task.moving_statistics,
            )
        keeper: OptimizerKeeper | None = None
        if settings.keep_optimizer and is_kept(settings.rule):
            keeper = OptimizerKeeper(settings.rule, replica, self._optimizer_due, welcome, at_end=task.saved)
        return self._loop_over(self._client, replica, self._read(source), keeper=keeper, source=source)

    def _loop_over(
        self,
        client: WorkerClient,
        replica: KerasReplica,
        batches: Iterator[Batch],
        *,
        keeper: OptimizerKeeper | None,
        source: BatchSource | None = None,
    ) -> Loop:
        """Return the loop over mini-batches of this partition, which ``source`` has, or of another one."""
        settings = self._task.settings
        tables = self._table_windows(client, batches)
        own: Iterator[Any] = bounded(batches if tables is None else iter(tables), lambda: client.end)
        loop = work(
            settings.rule,
            replica,
            self._tracked(client, source, own),
            (lambda: client.payload(settings.rule.traits.parts)) if tables is None else tables.payload,
            moving_statistics=self._task.moving_statistics,
            overlap=settings.overlap,
            windows=self._auto_window,
            keeper=keeper,
            tables=tables,
            leaving=self._notice.is_given,
        )
        return self._ended_by_notice(loop)

    def _ended_by_notice(self, loop: Loop) -> Loop:
        """Run ``loop``; then raise NodeError if notice was given, so that another attempt trains what is left."""
        with self._notice.used():
            yield from loop
        if self._notice.given is not None:
            raise NodeError(
                f"this process received {self._notice.given.name}; all that it has trained is committed",
                worker=self._client.worker,
            )

    def _table_windows(self, client: WorkerClient, batches: Iterator[Batch]) -> TableWindows | None:
        """Return the windows of the mini-batches to come, if tables travel by rows; one is read ahead."""
        rows, window = self._task.rows, self._task.settings.rule.window
        if rows is None or not isinstance(window, int):
            return None
        windows = WindowRows(batches, rows, self._task.spec, window, client.worker)
        return TableWindows(rows.tables, self._task.size, windows, outgoing=lambda: client.payload(1)[0])

    def _read(self, source: BatchSource) -> Iterator[Batch]:
        """Yield the mini-batches of ``source``, and record the position of the next one, for rewinds."""
        for batch in source:
            self._next = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)
            yield batch

    def _tracked(self, client: WorkerClient, source: BatchSource | None, batches: Iterator[Any]) -> Iterator[Batch]:
        """Yield ``batches``, and record the current one for errors and commits; ``source`` None: they are lent."""
        for batch in batches:
            self._step = batch.index
            if source is not None:
                client.passed = source.passed(batch)
                self._offer(source)
            elif self._helping is not None:
                self._helping.renew(client.incarnation)
            yield batch

    def _source_from(self, stack: ExitStack, welcome: Welcome) -> BatchSource:
        start = (welcome.epoch, welcome.batch)
        checksum = None if welcome.checksum < 0 else welcome.checksum
        if self._source is None:
            self._model_file = self._client.fetch_model()
            window = self._task.settings.rule.window
            source = BatchSource(
                self._records,
                self._task.spec,
                worker=self._client.worker,
                start=start,
                checksum=checksum,
                window=window if isinstance(window, int) else CALL_STEPS_MAX,
                timeout=self._task.settings.deadlines.rows,
                read_ahead=self._helping is not None,
            )
            self._source = stack.enter_context(source)
        elif start != self._next:
            if not self._task.spec.rewindable:
                raise LeaseLostError(
                    "this attempt cannot go back to an earlier mini-batch, because its rows are not kept",
                    worker=self._client.worker,
                )
            self._source.rewind(start, checksum)
        return self._source

    def _summary(self, rows: int, batches: int) -> pa.RecordBatch:
        client, auto = self._client, self._auto_window
        values = (
            client.worker,
            client.attempt,
            socket.gethostname(),
            rows,
            batches,
            client.sequence,
            self._ready or 0.0,
            time.monotonic() - self._began,
            auto.rule.window if auto is not None and auto.chosen else None,
            None if self._source is None else self._source.padding,
        )
        columns = [pa.array([value], kind) for value, (_, _, kind) in zip(values, _SUMMARY, strict=True)]
        return pa.RecordBatch.from_arrays(columns, [name for name, _, _ in _SUMMARY])


def members_host(server: str) -> str:
    """Return the address at which other workers reach this one: this machine's, or loopback if the server uses it."""
    loopback = server.startswith("127.") and not os.environ.get("SPARK_LOCAL_IP")
    return server if loopback else own_address()


def node_name() -> str:
    """Return the name that all workers of one node share: the address in Spark's configuration, or the host's name."""
    return os.environ.get("SPARK_LOCAL_IP") or socket.gethostname()


def member_loop(
    client: WorkerClient,
    settings: WorkerSettings,
    replica: KerasReplica,
    batches: Iterator[Batch],
    *,
    source: BatchSource,
    welcome: Welcome,
    epochs: int,
    moving_statistics: int,
) -> Loop:
    """Return the loop of a worker that exchanges with others after each step; it begins once all of them are ready."""
    rule = settings.rule
    assert isinstance(rule, Daso), rule
    source.read_to_end()  # all members must know how many steps an epoch has
    if not source.rows:
        raise EmptyDataError(
            f"rule {rule.name!r} needs rows in every partition. Received: none. Use fewer workers", worker=client.worker
        )
    source.rewind((welcome.epoch, welcome.batch), None if welcome.checksum < 0 else welcome.checksum)

    def meet(node: str) -> MemberLinks | None:
        links = MemberLinks(
            members_host(client.address.locate()[0]),
            client.address.key,
            worker=client.worker,
            attempt=client.attempt,
            size=client.size,
            shared=settings.shared_memory,
            deadlines=settings.deadlines,
        )
        return links if links.meet(client, node, source.batches_per_epoch) else None

    return run_member(
        rule,
        replica,
        batches,
        lambda: client.payload(rule.traits.parts),
        welcome=welcome,
        worker=client.worker,
        node=node_name(),
        epochs=epochs,
        meet=meet,
        moving_statistics=moving_statistics,
    )


def require_same_rows(welcome: Welcome, rows: int, checksum: int, *, epochs: int, stream: bool, worker: int) -> None:
    """Check that the rows of a partition that has ended are those that were trained on.

    The server knows whether the partition of a stream's micro-batch had rows.
    """
    whole, was_empty = welcome.epoch >= epochs, stream and welcome.checksum == -1
    if (whole and welcome.checksum not in (-1, checksum)) or (was_empty and rows):
        raise LedgerError(
            f"the input has not returned the same rows as before: checksum {checksum:#018x} of {rows} rows of a "
            f"partition that has ended with {welcome.checksum:#018x}. {SAVE_ROWS}",
            worker=worker,
        )
