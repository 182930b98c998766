"""What the server tells of jobs and users, and the schemas of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from distkeras.job_server.states import KINDS, JobState
from distkeras.job_server.store.accounts import AuditEntry, TokenInfo, UserInfo
from distkeras.job_server.store.jobs import StoredJob

_KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


@dataclasses.dataclass(frozen=True)
class JobView:
    """What a list shows of a job; times are seconds since the epoch."""

    id: str
    kind: str
    user: str
    name: str
    state: str
    created: float
    started: float | None
    ended: float | None
    attempt: int
    cancelled: bool
    error: str | None
    bytes: int

    @classmethod
    def of(cls, job: StoredJob) -> JobView:
        """Of one that the database has."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in ("state", "cancelled")]
        shown = {name: getattr(job, name) for name in names}
        return cls(state=job.state.value, cancelled=job.cancel is not None, **shown)


def listed_job(job: StoredJob) -> dict[str, Any]:
    """A job in a list."""
    return dataclasses.asdict(JobView.of(job))


def whole_job(job: StoredJob) -> dict[str, Any]:
    """A job by itself."""
    return listed_job(job) | {"description": job.submitted}


def _schema_of(kind: type) -> dict[str, Any]:
    """Of a dataclass whose fields are numbers and texts."""
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = str(field.type)
        told = _KINDS[name.removesuffix(" | None")]
        properties[field.name] = {"type": [told, "null"] if name.endswith("None") else told}
    return {"type": "object", "required": list(properties), "properties": properties}


def listed(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list, and of what to ask for next."""
    properties = {name: {"type": "array", "items": schema}, "next": {"type": ["string", "integer", "null"]}}
    return {"type": "object", "required": [name], "properties": properties}


def new_token() -> dict[str, Any]:
    """Return the schema of a new token, which is shown once."""
    return {"type": "object", "required": ["token"], "properties": {"token": {"type": "string"}}}


FOUND_JOB = _schema_of(JobView)
FOUND_JOB["properties"]["kind"] = {"enum": list(KINDS)}
FOUND_JOB["properties"]["state"] = {"enum": [state.value for state in JobState]}
JOB = FOUND_JOB | {"properties": FOUND_JOB["properties"] | {"description": {"type": "object"}}}
TOKEN, USER, AUDIT = _schema_of(TokenInfo), _schema_of(UserInfo), _schema_of(AuditEntry)
ME = {
    "type": "object",
    "required": ["name", "role"],
    "properties": {"name": {"type": "string"}, "role": {"type": "string"}},
}
ROWS = {
    "type": "object",
    "required": ["rows", "next"],
    "properties": {"rows": {"type": "array", "items": {"type": "object"}}, "next": {"type": "integer"}},
}
PIECE = {
    "type": "object",
    "required": ["text", "next"],
    "properties": {"text": {"type": "string"}, "next": {"type": "integer"}},
}
#: Of every answer that is an error.
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "field": {"type": "string", "description": "of what was sent"},
            },
        }
    },
}
