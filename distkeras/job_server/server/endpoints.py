"""What all endpoints share: the objects that they use, the audit log, and how the OpenAPI description shows errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flask import current_app, g, request
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, Field

from distkeras.job_server.errors import BY_STATUS
from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore

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
