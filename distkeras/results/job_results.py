"""What a training job leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkeras.keras_model import archive
from distkeras.ps.errors import LocalProtocolError
from distkeras.ps.events import Events
from distkeras.results.tables import JobRecords, Resumed, event_table
from distkeras.settings import JobFacts

if TYPE_CHECKING:
    import keras
    import pyarrow as pa
    from pyspark.sql import DataFrame


#: How the names end of those of a source's metrics that say what waits there, such as Kafka's maxOffsetsBehindLatest.
_WAITING = ("BehindLatest", "Outstanding")


@dataclass(frozen=True)
class MicroBatchProgress:
    """What became of one micro-batch.

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
    """What has become known of one job so far.

    Args:
        df: its data; None before the first job.
        events: everything out of the ordinary.
        records: as the server sent them last; None: it has not yet.
        model: with the center's weights of then.
        resumed: where it continued an earlier job; None: it began at the start.
        stopped: why a callback ended it early; None: none did.
        timings: seconds of its parts, once it has ended.
        facts: what was known of it before it started; None before the first job.
        failure: what ended it, where it has failed or was interrupted.
    """

    df: DataFrame | None = None
    events: Events = field(default_factory=Events)
    records: JobRecords | None = None
    model: keras.Model | None = None
    resumed: Resumed | None = None
    stopped: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    facts: JobFacts | None = None
    failure: str | None = None


class JobResults:
    """Model and records of the last job, also of one that failed or was interrupted."""

    def __init__(self) -> None:
        self.outcome = JobOutcome()

    @property
    def resumed(self) -> Resumed | None:
        """Where the last job continued an earlier one; None where it began at the start."""
        return self.outcome.resumed

    @property
    def stopped(self) -> str | None:
        """Why a callback ended the last job early; None where none did."""
        return self.outcome.stopped

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the parts of the last job: start, spark, finish, total; empty unless one has succeeded."""
        return self.outcome.timings

    @property
    def model(self) -> keras.Model:
        """The model with the center's last known weights; also after a job that failed or was interrupted.

        Raises:
            LocalProtocolError: nothing has been trained.
        """
        return self._require(self.outcome.model, "model")

    @property
    def history(self) -> DataFrame:
        """One row a mini-batch: worker, epoch, iteration (from 0, of the worker), timestamp, loss, metrics, samples."""
        return self._table(self._require(self.outcome.records, "history").history())

    @property
    def commits(self) -> DataFrame:
        """One row an applied commit, by clock.

        Worker, timestamp, staleness, gap (null unless measured), mean scale factor, bytes, wait (seconds that the
        worker had waited for the reply before), which mini-batches of which attempt it stands for, how many rows of
        tables it moved (`table_rows`), their bytes, which `bytes` includes (`table_bytes`), how many rows came back for
        the next window (`table_rows_back`), and how many times in a row its window was refused before (`ringmaster`).
        """
        return self._table(self._require(self.outcome.records, "commits").commits())

    @property
    def ledger(self) -> DataFrame:
        """One row a commit: which mini-batches of which partition it stands for, and whether it was applied.

        Partition, task attempt, sequence, epoch, first and last mini-batch, clock, incarnation, and whether it was
        applied, or skipped for a NaN or infinity (`max_skipped`).
        """
        return self._table(self._require(self.outcome.records, "ledger").ledger())

    @property
    def events(self) -> DataFrame:
        """One row for everything out of the ordinary, by time: timestamp, source (driver or server), kind, worker and
        attempt where one is concerned, text. All of them are in the log too.

        Kinds: takeover (a retried task goes on), fenced (a request of a task that lost its lease), restart (of the
        server), snapshot (failed, or succeeding again), records (lost, or kept in memory), optimizer (its state is
        taken over, or is not), refused (peers), skipped (commits), stall, stop, failed.
        """
        self._require(self.outcome.df, "events")
        return self._table(event_table(self.outcome.events.all()))

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
        What a summary of the job begins with: workers, commits, samples, and the seconds of `JobResults.timings`.

    Raises:
        LocalProtocolError: nothing has been trained.
    """
    import pyarrow.parquet as pq

    history, commits = results.history.toArrow(), results.commits.toArrow()
    (folder / "model.keras").write_bytes(archive.to_bytes(results.model))
    pq.write_table(history, folder / "history.parquet")
    pq.write_table(commits, folder / "commits.parquet")
    samples = sum(history["samples"].to_pylist())
    workers = len(commits["worker"].unique())
    return {"workers": workers, "commits": len(commits), "samples": samples, "seconds": results.timings}
