"""The application: it identifies the caller first, then checks the request; every error is a JSON answer.

The pages about the server itself are here too: its health, and metrics for Prometheus.
"""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from html import escape
from typing import Any, NoReturn

from flask import Blueprint, Response, g, jsonify, request
from flask.json.provider import DefaultJSONProvider
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from werkzeug.exceptions import HTTPException

import distkeras
from distkeras.dashboard.page import server_page
from distkeras.job_server.description import DESCRIPTION_BYTES_MAX, description_error, json_of
from distkeras.job_server.errors import DescriptionError, ForbiddenError, JobServerError, RateError, UnauthorizedError
from distkeras.job_server.server.about_jobs import jobs_api
from distkeras.job_server.server.about_users import account_api, admin_api
from distkeras.job_server.server.services import FailureLimit, Services, services
from distkeras.job_server.server.views import ErrorView
from distkeras.job_server.store.accounts import ADMIN, METRICS
from distkeras.ps.errors import ConfigurationError

server_pages = Blueprint("server", __name__)

#: Seconds after which a runner that has not checked the jobs counts as stuck.
SILENCE_MAX = 120.0


@server_pages.get("/healthz")
def show_health() -> tuple[Response, int]:
    """Answer 200 if the database answers and the jobs are checked, else 503; without a token."""
    problems = []
    try:
        services().jobs.counts()
    except SQLAlchemyError:
        problems.append("the database does not answer")
    if services().silence() > SILENCE_MAX:
        problems.append("the jobs are not being checked")
    return jsonify({"status": "failing" if problems else "ok", "problems": problems}), 503 if problems else 200


@server_pages.get("/metrics")
def show_metrics() -> Response:
    """Answer with the server's numbers in the text format of Prometheus; for the roles admin and metrics."""
    g.account.require(ADMIN, METRICS)
    registry, current = CollectorRegistry(), services()
    jobs = Gauge("distkeras_jobs", "Jobs in each state.", ["state"], registry=registry)
    for state, count in current.jobs.counts().items():
        jobs.labels(state.value).set(count)
    free, silence = current.files.free(), current.silence()
    Gauge("distkeras_disk_free_bytes", "Free bytes of the jobs' disk.", registry=registry).set(free)
    text = "Seconds since the jobs were last checked."
    Gauge("distkeras_runner_silence_seconds", text, registry=registry).set(silence)
    version = Gauge("distkeras_build_info", "The version of distkeras.", ["version"], registry=registry)
    version.labels(distkeras.__version__).set(1)
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


log = logging.getLogger(__name__)

#: Paths that need no token: they describe the interface, without data of jobs and users.
PUBLIC = {"/", "/openapi.json", "/dashboard", "/healthz"}
_POLICY = "Content-Security-Policy"
_HEADERS = {
    "Cache-Control": "no-store",
    _POLICY: "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class _StrictJson(DefaultJSONProvider):
    """JSON that all parsers read in the same way."""

    sort_keys = False

    def loads(self, s: str | bytes, **_keywords: Any) -> Any:
        return json_of(s)


def create_app(services: Services, failures: FailureLimit | None = None) -> OpenAPI:
    """Return the application, for any WSGI server."""
    app = OpenAPI(
        "distkeras.job_server",
        info=Info(
            title="distkeras job server",
            version=distkeras.__version__,
            description="Trains Keras models on Spark. Times are seconds since the epoch.",
        ),
        security_schemes={"token": {"type": "http", "scheme": "bearer"}},
        openapi_extensions={"security": [{"token": []}]},
        validation_error_callback=_refuse,
        validation_error_model=ErrorView,
        doc_ui=False,
        static_folder=None,
        template_folder=None,
    )
    app.json = _StrictJson(app)
    app.extensions["distkeras"] = services
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.config["MAX_FORM_MEMORY_SIZE"] = DESCRIPTION_BYTES_MAX
    app.config["MAX_FORM_PARTS"] = 50  # enough for an error that names unexpected parts
    app.config["MAX_CONTENT_LENGTH"] = services.settings.upload_max + 2 * DESCRIPTION_BYTES_MAX
    app.before_request(partial(_require_account, services, failures or FailureLimit()))
    app.before_request(_require_small_json)
    app.after_request(_with_headers)
    app.register_error_handler(Exception, _answer_error)
    for api in (jobs_api, account_api, admin_api):
        app.register_api(api)
    app.register_blueprint(server_pages)
    page = description_page(app.api_doc)
    app.add_url_rule("/openapi.json", "openapi", lambda: jsonify(app.api_doc))
    app.add_url_rule("/dashboard", "dashboard", _dashboard)
    app.add_url_rule("/", "page", lambda: Response(page, mimetype="text/html"))
    return app


def bearer(header: str | None) -> str:
    """Return the token in a header "Authorization"; an empty text if there is none."""
    match = re.fullmatch(r"Bearer +(\S{1,200}) *", header or "", re.IGNORECASE)
    return match[1] if match else ""


def description_page(description: dict[str, Any]) -> str:
    """Return an OpenAPI description as a page of HTML, without scripts and without resources from other hosts."""
    sections = []
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            answers = {status: answer for status, answer in operation["responses"].items() if int(status) < 300}
            parts = {"parameters": operation.get("parameters"), "body": operation.get("requestBody"), "answer": answers}
            blocks = "".join(_details(name, value) for name, value in parts.items() if value)
            title = f"<code>{method.upper()} {escape(path)}</code>"
            summary = escape(operation["summary"])
            sections.append(
                f'<section id="{operation["operationId"]}"><h2>{title}</h2><p>{summary}</p>{blocks}</section>'
            )
    schemas = "".join(_details(name, value) for name, value in description["components"]["schemas"].items())
    return _PAGE.replace("SECTIONS", "\n".join(sections)).replace("SCHEMAS", schemas)


def _details(name: str, value: Any) -> str:
    return f"<details><summary>{escape(name)}</summary><pre>{escape(json.dumps(value, indent=2))}</pre></details>"


def _dashboard() -> Response:
    """Return the page, which contains no data: it asks the user for a token."""
    page = server_page()
    return Response(page.html, mimetype="text/html", headers={_POLICY: page.policy})


def _require_account(services: Services, failures: FailureLimit) -> None:
    """Identify the caller before anything else is read.

    A valid token is accepted from every address, regardless of failures from the same address.
    """
    if request.path in PUBLIC and request.method in ("GET", "HEAD"):
        return
    token = bearer(request.headers.get("Authorization"))
    account = services.accounts.authenticate(token) if token else None
    if account is not None:
        if account.role == METRICS and request.path != "/metrics":
            raise ForbiddenError(f"the role {METRICS} may read /metrics only. Received: {request.path[:100]}")
        g.account = account
        return
    address = request.remote_addr or ""
    if failures.add(address):
        raise RateError("Too many requests without a valid token came from this address. Try again in a minute.")
    if token:
        services.accounts.record("", address, "refused")
    raise UnauthorizedError("a valid token must come in the header `Authorization: Bearer …`. Received: none")


def _require_small_json() -> None:
    """Limit the size of a JSON body, and parse the description in a form strictly, which the library does not."""
    if request.mimetype != "multipart/form-data":
        request.max_content_length = DESCRIPTION_BYTES_MAX
    elif "job" in request.form:
        json_of(request.form["job"])


def _refuse(error: ValidationError) -> NoReturn:
    """Raise the error of a request that does not match its model."""
    raise description_error(error, form=request.mimetype == "multipart/form-data")


def _with_headers(response: Response) -> Response:
    for name, value in _HEADERS.items():
        if name != _POLICY or name not in response.headers:
            response.headers[name] = value
    if request.is_secure:
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    return response


def _answer_error(error: Exception) -> Response:
    """Return an error as JSON; the traceback of an unexpected one is only in the log."""
    if isinstance(error, JobServerError):
        status, detail = error.status, {"type": type(error).__name__, "message": error.message}
        if isinstance(error, DescriptionError) and error.field:
            detail["field"] = error.field
    elif isinstance(error, OperationalError | PoolTimeoutError):
        log.error("%s %r failed: %s", request.method, request.path, str(error).partition("\n")[0])
        status, detail = 503, {"type": "UnavailableError", "message": "The server's database does not answer."}
    elif isinstance(error, ConfigurationError):
        status, detail = 422, {"type": "DescriptionError", "message": error.message}
    elif isinstance(error, HTTPException):
        status, detail = error.code or 500, {"type": error.name, "message": error.description or error.name}
    else:
        log.error("%s %r failed", request.method, request.path, exc_info=error)
        status, detail = (
            500,
            {"type": "JobServerError", "message": "The request failed; the server's log has the error."},
        )
    response = jsonify({"error": detail})
    response.status_code = status
    if isinstance(error, UnauthorizedError):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RateError):
        response.headers["Retry-After"] = "60"
    if isinstance(error, HTTPException) and error.get_response().headers.get("Allow"):
        response.headers["Allow"] = error.get_response().headers["Allow"]
    return response


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>distkeras job server</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 0; }
p { margin: .25rem 0; }
pre { overflow-x: auto; font-size: .85rem; }
</style>
</head>
<body>
<main>
<h1>distkeras job server</h1>
<p>Each request carries a token in its header: <code>Authorization: Bearer dk_…</code>.
<a href="/openapi.json">openapi.json</a> is this page for programs.</p>
SECTIONS
<h2 id="schemas">Schemas</h2>
SCHEMAS
</main>
</body>
</html>
"""
