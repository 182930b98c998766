"""The HTTP server: waitress, on a port that is bound before anything else starts.

Waitress receives all of a request before the application sees it, and has no deadline for a peer that sends a byte now
and then. So only this machine may reach it directly: for others, a reverse proxy requires tokens of uploads, limits
their number, and ends slow connections (`docs/guide/gateway.md`).
"""

from __future__ import annotations

import socket
from typing import Any

from waitress import wasyncore
from waitress.server import create_server

from distkeras.ps.errors import ConfigurationError


class HttpListener:
    """Serves an application over HTTP, with bodies of at most ``upload_max`` bytes.

    The constructor binds ``port``, or any free one for 0; ConfigurationError if it cannot. ``trusted_proxy`` is the
    address of a proxy that forwards the caller's address and scheme.
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
