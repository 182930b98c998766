"""What a training job leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distkeras.ps.errors import LocalProtocolError
from distkeras.ps.events import Events
from distkeras.results.tables import JobRecords, Resumed, event_table

if TYPE_CHECKING:
    import keras
    import pyarrow as pa
    from pyspark.sql import DataFrame


class JobResults:
    """Model and records of the last job, also of one that failed or was interrupted."""

    def __init__(self) -> None:
        self._begin_job()

    def _begin_job(self, df: DataFrame | None = None) -> None:
        """Lets go of the results of the job before; ``df`` is the data of the one that begins."""
        self._df = df
        self._records: JobRecords | None = None
        self._model: keras.Model | None = None
        self._events = Events()
        #: Where the last job went on with an earlier one; None where it began anew.
        self.resumed: Resumed | None = None
        #: Why a callback ended the last job early; None where none did.
        self.stopped: str | None = None
        #: Seconds of the parts of the last job: start, spark, finish, total.
        self.timings: dict[str, float] = {}

    @property
    def model(self) -> keras.Model:
        """The model with the center's last known weights; also after a job that failed or was interrupted.

        Raises:
            LocalProtocolError: nothing has been trained.
        """
        return self._require(self._model, "model")

    @property
    def history(self) -> DataFrame:
        """One row a mini-batch: worker, epoch, iteration (from 0, of the worker), timestamp, loss, metrics, samples."""
        return self._table(self._require(self._records, "history").history())

    @property
    def commits(self) -> DataFrame:
        """One row an applied commit, by clock.

        Worker, timestamp, staleness, gap (null unless measured), mean scale factor, bytes, wait (seconds that the
        worker had waited for the reply before), and which mini-batches of which attempt it stands for.
        """
        return self._table(self._require(self._records, "commits").commits())

    @property
    def ledger(self) -> DataFrame:
        """One row a commit: which mini-batches of which partition it stands for, and whether it was applied.

        Partition, task attempt, sequence, epoch, first and last mini-batch, clock, incarnation, and whether it was
        applied, or skipped for a NaN or infinity (`bad_numbers`).
        """
        return self._table(self._require(self._records, "ledger").ledger())

    @property
    def events(self) -> DataFrame:
        """One row for whatever was out of the ordinary, by time: timestamp, source (driver or server), kind, worker and
        attempt where one is concerned, text. All of them are in the log too.

        Kinds: takeover (a retried task goes on), fenced (a request of a task that lost its lease), restart (of the
        server), snapshot (failed, or succeeding again), records (lost, or
        kept in memory), refused (peers), skipped (commits), stall, stop, failed.
        """
        self._require(self._df, "events")
        return self._table(event_table(self._events.all()))

    def _require(self, value: Any, name: str) -> Any:
        if value is None:
            raise LocalProtocolError(f"`{name}` must be asked for after `train`. Received: no training yet")
        return value

    def _table(self, table: pa.Table) -> DataFrame:
        assert self._df is not None
        return self._df.sparkSession.createDataFrame(table)
