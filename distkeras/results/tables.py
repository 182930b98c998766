"""The server's records as tables: what happened in each step, and in each commit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import LedgerError
from distkeras.ps.events import Event
from distkeras.ps.protocol.messages import FIXED_HISTORY
from distkeras.ps.server.start import ResumePoint
from distkeras.ps.transport.driver_client import DriverClient

log = logging.getLogger(__name__)

_INTS = {"worker": pa.int32(), "epoch": pa.int32(), "steps": pa.int32()}
_LEDGER = ("worker", "attempt", "sequence", "epoch", "first_batch", "last_batch", "clock", "incarnation")
_COMMITS = (
    "clock",
    "worker",
    "timestamp",
    "staleness",
    "gap",
    "scale",
    "bytes",
    "wait",
    "attempt",
    "sequence",
    "epoch",
    "first_batch",
    "last_batch",
    "steps",
    "learning_rate",
)
#: Of the rows of tables that traveled with a commit and with its reply.
_OF_TABLES = ("table_rows", "table_bytes", "table_rows_back")


@dataclass(frozen=True)
class Resumed:
    """Where a job went on with an earlier one.

    Args:
        clock: commits before it.
        exact: each partition went on where it had stopped. Else the number of workers was another one, and all began
            with ``epoch``; rows of it that had been committed before count once more.
        epoch: the first epoch of this job; 0 where ``exact``.
        began_clock, began_epoch: what the partitions began with, in this job or in one before; 0 where the number of
            workers was never another one.
    """

    clock: int
    exact: bool
    epoch: int
    began_clock: int = 0
    began_epoch: int = 0

    @classmethod
    def from_point(cls, point: ResumePoint | None) -> Resumed | None:
        """Return what the server reports, and log it."""
        if point is None:
            return None
        resumed = cls(point.clock, point.exact, point.epoch, point.began_clock, point.began_epoch)
        if resumed.exact:
            log.info("the job goes on at clock %d, exactly where it stopped", resumed.clock)
        else:
            log.warning(
                "the job goes on at clock %d with another number of workers, from the beginning of epoch %d: "
                "rows of it that were committed before count once more",
                resumed.clock,
                resumed.epoch,
            )
        return resumed


class JobRecords:
    """All commits of a job with their history, in clock order, as the server sent them.

    Args:
        commits: rows of `commit_log.COMMIT`.
        steps: float64 ``(mini-batches, 2 + metrics)``: timestamp, samples, then the metrics.
        metrics: their names, loss first.
        missing: mini-batches behind commits whose records were lost with a damaged file of a checkpoint.
        start: number of the first of these commits, as the server counts them.
    """

    def __init__(
        self, commits: np.ndarray, steps: np.ndarray, metrics: tuple[str, ...], missing: int = 0, start: int = 0
    ) -> None:
        self.commits_array = commits
        self.steps_array = steps
        self.metrics = metrics
        self.missing = missing
        self.start = start

    @classmethod
    def drain(cls, driver: DriverClient, start: int = 0) -> JobRecords:
        """Fetch everything that the server has, from commit record number ``start`` on."""
        commits, steps, names, first = [], [], "", start
        while True:
            records = driver.drain(start)
            names = records.metrics
            commits.append(records.commits.view(COMMIT))
            if records.history.size:
                steps.append(records.history)
            start += len(commits[-1])
            if start >= records.total:
                break
        metrics = tuple(names.split("\n")) if names else ("loss",)
        rows = np.concatenate(steps) if steps else np.empty((0, len(FIXED_HISTORY) + len(metrics)))
        return cls(np.concatenate(commits), rows, metrics, records.missing, first)

    @classmethod
    def drain_micro_batch(cls, driver: DriverClient, stream: str, number: int) -> JobRecords:
        """Fetch the records of a stream's present micro-batch.

        Where they begin is asked for here and not kept from the micro-batch's beginning: a server that has started
        again without the records of a damaged file counts from another number.
        """
        return cls.drain(driver, driver.begin_micro_batch(stream, number).records)

    def commits(self) -> pa.Table:
        """Return one row an applied commit: clock, worker, timestamp, staleness, gap (null unless measured), …"""
        applied = self.commits_array["skipped"] == 0
        table = self._table(_COMMITS, self.commits_array[applied])
        table = table.append_column("refusals", pa.array(self._refusals()[applied]))
        for name in _OF_TABLES:
            table = table.append_column(name, self._column(name, self.commits_array[name][applied]))
        return table

    def _refusals(self) -> np.ndarray:
        """Return how often in a row each commit's window was refused: such a commit has a number, and no record."""
        refusals, latest = np.zeros(len(self.commits_array), np.int64), dict[int, int]()
        for row, (worker, sequence) in enumerate(self.commits_array[["worker", "sequence"]].tolist()):
            before = latest.get(worker, 0)
            # With other partitions, numbers begin again.
            refusals[row] = max(0, sequence - 1 - (before if sequence > before else 0))
            latest[worker] = sequence
        return refusals

    def ledger(self) -> pa.Table:
        """Return one row a commit: its mini-batches, partition and attempt, and whether it was applied."""
        table = self._table(_LEDGER, self.commits_array)
        return table.append_column("applied", pa.array(self.commits_array["skipped"] == 0))

    def history(self) -> pa.Table:
        """Return one row a mini-batch, by worker: worker, epoch, iteration, timestamp, loss, each metric, samples."""
        commits, steps = self.commits_array, self.steps_array
        counts = commits["steps"]
        starts = np.cumsum(counts) - counts
        batch = np.arange(len(steps)) - np.repeat(starts, counts) + np.repeat(commits["first_batch"], counts)
        worker, epoch = (np.repeat(commits[name], counts) for name in ("worker", "epoch"))
        order = np.lexsort((batch, epoch, worker))
        worker, epoch, steps = worker[order], epoch[order], steps[order]
        first_of_worker = np.searchsorted(worker, worker)
        columns = {
            "worker": pa.array(worker, pa.int32()),
            "epoch": pa.array(epoch, pa.int32()),
            "iteration": pa.array(np.arange(len(worker)) - first_of_worker, pa.int64()),
            "timestamp": _timestamps(steps[:, 0]),
            **{
                name: pa.array(steps[:, number], pa.float64())
                for number, name in enumerate(self.metrics, start=len(FIXED_HISTORY))
            },
            "samples": pa.array(steps[:, 1].astype(np.int64)),
        }
        return pa.table(columns)

    def check_exactly_once(
        self, batches: dict[int, int], epochs: int, resumed: Resumed | None = None, *, stopped: bool = False
    ) -> None:
        """Check that each mini-batch of each partition and epoch is committed once: applied, or skipped.

        Args:
            batches: mini-batches an epoch of each worker, as far as known; -1 where not.
            resumed: where it went on with an earlier one: commits of other partitions than these do not count.
            stopped: the job ended early: those of each partition are the first ones of all that were due.

        Where records are `missing`, what is left must be without a double, and lack no more than those.

        Raises:
            LedgerError: one is missing or counted twice.
        """
        commits, first_epoch = self.commits_array, 0
        if resumed is not None:
            commits, first_epoch = commits[commits["clock"] >= resumed.began_clock], resumed.began_epoch
        if self.missing:
            self._check_at_most_once(commits, batches, range(first_epoch, epochs), stopped=stopped)
            return
        for worker, expected in batches.items():
            own = commits[commits["worker"] == worker]
            counted, reached = 0, epochs - 1
            if stopped:
                reached = int(own["epoch"].max(initial=first_epoch))
            for epoch in range(first_epoch, epochs):
                ranges = np.sort(own[own["epoch"] == epoch][["first_batch", "last_batch"]], order="first_batch")
                firsts, lasts = ranges["first_batch"], ranges["last_batch"]
                if epoch > reached:
                    break
                whole = not len(ranges) or (firsts[0] == 0 and np.array_equal(firsts[1:], lasts[:-1] + 1))
                counted = int(lasts[-1]) + 1 if len(ranges) else 0
                expected = counted if expected < 0 else expected
                short = stopped and epoch == reached and counted <= expected
                if not whole or (counted != expected and not short):
                    raise LedgerError(
                        f"every mini-batch must be committed exactly once: 0 to {expected - 1} in epoch {epoch}. "
                        f"Received: {list(zip(firsts.tolist(), lasts.tolist(), strict=True))}",
                        worker=worker,
                    )

    def _check_at_most_once(
        self, commits: np.ndarray, batches: dict[int, int], epochs: range, *, stopped: bool
    ) -> None:
        absent = 0
        for worker, expected in batches.items():
            own = commits[commits["worker"] == worker]
            for epoch in epochs:
                ranges = np.sort(own[own["epoch"] == epoch][["first_batch", "last_batch"]], order="first_batch")
                firsts, lasts = ranges["first_batch"], ranges["last_batch"]
                beyond = 0 <= expected <= lasts.max(initial=-1)
                if beyond or np.any(firsts[1:] <= lasts[:-1]):
                    raise LedgerError(
                        f"no mini-batch must be committed twice, and none beyond the {expected} of epoch {epoch}. "
                        f"Received: {list(zip(firsts.tolist(), lasts.tolist(), strict=True))}",
                        worker=worker,
                    )
                absent += max(0, expected) - int((lasts - firsts + 1).sum())
        if absent > self.missing and not stopped:
            raise LedgerError(
                f"every mini-batch must be committed, but for {self.missing} whose records were lost. "
                f"Received: {absent} that are not"
            )

    def _table(self, names: tuple[str, ...], commits: np.ndarray) -> pa.Table:
        return pa.table({name: self._column(name, commits[name]) for name in names})

    def _column(self, name: str, values: np.ndarray) -> pa.Array:
        if name == "timestamp":
            return _timestamps(values)
        if name == "gap":
            return pa.array(values, pa.float64(), mask=np.isnan(values))
        return pa.array(np.ascontiguousarray(values), _INTS.get(name))


def event_table(events: list[Event]) -> pa.Table:
    """Return one row an event: timestamp, source, kind, worker, attempt, text."""
    columns = list(zip(*events, strict=True)) or [()] * len(Event._fields)
    kinds = (pa.float64(), pa.string(), pa.string(), pa.int32(), pa.int64(), pa.string())
    table = {name: pa.array(*column) for name, *column in zip(Event._fields, columns, kinds, strict=True)}
    return pa.table(table | {"timestamp": _timestamps(np.array(columns[0], np.float64))})


def _timestamps(seconds: np.ndarray) -> pa.Array:
    return pa.array((seconds * 1e6).astype(np.int64), pa.timestamp("us", tz="UTC"))
