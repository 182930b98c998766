"""Endpoints about jobs: each queries the store as the caller, so that another user's jobs do not exist for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flask import Response, g, request, send_file
from flask_openapi3.models.file import FileStorage
from pydantic import BaseModel, Field, create_model

from distkeras.dashboard.journal import STREAM_TYPE, as_events, read_since
from distkeras.dashboard.page import saved_page
from distkeras.job_server.description import Description, JobDescription, JobId, PredictionDescription, Tag, json_of
from distkeras.job_server.errors import DescriptionError, NotFoundError, StateError, StorageError
from distkeras.job_server.model_file import require_archive
from distkeras.job_server.places import require_readable, require_writable
from distkeras.job_server.runner.files import JobFolder, read_piece, read_progress
from distkeras.job_server.server.endpoints import audit, endpoints, services
from distkeras.job_server.states import PREDICT, TRAIN, JobState
from distkeras.job_server.store.jobs import ORDER, Attempt, JobSummary, StoredJob, new_id

jobs_api = endpoints("jobs")

_LARGEST = 2**53
#: The fields of a job in its saved page, which its user may give to others.
_SHOWN = ("kind", "state", "error", "attempts")
_MODEL_TYPE, _TABLE_TYPE = "application/zip", "application/vnd.apache.parquet"


class JobView(JobSummary, frozen=True):
    """A job with its description."""

    description: dict[str, Any] = Field(validation_alias="submitted")
    attempts: list[Attempt] = Field([], description="The drivers that the job has had.")


#: One page of jobs; ``next`` is the ``before`` of the next page.
JobsView = create_model("JobsView", jobs=(list[JobSummary], ...), next=(str | None, ...))
#: Parts of a job's progress and of its log; ``next`` is the offset of the next read.
RowsView = create_model("RowsView", rows=(list[dict[str, Any]], ...), next=(int, ...))
TextView = create_model("TextView", text=(str, ...), next=(int, ...))


class JobPath(BaseModel):
    """The path of a job."""

    job: str = Field(description="The id of the job.")


class JobForm(BaseModel, extra="forbid"):
    """A job, and the model that it trains, as Keras saves it."""

    job: JobDescription
    model: FileStorage


class PredictionForm(BaseModel, extra="forbid"):
    """A predict job, and a model as Keras saves it, unless the description names the job that trained one."""

    job: PredictionDescription
    model: FileStorage | None = None


class JobsQuery(BaseModel):
    """Which jobs to list."""

    state: JobState | None = Field(None, description="Only jobs in this state.")
    text: str = Field("", max_length=200, description="Only jobs with this text in their name or their user's name.")
    tag: Tag | None = Field(None, description="Only jobs with this tag.")
    before: JobId | None = Field(None, description="Only jobs that were submitted before this one.")
    limit: int = Field(100, ge=1, le=1000)


class RowsQuery(BaseModel):
    """Where to begin to read."""

    offset: int = Field(0, ge=0, le=_LARGEST, description="The byte to begin at.")


class LogQuery(BaseModel):
    """Where to begin to read."""

    offset: int = Field(0, ge=-_LARGEST, le=_LARGEST, description="The byte to begin at; from the end if below 0.")


def _file_of(media: str, schema: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return the OpenAPI description of an answer that is a file."""
    return {200: {"content": {media: {"schema": schema or {"type": "string", "format": "binary"}}}}}


@jobs_api.post("/jobs", responses={201: JobView})
def submit_job(form: JobForm) -> Any:
    """Submit a training job: its description, and a model that Keras saved."""
    return _accept(form.job, _saved(form.model))


@jobs_api.post("/predictions", responses={201: JobView})
def submit_prediction(form: PredictionForm) -> Any:
    """Submit a predict job: its description, and a model that Keras saved or the job that trained one."""
    return _accept(form.job, _saved(form.model) if form.job.job is None else _model_of(form.job.job))


@jobs_api.post("/jobs/<job>/resubmit", responses={201: JobView})
def resubmit_job(path: JobPath) -> Any:
    """Submit a job once more, as yours, with its model; a JSON body replaces fields of its description (RFC 7396)."""
    job = _job(path)
    removed = StateError(f"job {job.id} cannot be submitted again: its model was removed")
    changed = _merged(job.submitted, json_of(request.get_data() or b"{}"))
    kind = JobDescription if job.kind == TRAIN else PredictionDescription
    return _accept(kind.from_json(changed), _copied(services().files.of(job.id).sent_model, removed))


def _merged(value: Any, changes: Any) -> Any:
    """Return JSON with changes, as RFC 7396 merges them: an object's fields one by one, and null removes one."""
    if not isinstance(changes, dict):
        return changes
    kept = value if isinstance(value, dict) else {}
    changed = {name: _merged(kept.get(name), part) for name, part in changes.items() if part is not None}
    return {name: part for name, part in kept.items() if name not in changes} | changed


def _saved(sent: FileStorage | None) -> Callable[[Path], object]:
    """Return the function that writes the uploaded model to a file."""
    if sent is None or not hasattr(sent, "save"):  # the library does not refuse a text in place of a file
        raise DescriptionError("`model` must be a file in the form. Received: none", "model")
    return sent.save


def _model_of(job_id: str) -> Callable[[Path], object]:
    """Return the function that writes the model of a finished job of the caller to a file."""
    if request.files:
        raise DescriptionError("`model` must not be sent together with `job`. Received: both", "model")
    try:
        job = services().jobs.get(g.account, job_id)
    except NotFoundError as error:
        raise DescriptionError(f"`job` must be one of yours. Received: {job_id}", "job") from error
    unfit = DescriptionError(f"`job` must have trained a model. Received: {job_id}, {job.kind}, {job.state}", "job")
    if job.kind != TRAIN or job.state is not JobState.DONE:
        raise unfit
    return _copied(services().files.of(job_id).model, unfit)


def _copied(model: Path, error: Exception) -> Callable[[Path], object]:
    """Return the function that copies ``model`` to a file; it raises ``error`` if the model was removed."""

    def write(path: Path) -> None:
        try:
            shutil.copyfile(model, path)
        except FileNotFoundError:
            raise error from None

    return write


def _order(description: Description) -> dict[str, Any]:
    """Return what only the driver receives: the kind, and URIs; DescriptionError for a place that is not allowed."""
    settings, user = services().settings, g.account
    order = {"kind": TRAIN, "data": require_readable(description.data, "data", settings, user)}
    if isinstance(description, PredictionDescription):
        return order | {"kind": PREDICT, "output": require_writable(description.output, settings, user)}
    if isinstance(description, JobDescription) and (stopping := description.early_stopping) is not None:
        order["validation"] = require_readable(stopping.data, "early_stopping.data", settings, user)
    return order


def _accept(description: Description, write_model: Callable[[Path], object]) -> Any:
    """Put a job with its model into the queue; if that fails, remove its files."""
    files, settings, order = services().files, services().settings, _order(description)
    folder = files.incoming()
    try:
        write_model(folder.sent_model)
        size, job_id = folder.sent_model.stat().st_size, new_id()
        if request.files and size > settings.upload_max:  # a model that was trained here may be larger
            raise DescriptionError(f"`model` must have at most {settings.upload_max} bytes. Received: {size}", "model")
        if files.free() < settings.reserve:  # with the model, which goes if there is no room for it
            raise StorageError(f"The server's disk has fewer than {settings.reserve} bytes left: try again later.")
        require_archive(folder.sent_model)
        folder = files.accept(folder, job_id)
        stored = description.to_json() | {ORDER: order}
        job = services().jobs.add(g.account, description.name, stored, size, settings, job_id)
    except BaseException:
        files.remove(folder)
        raise
    audit("submit", job.id)
    return _view(job), 201


@jobs_api.get("/jobs", responses={200: JobsView})
def list_jobs(query: JobsQuery) -> Any:
    """List jobs, the latest first."""
    store, chosen = services().jobs, query.model_dump()
    if query.before is not None:
        chosen["before"] = store.get(g.account, query.before).number
    jobs = store.page(g.account, **chosen)
    following = jobs[-1].id if len(jobs) == query.limit else None
    return JobsView(jobs=list(jobs), next=following).model_dump(mode="json")


@jobs_api.get("/jobs/<job>", responses={200: JobView})
def show_job(path: JobPath) -> Any:
    """Show a job."""
    return _view(_job(path))


@jobs_api.post("/jobs/<job>/cancel", responses={200: JobView})
def cancel_job(path: JobPath) -> Any:
    """Cancel a job that waits or runs."""
    job = services().jobs.request_cancel(g.account, _job(path).id)
    audit("cancel", job.id)
    return _view(job)


@jobs_api.delete("/jobs/<job>", responses={204: None})
def remove_job(path: JobPath) -> Any:
    """Remove an ended job and its files."""
    job = _job(path)
    services().jobs.remove(job)
    services().files.remove(services().files.of(job.id))
    audit("remove", job.id)
    return "", 204


@jobs_api.get("/jobs/<job>/metrics", responses={200: RowsView})
def read_metrics(path: JobPath, query: RowsQuery) -> Any:
    """Read the progress of a job, also while it trains."""
    rows, following = read_progress(_folder(path).progress, query.offset)
    return {"rows": rows, "next": following}


@jobs_api.get("/jobs/<job>/log", responses={200: TextView})
def read_log(path: JobPath, query: LogQuery) -> Any:
    """Read what the driver of a job and Spark print."""
    piece, following = read_piece(_folder(path).log, query.offset)
    return {"text": piece.decode("utf-8", "replace"), "next": following}


@jobs_api.get("/jobs/<job>/model", responses=_file_of(_MODEL_TYPE))
def fetch_model(path: JobPath) -> Response:
    """Fetch the trained model (.keras)."""
    return _file(path, "model.keras")


@jobs_api.get("/jobs/<job>/history", responses=_file_of(_TABLE_TYPE))
def fetch_history(path: JobPath) -> Response:
    """Fetch the history, one row for each mini-batch (Parquet)."""
    return _file(path, "history.parquet")


@jobs_api.get("/jobs/<job>/commits", responses=_file_of(_TABLE_TYPE))
def fetch_commits(path: JobPath) -> Response:
    """Fetch the commits, one row for each (Parquet)."""
    return _file(path, "commits.parquet")


@jobs_api.get("/jobs/<job>/stream", responses=_file_of(STREAM_TYPE, {"type": "object"}))
def follow_job(path: JobPath) -> Response:
    """Read the events after `Last-Event-ID`. The answer ends, so that no thread waits; the client asks again."""
    entries = read_since(_folder(path).journal, request.headers.get("Last-Event-ID", ""))
    return Response(as_events(entries), mimetype=STREAM_TYPE)


@jobs_api.get("/jobs/<job>/page", responses=_file_of("text/html"))
def save_page(path: JobPath) -> Response:
    """Fetch the page of a job as one file (HTML)."""
    job = _job(path)
    entries = read_since(_folder(path).journal)
    if not entries:
        raise StateError(f"job {job.id} has no page yet: it is {job.state}, and has not begun to train")
    html = saved_page([entries], [job.name or job.id[:8]], [{name: _view(job)[name] for name in _SHOWN}])
    return Response(
        html, mimetype="text/html", headers={"Content-Disposition": f"attachment; filename={job.id[:8]}.html"}
    )


def _view(job: StoredJob) -> dict[str, Any]:
    """Return the JSON of a job with its attempts."""
    view = JobView.model_validate(job).model_copy(update={"attempts": services().jobs.attempts(job)})
    return view.model_dump(mode="json")


def _job(path: JobPath) -> StoredJob:
    return services().jobs.get(g.account, path.job)


def _folder(path: JobPath) -> JobFolder:
    return services().files.of(_job(path).id)


def _file(path: JobPath, name: str) -> Response:
    """Send a file of a finished job; before, a driver may not have written all of it."""
    job = _job(path)
    if job.kind != TRAIN:
        raise StateError(f"job {job.id} has no {name}: it does not train a model, but is to {job.kind}")
    if job.state is not JobState.DONE:
        raise StateError(f"job {job.id} has no {name}: it must be done, and is {job.state}")
    file, kind = services().files.of(job.id).path / name, _MODEL_TYPE if name.endswith(".keras") else _TABLE_TYPE
    try:
        return send_file(file, mimetype=kind, as_attachment=True, download_name=f"{job.id[:8]}-{name}", max_age=0)
    except FileNotFoundError:
        raise StateError(f"job {job.id} has no {name}: it was removed") from None
