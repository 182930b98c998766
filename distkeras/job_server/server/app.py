"""The application: it identifies the caller first, then checks the request; every error is a JSON answer.

The pages about the server itself are here too: its health, and metrics for Prometheus.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from flask import Blueprint, Response, g, jsonify, redirect, request
from flask.json.provider import DefaultJSONProvider
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from waitress import wasyncore
from waitress.server import create_server
from werkzeug.exceptions import HTTPException

import distkeras
from distkeras.dashboard.page import server_page
from distkeras.job_server.description import DESCRIPTION_BYTES_MAX, description_error, json_of
from distkeras.job_server.errors import (
    DescriptionError,
    ForbiddenError,
    JobServerError,
    NotFoundError,
    RateError,
    UnauthorizedError,
    UnavailableError,
)
from distkeras.job_server.server.endpoints import ErrorView, Services, account_api, admin_api, jobs_api, services
from distkeras.job_server.store.accounts import ADMIN, METRICS
from distkeras.ps.errors import ConfigurationError

log = logging.getLogger(__name__)

#: Seconds after which a runner that has not checked the jobs counts as stuck.
SILENCE_MAX = 120.0
#: Paths that need no token: they describe the interface, without data of jobs and users.
PUBLIC = {"/", "/openapi.json", "/dashboard", "/healthz"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
#: The most addresses whose failures are counted; beyond it, counting begins at zero.
_ADDRESSES = 10_000

server_pages = Blueprint("server", __name__)


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
    version = Gauge("distkeras_build_info", "The version of distkeras.", ["version"], registry=registry)
    version.labels(distkeras.__version__).set(1)
    for name, text, value in (
        ("distkeras_disk_free_bytes", "Free bytes of the jobs' disk.", current.files.free()),
        ("distkeras_runner_silence_seconds", "Seconds since the jobs were last checked.", current.silence()),
    ):
        Gauge(name, text, registry=registry).set(value)
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


@server_pages.get("/dashboard")
def show_dashboard() -> Response:
    """Answer with the page, which contains no data: it asks the user for a token."""
    page = server_page()
    return Response(page.html, mimetype="text/html", headers={"Content-Security-Policy": page.policy})


@server_pages.get("/")
def show_start() -> Any:
    """Lead a browser to the page."""
    return redirect("/dashboard")


class FailureLimit:
    """Counts failures by address, from zero every ``seconds``; thread-safe, with bounded memory."""

    def __init__(self, most: int = 20, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._lock, self._window = threading.Lock(), -1
        self._failures: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count one failure; return whether the address has more than the limit."""
        with self._lock:
            window = int(self._clock() / self._seconds)
            if window != self._window or len(self._failures) > _ADDRESSES:
                self._window, self._failures = window, Counter()
            self._failures[address] += 1
            return self._failures[address] > self._most


class _StrictJson(DefaultJSONProvider):
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
    app.add_url_rule("/openapi.json", "openapi", lambda: jsonify(app.api_doc))
    return app


def _require_account(services: Services, failures: FailureLimit) -> None:
    """Identify the caller before anything else is read; a valid token counts despite failures from its address."""
    if request.path in PUBLIC and request.method in ("GET", "HEAD"):
        return
    given = request.authorization
    token = given.token if given is not None and given.type == "bearer" else None
    account = services.accounts.authenticate(token) if token else None
    if account is not None:
        if account.role == METRICS and request.path != "/metrics":
            raise ForbiddenError(f"the role {METRICS} may read /metrics only. Received: {request.path[:100]}")
        if not request.path.isprintable():  # databases refuse some of the other characters
            raise NotFoundError("a path has printable characters only. Received: another one")
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
        response.headers.setdefault(name, value)
    if request.is_secure:
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    return response


def _answer_error(error: Exception) -> Response:
    """Return an error as JSON; the traceback of an unexpected one is only in the log."""
    headers = {}
    if isinstance(error, HTTPException):
        status, detail = error.code or 500, {"type": error.name, "message": error.description or error.name}
        headers = {name: value for name, value in error.get_headers() if name == "Allow"}
    else:
        known = _known_error(error)
        status, detail = known.status, {"type": type(known).__name__, "message": known.message}
        if isinstance(known, DescriptionError) and known.field:
            detail["field"] = known.field
        if isinstance(known, UnauthorizedError):
            headers["WWW-Authenticate"] = "Bearer"
        if isinstance(known, RateError):
            headers["Retry-After"] = "60"
    response = jsonify({"error": detail})
    response.status_code = status
    response.headers.update(headers)
    return response


def _known_error(error: Exception) -> JobServerError:
    if isinstance(error, JobServerError):
        return error
    if isinstance(error, ConfigurationError):
        return DescriptionError(error.message)
    if isinstance(error, OperationalError | PoolTimeoutError):
        log.error("%s %r failed: %s", request.method, request.path, str(error).partition("\n")[0])
        return UnavailableError("The server's database does not answer.")
    log.error("%s %r failed", request.method, request.path, exc_info=error)
    return JobServerError("The request failed; the server's log has the error.")


class HttpListener:
    """Serves an application over HTTP, with bodies of at most ``upload_max`` bytes.

    Waitress receives all of a request before the application sees it, and has no deadline for a peer that sends a byte
    now and then. So only this machine may reach it directly: for others, a reverse proxy requires tokens of uploads,
    limits their number, and ends slow connections (`docs/guide/gateway.md`).
    """

    def __init__(self, app: Any, host: str, port: int, *, upload_max: int, trusted_proxy: str | None = None) -> None:
        try:
            bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigurationError(
                f"`host` and `port` must be a free address of this machine. Received: {host}:{port}: {error}"
            ) from error
        self.port: int = bound.getsockname()[1]
        proxy: dict[str, Any] = {}
        if trusted_proxy is not None:
            headers = {"x-forwarded-for", "x-forwarded-proto"}
            proxy = {"trusted_proxy": trusted_proxy, "trusted_proxy_headers": headers, "trusted_proxy_count": 1}
        self._map: dict[int, Any] = {}
        self._server = create_server(
            app,
            map=self._map,
            sockets=[bound],
            ident=None,
            threads=8,
            connection_limit=500,
            channel_timeout=60,  # seconds after which an idle connection is closed
            max_request_header_size=1 << 14,
            max_request_body_size=upload_max,
            clear_untrusted_proxy_headers=True,
            **proxy,
        )

    def run(self) -> None:
        """Serve until `stop`, or until a signal's handler raises SystemExit in this thread."""
        try:
            self._server.run()
        finally:
            self._server.task_dispatcher.shutdown()
            wasyncore.close_all(self._map)

    def stop(self) -> None:
        """Close all connections, and make `run` return; from another thread."""
        # The thread that serves closes them, so that it does not read from a closed connection.
        self._server.trigger.pull_trigger(lambda: wasyncore.close_all(self._map))
