"""The HTTP server: waitress, which requires a token for large bodies, with deadlines for slow peers.

Waitress receives all of a request before the application sees it. So that a client without a token cannot fill the
disk, a body above `ANONYMOUS_BODY_MAX` is refused at its header unless the header has a valid token.

Waitress closes a connection that is idle, but not one that sends a byte now and then, and it accepts no connection
above its limit. So each request and each answer has a deadline from its first byte. If there are too many connections,
the address with the most connections that wait for their peer loses the one that has waited longest.

A thread of waitress blocks if an answer is not read and too much of it is buffered. Answers without a token are too
short for that, unless many requests come at once: so a connection with several requests at once is closed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import create_server
from waitress.utilities import Error

from distkeras.job_server.server.app import bearer
from distkeras.job_server.store.accounts import Accounts
from distkeras.ps.errors import ConfigurationError

#: The most bytes of a body without a token.
ANONYMOUS_BODY_MAX = 1 << 16
#: Seconds from one check whether to stop to the next.
_POLL_SECONDS = 0.5
#: Seconds from one check for slow connections to the next.
_SLOW_CHECK_SECONDS = 0.2
#: Seconds from a connection's first byte, or from its beginning, to the end of a request's header.
HEADER_SECONDS = 20.0
#: A body, or an answer, may take this many seconds, plus its bytes divided by `SLOWEST`.
BODY_SECONDS, SLOWEST = 60.0, 32 << 10
#: Above the first number of connections, some that wait for their peer are closed; above the second, none is accepted.
CONNECTIONS_MAX, _BACKSTOP = 200, 400


class _Unauthorized(Error):  # type: ignore[misc]  # waitress has no types
    """The answer to a large body without a valid token."""

    code, reason = 401, "Unauthorized"


class _DiskFull(Error):  # type: ignore[misc]  # waitress has no types
    """The answer to a body for which the disk has no room."""

    code, reason = 507, "Insufficient Storage"


class HttpListener:
    """Serves an application over HTTP. The port is bound in the constructor.

    Args:
        accounts: authenticate the senders of large bodies.
        port: to bind; 0: any free one.
        upload_max: the most bytes of a body.
        trusted_proxy: address of a proxy that forwards the caller's address and scheme.
        room: returns the bytes of large bodies that the disk has room for; None: no limit.

    Attributes:
        port: the bound port.

    Raises:
        ConfigurationError: the address cannot be bound.
    """

    def __init__(
        self,
        app: Any,
        accounts: Accounts,
        host: str,
        port: int,
        *,
        upload_max: int,
        trusted_proxy: str | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
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
            connection_limit=_BACKSTOP,
            channel_timeout=60,
            max_request_header_size=1 << 14,
            max_request_body_size=upload_max,
            clear_untrusted_proxy_headers=True,
            **proxy,
        )
        self._server.channel_class = _channel_class(accounts, room)

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._server.active_channels)

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop``."""
        looked = time.monotonic()
        try:
            while not stop.is_set():
                wasyncore.loop(timeout=_POLL_SECONDS, use_poll=True, map=self._map, count=1)
                if time.monotonic() - looked >= _SLOW_CHECK_SECONDS:
                    looked = time.monotonic()
                    _close_slow(list(self._server.active_channels.values()), looked)
        finally:
            self._server.task_dispatcher.shutdown()
            wasyncore.close_all(self._map)


def _close_slow(channels: list[Any], now: float) -> None:
    """Close connections past their deadline, and of too many connections those that wait longest for their peer."""
    for channel in channels:
        if channel.overdue(now):
            channel.handle_close()  # a close by waitress would wait for the peer to read
    remaining = [channel for channel in channels if channel.connected]
    waiting = sorted([channel for channel in remaining if channel.waits(now)], key=lambda channel: float(channel.began))
    counts = Counter(str(channel.addr[0]) for channel in waiting)
    for _ in range(min(len(remaining) - CONNECTIONS_MAX, len(waiting))):
        greatest = counts.most_common(1)[0][0]
        oldest = next(channel for channel in waiting if channel.addr[0] == greatest)
        waiting.remove(oldest)
        counts[greatest] -= 1
        oldest.handle_close()


class _TimedChannel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection that measures whether its peer is too slow."""

    request: Any
    requests: list[Any]
    total_outbufs_len: int

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        #: When the current request, or the wait for one, began; and when an answer began, with its bytes.
        self.began = time.monotonic()
        self._answer: tuple[float, int] | None = None
        self._fresh = True
        super().__init__(*arguments, **keywords)

    def received(self, data: bytes) -> bool:
        if self.request is None:
            self.began = time.monotonic()
        self._fresh = False
        done: bool = super().received(data)
        if len(self.requests) > 1:
            self.handle_close()
        return done

    def waits(self, now: float) -> bool:
        """Return whether the connection waits for a request, or for a peer that reads an answer too slowly."""
        if self.requests or self._answer is None:
            return not self.requests
        since, size = self._answer
        return size - self.total_outbufs_len < SLOWEST * (now - since - _SLOW_CHECK_SECONDS)

    def overdue(self, now: float) -> bool:
        """Return whether the peer has exceeded the deadline of a request or an answer."""
        if not self.total_outbufs_len:
            self._answer = None
        elif self._answer is None:
            self._answer = (now, self.total_outbufs_len)
        if self._answer is not None:
            since, size = self._answer
            late: bool = now - since > BODY_SECONDS + size / SLOWEST
            return late
        request = self.request
        if self.requests or (request is None and not self._fresh):
            return False  # the request is being answered, or the connection is idle, which waitress limits
        if request is None or not request.headers_finished:
            return now - self.began > HEADER_SECONDS
        size = max(request.content_length, request.body_bytes_received)
        return bool(now - self.began > BODY_SECONDS + size / SLOWEST)


def _channel_class(accounts: Accounts, room: Callable[[], int] | None) -> type[HTTPChannel]:
    class AdmittedRequest(HTTPRequestParser):  # type: ignore[misc]  # waitress has no types
        error: Any
        completed: bool

        def parse_header(self, header_plus: bytes) -> None:
            super().parse_header(header_plus)
            if self.error is None and (self.chunked or self.content_length > ANONYMOUS_BODY_MAX):
                token = bearer(self.headers.get("AUTHORIZATION"))
                if not token or accounts.authenticate(token) is None:
                    self.error = _Unauthorized("a large body needs a valid token in its header")
                    self.completed = True
                elif room is not None and room() < self.content_length:
                    self.error = _DiskFull("the disk is nearly full")
                    self.completed = True

    class AdmittedChannel(_TimedChannel):
        parser_class = AdmittedRequest

    return AdmittedChannel
