"""A page of some jobs of this process, served on loopback, shown in a notebook, or saved as a file."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, finalize

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.dashboard.page import Page, live_page, saved_page
from distkeras.dashboard.watch import STREAM_TYPE, JobWatch, as_events, read_since
from distkeras.ps.errors import ConfigurationError, LocalProtocolError

if TYPE_CHECKING:
    from distkeras.results import JobOutcome, JobResults

_LOOPBACK, _HTML = "127.0.0.1", "text/html; charset=utf-8"
#: Connections at a time: each has a thread.
_CONNECTIONS = 64
#: Seconds that a browser may keep a read or a write waiting.
_PATIENCE = 30.0
#: Seconds after which a stream without news shows that it lives; and after which it ends, to be asked for again.
_SIGN, _STREAM = 10.0, 300.0
#: The pages that may show this one in a frame: notebooks of this machine.
_FRAMES = "'self' http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:* vscode-webview:"


class _Server(ThreadingHTTPServer):
    """Gives each connection a thread, and refuses connections above a limit."""

    #: Connections above it are dropped by the system, and each is tried again after a second or more.
    request_queue_size = _CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread, or close it if there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Free the thread's place at its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: browsers may go away at any time."""


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection. Attributes of the class have what it serves."""

    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE
    token: str
    page: Page
    watches: Sequence[JobWatch]
    over: threading.Event

    def do_GET(self) -> None:
        """Answer with the page, its saved form, or a job's stream."""
        match = re.fullmatch(r"/([\w-]{1,64})/(|job\.html|jobs/\d{1,3})", self.path.partition("?")[0])
        known = match is not None and hmac.compare_digest(match[1], self.token)
        resource = match[2] if match is not None and known else None
        if resource == "":
            self._answer(HTTPStatus.OK, _HTML, self.page.html, self.page.policy)
        elif resource == "job.html":
            journals = [read_since(watch.path) for watch in self.watches]
            self._answer(HTTPStatus.OK, _HTML, saved_page(journals).encode())
        elif resource is not None and int(resource[5:]) < len(self.watches):
            self._stream(self.watches[int(resource[5:])])
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self._head(status, kind, policy)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, policy: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")

    def _stream(self, watch: JobWatch) -> None:
        self._head(HTTPStatus.OK, STREAM_TYPE, "default-src 'none'")
        self.send_header("Connection", "close")
        self.end_headers()
        last, ends = self.headers.get("Last-Event-ID", ""), time.monotonic() + _STREAM
        while not self.over.is_set() and time.monotonic() < ends:
            with watch.changed:
                entries = read_since(watch.path, last)
                if not entries and not self.over.is_set():
                    watch.changed.wait(_SIGN)
                    entries = read_since(watch.path, last)
            if entries:
                last = entries[-1].id
            self.wfile.write(as_events(entries))
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: an access log would fill the notebook."""


class Observed(Protocol):
    """A trainer, as far as a page needs it."""

    outcome: JobOutcome
    observers: list[Callback]


#: The page of each trainer that has one.
_PAGES: WeakKeyDictionary[Observed, Dashboard] = WeakKeyDictionary()
#: Pixels of the frame in a notebook.
_HEIGHT = 760


class Dashboard(Callback):
    """Show a trainer's jobs on a live page; a callback.

    ::

        dashboard = Dashboard()                              # in a notebook; elsewhere, open its `url`
        trainer.train(df, callbacks=[dashboard])
        dashboard.save("job.html")                           # one file that needs nothing else

    Args:
        watches: one `JobWatch` for each job, in the page's order; the first one watches the jobs of this callback.
            Default: a new one.
        port: port of loopback to listen at; 0 for any free port.

    Attributes:
        watches: the same.
        url: the page's address for browsers of this machine. Its secret lets anyone read the page.

    Raises:
        ConfigurationError: The port is not free.
    """

    def __init__(self, watches: Sequence[JobWatch] = (), port: int = 0) -> None:
        self.watches = list(watches) or [JobWatch()]
        super().__init__(every_seconds=self.watches[0].every_seconds)
        token = secrets.token_urlsafe(24)
        self._over = threading.Event()
        page = live_page(len(self.watches), frames=_FRAMES)
        served = {"token": token, "page": page, "watches": self.watches, "over": self._over}
        try:
            self._server = _Server((_LOOPBACK, port), type("PageHandler", (_Handler,), served))
        except OSError as error:
            raise ConfigurationError(f"`port` must be free on this machine. Received: {port}: {error}") from error
        self.url = f"http://{_LOOPBACK}:{self._server.server_port}/{token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="distkeras-dashboard", daemon=True
        )
        self._thread.start()

    @classmethod
    def of(cls, trainer: Observed, *others: Observed, port: int = 0) -> Dashboard:
        """Return the page of all later jobs of these trainers, next to each other; the same page for the same trainers.

        A job that has ended is shown from its records. The page is closed when the first trainer is deleted.

        Raises:
            ConfigurationError: The port is not free.
        """
        watches = [watch_of(each) for each in (trainer, *others)]
        page = _PAGES.get(trainer)
        if page is None or page.closed or page.watches != watches:
            if page is not None:
                page.close()
            page = _PAGES[trainer] = cls(watches, port)
            finalize(trainer, page.close)
        return page

    def on_begin(self, setup: TrainingSetup) -> None:
        """See `JobWatch`."""
        self.watches[0].on_begin(setup)

    def on_center(self, context: CallbackContext) -> None:
        """See `JobWatch`."""
        self.watches[0].on_center(context)

    def on_end(self, context: CallbackContext) -> None:
        """See `JobWatch`."""
        self.watches[0].on_end(context)

    def on_success(self, results: JobResults) -> None:
        """See `JobWatch`."""
        self.watches[0].on_success(results)

    def on_failure(self, error: BaseException) -> None:
        """See `JobWatch`."""
        self.watches[0].on_failure(error)

    @property
    def closed(self) -> bool:
        """Return whether the page is no longer served."""
        return self._over.is_set()

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page as it is now to one HTML file, which needs nothing else, not even a network.

        Raises:
            LocalProtocolError: No training has begun yet.
            OSError: The file cannot be written.
        """
        journals = [read_since(watch.path) for watch in self.watches]
        if not any(journals):
            raise LocalProtocolError(
                "`save` must be called after training has begun. Received: a dashboard without a job"
            )
        target = Path(path)
        target.write_text(saved_page([journal for journal in journals if journal]), encoding="utf-8")
        return target

    def close(self) -> None:
        """Stop serving the page, and end the streams that are open. Saved files stay."""
        if self._over.is_set():
            return
        self._over.set()
        for watch in self.watches:
            with watch.changed:
                watch.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_PATIENCE)

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Return a frame with the page, for a notebook, and a link to it."""
        url = escape(self.url)
        return (
            f'<p><a href="{url}" target="_blank" rel="noopener">Open the dashboard</a></p>'
            f'<iframe src="{url}" title="distkeras dashboard" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 1px solid #8888; border-radius: 6px"></iframe>'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'closed' if self.closed else self.url})"


def watch_of(trainer: Observed) -> JobWatch:
    """Return the callback that writes the journal of a trainer's jobs from now on."""
    for observer in trainer.observers:
        if isinstance(observer, JobWatch):
            return observer
    watch = JobWatch()
    watch.take(trainer.outcome)
    trainer.observers.append(watch)
    return watch
