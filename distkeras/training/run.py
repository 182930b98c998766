"""A job from its plan to its end: a server, the Spark action in a thread, and the driver waiting for both."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from distkeras.callbacks import CenterWeights
from distkeras.data.ordering import require_rows
from distkeras.data.schema import map_in_arrow
from distkeras.ps.center.micro_batches import NO_MICRO_BATCH
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import DeadlineError, DistkerasError, EmptyDataError
from distkeras.ps.events import Events
from distkeras.ps.protocol.driver_messages import Status
from distkeras.ps.server.process import ServerProcess, spawn_server
from distkeras.ps.server.start_report import ResumePoint
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.processes import Child
from distkeras.results import JobOutcome, JobRecords
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkAction, in_callers_scope
from distkeras.spark.failures import typed_error
from distkeras.spark.kept_layout import KeptLayout
from distkeras.spark.record_stream import in_sized_batches
from distkeras.training.callback_runner import CallbackRunner
from distkeras.training.cluster_server import ClusterServer, ServerHandle
from distkeras.training.helpers import Helpers
from distkeras.training.plan import CenterCopy, JobPlan, Publication
from distkeras.training.progress import Progress, StallDetector
from distkeras.training.supervisor import Supervisor
from distkeras.training.task import SUMMARY

if TYPE_CHECKING:
    from pyspark.sql import Row


log = logging.getLogger(__name__)

#: Seconds that Spark may take to end a cancelled job.
_CANCEL_SECONDS = 60.0
#: Seconds after which an idle thread checks whether the job is over.
_POLL_SECONDS = 1.0
#: The least seconds from one status of the server to the next: quick enough for the eye, and no load on the server.
_STATUS_SECONDS = 0.1
#: A job whose center has moved less than this share of what its workers did is reported: most of it is lost.
_SMALL_SHARE = 0.4
#: Where the weights of an interrupted job are.
KEPT_BY_TRAINER = "The center's weights are in `model` of the trainer"
#: The layout that the sessions of this process keep.
_LAYOUT = KeptLayout()


class _TasksEnded(NamedTuple):
    """Every task has returned, or Spark has given up."""


class _StatusArrived(NamedTuple):
    """The server has applied more commits."""

    status: Status


class _JobFailed(NamedTuple):
    """The server has reported why the job cannot continue, usually the error of a worker."""

    error: DistkerasError | OSError


class _StopRequested(NamedTuple):
    """A callback ends the job early."""

    reason: str


class _CallbackFailed(NamedTuple):
    """A callback has raised."""

    error: BaseException


_Signal = _TasksEnded | _StatusArrived | _JobFailed | _StopRequested | _CallbackFailed


class PreparedJob(NamedTuple):
    """A job that can begin: its plan, what it publishes, and the driver's copies of its center."""

    plan: JobPlan
    publication: Publication
    center: CenterCopy


class SparkJob:
    """Trains on every partition of a job's DataFrame.

    The Spark action runs in one thread, another one waits for the server's status, and each callback has its own. They
    send signals to the thread in `run`, which makes all decisions.
    """

    def __init__(
        self,
        plan: JobPlan,
        center: CenterCopy,
        server: ServerHandle,
        progress: Progress,
        stalls: StallDetector | None,
        events: Events,
        on_status: Callable[[Status], None] = lambda status: None,
    ) -> None:
        self._plan, self._server, self._progress, self._stalls, self._events = plan, server, progress, stalls, events
        self._on_status = on_status
        self._session = plan.df.sparkSession
        self._task = plan.task(server.address)
        self.stopped: str | None = None
        self._observer = server.connect()
        self._signals: queue.SimpleQueue[_Signal] = queue.SimpleQueue()
        self.callbacks = CallbackRunner(
            plan.callbacks,
            center.build_evaluator,
            server.connect,
            fetch_center=center.fetch,
            on_stop=lambda reason: self._signals.put(_StopRequested(reason)),
            on_error=self.fail,
            scope=partial(in_callers_scope, self._session),
        )
        self._helpers = Helpers(self._session, self._task, plan.training, events)
        self._over = threading.Event()

    def run(self) -> list[Row]:
        """Train, and return the tasks' summaries, one row each; the error of a callback is raised here."""
        try:
            self.callbacks.begin(lambda: self._server.ask(lambda driver: driver.observe(-1, 0.0)))
        except BaseException:
            self._observer.close()
            raise
        action = SparkAction(self._session, self._collect, "distkeras-train", lambda: self._signals.put(_TasksEnded()))
        watch_server = in_callers_scope(self._session, self._watch_server)
        watch = threading.Thread(target=watch_server, name="distkeras-watch", daemon=True)
        watch.start()
        self.callbacks.start()
        try:
            rows = self._wait_for_tasks(action)
            self.callbacks.wait_for_calls(self._task.settings.deadlines.reply)
            self._raise_late_callback_error()
            return rows
        except BaseException:
            self.callbacks.stop_calling()
            action.cancel(_CANCEL_SECONDS)
            with contextlib.suppress(DeadlineError):  # the first error is the one to report
                self.callbacks.wait_for_calls()
            raise
        finally:
            self._over.set()
            self._helpers.close()
            self._observer.close()
            watch.join(_CANCEL_SECONDS)

    def fail(self, error: BaseException) -> None:
        """Make `run` raise the error of a callback; thread-safe."""
        self._signals.put(_CallbackFailed(error))

    def _collect(self) -> list[Row]:
        plan = self._plan
        # The rows of a micro-batch are not kept for a later job.
        arrangement = plan.data.arrangement(plan.worker.workers) if plan.micro_batch == NO_MICRO_BATCH else None
        laid_out = in_sized_batches(_LAYOUT.of(plan.df, arrangement), plan.spec.row_bytes)
        return map_in_arrow(laid_out, self._task.run, SUMMARY, plan.training.resources).collect()

    def _wait_for_tasks(self, action: SparkAction) -> list[Row]:
        while True:
            try:
                signal = self._signals.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._progress.tick()
                self._server.watch()
                continue
            match signal:
                case _StatusArrived(status):
                    if status.joined == self._task.settings.workers:  # else they might take the slot of a worker
                        self._helpers.start()
                    self._progress.update(status)
                    self._on_status(status)
                    self.callbacks.update(status)
                case _StopRequested(reason):
                    self._end_early(reason)
                case _TasksEnded():
                    try:
                        rows = action.rows()
                    except Exception as error:  # noqa: BLE001 - raised as one of our errors
                        raise self._cause_of(error) from None
                    # The last commits may be newer than the last status.
                    status = self._server.ask(lambda driver: driver.observe(-1, 0.0))
                    self._progress.update(status)
                    self.callbacks.stop_calling()
                    self._on_status(status)
                    self.callbacks.update(status)
                    return rows
                case _JobFailed(error) | _CallbackFailed(error):
                    raise error

    def _end_early(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            self._events.report(log, "stop", "the job ends early: %s", reason, level=logging.INFO)
            self.callbacks.stop_calling()
            self._server.end_early(reason)

    def _raise_late_callback_error(self) -> None:
        """Raise the error of a callback that came while Spark's tasks ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                signal = self._signals.get_nowait()
                if isinstance(signal, _CallbackFailed):
                    raise signal.error

    def _cause_of(self, failure: Exception) -> Exception:
        """Return why Spark gave up: a worker's own report, which may still be in flight, else Spark's error."""
        deadline = time.monotonic() + 3 * _POLL_SECONDS + 2 * self._server.status_seconds
        with contextlib.suppress(queue.Empty):
            while True:
                signal = self._signals.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(signal, _JobFailed):
                    return signal.error
        return typed_error(failure, self._session)

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
                if self._observer.lost(error) or not self._server.alive():
                    clock = -1  # a restarted server has an older clock; `Supervisor.watch` restarts it
                    if self._plan.training.server == "cluster":  # it needs a slot
                        self._helpers.allow(False)
                    self._over.wait(_POLL_SECONDS)
                    continue
                self._signals.put(_JobFailed(error))
                return
            self._server.record_activity()
            self._helpers.allow(True)
            counts = (status.clock, status.joined, status.finished)
            if status.clock >= clock and counts != reported:
                clock, reported = status.clock, counts
                self._signals.put(_StatusArrived(status))
                self._over.wait(_STATUS_SECONDS)
            self._over.wait(self._server.status_seconds)


#: Seconds that a killed process may take to end.
_KILLED = 10.0


@contextmanager
def early_server(settings: TrainSettings) -> Iterator[Child | None]:
    """Yield the server's process, which starts while the driver prepares the job; None if it runs in the cluster."""
    if settings.server == "cluster":
        yield None
        return
    child = spawn_server()
    try:
        yield child
    finally:
        child.kill()  # a process that has served has ended
        child.wait(_KILLED)
        child.close()


def run_job(job: PreparedJob, outcome: JobOutcome, ahead: Child | None, began: float) -> None:
    """Train, and fill ``outcome`` as results become known, also if the job fails; ``began``: by the monotonic clock."""
    plan, events = job.plan, outcome.events
    settings = plan.training
    plan.server.check_store()
    opened: AbstractContextManager[ServerHandle] = _server_process(job, events, ahead)
    if settings.server == "cluster":
        opened = ClusterServer(plan.df, job.publication.server_task(), events)
    progress_bar = Progress(
        settings.num_epoch,
        plan.worker.workers,
        settings.progress,
        every=settings.log_every,
        below=plan.facts.console_bar,
    )
    stalls = None if settings.stall_after is None else StallDetector(settings.stall_after, events)
    with opened as server, progress_bar as progress:
        note_resumed(outcome, server.resumed)
        training = SparkJob(plan, job.center, server, progress, stalls, events)
        spark_began = time.monotonic()
        try:
            rows = training.run()
            spark_ended = time.monotonic()
        except BaseException as error:
            _salvage(server, job, outcome)
            if isinstance(error, KeyboardInterrupt):
                kept = "Nothing of it is kept"
                if outcome.model is not None:
                    kept = KEPT_BY_TRAINER
                raise KeyboardInterrupt(interruption(outcome, plan.server.checkpoint, kept)) from None
            raise
        center = server.ask(lambda driver: _collect(driver, job, outcome))
    outcome.stopped = training.stopped
    _require_complete(plan, outcome, rows)
    chosen = training.callbacks.end(center)
    if chosen is not center:  # an earlier center, to which the tables must belong as well
        job.center.require_all_tables()
    chosen.load(plan.replica)
    outcome.clock = chosen.clock
    finished = time.monotonic()
    outcome.timings = {
        "start": spark_began - began,
        "spark": spark_ended - spark_began,
        "finish": finished - spark_ended,
        "total": finished - began,
    }


def interruption(outcome: JobOutcome, checkpoint: Checkpoint | None, kept: str) -> str:
    """Return what is known of a job that Ctrl-C has ended: how far it came, and where its weights are."""
    ledger = None if outcome.records is None else outcome.records.ledger()
    done = "before the first commit"
    if ledger is not None and ledger.num_rows:
        done = f"after {ledger.num_rows:,} commits, in epoch {ledger['epoch'].to_numpy().max() + 1}"
    place = "" if checkpoint is None else f"; the same call with resume=True continues from {checkpoint.uri!r}"
    return f"the job was interrupted {done}. {kept}{place}."


def note_resumed(outcome: JobOutcome, point: ResumePoint | None) -> None:
    """Record and log the point at which a job continues an earlier one."""
    outcome.resumed = point
    if point is None:
        return
    if point.exact:
        log.info("the job continues at clock %d, exactly where it stopped", point.clock)
        return
    log.warning(
        "the job continues at clock %d with another number of workers, from the beginning of epoch %d: "
        "rows of it that were committed before count once more",
        point.clock,
        point.epoch,
    )


@contextmanager
def _server_process(job: PreparedJob, events: Events, ahead: Child | None) -> Iterator[Supervisor]:
    plan = job.plan
    process = ServerProcess(
        plan.server,
        resume=plan.resume,
        job=plan.identity(),
        epochs=plan.training.num_epoch,
        tls=plan.training.tls,
        events=events,
        ahead=ahead,
    )
    with process:
        if process.resumed is not None and process.resumed.row_sum is not None:
            require_rows(plan.df, process.resumed.row_sum)
        with Supervisor(process, job.publication.send, events) as server:
            yield server


def _require_complete(plan: JobPlan, outcome: JobOutcome, rows: Sequence[Row]) -> None:
    """Check that every mini-batch counts exactly once."""
    records, stopped = outcome.records, outcome.stopped is not None
    if records is None or not (len(records.commits_array) or stopped):
        raise EmptyDataError("`df` must have rows to train on. Received: none")
    for row in rows:
        if row["window"] is not None:
            text = "worker %d exchanges every %d steps"
            outcome.events.report(log, "window", text, row["worker"], row["window"], level=logging.INFO)
        if row["padding"] is not None:
            text = "of the steps in the mini-batches of worker %d, %.0f%% are padding"
            outcome.events.report(log, "padding", text, row["worker"], 100 * row["padding"], level=logging.INFO)
    batches = {row["worker"]: row["batches"] for row in rows}
    records.check_exactly_once(batches, plan.training.num_epoch, outcome.resumed, stopped=stopped)
    share = records.share_moved(plan.server.rule)
    if share < _SMALL_SHARE:
        text = (
            "the center moved %.0f%% of what its workers did, as %s has it, so an epoch teaches less than one of "
            "`fit`: the default rule moves it all the way, and a higher learning rate moves it further"
        )
        outcome.events.report(log, "pace", text, 100 * share, plan.server.rule.name)


def _salvage(server: ServerHandle, job: PreparedJob, outcome: JobOutcome) -> None:
    """Collect the center and the records of a failed job, if the server still answers; the caller raises its error."""
    if not server.alive():
        return
    try:
        # No commit may come between the center that is collected and its records.
        server.ask_once(lambda driver: driver.stop("the driver ended the job"))
        server.ask_once(lambda driver: _collect(driver, job, outcome))
    except DistkerasError as error:
        outcome.events.report(
            log, "lost", "the center and the records of the failed job cannot be fetched: %s", error.message
        )
        server.abandon(error)


def _collect(driver: DriverClient, job: PreparedJob, outcome: JobOutcome) -> CenterWeights:
    center, replica = job.center.collect(driver, outcome.events), job.plan.replica
    center.load(replica)
    outcome.model = replica.model
    outcome.records = JobRecords.drain(driver)
    return center
