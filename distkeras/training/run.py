"""A job from its plan to its end: a server for as long as Spark runs the tasks, and what both know when all have."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from distkeras.callbacks import CenterWeights
from distkeras.ps.errors import DistkerasError, EmptyDataError
from distkeras.ps.events import Events
from distkeras.ps.server.process import ServerProcess, spawn_server
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.processes import Child
from distkeras.results.job_results import JobOutcome
from distkeras.results.tables import JobRecords, Resumed
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import has_console_bar
from distkeras.training.cluster_server import ClusterServer
from distkeras.training.plan import EndedJob, JobPlan
from distkeras.training.progress import Progress, StallDetector
from distkeras.training.spark_job import SparkJob, WorkerStage
from distkeras.training.supervisor import ServerHandle, Supervisor

log = logging.getLogger(__name__)

#: Seconds for a process that was killed to be gone.
_KILLED = 10.0


@contextmanager
def server_ahead(settings: TrainSettings) -> Iterator[Child | None]:
    """The server's process, which comes up while the driver settles the job; None where the server is elsewhere."""
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


def run_job(plan: JobPlan, outcome: JobOutcome, ahead: Child | None = None) -> EndedJob:
    """Trains; what becomes known on the way is in ``outcome``, also of a job that fails.

    Args:
        plan: of the job.
        outcome: filled.
        ahead: of `server_ahead`.

    Raises:
        DistkerasError: why the job cannot go on.
        Exception: what a callback raised.
    """
    settings, events = plan.training, outcome.events
    held: AbstractContextManager[ServerHandle] = _beside_driver(plan, events, ahead)
    if settings.server == "cluster":
        held = ClusterServer(plan.df, plan.server_task(), events)
    with held as server, _progress_of(plan) as progress:
        outcome.resumed = Resumed.from_point(server.resumed)
        job = SparkJob(
            WorkerStage(plan.df, settings.resources, plan.arrangement),
            plan.task(server.address),
            supervisor=server,
            progress=progress,
            callbacks=plan.callbacks,
            build_replica=plan.build_replica,
            events=events,
            stalls=None if settings.stall_after is None else StallDetector(settings.stall_after, events),
        )
        began = time.monotonic()
        try:
            rows = job.run()
            ended = time.monotonic()
        except BaseException:
            _salvage(server, plan, outcome)
            raise
        center = server.ask(lambda driver: _collect(driver, plan, outcome))
    return EndedJob(job, rows, center, began, ended)


@contextmanager
def _beside_driver(plan: JobPlan, events: Events, ahead: Child | None) -> Iterator[ServerHandle]:
    """A server in a process of the driver's."""
    process = ServerProcess(
        plan.server,
        resume=plan.resume,
        job=plan.identity(),
        epochs=plan.training.num_epoch,
        tls=plan.training.tls,
        events=events,
        ahead=ahead,
    )
    with process, Supervisor(process, plan.publisher(process.resumed), events) as server:
        yield server


def finish_job(plan: JobPlan, ended: EndedJob, outcome: JobOutcome) -> None:
    """Checks that every mini-batch counts once, and gives the model the weights that it is to have.

    Raises:
        EmptyDataError: there were no rows.
        LedgerError: a mini-batch is missing, or counted twice.
    """
    job, records = ended.job, outcome.records
    outcome.stopped = job.stopped
    if records is None or not (len(records.commits_array) or job.stopped):
        raise EmptyDataError("`df` must have rows to train on. Received: none")
    for row in ended.rows:
        if row["window"] is not None:
            text = "worker %d exchanges every %d steps"
            outcome.events.report(log, "window", text, row["worker"], row["window"], level=logging.INFO)
    batches = {row["worker"]: row["batches"] for row in ended.rows}
    records.check_exactly_once(batches, plan.training.num_epoch, outcome.resumed, stopped=job.stopped is not None)
    job.callbacks.end(ended.center).load(plan.replica)


def _salvage(server: ServerHandle, plan: JobPlan, outcome: JobOutcome) -> None:
    """Collects what a job that failed has learned, if that is to be had; the job's own error is the one to tell."""
    if not server.alive():
        return
    try:
        # No commit may come between the center that is collected and its records.
        server.try_to_ask(lambda driver: driver.stop("the driver ended the job"))
        server.try_to_ask(lambda driver: _collect(driver, plan, outcome))
    except DistkerasError as error:
        outcome.events.report(log, "lost", "what the job had learned is not to be had: %s", error.message)
        server.abandon(error)


def _progress_of(plan: JobPlan) -> Progress:
    settings = plan.training
    return Progress(
        settings.num_epoch,
        plan.worker.workers,
        settings.progress,
        every=settings.log_every,
        below=has_console_bar(plan.df.sparkSession),
    )


def _collect(driver: DriverClient, plan: JobPlan, outcome: JobOutcome) -> CenterWeights:
    """The center and the records, also of a job that failed: what was learned is not lost."""
    center = CenterWeights.fetch(driver)
    center.load(plan.replica)
    outcome.model = plan.replica.model
    outcome.records = JobRecords.drain(driver)
    return center
