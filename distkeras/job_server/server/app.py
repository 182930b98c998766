"""The application: the caller is identified first, then the request; every error is an answer of JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from flask import Flask, Response, g, jsonify, request
from werkzeug.exceptions import HTTPException

from distkeras.dashboard.page import server_page
from distkeras.job_server.description import LONGEST, json_of
from distkeras.job_server.errors import DescriptionError, JobServerError, RateError, UnauthorizedError
from distkeras.job_server.server.endpoints import ENDPOINTS, JSON, PREFIX, Endpoint
from distkeras.job_server.server.openapi import description_page, openapi
from distkeras.job_server.server.services import Call, FailureLimit, Services
from distkeras.job_server.store.accounts import Account
from distkeras.ps.errors import ConfigurationError

log = logging.getLogger(__name__)

#: What is told to everybody: how to speak with the server, and nothing about it.
PUBLIC = {"/", "/openapi.json", "/dashboard"}
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


def create_app(services: Services, failures: FailureLimit | None = None) -> Flask:
    """The application, for any server of WSGI."""
    app = Flask("distkeras.job_server", static_folder=None, template_folder=None)
    app.config["MAX_FORM_MEMORY_SIZE"] = LONGEST
    app.config["MAX_FORM_PARTS"] = 50  # of which those that nobody expects are told by their names
    app.config["MAX_CONTENT_LENGTH"] = services.settings.upload_max + 2 * LONGEST
    app.json.sort_keys = False  # type: ignore[attr-defined]  # of Flask's default provider
    app.before_request(partial(_require_account, services, failures or FailureLimit()))
    app.after_request(_with_headers)
    app.register_error_handler(Exception, _answer_error)
    for endpoint in ENDPOINTS:
        rule = PREFIX + re.sub(r"{(\w+)}", r"<\1>", endpoint.path)
        view = partial(_serve, services, endpoint)
        app.add_url_rule(rule, endpoint.name, view, methods=[endpoint.method], provide_automatic_options=False)
    app.add_url_rule("/openapi.json", "openapi", lambda: jsonify(openapi()), provide_automatic_options=False)
    app.add_url_rule("/dashboard", "dashboard", _dashboard, provide_automatic_options=False)
    app.add_url_rule("/", "page", lambda: Response(description_page(), mimetype="text/html"))
    return app


def bearer(header: str | None) -> str:
    """The token in a header "Authorization"; an empty text where there is none."""
    found = re.fullmatch(r"Bearer +(\S{1,200}) *", header or "", re.IGNORECASE)
    return found[1] if found else ""


def _dashboard() -> Response:
    """A page without anything of anybody: it asks for a token, and reads with it what that one may."""
    page = server_page()
    return Response(page.html, mimetype="text/html", headers={_POLICY: page.policy})


def _require_account(services: Services, failures: FailureLimit) -> None:
    """Finds out who calls, before anything else is looked at.

    A valid token is let in from wherever it comes: a neighbor's failures are not its user's.
    """
    if request.path in PUBLIC and request.method in ("GET", "HEAD"):
        return
    token = bearer(request.headers.get("Authorization"))
    account = services.accounts.authenticate(token) if token else None
    if account is not None:
        g.account = account
        return
    address = request.remote_addr or ""
    if failures.add(address):
        raise RateError("fewer attempts must fail. Received: one more than this minute allows")
    if token:
        services.accounts.record("", address, "refused")
    raise UnauthorizedError("a valid token must come in the header `Authorization: Bearer …`. Received: none")


def _serve(services: Services, endpoint: Endpoint, **path: str) -> Response | tuple[Any, int]:
    account: Account = g.account
    if endpoint.admin:
        account.require_admin()
    call = Call(services, account, request.remote_addr or "", path, _query(endpoint), _body(endpoint))
    answer = endpoint.handler(call)
    return answer if isinstance(answer, Response) or answer[1] == 204 else (jsonify(answer[0]), answer[1])


def _query(endpoint: Endpoint) -> dict[str, Any]:
    """The parameters of the query, each of its type, with their defaults."""
    found: dict[str, Any] = {}
    for name, schema in endpoint.query.items():
        text = request.args.get(name)
        if text is None:
            if "default" in schema:
                found[name] = schema["default"]
            continue
        whole = schema.get("type") == "integer" and re.fullmatch(r"-?\d{1,17}", text)
        found[name] = int(text) if whole else text
        _require_valid(schema, found[name], name)
    return found


def _body(endpoint: Endpoint) -> Any:
    """The body's JSON, or that of the form; what an upload describes is checked by who takes it."""
    if endpoint.body is None:
        return None
    if endpoint.upload:
        more = sorted({*request.form, *request.files} - {"job", "model"})
        if more:
            raise DescriptionError(f"the form may have `job` and `model`. Received: {more[0][:100]!r}")
        return json_of(request.form.get("job", ""))
    if request.mimetype != JSON:
        raise DescriptionError(f"the body must be {JSON}. Received: {request.mimetype or 'nothing'}")
    if (request.content_length or 0) > LONGEST:
        raise DescriptionError(f"the body must have at most {LONGEST} bytes. Received: {request.content_length}")
    body = json_of(request.get_data(cache=False))
    _require_valid(endpoint.body, body, "")
    return body


@cache
def _validator(schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema))


def _require_valid(schema: Mapping[str, Any], value: Any, name: str) -> None:
    import jsonschema

    error = jsonschema.exceptions.best_match(_validator(json.dumps(schema)).iter_errors(value))
    if error is not None:
        field = ".".join(filter(None, [name, *map(str, error.absolute_path)]))
        raise DescriptionError(
            f"`{field or 'body'}` must be as the schema says. Received: {error.message[:300]}", field
        )


def _with_headers(response: Response) -> Response:
    for name, value in _HEADERS.items():
        if name != _POLICY or name not in response.headers:
            response.headers[name] = value
    if request.is_secure:
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    return response


def _answer_error(error: Exception) -> Response:
    """Return an error as JSON; of an unexpected one, the log has the traceback and the caller its kind."""
    if isinstance(error, JobServerError):
        status, told = error.status, {"type": type(error).__name__, "message": error.message}
        if isinstance(error, DescriptionError) and error.field:
            told["field"] = error.field
    elif isinstance(error, ConfigurationError):
        status, told = 422, {"type": "DescriptionError", "message": error.message}
    elif isinstance(error, HTTPException):
        status, told = error.code or 500, {"type": error.name, "message": error.description or error.name}
    else:
        log.error("%s %r failed", request.method, request.path, exc_info=error)
        status, told = 500, {"type": "JobServerError", "message": "the server's log says what went wrong"}
    response = jsonify({"error": told})
    response.status_code = status
    if isinstance(error, UnauthorizedError):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RateError):
        response.headers["Retry-After"] = "60"
    if isinstance(error, HTTPException) and error.get_response().headers.get("Allow"):
        response.headers["Allow"] = error.get_response().headers["Allow"]
    return response
