"""One training job: the Spark action in a thread, the server's news in another, and the driver waiting for both."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, Row

from distkeras.callbacks import Callback
from distkeras.data.schema import map_in_arrow
from distkeras.ps.errors import DeadlineError, DistkerasError
from distkeras.ps.events import Events
from distkeras.ps.protocol.messages import Status
from distkeras.spark.actions import cancel_tagged, in_callers_scope, tagged
from distkeras.spark.cluster import tasks_python
from distkeras.spark.failures import typed_error
from distkeras.spark.kept_layout import Arrangement, KeptLayout
from distkeras.spark.record_stream import in_sized_batches
from distkeras.training.callback_runner import CallbackRunner
from distkeras.training.progress import Progress, StallDetector
from distkeras.training.supervisor import ServerHandle
from distkeras.training.task import SUMMARY, Task

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

    from distkeras.keras_model.replica import KerasReplica

log = logging.getLogger(__name__)

#: Seconds that Spark may take to end a cancelled job.
_CANCEL_SECONDS = 60.0
#: Seconds after which an idle thread checks whether the job is over.
_POLL_SECONDS = 1.0
#: Seconds from one status of the server to the next, at least: enough for the eye, and no load on the server.
_STATUS_SECONDS = 0.1
#: Of this process' sessions.
_LAYOUT = KeptLayout()


class _TasksEnded(NamedTuple):
    """Every task has returned."""

    rows: list[Row]


class _SparkFailed(NamedTuple):
    """Spark has given up."""

    error: Exception


class _StatusArrived(NamedTuple):
    """The server has applied more commits."""

    status: Status


class _JobFailed(NamedTuple):
    """The server has reported why the job cannot continue: a worker's report, most often."""

    error: DistkerasError | OSError


class _StopRequested(NamedTuple):
    """A callback ends the job early."""

    reason: str


class _CallbackFailed(NamedTuple):
    """A callback has raised."""

    error: BaseException


_Signal = _TasksEnded | _SparkFailed | _StatusArrived | _JobFailed | _StopRequested | _CallbackFailed


class WorkerStage(NamedTuple):
    """What Spark runs tasks on.

    Args:
        df: one partition a worker.
        resources: what Spark gives each task, where a job says so.
        arrangement: what ``df`` was computed from; None: its rows are not kept for a later job.
    """

    df: DataFrame
    resources: ResourceProfile | None = None
    arrangement: Arrangement | None = None


class SparkJob:
    """Runs ``task`` on every partition of a stage.

    The Spark action runs in one thread, another one waits for the server's news, and each callback has its own. They
    signal the thread in `run`, which alone decides.

    Args:
        stage: where.
        task: what each runs.
        supervisor: the handle of the server.
        progress: shows the server's status.
        callbacks: see the server's status, and may end the job early; begun.
        build_replica: makes a copy of the model for a callback that wants one.
        events: takes the end that callbacks ask for.
        stalls: looks for workers that are silent; None: no one looks.

    Attributes:
        stopped: why a callback ended the job early; None: none did.
        callbacks: what runs them.
    """

    def __init__(
        self,
        stage: WorkerStage,
        task: Task,
        *,
        supervisor: ServerHandle,
        progress: Progress,
        callbacks: Sequence[Callback],
        build_replica: Callable[[], KerasReplica],
        events: Events,
        stalls: StallDetector | None = None,
    ) -> None:
        self._stage = stage
        self._session = stage.df.sparkSession
        self._task = task
        self._supervisor = supervisor
        self._progress = progress
        self._events = events
        self._stalls = stalls
        self.stopped: str | None = None
        self._observer = supervisor.connect()
        self._signals: queue.SimpleQueue[_Signal] = queue.SimpleQueue()
        self.callbacks = CallbackRunner(
            callbacks,
            build_replica,
            supervisor.connect,
            on_stop=lambda reason: self._signals.put(_StopRequested(reason)),
            on_error=lambda error: self._signals.put(_CallbackFailed(error)),
            scope=partial(in_callers_scope, self._session),
        )
        self._over = threading.Event()
        self._tag = f"distkeras-{uuid.uuid4().hex}"

    def run(self) -> list[Row]:
        """The tasks' summaries, one row each.

        Raises:
            DistkerasError: what a worker reported, or that the server is gone, or that Spark gave up.
            DeadlineError: a callback does not return.
            Exception: what a callback raised.
            KeyboardInterrupt: the Spark job is cancelled by then.
        """
        run_tasks, watch_server = (in_callers_scope(self._session, f) for f in (self._run_tasks, self._watch_server))
        spark = threading.Thread(target=run_tasks, name=f"{self._tag}-spark", daemon=True)
        watch = threading.Thread(target=watch_server, name=f"{self._tag}-server", daemon=True)
        spark.start()
        watch.start()
        self.callbacks.start()
        try:
            rows = self._wait_for_tasks()
            self.callbacks.close(self._task.settings.deadlines.reply)
            self._raise_late_callback_error()
            return rows
        except BaseException:
            self.callbacks.stop_calling()
            self._cancel(spark)
            with contextlib.suppress(DeadlineError):  # the first error is the one to report
                self.callbacks.close()
            raise
        finally:
            self._over.set()
            self._observer.close()
            watch.join(_CANCEL_SECONDS)

    def _wait_for_tasks(self) -> list[Row]:
        while True:
            try:
                signal = self._signals.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._progress.tick()
                self._supervisor.watch()
                continue
            match signal:
                case _StatusArrived(status):
                    self._progress.update(status)
                    self.callbacks.update(status)
                case _StopRequested(reason):
                    self._end_early(reason)
                case _TasksEnded(rows):
                    # The last commits may have come after the last news.
                    status = self._supervisor.ask(lambda driver: driver.observe(-1, 0.0))
                    self._progress.update(status)
                    self.callbacks.stop_calling()
                    self.callbacks.update(status)
                    return rows
                case _JobFailed(error) | _CallbackFailed(error):
                    raise error
                case _SparkFailed(error):
                    raise self._cause_of(error) from None

    def _end_early(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            self._events.report(log, "stop", "the job ends early: %s", reason, level=logging.INFO)
            self.callbacks.stop_calling()
            self._supervisor.end_early(reason)

    def _raise_late_callback_error(self) -> None:
        """What a callback may have raised while Spark's tasks came to their end."""
        with contextlib.suppress(queue.Empty):
            while True:
                signal = self._signals.get_nowait()
                if isinstance(signal, _CallbackFailed):
                    raise signal.error

    def _cause_of(self, failure: Exception) -> Exception:
        """Why Spark gave up: a worker's own report, which may still be on its way, else what Spark says."""
        deadline = time.monotonic() + 3 * _POLL_SECONDS + 2 * self._supervisor.news_seconds
        with contextlib.suppress(queue.Empty):
            while True:
                signal = self._signals.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(signal, _JobFailed):
                    return signal.error
        return typed_error(failure, tasks_python(self._session))

    def _cancel(self, spark: threading.Thread) -> None:
        deadline = time.monotonic() + _CANCEL_SECONDS
        while spark.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # the first error is the one to report
                cancel_tagged(self._session, self._tag)
            spark.join(_POLL_SECONDS)  # Spark may not have known the job yet

    def _run_tasks(self) -> None:
        # Bound to a local name: Spark pickles the function, and must not meet this object's threads and queues.
        task = self._task

        def run(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from task.run(records)

        try:
            with tagged(self._session, self._tag):
                laid_out = _LAYOUT.of(self._stage.df, self._stage.arrangement)
                rows = map_in_arrow(
                    in_sized_batches(laid_out, task.spec.row_bytes), run, SUMMARY, self._stage.resources
                ).collect()
            self._signals.put(_TasksEnded(rows))
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            self._signals.put(_SparkFailed(error))

    def _watch_server(self) -> None:
        clock, checked = -1, time.monotonic()
        reported: tuple[int, int, int] | None = None
        while not self._over.is_set():
            try:
                status = self._observer.observe(clock, _POLL_SECONDS)
                if self._stalls is not None and time.monotonic() - checked >= self._stalls.interval:
                    checked = time.monotonic()
                    self._stalls.check(self._observer.list_workers())
            except (DistkerasError, OSError) as error:
                if self._over.is_set():
                    return
                if self._observer.lost(error) or not self._supervisor.alive():
                    clock = -1  # a server that comes back has gone back; whether it must is for `Supervisor.watch`
                    self._over.wait(_POLL_SECONDS)
                    continue
                self._signals.put(_JobFailed(error))
                return
            self._supervisor.record_activity()
            news = (status.clock, status.joined, status.finished)
            if status.clock >= clock and news != reported:
                clock, reported = status.clock, news
                self._signals.put(_StatusArrived(status))
                self._over.wait(_STATUS_SECONDS)
            self._over.wait(self._supervisor.news_seconds)
