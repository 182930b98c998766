"""The driver's connection to a server that it cannot reach: requests travel within a Spark job of one task.

So each takes a free slot and the time of a small Spark job; the blocks of a table share a job. A request may arrive
twice, as over a connection that breaks: all requests of the driver are idempotent.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from distkeras.data.schema import map_in_arrow
from distkeras.ps.checkpoint.ownership import AnnouncedAddress, Owner, find, owner_of
from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    ServerLostError,
    SnapshotError,
    headline,
)
from distkeras.ps.protocol.driver_messages import InspectRows, TableRows
from distkeras.ps.protocol.framing import decode, encode
from distkeras.ps.protocol.messages import Fault, Message, error_of, fault_of
from distkeras.ps.protocol.shard_messages import ListShards, Shards
from distkeras.ps.server.start_report import started_from_json
from distkeras.ps.shards.spread_driver import WholeDriverClient
from distkeras.ps.transport.client import RETRY_SECONDS, UNREACHED, Address, Client, client_context, dial
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.world import REAL, World
from distkeras.spark.cluster import SparkAction

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

#: Bytes of an answer in one row: Spark Connect cannot send rows of more than about four times this size.
_PIECE = 1 << 20
#: Bytes of a table that one job fetches: driver and executor hold them, and several answers in addition.
_JOB_BYTES = 64 << 20
#: Seconds from one call of `meanwhile` to the next, while a job runs.
_POLL_SECONDS = 1.0
#: Seconds for a canceled job to end.
_CANCEL_SECONDS = 60.0
_PIECES = "answer long, lost boolean, part long, data binary"
_FOUND = "host string, incarnation long, place string, error string, unanswered boolean, starting boolean"
_R = TypeVar("_R")


def _retry_unreachable(call: Callable[[], _R], timeout: float, world: World) -> _R:
    """Return ``call()``, repeated for up to ``timeout`` seconds while the server cannot be reached."""
    backoff = Backoff(longest=RETRY_SECONDS, timeout=timeout, world=world)
    while True:
        try:
            return call()
        except UNREACHED:
            if not backoff.pause():
                raise


@dataclass(frozen=True)
class RemoteRequest:
    """Requests that a task sends to the server, one after the other, and whose answers it returns.

    Args:
        requests: their frames, one or more.
        timeout: seconds for an answer, and after which no further request is sent. The task tries to reach the server
            for the same time, but at most `Deadlines.reconnect`, since it keeps a slot while it tries.
        divided: the center is divided among shards, which the task asks, too.
    """

    address: Address
    deadlines: Deadlines
    requests: Sequence[bytes]
    timeout: float
    divided: bool = False

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the answers' frames in pieces; the function for ``mapInArrow``."""
        _read_to_end(records)
        for number, (lost, answer) in enumerate(self.fetch()):
            frame = b"".join(encode(answer))
            for part, start in enumerate(range(0, len(frame), _PIECE)):
                piece = {"answer": number, "lost": lost, "part": part, "data": frame[start : start + _PIECE]}
                yield pa.RecordBatch.from_pylist([piece])

    def fetch(self, world: World = REAL) -> Iterator[tuple[bool, Message]]:
        """Yield whether the server could not be reached, and the answer, or a `Fault` with that failure.

        Only the first request is repeated while the server cannot be reached. If a later one has no answer, or after a
        `Fault`, the answers end: the driver sends the next request first in another task.
        """
        client = (WholeDriverClient if self.divided else Client)(self.address, self.deadlines, world)
        deadline = world.monotonic() + self.timeout
        first, *others = map(decode, self.requests)

        def once() -> Message:
            client.close()
            return client.exchange(first, self.timeout)

        try:
            answer = _retry_unreachable(once, min(self.timeout, self.deadlines.reconnect), world)
            lost = False
        except UNREACHED as error:
            answer, lost = fault_of(error), True
        try:
            yield lost, answer
            for message in others:
                if isinstance(answer, Fault) or world.monotonic() >= deadline:
                    return
                try:
                    answer = client.exchange(message, self.timeout)
                except UNREACHED:
                    return
                yield False, answer
        finally:
            client.close()


@dataclass(frozen=True)
class Search:
    """Searches for the server from an executor, for ``timeout`` seconds; it also reports one that does not answer.

    With ``shards``, each shard must accept a connection, too.
    """

    address: AnnouncedAddress
    deadlines: Deadlines
    timeout: float
    shards: bool = False

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row of what `look` returns, with the host; the function for ``mapInArrow``."""
        _read_to_end(records)
        yield pa.RecordBatch.from_pylist([{"host": socket.gethostname(), **self.look()}])

    def look(self, world: World = REAL) -> dict[str, Any]:
        """Return the server's announcement (``place``, JSON), or the ``error`` why it is not found.

        ``incarnation`` is at least that of the server that owns the checkpoint, 0 if that is unknown. ``unanswered``: a
        connection was made, and not answered, as by a suspended process. ``starting``: the owner answers, and has not
        announced itself yet, as one that waits for its shards.
        """
        incarnation, place, error, unanswered, starting = 0, "", "", False, False
        try:
            incarnation, announced = _retry_unreachable(lambda: self._find(world), self.timeout, world)
            place = json.dumps(announced)
        except UNREACHED as failure:
            error = failure.message
            unanswered = isinstance(failure, DeadlineError) or DriverClient.handshake_unanswered(failure)
            with contextlib.suppress(SnapshotError):
                owner = owner_of(self.address.uri, world)
                incarnation = 0 if owner is None else owner.claim.incarnation
                place = "" if owner is None or owner.announced is None else json.dumps(owner.announced)
                starting = owner is not None and owner.announced is None and self._answers(owner, world)
        return {
            "incarnation": incarnation,
            "place": place,
            "error": error,
            "unanswered": unanswered,
            "starting": starting,
        }

    def _answers(self, owner: Owner, world: World) -> bool:
        if owner.address is None:
            return False
        host, port = owner.address
        client = DriverClient(Address(host, port, self.address.key, self.address.certificate), self.deadlines, world)
        try:
            client.ping()
        except DistkerasError:
            return client.channel is not None  # the error is the owner's answer
        else:
            return True
        finally:
            client.close()

    def _find(self, world: World) -> tuple[int, dict[str, Any]]:
        place = find(self.address.uri, world)
        client = DriverClient(self.address, self.deadlines, world)
        try:
            client.ping()
            places = client.request(ListShards(), Shards, self.deadlines.handshake).places if self.shards else ""
        except DistkerasError as error:
            if client.lost(error) or client.channel is None:
                raise
            places = ""  # it is found: it answered with the reason why the job has failed
        finally:
            client.close()
        context = client_context(self.address.certificate) if self.address.certificate else None
        for host, port in map(str.split, places.splitlines()):
            dial((host, int(port)), self.address.key, self.deadlines, context=context, world=world).close()
        return started_from_json(place["report"]).incarnation, place


def _read_to_end(records: Iterator[pa.RecordBatch]) -> None:
    for _ in records:
        pass


def search(session: SparkSession, task: Search, tasks: int) -> SparkAction:
    """Start a Spark job of ``tasks`` tasks, each of which searches for the server."""
    rows = session.range(0, tasks, 1, tasks)
    return SparkAction(session, lambda: map_in_arrow(rows, task.run, _FOUND).collect(), "distkeras-search")


class RemoteClient(DriverClient):
    """The driver's connection, in which Spark jobs carry the requests.

    A wait for a free slot may take `Deadlines.reply`. An error of ``meanwhile``, which is called every second, ends it.
    ``divided``: see `RemoteRequest`.
    """

    def __init__(
        self,
        session: SparkSession,
        address: Address,
        deadlines: Deadlines,
        meanwhile: Callable[[], object] = lambda: None,
        world: World = REAL,
        *,
        divided: bool = False,
    ) -> None:
        super().__init__(address, deadlines, world, met=True)
        self._divided = divided
        self._meanwhile = meanwhile
        self._session = session
        self._action: SparkAction | None = None

    def exchange(self, message: Message, timeout: float) -> Message:
        """Send ``message`` and return the answer, also a `Fault`; DeadlineError if no slot was free in time."""
        return self._exchange([message], timeout)[0]

    def read_blocks(self, messages: Iterable[InspectRows], nbytes: int) -> Iterator[tuple[InspectRows, TableRows]]:
        """See `DriverClient`; blocks of up to `_JOB_BYTES` share a job."""
        left, pending = iter(messages), list[InspectRows]()
        while True:
            pending += islice(left, max(1, _JOB_BYTES // nbytes) - len(pending))
            if not pending:
                return
            with self._requesting:
                answers = self._exchange(pending, self.reply_timeout)
            for message, answer in zip(pending, answers, strict=False):
                yield message, self._checked(message, answer, TableRows)
            del pending[: len(answers)]

    def _exchange(self, messages: Sequence[Message], timeout: float) -> list[Message]:
        """Return the answers to the first ``messages``, at least to one."""
        requests = [b"".join(encode(message)) for message in messages]
        answers = self._fetch(RemoteRequest(self.address, self.deadlines, requests, timeout, self._divided))
        lost, first = answers[0]
        if lost and isinstance(first, Fault):
            error = error_of(first)
            raise ServerLostError(f"an executor cannot reach the parameter server: {error.message}") from error
        return [answer for _, answer in answers]

    def _fetch(self, remote_request: RemoteRequest) -> list[tuple[bool, Message]]:
        """Run `RemoteRequest.fetch` in a task, and return its results."""
        rows = sorted(self._run(remote_request), key=lambda row: (int(row["answer"]), int(row["part"])))
        answers = []
        for _, group in groupby(rows, key=lambda row: int(row["answer"])):
            pieces = list(group)
            answers.append((bool(pieces[0]["lost"]), decode(b"".join(bytes(row["data"]) for row in pieces))))
        return answers

    def _run(self, remote_request: RemoteRequest) -> list[Row]:
        one_row = self._session.range(0, 1, 1, 1)
        collect = map_in_arrow(one_row, remote_request.run, _PIECES).collect
        action = self._action = SparkAction(self._session, collect, "distkeras-request")
        patience = 2 * remote_request.timeout + self.deadlines.reply
        try:
            deadline = time.monotonic() + patience
            while not action.ended(_POLL_SECONDS):
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
        """Cancel another thread's request in progress; later requests are not affected."""
        super().close()
        action = self._action
        if action is not None:
            action.cancel(_CANCEL_SECONDS)
