"""The server of HTTP: waitress, which accepts a large body only with a token.

Waitress takes in a request whole before the application sees it. So that a stranger cannot fill the disk with what is
never looked at, a body above `SMALL` is refused at its header, where that has no valid token.
"""

from __future__ import annotations

import socket
import threading
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

#: Bytes of a body that anybody may send.
SMALL = 1 << 16
#: Seconds from one look at whether to stop to the next.
_LOOK = 0.5
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _Unauthorized(Error):  # type: ignore[misc]  # waitress has no types
    """What waitress answers in place of the application."""

    code, reason = 401, "Unauthorized"


class _NoRoom(Error):  # type: ignore[misc]  # waitress has no types
    """Likewise."""

    code, reason = 507, "Insufficient Storage"


class HttpListener:
    """A server of an application, bound from the beginning.

    Args:
        app: of WSGI.
        accounts: who may send much.
        host: address to bind.
        port: to bind; 0: one that is free.
        upload_max: bytes of the longest body.
        trusted_proxy: address of a proxy that says who calls, and over what.
        room: how many bytes of large bodies the disk may take; None: any.

    Attributes:
        port: that is bound.

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
                f"`host` and `port` must be free here. Received: {host}:{port}: {error}"
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
            connection_limit=200,
            channel_timeout=60,
            max_request_header_size=1 << 14,
            max_request_body_size=upload_max,
            clear_untrusted_proxy_headers=True,
            **proxy,
        )
        self._server.channel_class = _channel_class(accounts, room)

    def run(self, stop: threading.Event) -> None:
        """Serves until ``stop``."""
        try:
            while not stop.is_set():
                wasyncore.loop(timeout=_LOOK, use_poll=True, map=self._map, count=1)
        finally:
            self._server.task_dispatcher.shutdown()
            wasyncore.close_all(self._map)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches it."""
    return host in _LOOPBACK or host.startswith("127.")


def _channel_class(accounts: Accounts, room: Callable[[], int] | None) -> type[HTTPChannel]:
    class AdmittedRequest(HTTPRequestParser):  # type: ignore[misc]  # waitress has no types
        error: Any
        completed: bool

        def parse_header(self, header_plus: bytes) -> None:
            super().parse_header(header_plus)
            if self.error is None and (self.chunked or self.content_length > SMALL):
                token = bearer(self.headers.get("AUTHORIZATION"))
                if not token or accounts.authenticate(token) is None:
                    self.error = _Unauthorized("a large body needs a valid token in its header")
                    self.completed = True
                elif room is not None and room() < self.content_length:
                    self.error = _NoRoom("the disk is nearly full")
                    self.completed = True

    class AdmittedChannel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
        parser_class = AdmittedRequest

    return AdmittedChannel
