"""Numbers of a job that trains, for Prometheus."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_integer, require_text

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import Gauge

#: Attributes of the server's status, and what they are.
_NUMBERS = {
    "clock": "Commits applied.",
    "batches": "Mini-batches committed.",
    "samples": "Samples committed.",
    "lent": "Mini-batches committed by another worker than the one whose rows they have.",
    "epochs": "Epochs that the partitions have passed, on average.",
    "loss": "Mean loss of the latest commits.",
    "staleness": "Mean staleness of the latest commits.",
    "joined": "Workers that have joined.",
    "finished": "Workers that have finished.",
}
#: Attributes of a stream's latest micro-batch, the gauges that have them, and what they are.
_OF_STREAM = {
    "batch": ("micro_batch", "Number of the latest micro-batch of a stream."),
    "rows": ("micro_batch_rows", "Rows of the latest micro-batch."),
    "seconds": ("micro_batch_seconds", "Seconds from when Spark handed the latest micro-batch over to its snapshot."),
    "lag": ("lag_seconds", "Seconds that a row of the latest micro-batch has waited for its snapshot, at most."),
}

#: What is counted of such a table.
_STATES = ("kept", "admitted", "expired", "removed")


class PrometheusMetrics(Callback):
    """Serve metrics of the current job at ``http://HOST:PORT/metrics``, for Prometheus.

    ::

        trainer.train(df, callbacks=[PrometheusMetrics(9400)])

    The names begin with ``distkeras_``: clock, batches, samples, lent, epochs, loss, staleness, joined, finished and up
    (1 while the job trains). For the latest micro-batch of a stream there are also micro_batch, micro_batch_rows,
    micro_batch_seconds and lag_seconds (see `StreamTraining.lastProgress`), and backlog, with a label ``measure`` for
    each measure that Spark's source reports. Without a stream they are NaN. For a `WideEmbedding` of a stream, or one
    whose rows are admitted or expire, table_rows has the labels ``table`` and ``state``: kept, admitted, expired and
    removed. The metrics of the last job are served until the process ends or `close` is called.

    Args:
        port: port to listen at; 0 for any free port.
        host: address to listen at. Default: loopback, which other machines cannot reach.
        every_seconds: seconds between two updates. Default: 5.

    Attributes:
        port: the port, once the first job has begun.

    Raises:
        ConfigurationError: An argument is invalid, the port is not free, or prometheus_client is not installed.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1", *, every_seconds: float = 5.0) -> None:
        super().__init__(every_seconds=every_seconds)
        self.port = require_integer("port", port, 0)
        self._host = require_text("host", host, "an address")
        self._gauges: dict[str, Gauge] = {}
        self._living: tuple[str, ...] = ()
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def on_begin(self, setup: TrainingSetup) -> None:
        """Begin to serve."""
        if self._server is None:
            self._serve()
        self._gauges["up"].set(1)
        self._gauges["table_rows"].clear()
        self._living = setup.living

    def on_center(self, context: CallbackContext) -> None:
        """Update the metrics from the server's status."""
        for name in _NUMBERS:
            value = getattr(context.status, name)
            self._gauges[name].set(math.nan if value is None else value)
        for table, counts in zip(self._living, context.status.tables.tolist(), strict=False):  # none before the center
            for state, count in zip(_STATES, counts, strict=True):
                self._gauges["table_rows"].labels(table, state).set(count)
        progress = context.micro_batch
        for attribute, (name, _) in _OF_STREAM.items():
            value = None if progress is None else getattr(progress, attribute)
            self._gauges[name].set(math.nan if value is None else value)
        if progress is None or progress.backlog is not None:  # not while Spark has yet to report it
            self._gauges["backlog"].clear()
            for measure, waiting in ({} if progress is None else progress.backlog or {}).items():
                self._gauges["backlog"].labels(measure).set(waiting)

    def on_end(self, context: CallbackContext) -> None:
        """Update the metrics from the last status, and set ``up`` to 0."""
        self.on_center(context)
        self._gauges["up"].set(0)

    def on_failure(self, error: BaseException) -> None:
        """Set ``up`` to 0."""
        if self._gauges:
            self._gauges["up"].set(0)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(5.0)
            self._server = None

    def _serve(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as error:
            raise ConfigurationError(
                f"`PrometheusMetrics` needs an extra: pip install 'distkeras[prometheus]'. Received: {error}"
            ) from error
        registry = CollectorRegistry()
        texts = {**_NUMBERS, **dict(_OF_STREAM.values()), "up": "1 while the job trains."}
        self._gauges = {name: Gauge(f"distkeras_{name}", text, registry=registry) for name, text in texts.items()}
        text = "What waits at the sources of a stream, by Spark's names."
        self._gauges["backlog"] = Gauge("distkeras_backlog", text, ["measure"], registry=registry)
        text = "Rows of tables whose touches are counted."
        self._gauges["table_rows"] = Gauge("distkeras_table_rows", text, ["table", "state"], registry=registry)
        try:
            self._server = start_http_server(self.port, self._host, registry)
        except OSError as error:
            raise ConfigurationError(
                f"`port` must be free. Received: port={self.port} of {self._host}: {error}"
            ) from error
        self.port = self._server[0].server_port

    def __copy__(self) -> PrometheusMetrics:
        """Return this object: one port serves the numbers of every job."""
        return self
