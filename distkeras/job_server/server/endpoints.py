"""The endpoints, in one table: the routes, the checks of what comes in, and the OpenAPI description are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flask import Response

from distkeras.dashboard.journal import STREAM_TYPE
from distkeras.job_server.schema import LINE, job_schema, prediction_schema
from distkeras.job_server.server import about_jobs, about_users
from distkeras.job_server.server.services import Call
from distkeras.job_server.server.views import AUDIT, FOUND_JOB, JOB, ME, PIECE, ROWS, TOKEN, USER, listed, new_token
from distkeras.job_server.states import JobState
from distkeras.job_server.store.accounts import NAME, ROLES

JSON, BYTES = "application/json", "application/octet-stream"
PREFIX = "/api/v1"


@dataclass(frozen=True)
class Endpoint:
    """One method of one path.

    Args:
        method: of HTTP.
        path: below `PREFIX`, with named parts in braces.
        summary: what it does.
        handler: what does it.
        answer: schema of the JSON that it answers with; None: something else.
        status: of a good answer.
        query: the schema of each parameter of the query.
        body: the schema of its JSON; None: there is none.
        upload: the body is a form: ``job``, of that JSON, and the file ``model``.
        model_optional: the form may come without the file.
        admin: only for administrators.
        media: type of what it answers with.
    """

    method: str
    path: str
    summary: str
    handler: Callable[[Call], Response | tuple[Any, int]]
    answer: Mapping[str, Any] | None = None
    status: int = 200
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    upload: bool = False
    model_optional: bool = False
    admin: bool = False
    media: str = JSON

    @property
    def name(self) -> str:
        """Unlike any other's."""
        return self.handler.__name__


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_LIMIT = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
_OFFSET = {"type": "integer", "minimum": 0, "maximum": 2**53, "default": 0}
_NAME = {"type": "string", "pattern": f"^{NAME.pattern}$"}

#: All of them.
ENDPOINTS = (
    Endpoint(
        "POST",
        "/jobs",
        "Submit a job: its description, and a model that Keras saved.",
        about_jobs.submit_job,
        JOB,
        201,
        body=job_schema(),
        upload=True,
    ),
    Endpoint(
        "POST",
        "/predictions",
        "Submit a predict job: its description, and a model that Keras saved, or the job that has trained one.",
        about_jobs.submit_prediction,
        JOB,
        201,
        body=prediction_schema(),
        upload=True,
        model_optional=True,
    ),
    Endpoint(
        "GET",
        "/jobs",
        "List jobs, the latest first; `next` is what `before` must be for those that follow.",
        about_jobs.list_jobs,
        listed("jobs", FOUND_JOB),
        query={
            "state": {"enum": [state.value for state in JobState]},
            "before": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
            "limit": _LIMIT,
        },
    ),
    Endpoint("GET", "/jobs/{job}", "Look at a job.", about_jobs.show_job, JOB),
    Endpoint("POST", "/jobs/{job}/cancel", "End a job that waits or runs.", about_jobs.cancel_job, JOB),
    Endpoint("DELETE", "/jobs/{job}", "Remove an ended job, and its files.", about_jobs.remove_job, {}, 204),
    Endpoint(
        "GET",
        "/jobs/{job}/metrics",
        "Read what a job says of itself, from the byte `offset` on: also while it trains.",
        about_jobs.read_metrics,
        ROWS,
        query={"offset": _OFFSET},
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/log",
        "Read what its driver and Spark print, from the byte `offset` on; one below 0 counts from the end.",
        about_jobs.read_log,
        PIECE,
        query={"offset": {**_OFFSET, "minimum": -(2**53)}},
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/stream",
        "Follow a job: server-sent events after `Last-Event-ID`. The answer ends, and is to be asked for again.",
        about_jobs.follow_job,
        media=STREAM_TYPE,
    ),
    Endpoint(
        "GET", "/jobs/{job}/page", "Fetch a job's page as one file (HTML).", about_jobs.save_page, media="text/html"
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/model",
        "Fetch the trained model (.keras).",
        about_jobs.fetch_model,
        media=about_jobs.MODEL_TYPE,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/history",
        "Fetch a row a mini-batch (Parquet).",
        about_jobs.fetch_history,
        media=about_jobs.TABLE_TYPE,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/commits",
        "Fetch a row a commit (Parquet).",
        about_jobs.fetch_commits,
        media=about_jobs.TABLE_TYPE,
    ),
    Endpoint("GET", "/me", "Say who calls.", about_users.show_me, ME),
    Endpoint(
        "GET", "/tokens", "List your tokens; as an administrator all.", about_users.list_tokens, listed("tokens", TOKEN)
    ),
    Endpoint(
        "POST",
        "/tokens",
        "Make a token, which is shown only in this answer; for another user only as an administrator.",
        about_users.make_token,
        new_token(),
        201,
        body=_object(
            [],
            user=_NAME,
            note={**LINE, "default": ""},
            days={"type": "number", "exclusiveMinimum": 0, "maximum": 36_500, "description": "that it counts"},
        ),
    ),
    Endpoint("DELETE", "/tokens/{token}", "Have a token not count any more.", about_users.revoke_token, {}, 204),
    Endpoint("GET", "/users", "List users.", about_users.list_users, listed("users", USER), admin=True),
    Endpoint(
        "POST",
        "/users",
        "Add a user, without a token.",
        about_users.make_user,
        USER,
        201,
        body=_object(["name"], name=_NAME, role={"enum": list(ROLES), "default": "user"}),
        admin=True,
    ),
    Endpoint(
        "DELETE",
        "/users/{user}",
        "Have none of a user's tokens count any more; the jobs stay.",
        about_users.remove_user,
        {},
        204,
        admin=True,
    ),
    Endpoint(
        "GET",
        "/audit",
        "Read who did what, the latest first.",
        about_users.read_audit,
        listed("entries", AUDIT),
        query={"before": {"type": "integer", "minimum": 1, "maximum": 2**53}, "limit": _LIMIT},
        admin=True,
    ),
)
