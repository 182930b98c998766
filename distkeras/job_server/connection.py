"""The client's HTTP connection, by the standard library, which sends a token to no host but its server."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request

from distkeras.job_server.errors import BY_STATUS, DescriptionError, JobServerError
from distkeras.ps.errors import ConfigurationError, DeadlineError, ServerLostError
from distkeras.ps.validate import require_number

_PREFIX = "/api/v1"
#: The most bytes of a JSON answer.
_LONGEST = 64 << 20
TOKEN = "DISTKERAS_TOKEN"
#: The statuses of a proxy whose server is unreachable, as during a restart.
_FROM_PROXIES = (502, 503, 504)


class ServerConnection:
    """Sends requests to a server in the name of a user; arguments and their errors are those of `JobClient`."""

    def __init__(self, url: str, token: str | None, timeout: float, *, plain_http: bool = False) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigurationError(f"`url` must be like https://host:port. Received: url={url!r}")
        local = is_loopback(parts.hostname)
        if parts.scheme == "http" and not (local or plain_http):
            raise ConfigurationError(
                "`url` must begin with https://, because each request carries the token; or set `plain_http`. "
                f"Received: url={url!r}"
            )
        token = token or os.environ.get(TOKEN, "")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigurationError(
                f"`token` must be a token of the server, or the variable {TOKEN} must be set. Received: none"
            )
        self.url = url.rstrip("/")
        self._token = token
        self._timeout = require_number("timeout", timeout)
        proxies = [ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(NoRedirect, *proxies)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Return the JSON answer of an endpoint; None if it is empty.

        Raises:
            JobServerError: The server has refused the request; the class depends on the status.
            ServerLostError: The server cannot be reached.
            DeadlineError: The server does not respond.
        """
        data = None if body is None else json.dumps(body).encode()
        return self._json(self._request(method, path, data, "application/json", query))

    def upload(self, path: str, name: str, value: Any, file_name: str, file: bytes | None) -> Any:
        """Post a form with a JSON part and, if there is one, a file; return the answer."""
        boundary = secrets.token_hex(16)
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n'
            f"Content-Type: application/json\r\n\r\n{json.dumps(value)}\r\n"
        )
        if file is not None:
            head += (
                f'--{boundary}\r\nContent-Disposition: form-data; name="{file_name}"; filename="{file_name}"\r\n'
                f"Content-Type: application/octet-stream\r\n\r\n"
            )
        parts = [head.encode()] if file is None else [head.encode(), file, b"\r\n"]
        body = b"".join((*parts, f"--{boundary}--\r\n".encode()))
        request = self._request("POST", path, body, f"multipart/form-data; boundary={boundary}", {})
        try:
            return self._json(request)
        except ServerLostError as error:
            raise ServerLostError(
                f"{error.message}. The request had {len(body)} bytes, perhaps more than the server accepts"
            ) from error

    def fetch(self, path: str, target: Path) -> None:
        """Write an endpoint's file to ``target``, completely or not at all."""
        with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=".distkeras-", delete=False) as partial:
            try:
                with self._open(self._request("GET", path, None, "", {})) as answer:
                    shutil.copyfileobj(answer, partial)
                Path(partial.name).replace(target)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise

    def _request(self, method: str, path: str, data: bytes | None, kind: str, query: Mapping[str, Any]) -> Request:
        parameters = {name: value for name, value in query.items() if value is not None}
        text = f"{self.url}{_PREFIX}{path}" + (f"?{urllib.parse.urlencode(parameters)}" if parameters else "")
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "*/*"}
        if data is not None:
            headers["Content-Type"] = kind
        return Request(text, data=data, headers=headers, method=method)

    def _open(self, request: Request) -> IO[bytes]:
        try:
            answer: IO[bytes] = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise _error_of(error.code, error.read(_LONGEST)) from None
        except TimeoutError as error:
            raise DeadlineError(f"{self.url} has not answered for {self._timeout:g} s") from error
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise DeadlineError(f"{self.url} has not answered for {self._timeout:g} s") from error
            raise ServerLostError(f"{self.url} cannot be reached: {reason}") from error
        return answer

    def _json(self, request: Request) -> Any:
        with self._open(request) as answer:
            text = answer.read(_LONGEST)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise JobServerError(f"{self.url} must answer with JSON. Received: {text[:100]!r}") from None


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NoRedirect(HTTPRedirectHandler):
    """Follows no redirect, which could send a token to another host."""

    def redirect_request(self, *_arguments: Any, **_keywords: Any) -> None:
        """Return no new request, so that the answer is an error."""


def _error_of(status: int, body: bytes) -> JobServerError | ServerLostError:
    """Return the error that the server describes, or ServerLostError if a proxy cannot reach the server."""
    kind = BY_STATUS.get(status, JobServerError)
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), str(error.get("field", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        if status in _FROM_PROXIES:
            return ServerLostError(f"a proxy cannot reach the job server: status {status}")
        return kind(f"the server must answer the request. Received: status {status}")
    return kind(message, field) if kind is DescriptionError else kind(message)
