"""The parameter server as a Spark task of its own, for drivers that executors cannot reach.

It announces its address in the checkpoint's directory, which every executor reaches, and serves until the driver says
goodbye. Spark runs it again where it dies, on whatever executor: it goes on from the latest snapshot there, and
announces its new address. Its output is what it has logged, or why it has not come up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.checkpoint.directory import SnapshotDirectory
from distkeras.ps.errors import ERRORS, ConfigurationError, DeadlineError, OwnershipLostError, ServerLostError
from distkeras.ps.events import JsonFormatter, report
from distkeras.ps.protocol.framing import decode
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.start import StartReport, StartRequest, build_server
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.processes import LOOK

log = logging.getLogger(__name__)

#: The task's output: what was logged (a line of JSON), or a `StartReport`.
OUTPUT = "kind string, text string"
LOGGED, REPORT = "logged", "report"
#: Lines of the log that are kept.
_LINES_MAX = 10_000
#: An address that nobody has, for documentation: the way there leads over the interface that others are reached by.
_ANYWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True)
class ServerTask:
    """Everything that a server needs, in Spark's own task closure.

    Args:
        request: what is to be served; its checkpoint lies where every executor reaches it. An empty host: that of the
            executor.
        publication: the frame of the driver's `Publish`.
        rows_checked: the rows are known to be those of the job that is gone on with, as far as a server can say.
    """

    request: StartRequest = dataclasses.field(repr=False)
    publication: bytes = dataclasses.field(repr=False)
    rows_checked: bool = False

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function for ``mapInArrow``."""
        from pyspark import TaskContext

        for _ in records:
            pass
        context = TaskContext.get()
        with _logged_lines() as lines:
            told = self.serve(0 if context is None else context.attemptNumber())
        rows = [(LOGGED, line) for line in lines]
        rows += [] if told is None else [(REPORT, told.to_json())]
        columns = [pa.array([row[column] for row in rows], pa.string()) for column in range(2)]
        yield pa.RecordBatch.from_arrays(columns, ["kind", "text"])

    def serve(self, attempt: int) -> StartReport | None:
        """Serves to the end; what there is to say instead where there is nothing to serve.

        Args:
            attempt: how often Spark has run the task before.

        Raises:
            ServerLostError: Spark is to run the task again.
            SnapshotError, OSError: likewise.
            DeadlineError: nobody has asked anything for too long.
        """
        settings = replace(self.request.settings, host=self.request.settings.host or own_address())
        assert settings.checkpoint is not None
        request = replace(self.request, settings=settings)
        try:
            request = replace(request, mode=_mode_of(request, settings.checkpoint.uri, attempt))
            server, came_up = build_server(request)
        except (ConfigurationError, OwnershipLostError) as error:  # no other attempt would do better
            return StartReport(error=str(error), code=ERRORS.index(type(error)))
        resumed = came_up.resumed
        if resumed is not None and resumed.row_sum is not None and not self.rows_checked:
            with server:
                return came_up
        if attempt:
            text = "the parameter server's task had ended; it is back with commit %d of a snapshot, on %s (attempt %d)"
            report(log, "restart", text, 0 if resumed is None else resumed.clock, settings.host, attempt)
        with server:
            self._publish(server)
            server.announce({"host": server.address[0], "port": server.address[1], "report": came_up.to_json()})
            _serve_until_over(server)
        return None

    def _publish(self, server: ParameterServer) -> None:
        certificate = self.request.certificate
        address = Address(*server.address, self.request.key, "" if certificate is None else certificate.certificate)
        driver = DriverClient(address, self.request.settings.deadlines, met=True)
        try:
            driver.request(decode(self.publication), Ack)
        finally:
            driver.close()


def _mode_of(request: StartRequest, uri: str, attempt: int) -> StartMode:
    """How a server begins that Spark may have run before.

    Raises:
        OwnershipLostError: nothing there is this job's any more, or was when the one before ended.
    """
    standing = SnapshotDirectory(uri, token=request.token).standing()
    if attempt and standing.others and not standing.epoch:
        raise OwnershipLostError(
            f"a server that is started again must find its job's claim in {uri!r}. Received: those of others alone"
        )
    return request.mode.again(standing.epoch, standing.epoch)


def _serve_until_over(server: ParameterServer) -> None:
    """Returns when the driver has said goodbye; a driver that is gone takes this task along, by Spark's hand."""
    asked = time.monotonic()
    while not server.over:
        if server.spoilt:
            raise ServerLostError(
                "the server must have its center whole, and its snapshots must count. Received: it does not"
            )
        if server.sessions:
            asked = time.monotonic()
        elif time.monotonic() - asked > server.deadlines.silence:
            raise DeadlineError(f"waited {server.deadlines.silence:g} s for anybody to ask the server")
        time.sleep(LOOK)


@contextlib.contextmanager
def _logged_lines() -> Iterator[deque[str]]:
    """What this process logs meanwhile, as lines of JSON: warnings and all events."""
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
    """This machine's address as others reach it: Spark's, where it was told one; else what its name stands for."""
    told = os.environ.get("SPARK_LOCAL_IP")
    if told and told not in ("0.0.0.0", "::"):
        return told
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if not str(address[0]).startswith(("127.", "::1", "fe80")):
                return str(address[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"
