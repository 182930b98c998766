"""The results of a training job: its model, and the server's records as tables of steps, commits and events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distkeras.keras_model import archive
from distkeras.metric_columns import arrays_of, in_columns
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import LedgerError, LocalProtocolError
from distkeras.ps.events import Event, Events
from distkeras.ps.protocol.loop import FIXED_HISTORY
from distkeras.ps.rules import Rule
from distkeras.ps.server.start_report import ResumePoint
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.settings import JobFacts
from distkeras.shown import Shown, rounded

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

_INTS = {"worker": pa.int32(), "epoch": pa.int32(), "steps": pa.int32(), "trained_by": pa.int32()}
_LEDGER = ("worker", "attempt", "sequence", "epoch", "first_batch", "last_batch", "trained_by", "clock", "incarnation")
#: Of the rows of tables that traveled with a commit and with its reply.
_OF_TABLES = ("table_rows", "table_bytes", "table_rows_back")
#: The columns of `commits`: these first, then all others of a record; those of tables come last.
_FIRST = ("clock", "worker", "timestamp", "staleness", "gap", "scale", "bytes", "wait", *_LEDGER[1:-2])
_COMMITS = tuple(
    name
    for name in dict.fromkeys([*_FIRST, *(COMMIT.names or ())])
    if name not in ("incarnation", "skipped", "lease", *_OF_TABLES)
)


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

        The number of the first record is requested here, not at the beginning of the micro-batch, because a server that
        was restarted without the records of a damaged file counts from another number.
        """
        return cls.drain(driver, driver.begin_micro_batch(stream, number).records)

    def commits(self) -> pa.Table:
        """Return one row per applied commit: clock, worker, timestamp, staleness, gap (null unless measured), …"""
        applied = self.commits_array["skipped"] == 0
        table = self._table(_COMMITS, self.commits_array[applied])
        table = table.append_column("refusals", pa.array(self._refusals()[applied]))
        for name in _OF_TABLES:
            table = table.append_column(name, self._column(name, self.commits_array[name][applied]))
        return table

    def _refusals(self) -> np.ndarray:
        """Return how often in a row each commit's window was refused: such a commit has a number, and no record."""
        refusals, latest = np.zeros(len(self.commits_array), np.int64), dict[int, int]()
        for row, (lease, sequence) in enumerate(self.commits_array[["lease", "sequence"]].tolist()):
            before = latest.get(lease, 0)
            # With other partitions, numbers begin again.
            refusals[row] = max(0, sequence - 1 - (before if sequence > before else 0))
            latest[lease] = sequence
        return refusals

    def ledger(self) -> pa.Table:
        """Return one row per commit: its mini-batches, partition and attempt, and whether it was applied."""
        table = self._table(_LEDGER, self.commits_array)
        return table.append_column("applied", pa.array(self.commits_array["skipped"] == 0))

    def history(self, *, elements: bool = False) -> pa.Table:
        """Return one row per mini-batch, by worker: worker, epoch, iteration, timestamp, loss, each metric, samples.

        A metric of one number for each class is an array, or with ``elements`` a column for each number. `columns_of`
        says which column a metric has.
        """
        places = {name: [place] for place, name in enumerate(self.metrics)} if elements else arrays_of(self.metrics)
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
            **in_columns(
                {
                    name: _metric(steps[:, len(FIXED_HISTORY) :][:, own], array=name not in self.metrics)
                    for name, own in places.items()
                }
            ),
            "samples": pa.array(steps[:, 1].astype(np.int64)),
        }
        return pa.table(columns)

    def epochs(self, validation: Sequence[Mapping[str, Any]] = ()) -> pa.Table:
        """Return one row per epoch: its number from 1 on, its samples, and the means of loss and metrics over them.

        Args:
            validation: evaluations. The last one within half an epoch of an epoch's end is that epoch's, with "val_"
                before its names.
        """
        history = self.history(elements=True)
        metrics = [name for name in history.column_names if pa.types.is_floating(history[name].type)]
        rows = []
        for epoch in np.unique(history["epoch"].to_numpy()).tolist():
            part = history.filter(pc.equal(history["epoch"], epoch))
            samples = part["samples"].to_numpy()
            means = {name: float(part[name].to_numpy() @ samples / samples.sum()) for name in metrics}
            rows.append({"epoch": epoch + 1, "samples": int(samples.sum())} | means | _validated(validation, epoch + 1))
        kinds = dict.fromkeys(("epoch", "samples"), pa.int64())
        kinds |= dict.fromkeys((*metrics, *_validated(validation, 0)), pa.float64())
        return pa.Table.from_pylist(rows, pa.schema(kinds))

    def share_moved(self, rule: Rule) -> float:
        """Return the mean share of the workers' movements that has reached the center, by what ``rule`` has scaled."""
        commits = self.commits_array[self.commits_array["scale"] > 0]  # 0: it was skipped
        if not len(commits):
            return 1.0
        steps = commits["last_batch"] - commits["first_batch"] + 1
        return float(np.mean([rule.share_sent(count) for count in steps.tolist()] * commits["scale"]))

    def check_exactly_once(
        self, batches: dict[int, int], epochs: int, resumed: ResumePoint | None = None, *, stopped: bool = False
    ) -> None:
        """Check that each mini-batch of each partition and epoch is committed once: applied, or skipped.

        Args:
            batches: mini-batches per epoch of each worker; -1 if unknown.
            resumed: where the job continued an earlier one, whose commits of other partitions do not count.
            stopped: whether the job ended early, so that only the first mini-batches of each partition, and of each
                part that was lent, are committed.

        If records are `missing`, or a job with loans has ended early, the remaining ones must not repeat a mini-batch,
        and lack no more than those.

        Raises:
            LedgerError: A mini-batch is missing or was committed twice.
        """
        commits, first_epoch = self.commits_array, 0
        if resumed is not None:
            commits, first_epoch = commits[commits["clock"] >= resumed.began_clock], resumed.began_epoch
        if self.missing or (stopped and (commits["lease"] != commits["worker"]).any()):
            self._check_at_most_once(commits, batches, range(first_epoch, epochs), stopped=stopped)
            return
        for worker, expected in batches.items():
            own = commits[commits["worker"] == worker]
            counted, reached = 0, epochs - 1
            if stopped:
                reached = int(own["epoch"].max(initial=first_epoch))
            for epoch in range(first_epoch, epochs):
                if epoch > reached:
                    break
                firsts, lasts = _ranges(own, epoch)
                whole = not len(firsts) or (firsts[0] == 0 and np.array_equal(firsts[1:], lasts[:-1] + 1))
                counted = int(lasts[-1]) + 1 if len(firsts) else 0
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
                firsts, lasts = _ranges(own, epoch)
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


def _validated(points: Sequence[Mapping[str, Any]], epoch: int) -> dict[str, float | None]:
    """Return the numbers of the last evaluation within half an epoch of the end of ``epoch``, None if there is none."""
    names = [name for name, value in points[0].items() if name not in _PLACE and np.ndim(value) == 0] if points else []
    names.sort(key=lambda name: name != "loss")  # as in the other columns, it is the first one
    near = [point for point in points if -0.5 <= point["epoch"] - epoch < 0.5]
    return {f"val_{name}": near[-1][name] if near else None for name in names}


#: Of an evaluation, what says where it belongs.
_PLACE = ("epoch", "clock", "seconds", "rows")


def _ranges(commits: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last mini-batch of each of a worker's commits in an epoch, in ascending order."""
    ranges = np.sort(commits[commits["epoch"] == epoch][["first_batch", "last_batch"]], order="first_batch")
    return ranges["first_batch"], ranges["last_batch"]


def _metric(values: np.ndarray, *, array: bool) -> pa.Array:
    """Return a metric's column from its numbers ``(rows, numbers)``: an ``array`` for each row, or the only number."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), pa.float64())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]).cast(pa.list_(pa.float64())) if array else flat


def event_table(events: list[Event]) -> pa.Table:
    """Return one row per event: timestamp, source, kind, worker, attempt, text."""
    columns = list(zip(*events, strict=True)) or [()] * len(Event._fields)
    kinds = (pa.float64(), pa.string(), pa.string(), pa.int32(), pa.int64(), pa.string())
    table = {name: pa.array(*column) for name, *column in zip(Event._fields, columns, kinds, strict=True)}
    return pa.table(table | {"timestamp": _timestamps(np.array(columns[0], np.float64))})


def _timestamps(seconds: np.ndarray) -> pa.Array:
    return pa.array((seconds * 1e6).astype(np.int64), pa.timestamp("us", tz="UTC"))


#: How the names end of those of a source's metrics that say what waits there, such as Kafka's maxOffsetsBehindLatest.
_WAITING = ("BehindLatest", "Outstanding")


@dataclass(frozen=True)
class MicroBatchProgress:
    """The outcome of one micro-batch.

    Args:
        batch: its number, as Spark counts them.
        rows: that it has.
        steps: mini-batches that were committed.
        seconds: from when Spark handed it over until a snapshot covered it.
        lag: seconds since the micro-batch before was handed over. No row of this one has waited longer between its
            arrival at the source and the snapshot, if the source had no backlog. None: it is the first one.
        loss: mean over its mini-batches, weighted by rows; NaN without rows.
        clock: commits that the center has.
        repeated: all of it had counted before: Spark has sent it again, and its rows were only compared.
        backlog: what waits at the sources, by Spark's names: such as maxOffsetsBehindLatest of Kafka, and
            numFilesOutstanding of Delta. Of several sources, the largest. Empty: they do not report it. None: Spark has
            not reported on the micro-batch yet.
    """

    batch: int
    rows: int
    steps: int
    seconds: float
    lag: float | None
    loss: float
    clock: int
    repeated: bool = False
    backlog: Mapping[str, float] | None = None

    def __str__(self) -> str:
        if self.repeated:
            return f"micro-batch {self.batch} had counted before, with the same {self.rows} rows"
        behind = "" if self.lag is None else f", at most {self.lag:.1f} s behind"
        return f"micro-batch {self.batch}: {self.rows} rows in {self.seconds:.2f} s, loss {self.loss:.4f}{behind}"


def backlog_of(sources: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return what waits at some sources.

    Args:
        sources: of Spark's `StreamingQueryProgress`. Of a mean, a least and a greatest value, the greatest is taken.
    """
    backlog: dict[str, float] = {}
    for source in sources:
        for name, value in (source.get("metrics") or {}).items():
            if name.endswith(_WAITING) and not name.startswith(("avg", "min")):
                backlog[name] = max(float(value), backlog.get(name, 0.0))
    return backlog


@dataclass
class JobOutcome:
    """The results of one job so far.

    Args:
        df: the job's data; None before the first job.
        events: the job's events.
        records: the records that the server has sent last; None before the first ones.
        model: the model with the center's weights at that time.
        clock: the number of commits in the weights of ``model``, once the job has ended; fewer than all if a callback
            has restored weights. None before the end.
        resumed: where the job continued an earlier one; None if it began at the start.
        stopped: why a callback has ended the job early; None if none did.
        timings: seconds of the job's parts, once it has ended.
        facts: the facts that were known before it started; None before the first job.
        failure: the error that ended the job, if it has failed or was interrupted.
        validation: a dictionary for each evaluation of the center on rows to validate on; see `JobResults.validation`.
    """

    df: DataFrame | None = None
    events: Events = field(default_factory=Events)
    records: JobRecords | None = None
    model: keras.Model | None = None
    clock: int | None = None
    resumed: ResumePoint | None = None
    stopped: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    facts: JobFacts | None = None
    failure: str | None = None
    validation: Sequence[Mapping[str, Any]] = ()


class JobResults(Shown):
    """The model and records of the last job, even if it has failed or was interrupted."""

    inner = frozenset({"outcome"})

    def __init__(self) -> None:
        self.outcome = JobOutcome()

    @property
    def resumed(self) -> ResumePoint | None:
        """Where the last job continued an earlier one; None if it began at the start."""
        return self.outcome.resumed

    @property
    def stopped(self) -> str | None:
        """The reason why a callback has ended the last job early; None if none did."""
        return self.outcome.stopped

    @property
    def timings(self) -> dict[str, float]:
        """The seconds of the last job's parts: start, spark, finish, total; empty unless a job has succeeded."""
        return self.outcome.timings

    @property
    def model(self) -> keras.Model:
        """The model with the center's last known weights, even after a job that has failed or was interrupted.

        Raises:
            LocalProtocolError: No job has been trained yet.
        """
        return self._require(self.outcome.model, "model")

    @property
    def history(self) -> DataFrame:
        """A row per mini-batch: worker, epoch, iteration (of the worker, from 0), timestamp, loss, metrics, samples.

        A metric of one number for each class is an array. A metric whose name is that of another column, without regard
        to upper and lower case, has a number behind it: "worker_2"; see `distkeras.metric_columns.columns_of`.
        """
        return self._table(self._require(self.outcome.records, "history").history())

    @property
    def epochs(self) -> DataFrame:
        """One row per epoch: epoch (from 1), samples, and the means of loss and metrics over them.

        With rows to validate on there are ``val_loss`` and so on as well: the center's, at the end of the epoch.
        """
        return self._table(self._require(self.outcome.records, "epochs").epochs(self.validation))

    @property
    def validation(self) -> Sequence[Mapping[str, Any]]:
        """A dictionary for each evaluation of the center on the rows to validate on.

        It has the epoch (the mean of what the partitions have passed), clock (commits), seconds since the beginning,
        rows, loss and metrics.
        """
        return self.outcome.validation

    @property
    def commits(self) -> DataFrame:
        """One row per applied commit, by clock.

        Worker, timestamp, staleness, gap (null unless measured), mean scale factor, bytes, wait (seconds that the
        worker had waited for the reply before), which mini-batches of which attempt it stands for, the worker that
        trained them (`trained_by`: another one than `worker`, whose rows they are, if they were lent), how many rows of
        tables it moved (`table_rows`), their bytes, which `bytes` includes (`table_bytes`), how many rows came back for
        the next window (`table_rows_back`), and how many times in a row its window was refused before (`ringmaster`).
        """
        return self._table(self._require(self.outcome.records, "commits").commits())

    @property
    def ledger(self) -> DataFrame:
        """One row per commit: which mini-batches of which partition it stands for, and whether it was applied.

        Partition, task attempt, sequence, epoch, first and last mini-batch, the worker that trained them
        (`trained_by`), clock, incarnation, and whether it was applied, or skipped for a NaN or infinity
        (`max_skipped`).
        """
        return self._table(self._require(self.outcome.records, "ledger").ledger())

    @property
    def events(self) -> DataFrame:
        """One row for everything out of the ordinary, by time: timestamp, source (driver or server), kind, worker and
        attempt where one is concerned, text. All of them are in the log too.

        Kinds: takeover (a retried task continues), fenced (a request of a task that lost its lease), restart (of the
        server), snapshot (failed, or succeeding again), records (lost, or kept in memory), optimizer (its state is
        taken over, or is not), refused (peers), skipped (commits), pace (the center has moved little), padding (its
        share), lent (a worker trains mini-batches of another one), helper (has failed), tables (which ones travel by
        rows), rows (of tables, that were admitted and have expired), stall, stop, failed.
        """
        self._require(self.outcome.df, "events")
        return self._table(event_table(self.outcome.events.all()))

    def _facts(self) -> Mapping[str, Any]:
        """Return the numbers of the last epoch, and how the job ended."""
        records, ends = self.outcome.records, {"stopped": self.stopped, "failure": self.outcome.failure}
        if records is None or not len(records.steps_array):
            return ends
        *_, last = records.epochs(self.validation).to_pylist()
        return {name: rounded(value) for name, value in last.items()} | ends

    def _require(self, value: Any, name: str) -> Any:
        if value is None:
            raise LocalProtocolError(f"`{name}` must be asked for after `train`. Received: no training yet")
        return value

    def _table(self, table: pa.Table) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        assert self.outcome.df is not None
        # With its schema, which Spark Connect cannot infer from a table without rows.
        return self.outcome.df.sparkSession.createDataFrame(table, from_arrow_schema(table.schema))


def write_files(results: JobResults, folder: Path) -> dict[str, Any]:
    """Write ``model.keras``, ``history.parquet`` and ``commits.parquet`` of a job into a folder.

    Returns:
        What a summary of the job begins with: workers, commits, samples, the seconds of `JobResults.timings`, and the
        last epoch: its number from 1 on, its samples, and the means of loss and metrics over them, None for a NaN.

    Raises:
        LocalProtocolError: nothing has been trained.
    """
    import pyarrow.parquet as pq

    history, commits = results.history.toArrow(), results.commits.toArrow()
    (folder / "model.keras").write_bytes(archive.to_bytes(results.model, plain=True))
    pq.write_table(history, folder / "history.parquet")
    pq.write_table(commits, folder / "commits.parquet")
    samples = sum(history["samples"].to_pylist())
    workers = len(commits["worker"].unique())
    numbers = {"workers": workers, "commits": len(commits), "samples": samples, "seconds": results.timings}
    epochs = results.epochs.toArrow().to_pylist()
    last = epochs[-1] if epochs else {}
    undefined = [name for name, value in last.items() if isinstance(value, float) and not math.isfinite(value)]
    return numbers | {"last_epoch": last | dict.fromkeys(undefined)}
