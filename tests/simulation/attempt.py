"""One attempt at a partition, which also trains what other partitions lend: the real client, loop and helper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np

from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    JobStoppedError,
    LeaseLostError,
    LedgerError,
    ServerLostError,
)
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.protocol.tables import spans
from distkeras.ps.rules.base import AUTO
from distkeras.ps.settings import WorkerSettings
from distkeras.ps.simulation.virtual_job import VirtualBatch
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.row_links import RawBatch
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.helping import Helping, LoanTask, bounded
from distkeras.ps.worker.loop import AutoWindow, run_worker, work
from distkeras.ps.worker.optimizer_keeper import OptimizerKeeper, is_kept
from distkeras.ps.worker.tables import TableWindows
from distkeras.training import task
from simulation.members import Member, loss_of
from simulation.plan import Layout, Plan
from simulation.scheduler import Finding, Process
from simulation.tables import cut_windows, shapes_of
from simulation.watch import Watch
from simulation.worker import CountingReplica, TableReplica, WatchedClient, WatchedGroup, WatchedSpreadClient
from simulation.world import VirtualWorld

#: Errors that end a task without a report, so that Spark retries it.
_UNREPORTED = (LeaseLostError, ServerLostError, JobStoppedError, DeadlineError)


class Attempt:
    """One attempt at a partition, as a task makes it.

    Args:
        plan, watch: plan and watch of the run.
        driver, layout: driver and layout of its job.
        world: world of the task.
        address: address of the server.
        worker, attempt: numbers of partition and attempt.
    """

    def __init__(
        self,
        plan: Plan,
        driver: Process,
        layout: Layout,
        watch: Watch,
        world: VirtualWorld,
        address: Address,
        worker: int,
        attempt: int,
    ) -> None:
        self._plan, self._driver, self._layout, self._watch, self._world = plan, driver, layout, watch, world
        self._address, self._worker, self._attempt = address, worker, attempt
        self._epochs, self._settings = watch.epochs[driver], _settings(plan, layout, watch.shards[driver])
        self._windows = _windows(self._settings, world)
        self._group = WatchedGroup(lambda: world.process.host, "", self._settings.workers, shared=plan.neighbors > 0)
        self._client = self._client_for(worker)
        self._member = None if watch.course is None else Member(plan, watch.course, self._client, world)
        self._helping: Helping | None = None
        if plan.lends:
            self._helping = Helping(
                address,
                self._settings.deadlines,
                worker=worker,
                attempt=attempt,
                epochs=self._epochs,
                host=lambda: world.process.host,
                workers=self._settings.workers,
                task=LoanTask(self._client_for, self._begin_loan, lambda rows, lease: nullcontext(rows)),
                world=world,
            )

    def run(self) -> None:
        """Train the partition, and what others lend.

        Raises:
            DistkerasError: it failed; Spark may try again.
        """
        try:
            self._train()
        except DistkerasError as error:
            if not isinstance(error, _UNREPORTED):
                self._client.report(error)
            raise
        finally:
            for end in (self._member, self._group, self._helping, self._client):
                if end is not None:
                    end.close()

    def _train(self) -> None:
        client, worker = self._client, self._worker
        if worker >= len(self._layout.batches):  # It has no rows.
            assert self._helping is not None
            self._helping.help(lambda: False)
            return
        welcome = client.join()
        if welcome.finished and self._plan.stream:
            count = self._layout.batches[worker]
            checksum = self._layout.checksum(worker, count - 1)
            task.require_same_rows(welcome, count, checksum, epochs=self._epochs, stream=True, worker=worker)
        if not welcome.finished:
            client.fetch_model()
            run_worker(client, welcome, self._begin)
        if self._helping is not None and not client.stopping:
            if welcome.owes or not welcome.finished:
                self._offer()
            self._helping.help(lambda: client.stopping)
        self._watch.note_let_go(self._layout, worker, self._epochs)

    def _client_for(self, lease: int, connection: int = 0) -> WatchedClient:
        options = _client_options(self._settings, self._watch.size, self._plan)
        kind = WatchedClient if self._settings.shards == 1 else WatchedSpreadClient
        return kind(
            self._plan,
            self._watch,
            self._driver,
            self._layout,
            self._address,
            **options,
            worker=lease,
            attempt=self._attempt,
            connection=connection,
            micro_batch=self._layout.micro_batch,
            world=self._world,
            group=self._group if self._plan.relays else None,
        )

    def _begin(self, welcome: Welcome) -> Loop:
        client, rule = self._client, self._settings.rule
        client.begin()
        replica, keeper = self._replica(client, self._worker), None
        if self._settings.keep_optimizer and is_kept(rule):
            at_end = bool(self._plan.stream)
            keeper = OptimizerKeeper(rule, replica, client.interval, welcome, at_end=at_end)
        batches = _batches(self._epochs, self._layout, self._worker, welcome)
        if self._member is not None:
            return self._member.begin(welcome, replica, batches)
        return self._loop(client, self._worker, replica, self._offering(batches), keeper)

    def _begin_loan(self, stack: ExitStack, client: WorkerClient, partition: int, rows: Iterator[RawBatch]) -> Loop:
        assert isinstance(client, WatchedClient)
        client.begin()
        batches = (batch_of(raw, partition) for raw in rows)
        return self._loop(client, partition, self._replica(client, partition), batches, None)

    def _offering(self, batches: Iterator[VirtualBatch]) -> Iterator[VirtualBatch]:
        for batch in batches:
            self._offer()
            yield batch

    def _offer(self) -> None:
        if self._helping is not None:
            rows = partial(LentRows, self._layout, self._worker, self._epochs)
            self._helping.offer(rows, self._client.incarnation)

    def _loop(
        self,
        client: WatchedClient,
        partition: int,
        replica: CountingReplica,
        batches: Iterator[Any],
        keeper: OptimizerKeeper | None,
    ) -> Loop:
        rule = self._settings.rule
        tables = self._table_windows(client, partition, batches)
        return work(
            rule,
            replica,
            bounded(batches if tables is None else iter(tables), lambda: client.end),
            partial(client.payload, rule.traits.parts) if tables is None else tables.payload,
            moving_statistics=self._plan.statistics,
            overlap=self._settings.overlap,
            windows=self._windows,
            keeper=keeper,
            tables=tables,
            now=self._world.time,
        )

    def _replica(self, client: WatchedClient, partition: int) -> CountingReplica:
        """Return a new model for mini-batches of ``partition``."""
        plan, layout, watch, worker = self._plan, self._layout, self._watch, self._worker
        places = spans(watch.size, shapes_of(plan, watch.size))
        kind = partial(TableReplica, places) if places else CountingReplica
        return kind(
            places[-1].stop if places else watch.size,
            lambda batch: layout.element(partition, batch.epoch, batch.index),
            lambda element: _step(plan, self._world, worker) * float(watch.amounts[element]),
            plan.statistics,
            (layout.number, worker, client.attempt),
            partial(loss_of, plan.workers, worker),
            lambda: client.least,
        )

    def _table_windows(
        self, client: WatchedClient, partition: int, batches: Iterator[VirtualBatch]
    ) -> TableWindows | None:
        """Return the windows of ``batches`` whose rows travel, or None if the run has no tables."""
        shapes, window, layout = shapes_of(self._plan, self._watch.size), self._settings.rule.window, self._layout
        if not shapes:
            return None
        assert isinstance(window, int)
        cut = cut_windows(
            batches, lambda batch: layout.element(partition, batch.epoch, batch.index), window, len(shapes)
        )
        return TableWindows(shapes, self._watch.size, cut, outgoing=lambda: client.payload(1)[0])


def batch_of(raw: RawBatch, partition: int) -> VirtualBatch:
    """Return a mini-batch that another worker has sent, after a check of its row."""
    (row,) = raw.arrays
    if row.tolist() != [partition, raw.epoch, raw.number]:
        text = f"the row of mini-batch {raw.number} of epoch {raw.epoch}, partition {partition}, must come"
        raise Finding("rows", f"{text}. Received: {row.tolist()}")
    return VirtualBatch(raw.number, raw.epoch, raw.last, checksum=raw.checksum)


class LentRows:
    """The rows of a partition, as other workers receive them."""

    def __init__(self, layout: Layout, worker: int, epochs: int) -> None:
        self._layout, self._worker, self._epochs = layout, worker, epochs
        self.batches_per_epoch = layout.batches[worker]
        self.checksum = layout.checksum(worker, self.batches_per_epoch - 1)

    def raw_batches(self, epoch: int, number: int) -> Iterator[RawBatch]:
        """Yield the mini-batches from a position on."""
        place = Welcome(0, 0, 0, 0, epoch, number, finished=False)
        for batch in _batches(self._epochs, self._layout, self._worker, place):
            row = np.array([self._worker, batch.epoch, batch.index])
            yield RawBatch(batch.epoch, batch.index, batch.last, batch.checksum, [row])


def _settings(plan: Plan, layout: Layout, shards: int) -> WorkerSettings:
    """Return the settings of a job's workers."""
    return WorkerSettings(
        plan.make_rule(),
        len(layout.batches),
        wire_format=plan.wire_format,
        overlap=plan.overlap,
        keep_optimizer=plan.keeps,
        relays=plan.relays or None,
        lends=plan.lends,
        shards=shards,
        deadlines=plan.deadlines,
    )


def _client_options(settings: WorkerSettings, size: int, plan: Plan) -> dict[str, Any]:
    """Return the options of the client that follow from the job."""
    return {
        "size": size,
        "moving_statistics": plan.statistics,
        "deadlines": settings.deadlines,
        "wire_format": settings.wire_format,
        "tables": shapes_of(plan, size),
        "shared_parts": settings.rule.traits.parts if plan.neighbors else 0,
    }


def _windows(settings: WorkerSettings, world: VirtualWorld) -> AutoWindow | None:
    """Return the function that chooses a worker's window, or None if the rule does."""
    if settings.rule.window != AUTO:
        return None
    return AutoWindow(settings.rule, overlap=settings.overlap, now=world.monotonic)


def _batches(epochs: int, layout: Layout, worker: int, welcome: Welcome) -> Iterator[VirtualBatch]:
    """Return the mini-batches of a partition from its position, if its rows are unchanged."""
    count = layout.batches[worker]
    known = layout.checksum(worker, (count if welcome.epoch else welcome.batch) - 1)
    if (welcome.epoch, welcome.batch) != (0, 0) and welcome.checksum not in (-1, known):
        raise LedgerError(f"the input has not returned the same rows as before: {known}, not {welcome.checksum}")
    for epoch in range(epochs):
        for index in range(count):
            if (epoch, index) >= (welcome.epoch, welcome.batch):
                read = index if not epoch else count - 1  # From the second epoch on, all rows are known.
                yield VirtualBatch(index, epoch, index == count - 1, checksum=layout.checksum(worker, read))


def _step(plan: Plan, world: VirtualWorld, worker: int) -> float:
    """Take the time of a step; return what it adds: 1, or a NaN if a fault requires it."""
    draw, poisoned = world.surroundings.scheduler.random.random, world.surroundings.poisoned
    times = plan.slow[worker] if worker < len(plan.slow) else 1
    world.sleep(plan.long_step if draw() < plan.long else times * plan.compute * (0.5 + draw()))
    if worker not in poisoned:
        return 1.0
    poisoned.remove(worker)
    return math.nan
