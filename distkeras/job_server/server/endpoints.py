"""The endpoints about jobs and accounts. Each asks the store as the caller, for whom other users' jobs do not exist."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from flask import Response, current_app, g, request, send_file
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.file import FileStorage
from pydantic import BaseModel, Field, create_model

from distkeras.dashboard.page import saved_page
from distkeras.dashboard.watch import STREAM_TYPE, as_events, read_since
from distkeras.job_server.description import (
    Description,
    JobDescription,
    JobId,
    Line,
    PredictionDescription,
    Submitted,
    Tag,
    json_of,
)
from distkeras.job_server.errors import (
    BY_STATUS,
    PREDICT,
    TRAIN,
    JobState,
    NotFoundError,
    StateError,
    StorageError,
    refused,
)
from distkeras.job_server.model_file import require_archive
from distkeras.job_server.places import require_readable, require_writable
from distkeras.job_server.runner.files import JobFiles, JobFolder, read_piece, read_progress
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import ADMIN, NAME, Accounts, AuditEntry, TokenInfo, UserInfo
from distkeras.job_server.store.jobs import ORDER, Attempt, JobStore, JobSummary, StoredJob, new_id

PREFIX = "/api/v1"


@dataclass(frozen=True)
class Services:
    """The objects that the endpoints use; ``silence`` returns the seconds since the jobs were last checked."""

    accounts: Accounts
    jobs: JobStore
    files: JobFiles
    settings: Settings
    silence: Callable[[], float] = lambda: 0.0


def services() -> Services:
    """Return the services of the current request's application."""
    current: Services = current_app.extensions["distkeras"]
    return current


def audit(action: str, subject: str = "") -> None:
    """Record what the caller of the current request did."""
    services().accounts.record(g.account.name, request.remote_addr or "", action, subject)


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    field: str | None = Field(None, description="The part of the request that is not valid.")


class ErrorView(BaseModel):
    """The answer in place of a result."""

    error: ErrorDetail


def endpoints(name: str) -> APIBlueprint:
    """Return a group of endpoints, all of which may answer with an `ErrorView`."""
    schema = {"$ref": f"#/components/schemas/{ErrorView.__name__}"}
    content = {"application/json": {"schema": schema}}
    texts = {400: "The request cannot be read."}
    texts |= {status: str(kind.__doc__).partition("\n")[0] for status, kind in BY_STATUS.items()}
    responses: dict[Any, Any] = {status: {"description": text, "content": content} for status, text in texts.items()}
    return APIBlueprint(
        name, name, url_prefix=PREFIX, abp_responses=responses, operation_id_callback=lambda *, name, **_where: name
    )


jobs_api = endpoints("jobs")

_LARGEST = 2**53
#: The fields of a job in its saved page, which its user may give to others.
_SHOWN = ("kind", "state", "error", "attempts")
_MODEL_TYPE, _TABLE_TYPE = "application/zip", "application/vnd.apache.parquet"


class JobView(JobSummary, frozen=True):
    """A job with its description."""

    description: dict[str, Any]
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
    changed = _merged(job.description, json_of(request.get_data() or b"{}"))
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
        raise refused("model", "be a file in the form. Received: none")
    return sent.save


def _model_of(job_id: str) -> Callable[[Path], object]:
    """Return the function that writes the model of a finished job of the caller to a file."""
    if request.files:
        raise refused("model", "not be sent together with `job`. Received: both")
    try:
        job = services().jobs.get(g.account, job_id)
    except NotFoundError as error:
        raise refused("job", f"be one of yours. Received: {job_id}") from error
    unfit = refused("job", f"have trained a model. Received: {job_id}, {job.kind}, {job.state}")
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
            raise refused("model", f"have at most {settings.upload_max} bytes. Received: {size}")
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


account_api, admin_api = endpoints("account"), endpoints("admin")

UserName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]

MeView = create_model("MeView", name=(str, ...), role=(str, ...))
TokensView = create_model("TokensView", tokens=(list[TokenInfo], ...))
NewTokenView = create_model("NewTokenView", token=(str, ...))
UsersView = create_model("UsersView", users=(list[UserInfo], ...))
#: One page of the audit log; ``next`` is the ``before`` of the next page.
AuditView = create_model("AuditView", entries=(list[AuditEntry], ...), next=(int | None, ...))


class TokenPath(BaseModel):
    """The path of a token."""

    token: str = Field(description="The id of the token.")


class UserPath(BaseModel):
    """The path of a user."""

    user: str = Field(description="The name of the user.")


class TokenRequest(Submitted):
    """A token to make."""

    user: UserName | None = Field(None, description="The user of the token. Default: the caller.")
    note: Line = ""
    days: float | None = Field(
        None, gt=0, le=36_500, description="The days of validity. Default: as long as the caller's own token."
    )


class UserRequest(Submitted):
    """A user to add."""

    name: UserName
    role: Literal["user", "admin", "metrics"] = "user"


class AuditQuery(BaseModel):
    """Which part of the audit log to read."""

    before: int | None = Field(None, ge=1, le=2**53, description="Only entries with a smaller number.")
    limit: int = Field(100, ge=1, le=1000)


class RevokeQuery(BaseModel):
    """What to revoke."""

    alone: bool = Field(False, description="Keep the tokens that this token has made.")


@admin_api.before_request
def _require_admin() -> None:
    g.account.require(ADMIN)


@account_api.get("/me", responses={200: MeView})
def show_me() -> Any:
    """Show the caller's name and role."""
    return {"name": g.account.name, "role": g.account.role}


@account_api.get("/tokens", responses={200: TokensView})
def list_tokens() -> Any:
    """List your tokens. An administrator sees all tokens."""
    return TokensView(tokens=services().accounts.tokens(g.account)).model_dump()


@account_api.post("/tokens", responses={201: NewTokenView})
def make_token(body: TokenRequest) -> Any:
    """Make a token, which only this answer shows. An administrator may make tokens of other users."""
    user = body.user or g.account.name
    if user != g.account.name:
        g.account.require(ADMIN)
    limit = g.account.expires
    expires = limit if body.days is None else time.time() + body.days * 86400.0
    if limit is not None and expires > limit:
        raise refused("days", f"not exceed those of the caller's own token. Received: days={body.days:g}")
    token = services().accounts.add_token(user, body.note, expires, parent=g.account.token)
    audit("make token", f"{token.split('_')[1]} of {user}")
    return {"token": token}, 201


@account_api.delete("/tokens/<token>", responses={204: None})
def revoke_token(path: TokenPath, query: RevokeQuery) -> Any:
    """Revoke a token, and the tokens that it has made."""
    services().accounts.revoke(g.account, path.token, alone=query.alone)
    audit("revoke token", path.token)
    return "", 204


@admin_api.get("/users", responses={200: UsersView})
def list_users() -> Any:
    """List users. Only for administrators."""
    return UsersView(users=services().accounts.users()).model_dump()


@admin_api.post("/users", responses={201: UserInfo})
def make_user(body: UserRequest) -> Any:
    """Add a user, without a token. Only for administrators."""
    user = services().accounts.add_user(body.name, body.role)
    audit("add user", f"{user.name}, {user.role}")
    return user.model_dump(), 201


@admin_api.delete("/users/<user>", responses={204: None})
def remove_user(path: UserPath) -> Any:
    """Revoke all tokens of a user, whose jobs stay. Only for administrators."""
    services().accounts.remove_user(path.user)
    audit("remove user", path.user)
    return "", 204


@admin_api.post("/users/<user>/reinstate", responses={204: None})
def reinstate_user(path: UserPath) -> Any:
    """Let a removed user have tokens again; the old ones stay revoked. Only for administrators."""
    services().accounts.reinstate_user(path.user)
    audit("reinstate user", path.user)
    return "", 204


@admin_api.get("/audit", responses={200: AuditView})
def read_audit(query: AuditQuery) -> Any:
    """Read the audit log, the latest entries first. Only for administrators."""
    entries = services().accounts.audit(query.before, query.limit)
    more = len(entries) == query.limit
    return AuditView(entries=entries, next=entries[-1].number if more else None).model_dump()
