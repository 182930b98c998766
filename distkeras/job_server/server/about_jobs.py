"""Endpoints about jobs: each asks the store as the caller, so that another user's jobs are not there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flask import Response, request, send_file

from distkeras.dashboard.journal import STREAM_TYPE, as_events, read_since
from distkeras.dashboard.page import saved_page
from distkeras.job_server.description import JobDescription
from distkeras.job_server.errors import DescriptionError, NotThereError, StateError, StorageError
from distkeras.job_server.model_file import require_archive
from distkeras.job_server.places import require_allowed, require_elsewhere, require_output
from distkeras.job_server.prediction import PredictionDescription
from distkeras.job_server.runner.files import PIECE_MAX, JobFolder, read_progress
from distkeras.job_server.server.services import Call
from distkeras.job_server.server.views import listed_job, whole_job
from distkeras.job_server.states import PREDICT, TRAIN, JobState
from distkeras.job_server.store.jobs import ORDER, StoredJob, new_id

_ID = re.compile(r"[0-9a-f]{32}")
#: Of what is fetched of a job that is done.
MODEL_TYPE, TABLE_TYPE = "application/zip", "application/vnd.apache.parquet"


def submit_job(call: Call) -> tuple[Any, int]:
    """Takes a job in: everything that can be checked without Spark and Keras is, before it is."""
    description = JobDescription.from_json(call.body)
    order = {"kind": TRAIN, "data": _data(call, description.data)}
    if description.early_stopping is not None:
        order["validation"] = _data(call, description.early_stopping["data"], "early_stopping.data")
    return _taken(call, description.name, description.to_json() | {ORDER: order}, _sent_model(call))


def submit_prediction(call: Call) -> tuple[Any, int]:
    """Put a predict job into the queue."""
    services, description = call.services, PredictionDescription.from_json(call.body)
    output = require_output(description.output, services.settings.output, call.account.name)
    require_elsewhere(output, services.files.root, "output")
    order = {"kind": PREDICT, "data": _data(call, description.data), "output": output.uri}
    model = _sent_model(call) if description.job is None else _model_of(call, description.job)
    return _taken(call, description.name, description.to_json() | {ORDER: order}, model)


def _data(call: Call, data: str, field: str = "data") -> str:
    """Return where a job reads, as its driver gets it."""
    place = require_allowed(data, call.services.settings.data, field)
    require_elsewhere(place, call.services.files.root, field)
    return place.uri


def _sent_model(call: Call) -> Callable[[Path], object]:
    """What writes the model that was sent to a file."""
    sent = request.files.get("model")
    if sent is None:
        raise DescriptionError("`model` must be a file of the form. Received: none", "model")
    most = call.services.settings.upload_max

    def write(path: Path) -> None:
        sent.save(path)
        size = path.stat().st_size
        if size > most:
            raise DescriptionError(f"`model` must have at most {most} bytes. Received: {size}", "model")

    return write


def _model_of(call: Call, job_id: str) -> Callable[[Path], object]:
    """Return what writes the model of a job that is done and that the caller sees."""
    try:
        job = call.services.jobs.get(call.account, job_id)
    except NotThereError as error:
        raise DescriptionError(f"`job` must be one of yours. Received: {job_id}", "job") from error
    model = call.services.files.of(job_id).model
    if request.files:
        raise DescriptionError("`model` must not be sent together with `job`. Received: both", "model")
    if job.kind != TRAIN or job.state is not JobState.DONE or not model.exists():
        raise DescriptionError(f"`job` must have trained a model. Received: {job_id}, {job.kind}, {job.state}", "job")

    def write(path: Path) -> None:
        try:
            shutil.copyfile(model, path)
        except FileNotFoundError:
            raise DescriptionError(
                f"`job` must be one of yours. Received: {job_id}, removed meanwhile", "job"
            ) from None

    return write


def _taken(
    call: Call, name: str, description: Mapping[str, Any], write_model: Callable[[Path], object]
) -> tuple[Any, int]:
    """Put a job into the queue with its model; all of it or nothing."""
    services = call.services
    if services.files.free() < services.settings.reserve:
        raise StorageError(f"the disk must have {services.settings.reserve} bytes left. Received: fewer")
    folder = services.files.incoming()
    try:
        write_model(folder.sent_model)
        require_archive(folder.sent_model)
        size, job_id = folder.sent_model.stat().st_size, new_id()
        folder = services.files.accept(folder, job_id)
        job = services.jobs.add(call.account, name, description, size, services.settings.quota, job_id)
    except BaseException:
        services.files.remove(folder)
        raise
    call.audit("submit", job.id)
    return whole_job(job), 201


def list_jobs(call: Call) -> tuple[Any, int]:
    """A page of jobs."""
    before, state = call.query.get("before"), call.query.get("state")
    jobs = call.services.jobs.page(
        call.account,
        state=None if state is None else JobState(state),
        before=None if before is None else call.services.jobs.get(call.account, before).number,
        limit=call.query["limit"],
    )
    more = len(jobs) == call.query["limit"]
    return {"jobs": [listed_job(job) for job in jobs], "next": jobs[-1].id if more else None}, 200


def show_job(call: Call) -> tuple[Any, int]:
    """One job."""
    return whole_job(_job(call)), 200


def cancel_job(call: Call) -> tuple[Any, int]:
    """Has a job end."""
    job = call.services.jobs.request_cancel(call.account, _job(call).id)
    call.audit("cancel", job.id)
    return whole_job(job), 200


def remove_job(call: Call) -> tuple[Any, int]:
    """Removes an ended job."""
    job = _job(call)
    call.services.jobs.remove(job)
    call.services.files.remove(call.services.files.of(job.id))
    call.audit("remove", job.id)
    return "", 204


def read_metrics(call: Call) -> tuple[Any, int]:
    """What a job says of itself."""
    rows, following = read_progress(_folder(call).progress, call.query["offset"])
    return {"rows": rows, "next": following}, 200


def read_log(call: Call) -> tuple[Any, int]:
    """What a job prints."""
    try:
        with _folder(call).log.open("rb") as file:
            offset = call.query["offset"]
            size = file.seek(0, 2)
            file.seek(min(size, max(0, offset if offset >= 0 else size + offset)))
            piece = file.read(PIECE_MAX)
            return {"text": piece.decode("utf-8", "replace"), "next": file.tell()}, 200
    except FileNotFoundError:
        return {"text": "", "next": 0}, 200


def fetch_model(call: Call) -> Response:
    """The trained model."""
    return _file(call, _folder(call).model, MODEL_TYPE, "model.keras")


def fetch_history(call: Call) -> Response:
    """A row a mini-batch."""
    return _file(call, _folder(call).history, TABLE_TYPE, "history.parquet")


def fetch_commits(call: Call) -> Response:
    """A row a commit."""
    return _file(call, _folder(call).commits, TABLE_TYPE, "commits.parquet")


def follow_job(call: Call) -> Response:
    """What has come since the last event that the caller knows, and no more: a thread is not held for who watches."""
    entries = read_since(_folder(call).journal, request.headers.get("Last-Event-ID", ""))
    return Response(as_events(entries), mimetype=STREAM_TYPE)


def save_page(call: Call) -> Response:
    """A job's page, as a file."""
    job = _job(call)
    entries = read_since(_folder(call).journal)
    if not entries:
        raise StateError(f"a job must have begun to train for its page. Received: {job.id}, which is {job.state}")
    html = saved_page([entries], [job.name or job.id[:8]], [(job.state.value, job.error or "")])
    return Response(
        html, mimetype="text/html", headers={"Content-Disposition": f"attachment; filename={job.id[:8]}.html"}
    )


def _job(call: Call) -> StoredJob:
    job_id = call.path["job"]
    if _ID.fullmatch(job_id) is None:
        raise NotThereError("there must be such a job. Received: another text than an id")
    return call.services.jobs.get(call.account, job_id)


def _folder(call: Call) -> JobFolder:
    return call.services.files.of(_job(call).id)


def _file(call: Call, path: Path, kind: str, name: str) -> Response:
    """A file of a job that is done: one that a driver has only begun to write is not served."""
    job = _job(call)
    if job.kind != TRAIN:
        raise StateError(f"a job must be for training to have a {name}. Received: {job.id}, which is to {job.kind}")
    if job.state is not JobState.DONE or not path.exists():
        raise StateError(f"a job must be done for its {name}. Received: {job.id}, which is {job.state}")
    try:
        return send_file(path, mimetype=kind, as_attachment=True, download_name=f"{job.id[:8]}-{name}", max_age=0)
    except FileNotFoundError:
        raise NotThereError(f"there must be such a job. Received: {job.id}") from None  # removed meanwhile
