"""The jobs and their servers: each change is a compare-and-swap, so that several servers may share a database."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import BaseModel, Field

from distkeras.job_server.errors import (
    ACTIVE,
    FINAL,
    PREDICT,
    TRAIN,
    JobState,
    NotFoundError,
    QuotaError,
    StateError,
    before,
    refused,
)
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Account, seen_by
from distkeras.job_server.store.tables import ATTEMPTS, JOBS, USERS

#: The part of a stored description that only the driver sees.
ORDER = "order"
#: The most users whose next job one claim tries.
_CANDIDATES = 16


class JobSummary(BaseModel, from_attributes=True, frozen=True):
    """A job in a list. Times are seconds since the epoch."""

    id: str
    kind: Literal["train", "predict"]
    user: str
    name: str
    tags: list[str]
    state: JobState
    created: float
    started: float | None
    ended: float | None
    attempt: int = Field(description="The number of drivers that were started for the job.")
    cancelled: bool
    error: str | None
    summary: dict[str, Any] | None = Field(
        description="The numbers of a job that is done: epochs, loss, metrics, commits, samples, seconds by part, and "
        "why a callback has stopped it early; the rows of a predict job."
    )
    mlflow_run: str | None = Field(description="The job's run in MLflow: its address, or runs:/ID.")
    bytes: int


class StoredJob(JobSummary, frozen=True):
    """A job in the database; times are seconds since the epoch."""

    number: int  # rises with each job; users know a job by its ``id``, which cannot be guessed
    description: dict[str, Any]  # as the user submitted it
    order: dict[str, Any]  # what only the driver receives: the job's kind, and the places where it reads and writes
    server: str | None  # the process that is responsible for it
    renewal: int  # rises while that process is alive
    driver: str | None  # the process that runs it
    cancel: float | None  # when a user cancelled it


class Attempt(BaseModel, frozen=True):
    """One driver of a job. Times are seconds since the epoch."""

    attempt: int = Field(description="The number of the driver, from 1.")
    started: float
    ended: float | None
    outcome: str | None = Field(description="How the driver ended.")


_COLUMNS = [USERS.c.name.label("user"), *(JOBS.c[name] for name in StoredJob.model_fields if name in JOBS.c)]
_JOINED = sa.select(*_COLUMNS).join_from(JOBS, USERS)
_SHORT = [sa.literal("{}").label(column.name) if column.name == "description" else column for column in _COLUMNS]
_LISTED = sa.select(*_SHORT).join_from(JOBS, USERS)


class JobStore:
    """The jobs; thread-safe. ``clock`` returns seconds since the epoch."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._clock = engine, clock

    def add(
        self, account: Account, name: str, description: Mapping[str, Any], size: int, limits: Settings, job_id: str = ""
    ) -> StoredJob:
        """Add a job to the queue: its description with the order, JSON-ready, and the bytes of its files."""
        job_id = job_id or new_id()
        values = {"id": job_id, "user_id": account.id, "name": name, "state": JobState.QUEUED, "bytes": size}
        values["kind"] = description.get(ORDER, {}).get("kind", TRAIN)
        values["tags"] = "".join(f" {tag} " for tag in description.get("tags", []))
        values |= {"description": json.dumps(description), "created": self._clock(), "attempt": 0}
        waiting = sa.func.count().filter(JOBS.c.state == JobState.QUEUED)
        held = sa.select(sa.func.sum(JOBS.c.bytes), waiting).where(JOBS.c.user_id == account.id)
        with self._engine.begin() as connection:
            # This locks the user's row: other submissions of the user wait, so that the counts below stay correct.
            connection.execute(sa.update(USERS).where(USERS.c.id == account.id).values(active=USERS.c.active))
            _require_free_output(connection, account, description)
            connection.execute(sa.insert(JOBS).values(values))
            total, queued = connection.execute(held).one()
            if total > limits.bytes_max:
                raise QuotaError(
                    f"a user's jobs may have at most {limits.bytes_max} bytes. Received: {total} bytes with this job"
                )
            if queued > limits.queued_max:
                raise QuotaError(f"a user may have at most {limits.queued_max} waiting jobs. Received: one more")
        return self.get(account, job_id)

    def get(self, viewer: Account, job_id: str) -> StoredJob:
        """Return one job; raise NotFoundError if the viewer sees no such job."""
        for job in self._read(_JOINED.where(JOBS.c.id == job_id, seen_by(viewer, JOBS))):
            return job
        raise NotFoundError(f"there is no job {job_id}, or it belongs to another user")

    def is_known(self, job_id: str) -> bool:
        """Return whether there is a job of this id."""
        with self._engine.connect() as connection:
            return connection.execute(sa.select(JOBS.c.number).where(JOBS.c.id == job_id)).first() is not None

    def page(
        self,
        viewer: Account,
        *,
        state: JobState | None = None,
        text: str = "",
        tag: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[StoredJob]:
        """Return at most ``limit`` jobs with numbers below ``before``, the latest first, without their descriptions."""
        query = _LISTED.where(seen_by(viewer, JOBS))
        if state is not None:
            query = query.where(JOBS.c.state == state)
        if text:
            named = (name.icontains(text, autoescape=True) for name in (JOBS.c.name, USERS.c.name))
            query = query.where(sa.or_(*named))
        if tag is not None:
            query = query.where(JOBS.c.tags.contains(f" {tag} ", autoescape=True))
        if before is not None:
            query = query.where(JOBS.c.number < before)
        return self._read(query, JOBS.c.number.desc(), limit)

    def attempts(self, job: StoredJob) -> list[Attempt]:
        """Return the drivers that a job has had, the first one first."""
        query = sa.select(ATTEMPTS).where(ATTEMPTS.c.job == job.number).order_by(ATTEMPTS.c.attempt)
        with self._engine.connect() as connection:
            return [Attempt.model_validate(row) for row in connection.execute(query).mappings()]

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        query = sa.select(JOBS.c.state, sa.func.count()).group_by(JOBS.c.state)
        with self._engine.connect() as connection:
            counted = {state: number for state, number in connection.execute(query)}
        return {state: counted.get(state, 0) for state in JobState}

    def request_cancel(self, viewer: Account, job_id: str) -> StoredJob:
        """Cancel a waiting job, or ask a running one to end; NotFoundError if invisible, StateError if it has ended."""
        now, this = self._clock(), JOBS.c.id == job_id
        self.get(viewer, job_id)
        waits = sa.update(JOBS).where(this, JOBS.c.state == JobState.QUEUED)
        runs = sa.update(JOBS).where(this, JOBS.c.state.in_(ACTIVE), JOBS.c.cancel.is_(None))
        with self._engine.begin() as connection:
            if not connection.execute(waits.values(state=JobState.CANCELLED, ended=now, cancel=now)).rowcount:
                connection.execute(runs.values(cancel=now))
        job = self.get(viewer, job_id)
        if job.cancel is None or job.state in FINAL - {JobState.CANCELLED}:
            raise StateError(f"job {job_id} cannot be cancelled: it has ended, and is {job.state}")
        return job

    def remove(self, job: StoredJob) -> None:
        """Delete a job; raise StateError if it has not ended."""
        with self._engine.begin() as connection:
            if not connection.execute(sa.delete(JOBS).where(JOBS.c.id == job.id, JOBS.c.state.in_(FINAL))).rowcount:
                raise StateError(f"job {job.id} cannot be removed: it has not ended, and is {job.state}")

    def claim(self, server: str) -> StoredJob | None:
        """Claim the next waiting job: of the user with the fewest running jobs, then the earliest last start."""
        running = sa.func.sum(JOBS.c.state.in_(ACTIVE).cast(JOBS.c.number.type))
        waiting = sa.func.min(JOBS.c.number).filter(JOBS.c.state == JobState.QUEUED)
        turn = sa.func.coalesce(sa.func.max(JOBS.c.started), 0.0)
        query = (
            sa.select(waiting).group_by(JOBS.c.user_id).having(waiting.is_not(None)).order_by(running, turn, waiting)
        )
        with self._engine.connect() as connection:
            numbers = list(connection.execute(query.limit(_CANDIDATES)).scalars())
        for number in numbers:
            values = {"attempt": JOBS.c.attempt + 1, "server": server, "driver": None, "started": self._clock()}
            waits = (JOBS.c.number == number) & JOBS.c.state.in_(before(JobState.STARTING)) & JOBS.c.cancel.is_(None)
            change = sa.update(JOBS).where(waits)
            with self._engine.begin() as connection:
                if connection.execute(change.values(state=JobState.STARTING, **values)).rowcount:
                    job = _job_of(connection.execute(_JOINED.where(JOBS.c.number == number)).one())
                    attempt = {"job": number, "attempt": job.attempt, "started": job.started}
                    connection.execute(sa.insert(ATTEMPTS).values(attempt))
                    return job
        return None

    def active(self) -> list[StoredJob]:
        """Return the jobs for which a server is responsible, the oldest first."""
        return self._read(_JOINED.where(JOBS.c.state.in_(ACTIVE)))

    def adopt(self, job: StoredJob, server: str) -> bool:
        """Make ``server`` responsible for a job whose lease has expired; return False if it was renewed or taken."""
        return self._swap(job, JOBS.c.renewal == job.renewal, server=server, renewal=JOBS.c.renewal + 1)

    def renew(self, server: str) -> None:
        """Renew the lease of all jobs of ``server``."""
        theirs = (JOBS.c.server == server) & JOBS.c.state.in_(ACTIVE)
        with self._engine.begin() as connection:
            connection.execute(sa.update(JOBS).where(theirs).values(renewal=JOBS.c.renewal + 1))

    def set_driver(self, job: StoredJob, driver: str) -> bool:
        """Record the process of a job's driver; return False if another server has the job."""
        return self._swap(job, driver=driver)

    def move(
        self,
        job: StoredJob,
        state: JobState,
        error: str | None = None,
        size: int | None = None,
        outcome: str | None = None,
        summary: Mapping[str, Any] | None = None,
        mlflow_run: str | None = None,
    ) -> bool:
        """Change a job's state; return False if its state does not allow it any more, or another server has it."""
        values: dict[str, Any] = {"state": state}
        allowed: sa.ColumnElement[bool] = JOBS.c.state.in_(before(state))
        if state is JobState.QUEUED:
            values |= {"server": None, "driver": None}
            allowed &= JOBS.c.cancel.is_(None)
        if state in FINAL:
            values |= {"ended": self._clock(), "error": error, "summary": summary and json.dumps(summary)}
        values |= {name: value for name, value in (("bytes", size), ("mlflow_run", mlflow_run)) if value is not None}
        if state in ACTIVE:
            return self._swap(job, allowed, **values)
        this = (ATTEMPTS.c.job == job.number) & (ATTEMPTS.c.attempt == job.attempt)
        attempt = sa.update(ATTEMPTS).where(this).values(ended=self._clock(), outcome=outcome or error or state.value)
        return self._swap(job, allowed, attempt, **values)

    def ended_before(self, moment: float) -> list[StoredJob]:
        """Return the jobs that ended before ``moment``, the oldest first."""
        return self._read(_JOINED.where(JOBS.c.state.in_(FINAL), JOBS.c.ended < moment))

    def _read(
        self, query: sa.Select[Any], order: sa.ColumnElement[Any] = JOBS.c.number, limit: int | None = None
    ) -> list[StoredJob]:
        with self._engine.connect() as connection:
            return [_job_of(row) for row in connection.execute(query.order_by(order).limit(limit))]

    def _swap(
        self,
        job: StoredJob,
        condition: sa.ColumnElement[bool] | None = None,
        then: sa.Update | None = None,
        **values: Any,
    ) -> bool:
        """Change a job if it has the same attempt and server as ``job``; ``then`` follows in the same transaction."""
        same = (JOBS.c.id == job.id) & (JOBS.c.attempt == job.attempt) & (JOBS.c.server == job.server)
        change = sa.update(JOBS).where(same, JOBS.c.state.in_(ACTIVE), sa.true() if condition is None else condition)
        with self._engine.begin() as connection:
            swapped = bool(connection.execute(change.values(**values)).rowcount)
            if swapped and then is not None:
                connection.execute(then)
        return swapped


def _require_free_output(connection: sa.Connection, account: Account, description: Mapping[str, Any]) -> None:
    output = description.get(ORDER, {}).get("output")
    if output is None:
        return
    unfinished = (JOBS.c.user_id == account.id) & JOBS.c.state.not_in(FINAL) & (JOBS.c.kind == PREDICT)
    path = PurePosixPath(output)
    for job_id, text in connection.execute(sa.select(JOBS.c.id, JOBS.c.description).where(unfinished)):
        other = PurePosixPath(json.loads(text)[ORDER]["output"])
        if path.is_relative_to(other) or other.is_relative_to(path):
            raise refused("output", f"not overlap with that of a job. Received: {output}; {job_id} writes to {other}")


def new_id() -> str:
    """Return an id for a new job."""
    return uuid.uuid4().hex


def _job_of(row: sa.Row[Any]) -> StoredJob:
    values = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for it
    description = json.loads(values["description"])
    values |= {"tags": values["tags"].split(), "order": description.pop(ORDER, {}), "description": description}
    values["summary"] = None if values["summary"] is None else json.loads(values["summary"])
    return StoredJob(**values, cancelled=values["cancel"] is not None)
