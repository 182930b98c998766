"""The server's answers, as pydantic models from which the OpenAPI description is derived."""

from __future__ import annotations

from typing import Any

from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, Field

from distkeras.job_server.store.accounts import AuditEntry, TokenInfo, UserInfo
from distkeras.job_server.store.jobs import Attempt, JobSummary

#: The errors that any endpoint may answer with.
_ERRORS = {
    400: "The request cannot be read.",
    401: "The token is missing or not valid.",
    403: "The endpoint is for administrators.",
    404: "It does not exist, or it belongs to another user.",
    409: "The state of the job does not allow it.",
    413: "The request or the user's files are too large.",
    422: "The request is not valid; `field` names the part.",
    503: "The server's database does not answer.",
    429: "Too many requests without a valid token came from this address.",
    507: "The server's disk is nearly full.",
}
PREFIX = "/api/v1"


def endpoints(name: str) -> APIBlueprint:
    """Return a group of endpoints, all of which may answer with an `ErrorView`."""
    schema = {"$ref": f"#/components/schemas/{ErrorView.__name__}"}
    content = {"application/json": {"schema": schema}}
    responses: dict[Any, Any] = {status: {"description": text, "content": content} for status, text in _ERRORS.items()}
    return APIBlueprint(
        name, name, url_prefix=PREFIX, abp_responses=responses, operation_id_callback=lambda *, name, **_where: name
    )


class JobView(JobSummary):
    """A job with its description."""

    description: dict[str, Any] = Field(validation_alias="submitted")
    attempts: list[Attempt] = Field([], description="The drivers that the job has had.")


class JobsView(BaseModel):
    """One page of jobs; ``next`` is the ``before`` of the next page."""

    jobs: list[JobSummary]
    next: str | None


class RowsView(BaseModel):
    """Rows of a job's progress, and the offset of the next read."""

    rows: list[dict[str, Any]]
    next: int


class TextView(BaseModel):
    """A part of a job's log, and the offset of the next read."""

    text: str
    next: int


class MeView(BaseModel):
    """The caller."""

    name: str
    role: str


class TokensView(BaseModel):
    """Tokens, without their secrets."""

    tokens: list[TokenInfo]


class NewTokenView(BaseModel):
    """A new token, which is shown only once."""

    token: str


class UsersView(BaseModel):
    """Users."""

    users: list[UserInfo]


class AuditView(BaseModel):
    """One page of the audit log; ``next`` is the ``before`` of the next page."""

    entries: list[AuditEntry]
    next: int | None


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    field: str | None = Field(None, description="The part of the request that is not valid.")


class ErrorView(BaseModel):
    """The answer in place of a result."""

    error: ErrorDetail
