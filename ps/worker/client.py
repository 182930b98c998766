"""The worker's end of a connection to the parameter server."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TypeVar

import numpy as np

from distkeras.ps.errors import DeadlineError, DistkerasError, LeaseLostError, RemoteProtocolError, ServerLostError
from distkeras.ps.protocol.compression import codec_of
from distkeras.ps.protocol.faults import fault_of
from distkeras.ps.protocol.messages import (
    Ack,
    CenterReply,
    Commit,
    FetchModel,
    Hello,
    Leave,
    Message,
    ModelFile,
    Occupancy,
    Parked,
    Probe,
    Pull,
    Welcome,
)
from distkeras.ps.rules.base import Vector
from distkeras.ps.transport.backoff import Backoff
from distkeras.ps.transport.client import Address, Caller
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.worker.loop import (
    CollectRequest,
    CommitRequest,
    Compute,
    Loop,
    PostRequest,
    ProbeRequest,
    PullRequest,
    Reply,
)

_M = TypeVar("_M", bound=Message)
_LONGEST_PAUSE = 2.0  # seconds between two attempts to reach the server again


class WorkerClient(Caller):
    """One worker's connection: asks for its partition's lease, then pulls and commits.

    A lost connection is made again, with growing pauses, until ``deadlines.reconnect`` has passed. The server then
    tells which commit it applied last: one whose reply was lost is never sent again, the center is pulled instead.
    `run` also outlives a restart of the server.

    Args:
        address: the server's.
        worker: the partition's number.
        attempt: Spark's task attempt id.
        size: elements of the model's parameter vector.
        moving_statistics: elements of its moving statistics.
        metrics: the history's metric columns, loss first.
        deadlines: of every wait.
        wire_format: what vectors look like on the wire, both ways: a name in `codecs`.

    Raises:
        ConfigurationError: no such format.
    """

    def __init__(
        self,
        address: Address,
        *,
        worker: int,
        attempt: int,
        size: int,
        moving_statistics: int = 0,
        metrics: tuple[str, ...] = ("loss",),
        deadlines: Deadlines | None = None,
        wire_format: str = "float32",
    ) -> None:
        super().__init__(address, deadlines)
        self.worker = worker
        self.attempt = attempt
        self._hello = Hello(worker, attempt, size, moving_statistics, "\n".join(metrics), wire_format)
        self._size = size
        self._codec = codec_of(wire_format, size)
        #: Encoded vectors: the parts of the latest commit, and a reply. Of a format that needs
        #: error feedback, the residuals too.
        self._packed: tuple[np.ndarray, ...] = ()
        self._residuals: tuple[Vector, ...] = ()
        self._arriving: np.ndarray | None = None
        self._vectors: list[np.ndarray] = []
        self._delivered: np.ndarray | None = None
        self._payloads: list[tuple[Vector, ...]] = []
        self._posted: tuple[Vector, ...] = ()
        self._waited = 0.0
        #: Which life of the server this worker works with; 0 before it joined.
        self.incarnation = 0
        #: Number of the last commit that the server applied.
        self.sequence = 0
        self._skipped = False
        #: Whether the server has said that the job ends early.
        self.stopping = False

    def _allocate(self, kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        # Statistics of the vector's own size would be given the same memory.
        if kind is CenterReply and dtype == np.float32 and size == self._size != self._hello.moving_statistics:
            return self._spare()
        if kind is CenterReply and self._codec is not None and (dtype, size) == (np.uint8, self._codec.nbytes):
            if self._arriving is None:
                self._arriving = np.empty(size, np.uint8)
            return self._arriving
        return super()._allocate(kind, dtype, size)

    def _spare(self) -> Vector:
        # The rule still reads the vector delivered last while the next one arrives, so there are two.
        for vector in self._vectors:
            if vector is not self._delivered:
                return vector
        self._vectors.append(np.empty(self._size, np.float32))
        return self._vectors[-1]

    def join(self) -> Welcome:
        """Asks for the partition's lease, and waits while another attempt has it and is alive.

        Returns:
            Where to go on; or, where another attempt has brought the partition to its end, that it has ``finished``.

        Raises:
            ShapeError: the model differs from the published one.
            JobStoppedError: the job ended meanwhile.
        """
        return self._again(self._join, rejoin=False)

    def _join(self) -> Welcome:
        timeout = self.deadlines.publish + self._patience
        answer: Message = Parked()
        while isinstance(answer, Parked):
            answer = self._call(self._hello, (Welcome, Parked), timeout)
        assert isinstance(answer, Welcome)
        known, self.incarnation, self.sequence = self.incarnation, answer.incarnation, answer.sequence
        self._skipped, self.stopping = answer.skipped, self.stopping or answer.stopping
        if known and (known != answer.incarnation or answer.finished or not answer.held):
            raise _BeginAgain(answer)
        return answer

    def payload(self, parts: int) -> tuple[Vector, ...]:
        """Buffers for the next commit: other ones than those of a commit that is under way."""
        for payload in self._payloads:
            if payload is not self._posted:
                return payload
        self._payloads.append(tuple(np.empty(self._size, np.float32) for _ in range(parts)))
        return self._payloads[-1]

    def run(self, welcome: Welcome, begin: Callable[[Welcome], Loop]) -> None:
        """Drives the worker's loop to its end, then leaves.

        A server that was restarted from a snapshot has forgotten the latest commits, and another attempt may have held
        the lease in between: the loop is then begun again where the partition stands. So it is after a commit that was
        skipped for its numbers: what had led to them is forgotten. A job that ends early begins no loop any more.

        Args:
            welcome: what `join` returned.
            begin: makes the loop that goes on from there.
        """
        while not welcome.finished:
            self._residuals = ()  # they belong to steps that are forgotten
            loop = begin(welcome) if not welcome.stopping else _nothing()
            try:
                return self._drive(loop)
            except _BeginAgain as news:
                welcome = news.welcome
            except LeaseLostError:
                # Were this attempt to end now, Spark could take it for the one that counts. It waits for its turn.
                self.close()
                self.incarnation = 0
                welcome = self.join()
            finally:
                loop.close()

    def _drive(self, loop: Loop) -> None:
        reply: Reply | None = None
        posted: Future[Reply] | None = None
        courier = ThreadPoolExecutor(1, f"ps-worker-{self.worker}")  # has no thread before it gets a commit
        try:
            request = next(loop)
            while True:
                match request:
                    case PullRequest():
                        reply = self.pull()
                    case CommitRequest():
                        reply = self.commit(request)
                    case PostRequest():
                        self._posted, reply = request.commit.parts, None
                        posted = courier.submit(self.commit, request.commit)
                    case CollectRequest():
                        assert posted is not None, "the loop must post a commit before it collects the reply"
                        reply = self._collect(posted)
                    case ProbeRequest():
                        reply = Reply(occupied=self.occupied())
                    case Compute():
                        reply = None
                request = loop.send(reply)
        except StopIteration:
            self.leave()
        finally:
            if posted is not None:
                wait_for([posted], timeout=self._longest)  # then the connection is this thread's again
            courier.shutdown(wait=False)

    @property
    def _longest(self) -> float:
        """What a commit may take, with a new connection and another turn at the partition on the way."""
        return self.deadlines.reconnect + self.deadlines.publish + 3 * self._patience

    def _collect(self, posted: Future[Reply]) -> Reply:
        began = time.monotonic()
        if not wait_for([posted], timeout=self._longest).done:
            raise DeadlineError(f"waited {self._longest:g} s for a commit to be answered", worker=self.worker)
        self._posted, self._waited = (), time.monotonic() - began
        return posted.result(timeout=0)

    def pull(self) -> Reply:
        """The center."""
        return self._timed(lambda: self._taken(self._again(self._pull)))

    def commit(self, request: CommitRequest) -> Reply:
        """Has ``request`` applied, once."""
        if not self.incarnation:
            self.join()
        sequence = self.sequence + 1
        packed = self._pack(request.parts)  # once: a commit that is sent again is the same
        commit = Commit(
            worker=self.worker,
            attempt=self.attempt,
            incarnation=self.incarnation,
            sequence=sequence,
            epoch=request.epoch,
            first=request.first,
            last=request.last,
            epoch_end=request.epoch_end,
            wants_center=request.wants_center,
            learning_rate=request.learning_rate,
            scale=request.scale,
            waited=self._waited,
            parts=() if packed else request.parts,
            moving_statistics=request.moving_statistics,
            history=request.history,
            checksum=request.checksum,
            overlapped=request.overlapped,
            packed=packed,
        )

        def once() -> CenterReply | Ack:
            # Applied already: only the reply was lost. What it carried is pulled; the commit is never sent again.
            applied = self.sequence == sequence
            if applied and (self._skipped or not request.wants_center):
                return Ack(self.incarnation, 0, sequence, sequence, self._skipped, self.stopping)
            return self._pull() if applied else self._call(commit, _COMMITTED)

        reply = self._timed(lambda: self._again(once))
        self.sequence = sequence
        if isinstance(reply, CenterReply):
            return self._taken(reply)
        self.stopping = self.stopping or reply.stopping
        if reply.skipped:
            raise _BeginAgain(self.join())
        if request.wants_center:
            raise RemoteProtocolError("the answer to a Commit that is applied must be the center. Received: an Ack")
        return Reply(stopping=self.stopping)

    def occupied(self) -> bool:
        """Whether the server is incorporating commits of others now."""
        return self._again(lambda: self._call(Probe(), Occupancy)).occupied

    def fetch_model(self) -> bytes:
        """The model file that the driver published."""
        leased, timeout = self.channel, self.deadlines.publish + self.deadlines.frame
        answer = self._again(lambda: self._call(FetchModel(), ModelFile, timeout), rejoin=False)
        if self.channel is not leased:
            self.close()  # nobody holds a lease over the new connection
        return answer.model.tobytes()

    def leave(self) -> None:
        """Tells the server that the partition's data has ended."""
        self._again(lambda: self._call(Leave(self.worker, self.attempt, self.incarnation), Ack))

    def report(self, error: DistkerasError) -> None:
        """Ends the job with ``error``; a server that is gone has nothing to end."""
        try:
            self._call(fault_of(error), Ack, self.deadlines.handshake)
        except (ServerLostError, DeadlineError):
            self.close()

    def _pull(self) -> CenterReply:
        if not self.incarnation:
            self.join()
        return self._call(Pull(self.worker, self.attempt, self.incarnation), CenterReply)

    def _taken(self, reply: CenterReply) -> Reply:
        self._delivered = center = self._unpack(reply) if reply.packed.size else reply.center
        self.stopping = self.stopping or reply.stopping
        return Reply(reply.learning_rate, center, reply.moving_statistics, stopping=self.stopping)

    def _pack(self, parts: tuple[Vector, ...]) -> tuple[np.ndarray, ...]:
        codec = self._codec
        if codec is None:
            return ()
        if len(self._packed) != len(parts):
            self._packed = tuple(np.empty(codec.nbytes, np.uint8) for _ in parts)
        if codec.needs_error_feedback and len(self._residuals) != len(parts):
            self._residuals = tuple(np.zeros_like(part) for part in parts)
        for number, (part, packed) in enumerate(zip(parts, self._packed, strict=True)):
            if codec.needs_error_feedback:
                codec.encode_with_residual(part, self._residuals[number], packed)
            else:
                codec.encode(part, packed)
        return self._packed

    def _unpack(self, reply: CenterReply) -> Vector:
        codec, known, center = self._codec, self._delivered, self._spare()
        sizes = reply.center.size, reply.packed.size
        if codec is None or sizes != (0, codec.nbytes) or (codec.needs_error_feedback and known is None):
            raise RemoteProtocolError(
                "a center must come as the Hello asked, and whole before a change of it. "
                f"Received: {sizes[0]} elements and {sizes[1]} bytes"
            )
        if codec.needs_error_feedback and known is not None:
            codec.decode_change(reply.packed, known, center)
        else:
            codec.decode(reply.packed, center)
        return center

    def _timed(self, call: Callable[[], _R]) -> _R:
        began = time.monotonic()
        result = call()
        self._waited = time.monotonic() - began
        return result

    def _again(self, call: Callable[[], _R], rejoin: bool = True) -> _R:
        """``call()``, over a new connection as often as the old one breaks or stalls, until the deadline."""
        backoff: Backoff | None = None
        while True:
            try:
                if self.channel is None and rejoin and (self.incarnation or backoff is not None):
                    self._join()
                return call()
            except (ServerLostError, DeadlineError) as error:
                if isinstance(error, DeadlineError) and self.channel is not None:
                    raise  # the server's own; after one of ours the connection is closed, for this process was stopped
                self.close()
                backoff = backoff or Backoff(longest=_LONGEST_PAUSE, timeout=self.deadlines.reconnect)
                if not backoff.pause():
                    raise ServerLostError(
                        f"the server at {self.address.host}:{self.address.port} must be reached within "
                        f"{self.deadlines.reconnect:g} s. Received: {error.message}",
                        worker=self.worker,
                    ) from error


_R = TypeVar("_R")
_COMMITTED: tuple[type[CenterReply | Ack], ...] = (CenterReply, Ack)


def _nothing() -> Loop:
    """A worker's loop that has ended."""
    yield from ()


class _BeginAgain(Exception):
    """The server is in another life than the one that this worker's latest steps belong to."""

    def __init__(self, welcome: Welcome) -> None:
        super().__init__(welcome)
        self.welcome = welcome
