"""Endpoints about jobs: each queries the store as the caller, so that another user's jobs do not exist for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flask import Response, g, request, send_file
from flask_openapi3.models.file import FileStorage
from pydantic import BaseModel, ConfigDict, Field

from distkeras.dashboard.journal import STREAM_TYPE, as_events, read_since
from distkeras.dashboard.page import saved_page
from distkeras.job_server.description import Description, JobDescription, JobId, PredictionDescription, Tag, json_of
from distkeras.job_server.errors import DescriptionError, NotFoundError, StateError, StorageError
from distkeras.job_server.model_file import require_archive
from distkeras.job_server.places import (
    require_allowed,
    require_elsewhere,
    require_existing,
    require_output,
    require_own,
)
from distkeras.job_server.runner.files import JobFolder, read_progress
from distkeras.job_server.server.services import audit, services
from distkeras.job_server.server.views import JobsView, JobView, RowsView, TextView, endpoints
from distkeras.job_server.states import PREDICT, TRAIN, JobState
from distkeras.job_server.store.jobs import ORDER, StoredJob, new_id

jobs_api = endpoints("jobs")

_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST = 2**53
#: The fields of a job in its saved page, which its user may give to others.
_SHOWN = ("kind", "state", "error", "attempts")


def _file_of(media: str, schema: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return the OpenAPI description of an answer that is a file."""
    return {200: {"content": {media: {"schema": schema or {"type": "string", "format": "binary"}}}}}


_MODEL, _TABLE = _file_of("application/zip"), _file_of("application/vnd.apache.parquet")


class JobPath(BaseModel):
    """The path of a job."""

    job: str = Field(description="The id of the job.")


class JobForm(BaseModel):
    """A job, and the model that it trains, as Keras saves it."""

    model_config = ConfigDict(extra="forbid")

    job: JobDescription
    model: FileStorage


class PredictionForm(BaseModel):
    """A predict job, and a model as Keras saves it, unless the description names the job that trained one."""

    model_config = ConfigDict(extra="forbid")

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


@jobs_api.post("/jobs", responses={201: JobView})
def submit_job(form: JobForm) -> Any:
    """Submit a training job: its description, and a model that Keras saved."""
    return _accept(form.job, _training_order(form.job), _sent_model(form.model))


@jobs_api.post("/predictions", responses={201: JobView})
def submit_prediction(form: PredictionForm) -> Any:
    """Submit a predict job: its description, and a model that Keras saved or the job that trained one."""
    model = _sent_model(form.model) if form.job.job is None else _model_of(form.job.job)
    return _accept(form.job, _prediction_order(form.job), model)


@jobs_api.post("/jobs/<job>/resubmit", responses={201: JobView})
def resubmit_job(path: JobPath) -> Any:
    """Submit a job once more, as yours, with its model; a JSON body replaces fields of its description (RFC 7396)."""
    job = _job(path)
    write = _copy_of(
        services().files.of(job.id).sent_model,
        StateError(f"job {job.id} cannot be submitted again: its model was removed"),
    )
    description = _merged(job.submitted, json_of(request.get_data() or b"{}"))
    if job.kind == TRAIN:
        training = JobDescription.from_json(description)
        return _accept(training, _training_order(training), write)
    prediction = PredictionDescription.from_json(description)
    return _accept(prediction, _prediction_order(prediction), write)


def _merged(value: Any, changes: Any) -> Any:
    """Return JSON with changes, as RFC 7396 merges them: an object's fields one by one, and null removes one."""
    if not isinstance(changes, dict):
        return changes
    merged = dict(value) if isinstance(value, dict) else {}
    for name, change in changes.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), change)
    return merged


def _training_order(description: JobDescription) -> dict[str, Any]:
    """Return the order for the driver; raise DescriptionError unless the server allows the places it reads."""
    order = {"kind": TRAIN, "data": _data(description.data)}
    if description.early_stopping is not None:
        order["validation"] = _data(description.early_stopping.data, "early_stopping.data")
    return order


def _prediction_order(description: PredictionDescription) -> dict[str, Any]:
    """Return the order for the driver; raise DescriptionError unless the server allows the places it uses."""
    output = require_output(description.output, services().settings.output, g.account.name)
    _require_public(output, "output")
    return {"kind": PREDICT, "data": _data(description.data), "output": output}


def _data(data: str, field: str = "data") -> str:
    """Return the URI of the Parquet that a job reads, if the server allows it."""
    settings = services().settings
    uri = require_allowed(data, settings.data, field)
    _require_public(uri, field)
    if not g.account.is_admin:
        require_own(uri, settings.output, g.account.name, field)
    require_existing(uri, field)
    return uri


def _require_public(uri: str, field: str) -> None:
    for folder in (services().files.root, *services().settings.private):
        require_elsewhere(uri, folder, field)


def _sent_model(sent: FileStorage | None) -> Callable[[Path], object]:
    """Return the function that writes the uploaded model to a file."""
    if sent is None or not hasattr(sent, "save"):  # the library does not refuse a text in place of a file
        raise DescriptionError("`model` must be a file in the form. Received: none", "model")
    most = services().settings.upload_max

    def write(path: Path) -> None:
        sent.save(path)
        size = path.stat().st_size
        if size > most:
            raise DescriptionError(f"`model` must have at most {most} bytes. Received: {size}", "model")

    return write


def _model_of(job_id: str) -> Callable[[Path], object]:
    """Return the function that writes the model of a finished job of the caller to a file."""
    try:
        job = services().jobs.get(g.account, job_id)
    except NotFoundError as error:
        raise DescriptionError(f"`job` must be one of yours. Received: {job_id}", "job") from error
    model = services().files.of(job_id).model
    if request.files:
        raise DescriptionError("`model` must not be sent together with `job`. Received: both", "model")
    if job.kind != TRAIN or job.state is not JobState.DONE or not model.exists():
        raise DescriptionError(f"`job` must have trained a model. Received: {job_id}, {job.kind}, {job.state}", "job")

    return _copy_of(
        model, DescriptionError(f"`job` must be one of yours. Received: {job_id}, removed meanwhile", "job")
    )


def _copy_of(model: Path, error: Exception) -> Callable[[Path], object]:
    """Return the function that copies ``model`` to a file; it raises ``error`` if the model was removed."""

    def write(path: Path) -> None:
        try:
            shutil.copyfile(model, path)
        except FileNotFoundError:
            raise error from None

    return write


def _accept(description: Description, order: Mapping[str, Any], write_model: Callable[[Path], object]) -> Any:
    """Put a job with its model into the queue; if that fails, remove its files."""
    files, settings = services().files, services().settings
    folder = files.incoming()
    try:
        write_model(folder.sent_model)
        if files.free() < settings.reserve:  # with the model, which goes if there is no room for it
            raise StorageError(f"The server's disk has fewer than {settings.reserve} bytes left: try again later.")
        require_archive(folder.sent_model)
        size, job_id = folder.sent_model.stat().st_size, new_id()
        folder = files.accept(folder, job_id)
        stored = description.to_json() | {ORDER: order}
        job = services().jobs.add(g.account, description.name, stored, size, settings.quota, job_id)
    except BaseException:
        files.remove(folder)
        raise
    audit("submit", job.id)
    return _view(job), 201


@jobs_api.get("/jobs", responses={200: JobsView})
def list_jobs(query: JobsQuery) -> Any:
    """List jobs, the latest first."""
    store, before = services().jobs, query.before
    number = None if before is None else store.get(g.account, before).number
    jobs = store.page(
        g.account, state=query.state, text=query.text, tag=query.tag or "", before=number, limit=query.limit
    )
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
    try:
        piece, following = _folder(path).read_log(query.offset)
        return {"text": piece.decode("utf-8", "replace"), "next": following}
    except FileNotFoundError:
        return {"text": "", "next": 0}


@jobs_api.get("/jobs/<job>/model", responses=_MODEL)
def fetch_model(path: JobPath) -> Response:
    """Fetch the trained model (.keras)."""
    return _file(path, "model.keras")


@jobs_api.get("/jobs/<job>/history", responses=_TABLE)
def fetch_history(path: JobPath) -> Response:
    """Fetch the history, one row for each mini-batch (Parquet)."""
    return _file(path, "history.parquet")


@jobs_api.get("/jobs/<job>/commits", responses=_TABLE)
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
    if _ID.fullmatch(path.job) is None:
        raise NotFoundError("there is no such job: the path has no job's id")
    return services().jobs.get(g.account, path.job)


def _folder(path: JobPath) -> JobFolder:
    return services().files.of(_job(path).id)


def _file(path: JobPath, name: str) -> Response:
    """Send a file of a finished job; before, a driver may not have written all of it."""
    job = _job(path)
    file = services().files.of(job.id).path / name
    kind = next(iter((_MODEL if name.endswith(".keras") else _TABLE)[200]["content"]))
    if job.kind != TRAIN:
        raise StateError(f"job {job.id} has no {name}: it does not train a model, but is to {job.kind}")
    if job.state is not JobState.DONE or not file.exists():
        raise StateError(f"job {job.id} has no {name}: it must be done, and is {job.state}")
    try:
        return send_file(file, mimetype=kind, as_attachment=True, download_name=f"{job.id[:8]}-{name}", max_age=0)
    except FileNotFoundError:
        raise NotFoundError(f"there is no job {job.id}: it was removed meanwhile") from None
