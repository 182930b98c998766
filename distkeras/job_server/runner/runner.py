"""Starts jobs, watches their drivers, ends them, and records their outcomes; another server continues if this one dies.

Rules:
    1. A driver works only after the database has its process identity: no job has an unknown driver.
    2. The result file of a driver is authoritative. A driver that has ended without one has died: the job continues
       from its checkpoint, in a new driver, or is lost.
    3. A job has ended only when no process of its session is left or, if the driver is not visible from here, when its
       heartbeat has stopped for the length of a lease and it is fenced.
    4. A job's server holds a lease in the database and renews it. Another server takes the job over when it sees that
       the process of the server has ended, or that the lease was not renewed for its length. That length is measured by
       the monotonic clock of the observer: no two clocks are compared, and none that can be set.
    5. Each change of state is a compare-and-swap on the attempt and its server, so that two servers never both act.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from distkeras.job_server.driver import GO
from distkeras.job_server.errors import WORKING_STATES, JobState, StateError
from distkeras.job_server.runner.files import JobFiles, JobFolder, read_whole, write_whole
from distkeras.job_server.runner.processes import ProcessId
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import ADMIN, Account
from distkeras.job_server.store.jobs import JobStore, StoredJob

log = logging.getLogger(__name__)

#: Seconds from one check of all jobs to the next, and from one removal of old files to the next.
_POLL_SECONDS, _REMOVAL_SECONDS = 1.0, 600.0
#: Seconds for all threads of a killed driver to end.
_REAPED = 5.0
#: How often a lease is renewed within its length.
_RENEWALS = 6
#: The environment variables that a driver does not receive: secrets of the server and of its operator.
_SECRETS = ("DISTKERAS_JOBS_", "DISTKERAS_TOKEN")
#: The account of the server itself, which sees all jobs.
_SERVER = Account(0, "server", ADMIN)


class JobRunner:
    """Runs jobs; see the module. ``clock`` is the monotonic clock, in seconds, that measures leases."""

    def __init__(
        self, store: JobStore, files: JobFiles, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._files, self._settings, self._clock = store, files, settings, clock
        #: The identity of this server: host and process, and a suffix that distinguishes two runners of one process.
        self.name = f"{socket.gethostname()[:100]}/{ProcessId.of(os.getpid())}/{uuid.uuid4().hex[:8]}"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ending_since: dict[str, float] = {}  # by job: when this process began to wait for the driver to end
        self._excesses: dict[str, str] = {}  # by job: the error if its driver was killed for its memory
        #: The latest renewals of servers and heartbeats of drivers, and when each was first seen.
        self._signs: dict[tuple[str, str], tuple[str, float]] = {}
        self._next_sweep, self._next_renewal = 0.0, clock()
        self._checked_at = time.monotonic()
        self._when_drained: Callable[[], object] | None = None

    def drain(self, when_drained: Callable[[], object]) -> None:
        """Start no more jobs; call ``when_drained`` at each check at which none runs."""
        self._when_drained = when_drained

    def silence(self) -> float:
        """Return the seconds since the jobs were last checked."""
        return time.monotonic() - self._checked_at

    def run(self, stop: threading.Event) -> None:
        """Start and watch the jobs until ``stop``. The drivers continue."""
        while not stop.wait(_POLL_SECONDS):
            try:
                self.tick()
                self._checked_at = time.monotonic()
            except (SQLAlchemyError, OSError) as error:
                text = str(error).partition("\n")[0]
                log.warning("the jobs could not be checked, and will be checked again: %s", text)

    def tick(self) -> None:
        """Check all jobs once, and start waiting ones in free slots."""
        running = 0
        if self._clock() >= self._next_renewal:
            self._next_renewal = self._clock() + self._settings.lease / _RENEWALS
            self._store.renew(self.name)
        active = self._store.active()
        mine = {job.id for job in active if job.server == self.name}
        # A driver whose job another server has taken over is still this process' child.
        self._children = {job: child for job, child in self._children.items() if child.poll() is None or job in mine}
        self._signs = {key: sign for key, sign in self._signs.items() if key[1] in {job.id for job in active}}
        for job in active:
            if job.server != self.name and (self._when_drained is not None or not self._adopt(job)):
                continue
            running += not self._check(self._store.get(_SERVER, job.id))
        if self._when_drained is not None:
            if not running:
                self._when_drained()
            return
        while running < self._settings.slots and self._files.free() >= self._settings.reserve:
            claimed = self._store.claim(self.name)
            if claimed is None:
                break
            running += self._launch(claimed)
        self._sweep()

    def _adopt(self, job: StoredJob) -> bool:
        """Take a job over if its server has died; return whether that was done."""
        server = ProcessId.parse((job.server or "").split("/")[1] if "/" in (job.server or "") else None)
        silent = self._is_silent("server", job.id, f"{job.server} {job.renewal}")
        self._is_silent("driver", job.id, self._beat(job))  # so that both leases run at the same time
        died = silent or (server is not None and server.visible and not server.alive())
        if not died or not self._files.of(job.id).path.is_dir() or not self._store.adopt(job, self.name):
            return False
        log.info("job %s is taken over after the death of its server", job.id)
        return True

    def _is_silent(self, kind: str, job_id: str, sign: str) -> bool:
        """Return whether a renewal or heartbeat has not changed for the length of a lease."""
        now = self._clock()
        known, since = self._signs.get((kind, job_id), (None, now))
        if known != sign:
            since = now
        self._signs[kind, job_id] = (sign, since)
        return now - since >= self._settings.lease

    def _beat(self, job: StoredJob) -> str:
        try:
            return f"{job.attempt} {self._files.of(job.id).beat(job.attempt).read_text()}"
        except OSError:
            return f"{job.attempt}"

    def _launch(self, job: StoredJob) -> bool:
        """Start a job's driver; return whether it was started."""
        folder, settings = self._files.of(job.id), self._settings
        common = {"master": settings.master, "config": dict(settings.config), "mlflow": settings.mlflow}
        try:
            write_whole(folder.order(job.attempt), {"description": job.description, **job.order, **common})
            with folder.log.open("ab") as output:
                child = subprocess.Popen(
                    [*settings.driver_command, str(folder.path), str(job.attempt)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder.path,
                    env={name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)},
                    start_new_session=True,
                )
        except OSError as error:
            self._store.move(job, JobState.FAILED, f"the driver could not be started: {error}")
            return False
        self._children[job.id] = child
        assert child.stdin is not None
        # One that has died already is found by the next check.
        with contextlib.suppress(ProcessLookupError, BrokenPipeError), child.stdin as pipe:
            if self._store.set_driver(job, str(ProcessId.of(child.pid))):
                pipe.write(GO)
        log.info("job %s of %s begins, attempt %d", job.id, job.user, job.attempt)
        return True

    def _check(self, job: StoredJob) -> bool:
        """Check one job; return whether its driver has ended, so that its slot is free."""
        folder = self._files.of(job.id)
        silent = self._is_silent("driver", job.id, self._beat(job))
        driver = ProcessId.parse(job.driver)
        if driver is not None and (driver.alive() if driver.visible else not silent):
            folder.cut_log(self._settings.log_max)
            if self._excess(job, driver):
                driver.kill_session()
            elif job.cancel is not None or self._overdue(job) or folder.result(job.attempt).exists():
                self._end(job, driver, folder)
            elif job.state is JobState.STARTING and folder.working(job.attempt).exists():
                self._store.move(job, WORKING_STATES[job.kind], mlflow_run=read_whole(folder.mlflow).get("link"))
            return False
        if driver is not None and driver.visible and not driver.kill_session():
            return False
        if driver is not None and not driver.visible:
            write_whole(folder.fence, job.attempt + 1)  # if it was only suspended, it ends when it resumes
        self._record_outcome(job, folder)
        return True

    def _excess(self, job: StoredJob, driver: ProcessId) -> str:
        """Return the error of a job whose processes exceed the limit of memory, which is kept; else an empty text."""
        most = self._settings.memory_max
        if most is not None and driver.visible and (used := driver.memory()) > most:
            self._excesses[job.id] = (
                f"the processes of a job must have at most {most >> 20} MB of memory, as the server's operator says. "
                f"Received: {used >> 20} MB"
            )
        return self._excesses.get(job.id, "")

    def _overdue(self, job: StoredJob) -> bool:
        """Return whether the job's driver has run for longer than the limit."""
        most, started = self._settings.run_max, job.started
        return most is not None and started is not None and time.time() - started > most

    def _end(self, job: StoredJob, driver: ProcessId, folder: JobFolder) -> None:
        """Ask a driver to end, or wait for one that has written its result; kill it after the grace period."""
        must_end = job.cancel is not None or self._overdue(job)
        if not driver.visible:
            if must_end:
                write_whole(folder.fence, job.attempt + 1)
        elif job.id not in self._ending_since:
            self._ending_since[job.id] = time.monotonic()
            if must_end:
                driver.terminate()
        elif time.monotonic() - self._ending_since[job.id] > self._settings.grace:
            driver.kill_session()

    def _record_outcome(self, job: StoredJob, folder: JobFolder) -> None:
        """Record the outcome of a job whose driver has ended, or put the job back into the queue."""
        child = self._children.pop(job.id, None)
        self._ending_since.pop(job.id, None)
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its main thread may end before the others
            status = None if child is None else child.wait(_REAPED)
        exit_status = "" if status is None else f" with exit status {status}"
        result, size, excess = read_whole(folder.result(job.attempt)), folder.size(), self._excesses.pop(job.id, None)
        state, error, outcome = JobState.FAILED, excess, None
        if result.get("state") == JobState.DONE:
            state, error = JobState.DONE, None
        elif job.cancel is not None:
            state, error = JobState.CANCELLED, None
        elif result.get("state") == JobState.FAILED:
            error = f"{result.get('type')}: {result.get('error')}"
        elif excess is None and self._overdue(job):
            error = f"a driver must have ended after {self._settings.run_max:g} s, as the server's operator says"
        elif excess is None:
            state, outcome = JobState.QUEUED, f"died{exit_status}"
            log.warning("job %s: driver %d %s", job.id, job.attempt, outcome)
            if job.attempt >= self._settings.attempts_max:
                state = JobState.LOST
                error = f"{job.attempt} drivers died without a report, the last one{exit_status}; see the log"
        run = read_whole(folder.mlflow).get("link")
        self._store.move(job, state, error, size, outcome, result.get("summary"), run)

    def _sweep(self) -> None:
        """Remove expired jobs, and uploads that ended in the middle, every `_REMOVAL_SECONDS` seconds."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + _REMOVAL_SECONDS
        retention = self._settings.retention
        for job in [] if retention is None else self._store.ended_before(time.time() - retention):
            self._files.remove(self._files.of(job.id))
            with contextlib.suppress(StateError):  # its user has removed it
                self._store.remove(job)
                log.info("job %s of %s is removed, as its retention has ended", job.id, job.user)
        for folder in self._files.stray_uploads():
            self._files.remove(folder)
