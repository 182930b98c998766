"""A job from its plan to its end: a server while Spark runs the tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from distkeras.callbacks import CenterWeights
from distkeras.data.ordering import require_rows
from distkeras.ps.errors import DistkerasError, EmptyDataError
from distkeras.ps.events import Events
from distkeras.ps.server.process import ServerProcess, spawn_server
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.processes import Child
from distkeras.results.job_results import JobOutcome
from distkeras.results.tables import JobRecords, Resumed
from distkeras.settings import TrainSettings
from distkeras.training.cluster_server import ClusterServer, ServerHandle
from distkeras.training.plan import JobPlan
from distkeras.training.progress import Progress, StallDetector
from distkeras.training.spark_job import SparkJob
from distkeras.training.supervisor import Supervisor

if TYPE_CHECKING:
    from pyspark.sql import Row

log = logging.getLogger(__name__)

#: Seconds for a process that was killed to be gone.
_KILLED = 10.0


@contextmanager
def server_ahead(settings: TrainSettings) -> Iterator[Child | None]:
    """Give the server's process, which comes up while the driver prepares the job; None if it runs elsewhere."""
    if settings.server == "cluster":
        yield None
        return
    child = spawn_server()
    try:
        yield child
    finally:
        child.kill()  # one that was put to use has ended
        child.wait(_KILLED)
        child.close()


def run_job(plan: JobPlan, outcome: JobOutcome, ahead: Child | None, began: float) -> None:
    """Train; what becomes known on the way is in ``outcome``, also of a job that fails.

    Args:
        plan: the job.
        outcome: is filled.
        ahead: the process of `server_ahead`.
        began: when the call of `Trainer.train` began, in seconds of the monotonic clock.

    Raises:
        EmptyDataError: there were no rows.
        LedgerError: a mini-batch is missing, or counted twice.
        DistkerasError: the reason why the job cannot go on.
        Exception: what a callback raised.
        KeyboardInterrupt: Spark has been asked to cancel by then.
    """
    settings, events = plan.training, outcome.events
    opened: AbstractContextManager[ServerHandle] = _server_process(plan, events, ahead)
    if settings.server == "cluster":
        task = plan.server_task()
        opened = ClusterServer(plan.df, task, events)
    shown = Progress(
        settings.num_epoch,
        plan.worker.workers,
        settings.progress,
        every=settings.log_every,
        below=plan.facts.console_bar,
    )
    stalls = None if settings.stall_after is None else StallDetector(settings.stall_after, events)
    with opened as server, shown as progress:
        outcome.resumed = Resumed.from_point(server.resumed)
        job = SparkJob(plan, server, progress, stalls, events)
        spark_began = time.monotonic()
        try:
            rows = job.run()
            spark_ended = time.monotonic()
        except BaseException:
            _salvage(server, plan, outcome)
            raise
        center = server.ask(lambda driver: _collect(driver, plan, outcome))
    outcome.stopped = job.stopped
    _require_complete(plan, outcome, rows)
    chosen = job.callbacks.end(center)
    if chosen is not center:  # the weights of another moment, to which the tables must belong as well
        plan.require_all_tables()
    chosen.load(plan.replica)
    finished = time.monotonic()
    outcome.timings = {
        "start": spark_began - began,
        "spark": spark_ended - spark_began,
        "finish": finished - spark_ended,
        "total": finished - began,
    }


@contextmanager
def _server_process(plan: JobPlan, events: Events, ahead: Child | None) -> Iterator[Supervisor]:
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
        with Supervisor(process, plan.publisher(), events) as server:
            yield server


def _require_complete(plan: JobPlan, outcome: JobOutcome, rows: Sequence[Row]) -> None:
    """Check that every mini-batch counts once."""
    records, stopped = outcome.records, outcome.stopped is not None
    if records is None or not (len(records.commits_array) or stopped):
        raise EmptyDataError("`df` must have rows to train on. Received: none")
    for row in rows:
        if row["window"] is not None:
            text = "worker %d exchanges every %d steps"
            outcome.events.report(log, "window", text, row["worker"], row["window"], level=logging.INFO)
    batches = {row["worker"]: row["batches"] for row in rows}
    records.check_exactly_once(batches, plan.training.num_epoch, outcome.resumed, stopped=stopped)


def _salvage(server: ServerHandle, plan: JobPlan, outcome: JobOutcome) -> None:
    """Collect what a job that failed has learned, if the server still answers; the job's own error is raised."""
    if not server.alive():
        return
    try:
        # No commit may come between the center that is collected and its records.
        server.try_to_ask(lambda driver: driver.stop("the driver ended the job"))
        server.try_to_ask(lambda driver: _collect(driver, plan, outcome))
    except DistkerasError as error:
        outcome.events.report(
            log, "lost", "the center and the records of the failed job cannot be fetched: %s", error.message
        )
        server.abandon(error)


def _collect(driver: DriverClient, plan: JobPlan, outcome: JobOutcome) -> CenterWeights:
    center = plan.fetch_center(driver)
    center.load(plan.replica)
    plan.save_rows(driver)
    outcome.model = plan.replica.model
    outcome.records = JobRecords.drain(driver)
    return center
