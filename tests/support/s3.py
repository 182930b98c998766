"""A real HTTP server that speaks the protocol of S3, and the faults that are planted in it."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from support.patience import patience

#: The environment of a client: moto accepts any key.
CLIENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}

Environ = dict[str, Any]
Start = Callable[..., Any]
App = Callable[[Environ, Start], Iterable[bytes]]


class Fault:
    """Does nothing; the base of the faults.

    Args:
        times: how often each request fails, so that 1 means that its first repetition succeeds.
    """

    def __init__(self, times: float = math.inf) -> None:
        self.times = times
        self._counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
        #: How often it struck.
        self.struck = 0
        self._busy = True

    def meets(self, environ: Environ) -> bool:
        return True

    def answer(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        key = (environ["REQUEST_METHOD"], environ["PATH_INFO"], frozenset(query), "HTTP_X_AMZ_COPY_SOURCE" in environ)
        if not self.meets(environ) or self._counts[key] >= self.times:
            return app(environ, start)
        self._counts[key] += 1
        self.struck += 1
        return self.strike(environ, start, app)

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        return app(environ, start)


class Status(Fault):
    """Answers with the status 500 and 503 in turn, and does nothing of what was requested."""

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        self._busy = not self._busy
        return _refused(
            environ, start, *(("503 Slow Down", "SlowDown") if self._busy else ("500 Error", "InternalError"))
        )


class ErrorWithin200(Fault):
    """Answers a copy, or the end of an upload, with an error in a reply whose status says success, as S3 may."""

    def meets(self, environ: Environ) -> bool:
        ends_upload = environ["REQUEST_METHOD"] == "POST" and "uploadId=" in environ["QUERY_STRING"]
        return "HTTP_X_AMZ_COPY_SOURCE" in environ or ends_upload

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        return _refused(environ, start, "200 OK", "InternalError")


class Slow(Fault):
    """Answers late."""

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        threading.Event().wait(0.01)
        return app(environ, start)


class Silent(Fault):
    """Does not answer until the `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self.end = self._over.set

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        self._over.wait(patience(60))
        raise _closed(environ)


class CutRequest(Fault):
    """Closes the connection within the body of a request, and does nothing of what was requested."""

    def meets(self, environ: Environ) -> bool:
        return environ["REQUEST_METHOD"] in ("PUT", "POST")

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
        raise _closed(environ)


class LostReply(Fault):
    """Does what was requested, and closes the connection without a reply."""

    def meets(self, environ: Environ) -> bool:
        return environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE")

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        _answered(environ, app)
        raise _closed(environ)


class CutReply(Fault):
    """Closes the connection within the body of a reply."""

    def meets(self, environ: Environ) -> bool:
        return environ["REQUEST_METHOD"] == "GET"

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        status, headers, body = _answered(environ, app)
        start(status, headers)
        yield body[: len(body) // 2]
        raise _closed(environ)


class LaggingLists(Fault):
    """Leaves each new object out of the first ``times`` lists."""

    def __init__(self, times: float = math.inf) -> None:
        super().__init__()
        self._lists, self._new = times, dict[str, int]()

    def meets(self, environ: Environ) -> bool:
        return environ["REQUEST_METHOD"] in ("PUT", "POST") or "list-type" in environ["QUERY_STRING"]

    def strike(self, environ: Environ, start: Start, app: App) -> Iterable[bytes]:
        status, headers, body = _answered(environ, app)
        if environ["REQUEST_METHOD"] in ("PUT", "POST"):
            self._new.setdefault(unquote(environ["PATH_INFO"]).split("/", 2)[-1], 0)
        else:
            for key, missing in self._new.items():
                if missing < self._lists:
                    entry = rf"<Contents>\s*<Key>{re.escape(key)}</Key>.*?</Contents>".encode()
                    body, found = re.subn(entry, b"", body, flags=re.DOTALL)
                    self._new[key] += found
        start(status, [header for header in headers if header[0].lower() != "content-length"])
        return [body]


def _refused(environ: Environ, start: Start, status: str, code: str) -> list[bytes]:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>planted</Message></Error>'.encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _answered(environ: Environ, app: App) -> tuple[str, list[tuple[str, str]], bytes]:
    begun = list[Any]()
    body = b"".join(app(environ, lambda status, headers, *_: begun.extend((status, headers))))
    return begun[0], begun[1], body


def _closed(environ: Environ) -> ConnectionError:
    """Close a request's connection, and return the error that ends its thread."""
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return ConnectionError("planted")


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"  # clients keep their connections
    disable_nagle_algorithm = True


class S3:
    """The server; ``fault`` is what happens to each request now."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        self.fault = Fault()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def uri(self, path: str) -> str:
        return f"s3://{path}?scheme=http&region=us-east-1&allow_bucket_creation=true&endpoint_override={self.endpoint}"

    def _answer(self, environ: Environ, start: Start) -> Iterable[bytes]:
        return self.fault.answer(environ, start, self._app)

    @contextlib.contextmanager
    def serving(self) -> Iterator[S3]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    @contextlib.contextmanager
    def broken(self, fault: Fault) -> Iterator[Fault]:
        self.fault = fault
        try:
            yield fault
        finally:
            self.fault = Fault()
