"""Endpoints about jobs: each asks the store as whoever calls, so that what is somebody else's is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flask import Response, request, send_file

from distkeras.dashboard.journal import read_since
from distkeras.dashboard.page import saved_page
from distkeras.dashboard.stream import STREAM_TYPE, as_events
from distkeras.jobs.description import JobDescription, require_allowed
from distkeras.jobs.errors import DescriptionError, NotThereError, StateError, StorageError
from distkeras.jobs.model_file import require_archive
from distkeras.jobs.runner.files import PIECE_MAX, JobFolder, read_progress
from distkeras.jobs.server.services import Call, Services
from distkeras.jobs.server.views import listed_job, whole_job
from distkeras.jobs.states import JobState
from distkeras.jobs.store.jobs import StoredJob, new_id

_ID = re.compile(r"[0-9a-f]{32}")
_PARQUET = "application/vnd.apache.parquet"


def submit_job(call: Call) -> tuple[Any, int]:
    """Takes a job in: everything that can be checked without Spark and Keras is, before it is."""
    services = call.services
    description = JobDescription.from_json(call.body)
    location = require_allowed(description.data, services.settings.data)
    _require_not_ours(location, services)
    sent = request.files.get("model")
    if sent is None:
        raise DescriptionError("`model` must be a file of the form. Received: none", "model")
    if services.files.free() < services.settings.reserve:
        raise StorageError(f"the disk must have {services.settings.reserve} bytes left. Received: fewer")
    folder = services.files.incoming()
    try:
        sent.save(folder.sent_model)
        size = folder.sent_model.stat().st_size
        if size > services.settings.upload_max:
            raise DescriptionError(
                f"`model` must have at most {services.settings.upload_max} bytes. Received: {size}", "model"
            )
        require_archive(folder.sent_model)
        job_id = new_id()
        folder = services.files.accept(folder, job_id)
        stored = description.to_json() | {"location": location}
        job = services.jobs.add(call.account, description.name, stored, size, services.settings.quota, job_id)
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
    return _file(call, _folder(call).model, "application/zip", "model.keras")


def fetch_history(call: Call) -> Response:
    """A row a mini-batch."""
    return _file(call, _folder(call).history, _PARQUET, "history.parquet")


def fetch_commits(call: Call) -> Response:
    """A row a commit."""
    return _file(call, _folder(call).commits, _PARQUET, "commits.parquet")


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
    """A file of a job that is done: one that a driver has only begun to write is nobody's to read."""
    job = _job(call)
    if job.state is not JobState.DONE or not path.exists():
        raise StateError(f"a job must be done for its {name}. Received: {job.id}, which is {job.state}")
    return send_file(path, mimetype=kind, as_attachment=True, download_name=f"{job.id[:8]}-{name}", max_age=0)


def _require_not_ours(location: str, services: Services) -> None:
    """Whether what a job reads lies outside of the files of the jobs, which are of others too."""
    ours, path = services.files.root.resolve(), Path(location.removeprefix("file://"))
    if location.startswith("file://") and (path.is_relative_to(ours) or ours.is_relative_to(path)):
        raise DescriptionError("`data` must be elsewhere than the server's own files. Received: a place there", "data")
