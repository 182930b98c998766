"""The parameter server as a Spark task of its own, for drivers that executors cannot reach, and its shards as others.

It announces its address in the checkpoint's directory, which every executor reaches, and serves until the driver says
goodbye. Spark runs it again if it dies, on any executor: it continues from the latest snapshot there, and
announces its new address. Its output is its log, or the reason why it did not start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from distkeras.ps.errors import ServerLostError
from distkeras.ps.events import JsonFormatter
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.server.announced import serve_announced
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.start_report import StartReport, report_to_json
from distkeras.ps.shards.shard_task import DividedAmongTasks, ShardTask
from distkeras.ps.world.world import REAL
from distkeras.spark.notice import given_by_signals
from distkeras.spark.task_process import task_context

#: The task's output: a log record (a line of JSON), or a `StartReport`.
OUTPUT = "kind string, text string"
LOGGED, REPORT = "logged", "report"
#: The most attempts at one server task that have unique numbers among all starts by the driver.
ATTEMPTS_PER_START = 64
#: The most lines of the log that are kept.
_LINES_MAX = 10_000
#: An address reserved for documentation: the route to it shows the interface that reaches other hosts.
_ROUTE_TARGET = ("192.0.2.1", 9)


@dataclass(frozen=True)
class ServerTask:
    """Everything that a server needs, in Spark's own task closure.

    Args:
        request: the server's settings; every executor reaches its checkpoint. An empty host means the executor's.
        publication: the frame of the driver's `Publish`.
        tables: the initial rows of each table that travels by rows, float32 ``(rows, width)``.
        rows_checked: the rows were found to have the checksum of the resumed job's rows.
        start: the number of earlier starts by the driver.
        given_up: the driver has given up all servers up to this incarnation; the new one does not wait for them.
        driver: the address of Spark's driver; None: unknown.
    """

    request: StartRequest = dataclasses.field(repr=False)
    publication: bytes = dataclasses.field(repr=False)
    tables: Sequence[tuple[TableShape, np.ndarray]] = dataclasses.field(default=(), repr=False)
    rows_checked: bool = False
    start: int = 0
    given_up: int = 0
    driver: tuple[str, int] | None = None

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Serve, and yield the log and the report; the function for ``mapInArrow``."""
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = 0 if context is None else context.attemptNumber()
        yield from _served(records, lambda ending: self.serve(attempt, ending))

    def shards(self) -> ShardTasks:
        """Return the tasks of the shards."""
        return ShardTasks(self.request, self.driver)

    def serve(self, attempt: int, ending: Callable[[], bool] = lambda: False) -> StartReport | None:
        """Serve until the job ends: see `serve_announced`. ``attempt``: Spark's number of this attempt, from 0 on."""
        request = _on_this_host(self.request)
        return serve_announced(
            request,
            self.publication,
            tables=self.tables,
            attempt=self.start * ATTEMPTS_PER_START + attempt,
            given_up=self.given_up,
            rows_checked=self.rows_checked,
            require_driver=partial(_require_driver, self.driver, request),
            ending=ending,
            kind=None if request.settings.shards == 1 else DividedAmongTasks(request),
        )


@dataclass(frozen=True)
class ShardTasks:
    """One task for each shard of the server: see `ShardTask`. Unlike the server's, they do not have the model."""

    request: StartRequest = dataclasses.field(repr=False)
    driver: tuple[str, int] | None = None

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Serve the shard with the number of the partition, and yield the log; the function for ``mapInArrow``."""
        shard, request = task_context("the task of a shard").partitionId(), _on_this_host(self.request)
        require_driver = partial(_require_driver, self.driver, request)
        yield from _served(records, lambda ending: ShardTask(request, shard, require_driver, ending).serve())


def _on_this_host(request: StartRequest) -> StartRequest:
    return replace(request, settings=replace(request.settings, host=request.settings.host or own_address()))


def _served(
    records: Iterator[pa.RecordBatch], serve: Callable[[Callable[[], bool]], StartReport | None]
) -> Iterator[pa.RecordBatch]:
    """Run ``serve``, whose argument returns whether this process must end, and yield its log and report."""
    for _ in records:
        pass
    with _logged_lines() as lines, given_by_signals() as notice, notice.used():
        outcome = serve(notice.is_given)
    rows = [(LOGGED, line) for line in lines]
    rows += [] if outcome is None else [(REPORT, report_to_json(outcome))]
    columns = [pa.array([row[column] for row in rows], pa.string()) for column in range(2)]
    yield pa.RecordBatch.from_arrays(columns, ["kind", "text"])


def _require_driver(driver: tuple[str, int] | None, request: StartRequest) -> None:
    """Raise ServerLostError if the driver's machine refuses a connection: Spark ends a dead driver's tasks late."""
    if driver is None:
        return
    try:
        REAL.connect(driver, request.settings.deadlines.connect).close()
    except ConnectionRefusedError:
        host, port = driver
        raise ServerLostError(f"the job's driver has ended: nothing listens at its address {host}:{port}") from None
    except OSError:  # for example a network that is down: the driver may be running
        return


@contextlib.contextmanager
def _logged_lines() -> Iterator[deque[str]]:
    """Collect the warnings and all events that this process logs, as lines of JSON."""
    lines: deque[str] = deque(maxlen=_LINES_MAX)

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING or getattr(record, "event", None) is not None:
                lines.append(self.format(record))

    logger, collector = logging.getLogger("distkeras"), Collector()
    collector.setFormatter(JsonFormatter())
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)


def own_address() -> str:
    """Return the address at which other machines reach this one: Spark's setting, or else that of the host name."""
    configured = os.environ.get("SPARK_LOCAL_IP")
    if configured and configured not in ("0.0.0.0", "::"):
        return configured
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if not str(address[0]).startswith(("127.", "::1", "fe80")):
                return str(address[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ROUTE_TARGET)  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"
