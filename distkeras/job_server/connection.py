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
from pathlib import Path
from typing import IO, Any
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request

from distkeras.job_server.errors import BY_STATUS, DescriptionError, JobServerError, UnauthorizedError
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
                f"`token` must be a token of the server, or the variable {TOKEN} must be set. Received: "
                + ("a text with spaces or characters that no token has" if token else "none")
            )
        self.url, self._timeout = url.rstrip("/"), require_number("timeout", timeout)
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "*/*"}
        self._opener = urllib.request.build_opener(_NoRedirect, *([ProxyHandler({})] if local else []))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Return the JSON answer of an endpoint; None if it is empty.

        Raises:
            JobServerError: The server has refused the request; the class depends on the status.
            ServerLostError: The server cannot be reached.
            DeadlineError: The server does not respond.
        """
        given = {name: value for name, value in query.items() if value is not None}
        path += f"?{urllib.parse.urlencode(given)}" if given else ""
        return self._json(method, path, None if body is None else json.dumps(body).encode(), "application/json")

    def upload(self, path: str, name: str, value: Any, file_name: str, file: bytes | None) -> Any:
        """Post a form with a JSON part and, if there is one, a file; return the answer."""
        mark = f"--{secrets.token_hex(16)}"
        head = f'{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{json.dumps(value)}\r\n'
        disposition = f'form-data; name="{file_name}"; filename="{file_name}"'
        kind = "application/octet-stream"
        part = f"{mark}\r\nContent-Disposition: {disposition}\r\nContent-Type: {kind}\r\n\r\n".encode()
        parts = [head.encode(), *([] if file is None else [part, file, b"\r\n"]), f"{mark}--\r\n".encode()]
        body = b"".join(parts)
        try:
            return self._json("POST", path, body, f"multipart/form-data; boundary={mark[2:]}")
        except ServerLostError as error:
            reason = getattr(error.__cause__, "reason", error.__cause__)
            if isinstance(reason, ConnectionRefusedError):  # no server has seen the request
                raise
            raise ServerLostError(
                f"{error.message}. The request had {len(body)} bytes, perhaps more than the server accepts"
            ) from error

    def fetch(self, path: str, target: Path) -> None:
        """Write an endpoint's file to ``target``, completely or not at all."""
        with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=".distkeras-", delete=False) as partial:
            try:
                with self._open("GET", path) as answer:
                    shutil.copyfileobj(answer, partial)
                Path(partial.name).replace(target)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise

    def read(self, path: str) -> bytes:
        """Return an endpoint's file."""
        with self._open("GET", path) as answer:
            return answer.read()

    def _open(self, method: str, path: str, data: bytes | None = None, kind: str = "") -> IO[bytes]:
        headers = self._headers | ({} if data is None else {"Content-Type": kind})
        request = Request(f"{self.url}{_PREFIX}{path}", data=data, headers=headers, method=method)
        try:
            answer: IO[bytes] = self._opener.open(request, timeout=self._timeout)
            return answer
        except urllib.error.HTTPError as error:
            with error:
                typed = _error_of(error.code, error.read(_LONGEST))
            if isinstance(typed, UnauthorizedError):  # the server does not say whether a token came
                typed = UnauthorizedError(f"{self.url} has refused the token: it is not valid there, or was revoked")
            raise typed from None
        except OSError as error:  # or URLError, which may contain one
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise DeadlineError(f"{self.url} has not answered for {self._timeout:g} s") from error
            hint = "; is the server running?" if isinstance(reason, ConnectionRefusedError) else ""
            raise ServerLostError(f"{self.url} cannot be reached: {reason}{hint}") from error

    def _json(self, method: str, path: str, data: bytes | None, kind: str) -> Any:
        with self._open(method, path, data, kind) as answer:
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


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect, which could send a token to another host: the answer is an error."""

    def redirect_request(self, *_arguments: Any, **_keywords: Any) -> None:
        """Return no new request."""


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
