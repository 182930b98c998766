"""The driver's connection to a server that it cannot reach: each request travels within a Spark job of one task.

So it takes a free slot, and what Spark takes for a small job. A request may arrive twice, as over a connection that
breaks: none of the driver's does harm then.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from distkeras.data.schema import map_in_arrow
from distkeras.ps.checkpoint.ownership import AnnouncedAddress, find, owner_of
from distkeras.ps.errors import (
    AuthenticationError,
    DeadlineError,
    DistkerasError,
    RemoteProtocolError,
    ServerLostError,
    SnapshotError,
    headline,
)
from distkeras.ps.protocol.framing import decode, encode
from distkeras.ps.protocol.messages import Fault, Message, error_of, fault_of
from distkeras.ps.server.start import StartReport
from distkeras.ps.transport.client import Client
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.world import REAL, World
from distkeras.spark.actions import SparkAction

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

#: Bytes of an answer in one row: Spark Connect sends none that is much larger than four times this.
_PIECE = 1 << 20
#: Seconds between two tries to reach the server, at most.
_LONGEST_PAUSE = 2.0
#: Seconds from one look at what else happens to the next, while a job runs.
_LOOK = 1.0
#: Seconds for a canceled job to end.
_CANCEL_SECONDS = 60.0
_PIECES = "lost boolean, part long, data binary"
_FOUND = "host string, incarnation long, place string, error string"
_UNREACHED = (ServerLostError, DeadlineError, AuthenticationError, RemoteProtocolError)
_R = TypeVar("_R")


def _patiently(call: Callable[[], _R], timeout: float, world: World) -> _R:
    """Return ``call()``, which is called again while the server cannot be reached."""
    backoff = Backoff(longest=_LONGEST_PAUSE, timeout=timeout, world=world)
    while True:
        try:
            return call()
        except _UNREACHED:
            if not backoff.pause():
                raise


@dataclass(frozen=True)
class RemoteRequest:
    """A request that a task takes to the server, and brings the answer back.

    Args:
        address, deadlines: of the server, and of every wait.
        request: its frame.
        timeout: seconds for the answer; to reach the server it has as many, and `Deadlines.reconnect` at most: it
            keeps a slot while it tries.
    """

    address: AnnouncedAddress
    deadlines: Deadlines
    request: bytes
    timeout: float

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the answer's frame in pieces; the function for ``mapInArrow``."""
        _read_to_end(records)
        lost, answer = self.fetch()
        frame = b"".join(encode(answer))
        for part, start in enumerate(range(0, len(frame), _PIECE)):
            yield pa.RecordBatch.from_pylist([{"lost": lost, "part": part, "data": frame[start : start + _PIECE]}])

    def fetch(self, world: World = REAL) -> tuple[bool, Message]:
        """Return whether the server could not be reached, and its answer or that failure."""
        client, message = Client(self.address, self.deadlines, world), decode(self.request)

        def once() -> Message:
            client.close()
            return client.exchange(message, self.timeout)

        try:
            return False, _patiently(once, min(self.timeout, self.deadlines.reconnect), world)
        except _UNREACHED as error:
            return True, fault_of(error)
        finally:
            client.close()


@dataclass(frozen=True)
class Search:
    """Looks for the server from an executor, for ``timeout`` seconds, and reports also one that does not answer."""

    address: AnnouncedAddress
    deadlines: Deadlines
    timeout: float

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row of what `look` returns, with the host; the function for ``mapInArrow``."""
        _read_to_end(records)
        yield pa.RecordBatch.from_pylist([{"host": socket.gethostname(), **self.look()}])

    def look(self, world: World = REAL) -> dict[str, Any]:
        """Return what the server has announced (``place``, JSON), or the ``error`` why it is not found.

        ``incarnation`` is at least that of the server that owns the checkpoint, 0 where that is not known.
        """
        incarnation, place, error = 0, "", ""
        try:
            incarnation, announced = _patiently(lambda: self._find(world), self.timeout, world)
            place = json.dumps(announced)
        except _UNREACHED as failure:
            error = failure.message
            with contextlib.suppress(SnapshotError):
                owner = owner_of(self.address.uri, world)
                incarnation = 0 if owner is None else owner.claim.incarnation
                place = "" if owner is None or owner.announced is None else json.dumps(owner.announced)
        return {"incarnation": incarnation, "place": place, "error": error}

    def _find(self, world: World) -> tuple[int, dict[str, Any]]:
        place = find(self.address.uri, world)
        client = DriverClient(self.address, self.deadlines, world)
        try:
            client.ping()
        except DistkerasError as error:
            if client.lost(error) or client.channel is None:
                raise
            # it has answered: why the job has failed
        finally:
            client.close()
        return StartReport.from_json(place["report"]).incarnation, place


def _read_to_end(records: Iterator[pa.RecordBatch]) -> None:
    for _ in records:
        pass


def search(session: SparkSession, task: Search, tasks: int) -> SparkAction:
    """Start a Spark job of so many tasks, each of which looks for the server."""
    rows = session.range(0, tasks, 1, tasks)
    return SparkAction(session, lambda: map_in_arrow(rows, task.run, _FOUND).collect(), "distkeras-search")


class RemoteClient(DriverClient):
    """The driver's connection, in which Spark jobs carry the requests.

    Args:
        deadlines: of every wait; a free slot is waited for as long as for a ``reply``.
        meanwhile: called now and then while a request is under way; what it raises ends the request.
    """

    def __init__(
        self,
        session: SparkSession,
        address: AnnouncedAddress,
        deadlines: Deadlines,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(address, deadlines, met=True)
        self._meanwhile = meanwhile
        self._session = session
        self._announced = address
        self._action: SparkAction | None = None

    def exchange(self, message: Message, timeout: float) -> Message:
        """Send ``message`` and return the answer, also a `Fault`.

        Raises:
            ServerLostError: the server is not there, or no task could be run to its end.
            DeadlineError: no slot was free in time.
        """
        rows = self._run(RemoteRequest(self._announced, self.deadlines, b"".join(encode(message)), timeout))
        pieces = sorted(rows, key=lambda row: int(row["part"]))
        answer = decode(b"".join(bytes(row["data"]) for row in pieces))
        if pieces[0]["lost"] and isinstance(answer, Fault):
            error = error_of(answer)
            raise ServerLostError(f"an executor cannot reach the parameter server: {error.message}") from error
        return answer

    def _run(self, remote_request: RemoteRequest) -> list[Row]:
        one = self._session.range(0, 1, 1, 1)
        collect = map_in_arrow(one, remote_request.run, _PIECES).collect
        action = self._action = SparkAction(self._session, collect, "distkeras-request")
        patience = 2 * remote_request.timeout + self.deadlines.reply
        try:
            deadline = time.monotonic() + patience
            while not action.ended(_LOOK):
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"waited {patience:g} s for a free slot for a task that asks the parameter server. "
                        "Leave one slot more than the workers and the server need"
                    )
                self._meanwhile()
            rows = action.rows()
        except DistkerasError:
            raise
        except Exception as error:
            text = headline(str(error))
            raise ServerLostError(f"the Spark task that asks the parameter server has failed: {text}") from error
        finally:
            self._action = None
            action.cancel(_CANCEL_SECONDS)
        if not rows:
            raise ServerLostError(
                "the Spark task that asks the parameter server has returned no answer. See the log of its executor"
            )
        return rows

    def close(self) -> None:
        """Cancel the request of another thread that is under way; a later one is another job."""
        super().close()
        action = self._action
        if action is not None:
            action.cancel(_CANCEL_SECONDS)
