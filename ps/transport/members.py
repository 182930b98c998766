"""The connections between the members of a job whose workers exchange with each other, and their sums.

A member is identified by its rank, ``node * devices + device``. Each connection is authenticated with the job's key,
like those to the server. Rules:

1. Every sum adds its terms in the order of the ranks, so the result does not depend on the order of arrival.
2. Every message names its purpose and its step, and an unexpected message is an error.
3. Every wait has a deadline. If a member hangs up, or does not respond in time, a `MemberLostError` names it. The
   member that detects the loss hangs up on all others, so that all of them detect it; then all announce themselves to
   the server again, and connect again (`server.rendezvous`). Members leave after the same round of the server, so no
   member waits for one that has left in good order.
4. The first member of a node shares memory with each of the others, if possible: then gradients and their sums are not
   sent over the connection (`shared_slots`). Other pairs seldom exchange, and shared memory would not pay.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from ml_dtypes import bfloat16

from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    LocalProtocolError,
    MemberLostError,
    RemoteProtocolError,
)
from distkeras.ps.protocol.framing import EndOfStream, Limits
from distkeras.ps.protocol.messages import Hello, Members, Message, PeerLoss, PeerVector
from distkeras.ps.protocol.shared_slots import SlotSizes
from distkeras.ps.rules.base import Vector, total_of
from distkeras.ps.transport.client import Channel, dial
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.handshakes import MemberListener, answer_handshake, begin_handshake
from distkeras.ps.transport.worker_client import Posting, WorkerClient
from distkeras.ps.world.world import REAL, World

_Answer = TypeVar("_Answer", bound=Message)

#: Bytes of a frame in addition to its vector.
_FRAME_ROOM = 4096


class Purpose(enum.IntEnum):
    """The purpose of a `PeerVector`."""

    GRADIENT = 0
    LOCAL_TOTAL = 1
    PARAMETERS = 2
    GLOBAL_TOTAL = 3
    BROADCAST = 4


@dataclass(frozen=True)
class Membership:
    """The members of a job, as seen by one of them: worker, host and port of each, by rank, and P nodes."""

    places: tuple[tuple[int, str, int], ...]
    nodes: int
    rank: int
    batches: int

    @classmethod
    def of(cls, message: Members, worker: int) -> Membership:
        """Return the membership of ``worker`` from ``message``; raise a RemoteProtocolError if it is inconsistent."""
        places = message.rows(worker)
        numbers = [number for number, _, _ in places]
        if worker not in numbers:
            raise RemoteProtocolError(f"members must include the worker. Received: {message.places!r}", worker=worker)
        if not 1 <= message.nodes <= len(places) or len(places) % message.nodes:
            raise RemoteProtocolError(
                f"members must be spread evenly. Received: {len(places)} on {message.nodes} nodes", worker=worker
            )
        return cls(places, message.nodes, numbers.index(worker), message.batches)

    @property
    def worker(self) -> int:
        return self.places[self.rank][0]

    @property
    def devices(self) -> int:
        """The number of members of a node, G."""
        return len(self.places) // self.nodes

    @property
    def device(self) -> int:
        """This member's place in its node."""
        return self.rank % self.devices

    @property
    def node(self) -> list[int]:
        first = self.rank - self.device
        return [*range(first, first + self.devices)]

    @property
    def group(self) -> list[int]:
        """The ranks of this member's group, one of each node."""
        return [*range(self.device, len(self.places), self.devices)]


class MemberLinks:
    """One member's connections to the members of its node and to those of its group; ``shared``: through shared memory.

    The constructor binds a port of ``host``. Call `connect` when the membership is known, and `close` in any case.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        *,
        worker: int,
        attempt: int,
        size: int,
        shared: bool = True,
        deadlines: Deadlines,
        world: World = REAL,
    ) -> None:
        self._key, self._deadlines, self._world = key, deadlines, world
        self._hello = Hello(worker, attempt, size, 0)
        self._shared, self._sizes = shared, SlotSizes(size, parts=1)
        self._limits = Limits(body=4 * size + _FRAME_ROOM)
        self._changed = world.condition()
        #: The channels of members that have connected to this one, by worker.
        self._arrived: dict[int, Channel] = {}
        self._closed = False
        self._links: dict[int, Channel] = {}
        self._membership: Membership | None = None
        self._poster: Posting[Vector] | None = None
        self._posted = False
        #: Memory for a gradient and for a sum, if none is shared with another member.
        self._gradient, self._total = np.empty(size, np.float32), np.empty(size, np.float32)
        self._listener = MemberListener(host, key, deadlines, world)
        self.address = self._listener.address

    @property
    def membership(self) -> Membership:
        """The members; raise a LocalProtocolError before `connect`."""
        if self._membership is None:
            raise LocalProtocolError("members must be connected first. Received: an exchange before `connect`")
        return self._membership

    def meet(self, client: WorkerClient, node: str, batches: int) -> bool:
        """Announce this member, of the node of this name, and connect to the others when all are known.

        Return False if the job ends early, without members. All connections are closed then, and on an error.
        """
        try:
            members = client.announce(*self.address, node, batches)
            if members.places:
                self.connect(Membership.of(members, client.worker))
                return True
        except BaseException:
            self.close()
            raise
        self.close()
        client.stopping = True
        return False

    def connect(self, membership: Membership) -> None:
        """Connect to the others: a member dials those of a lower rank, and waits for those of a higher rank."""
        self._membership = membership
        self._listener.start(self._take, most=len(membership.places), limits=self._limits, read_ahead=False)
        peers = sorted({*membership.node, *membership.group} - {membership.rank})
        for rank in [peer for peer in peers if peer < membership.rank]:
            _, host, port = membership.places[rank]
            sizes = self._sizes if self._shared and rank == membership.node[0] else None
            try:
                self._links[rank] = link = dial(
                    (host, port), self._key, self._deadlines, limits=self._limits, read_ahead=False, world=self._world
                )
                begin_handshake(link, self._hello, sizes, self._deadlines.handshake, self._world)
            except (DistkerasError, OSError) as error:
                raise self._lost(rank, f"cannot be reached at {host}:{port}: {error}", 0) from error
        for rank in [peer for peer in peers if peer > membership.rank]:
            self._links[rank] = self._await(rank)

    def _await(self, rank: int) -> Channel:
        worker = self.membership.places[rank][0]
        timeout = self._deadlines.connect + self._deadlines.handshake
        deadline = self._world.monotonic() + timeout
        with self._changed:
            while worker not in self._arrived:
                left = deadline - self._world.monotonic()
                if left <= 0:
                    raise self._lost(rank, f"has not connected within {timeout:g} s", 0)
                self._changed.wait(left)
            return self._arrived[worker]

    def _take(self, hello: Hello, channel: Channel) -> bool:
        """Keep the channel if its peer is an expected member; return whether it is kept."""
        workers = {worker for worker, _, _ in self.membership.places}
        if hello.worker not in workers or hello.size != self._hello.size:
            return False
        answer_handshake(channel, hello, self._sizes, self._world)
        with self._changed:
            kept = not self._closed and self._arrived.setdefault(hello.worker, channel) is channel
            self._changed.notify_all()
        return kept

    def close(self) -> None:
        """Close all connections; idempotent; for the thread that exchanges."""
        with self._changed:
            self._closed = True
            channels = {*self._links.values(), *self._arrived.values()}
        self._listener.close()
        for channel in channels:
            channel.close()
            channel.connection.share(None)  # the memory is freed with the last received vector
        if self._poster is not None:
            self._poster.close()

    def memory_of_gradient(self) -> Vector:
        """Return memory for this member's next gradient, shape ``(size,)``, float32."""
        return self._shared_memory(self.membership.node[:1], self._gradient)

    def _shared_memory(self, ranks: Sequence[int], own: Vector) -> Vector:
        """Return the shared memory for the next vector to the first of ``ranks``; ``own`` if none is shared."""
        link = self._links.get(ranks[0]) if ranks else None
        slots = None if link is None else link.connection.slots
        return own if slots is None else slots.next_vector()

    def sum_gradients(self, step: int, gradient: Vector | None, learning_rate: float) -> tuple[Vector, int, float]:
        """Sum the gradients of this member's node; None: its rows have ended.

        Return the sum, valid until the next step; the number of gradients in it (0: the sum is empty); and the learning
        rate of the node's first member.
        """
        first, *others = self.membership.node
        empty = np.empty(0, np.float32)
        if self.membership.rank != first:
            own = empty if gradient is None else gradient
            self._send(first, PeerVector(Purpose.GRADIENT, step, own, members=int(gradient is not None)))
            answer = self._vector(first, Purpose.LOCAL_TOTAL, step)
            return answer.vector, answer.members, answer.learning_rate
        gradients = [] if gradient is None else [gradient]
        for rank in others:
            arrived = self._vector(rank, Purpose.GRADIENT, step)
            gradients += [arrived.vector] if arrived.members else []
        total = empty
        if gradients:
            total = total_of(gradients, self._shared_memory(others, self._total))
        for rank in others:
            self._send(rank, PeerVector(Purpose.LOCAL_TOTAL, step, total, len(gradients), learning_rate))
        return total, len(gradients), learning_rate

    def post(self, step: int, theta: Vector) -> None:
        """Begin to sum the parameters of this member's group, in a thread; ``theta`` must not change meanwhile."""
        self.wait_for_posted(step)
        if self._poster is None:
            self._poster = Posting(self._world, f"member-{self._hello.worker}")
        self._posted = True
        self._poster.post(lambda: self.sum_parameters(step, theta, cast=False))

    def collect(self, step: int) -> Vector:
        """Return the sum that was posted last."""
        if self._poster is None:
            raise LocalProtocolError("a sum must be posted before it is collected. Received: no sum", step=step)
        self.wait_for_posted(step)
        return self._poster.outcome()

    def wait_for_posted(self, step: int) -> None:
        """Wait until the posted sum, if any, has ended; then this thread owns the group's connections again."""
        if self._poster is None or not self._posted:
            return
        timeout = 2 * self._deadlines.reply
        if not self._poster.wait(timeout):
            raise DeadlineError(
                f"waited {timeout:g} s for the exchange between nodes", worker=self._hello.worker, step=step
            )
        self._posted = False
        self._poster.outcome()

    def sum_parameters(self, step: int, theta: Vector, *, cast: bool) -> Vector:
        """Return the sum of the parameters of this member's group; with ``cast``, they are sent as bfloat16."""
        first, *others = self.membership.group
        if self.membership.rank != first:
            self._send(first, _packed(step, theta) if cast else PeerVector(Purpose.PARAMETERS, step, theta))
            return self._vector(first, Purpose.GLOBAL_TOTAL, step).vector
        messages = [_packed(step, theta) if cast else PeerVector(Purpose.PARAMETERS, step, theta)]
        messages += [self._vector(rank, Purpose.PARAMETERS, step, packed=cast) for rank in others]
        total = total_of([each.packed.view(bfloat16).astype(np.float32) if cast else each.vector for each in messages])
        for rank in others:
            self._send(rank, PeerVector(Purpose.GLOBAL_TOTAL, step, total))
        return total

    def broadcast(self, step: int, device: int, vector: Vector | None) -> Vector:
        """Return the ``vector`` of the node's member number ``device``, which sends it to the others of its node."""
        membership = self.membership
        source = membership.node[device]
        if membership.rank != source:
            return self._vector(source, Purpose.BROADCAST, step).vector
        if vector is None:
            raise LocalProtocolError("the member of the group must have the vector. Received: None", step=step)
        for rank in membership.node:
            if rank != source:
                self._send(rank, PeerVector(Purpose.BROADCAST, step, vector))
        return vector

    def mean_loss(self, step: int, total: float, samples: float) -> float:
        """Return the mean loss of the epoch that ends with ``step``, over the samples of all members."""
        node, group = self.membership.node, self.membership.group
        losses = self._gather_losses(node, PeerLoss(step, total, samples))
        if self.membership.device == 0:
            self.wait_for_posted(step)
            losses = self._share_losses(group, self._gather_losses(group, losses))
        losses = self._share_losses(node, losses)
        return losses.total / losses.samples

    def _gather_losses(self, ranks: Sequence[int], own: PeerLoss) -> PeerLoss:
        """Send the losses to the first of ``ranks``; return their sum there, and ``own`` at the others."""
        first, *others = ranks
        if self.membership.rank != first:
            self._send(first, own)
            return own
        total, samples = own.total, own.samples
        for rank in others:
            losses = self._receive(rank, PeerLoss, own.step)
            total, samples = total + losses.total, samples + losses.samples
        return PeerLoss(own.step, total, samples)

    def _share_losses(self, ranks: Sequence[int], losses: PeerLoss) -> PeerLoss:
        """Return the ``losses`` of the first of ``ranks``, which sends them to the others."""
        first, *others = ranks
        if self.membership.rank != first:
            return self._receive(first, PeerLoss, losses.step)
        for rank in others:
            self._send(rank, losses)
        return losses

    def _vector(self, rank: int, purpose: Purpose, step: int, *, packed: bool = False) -> PeerVector:
        message = self._receive(rank, PeerVector, step)
        size = 0 if purpose in (Purpose.GRADIENT, Purpose.LOCAL_TOTAL) and not message.members else self._hello.size
        sizes = (0, 2 * size) if packed else (size, 0)
        if message.purpose != purpose or (message.vector.size, message.packed.size) != sizes:
            raise RemoteProtocolError(
                f"worker {self.membership.places[rank][0]} must send {purpose.name} with {sizes} elements and bytes. "
                f"Received: purpose {message.purpose} with {message.vector.size} and {message.packed.size}",
                worker=self._hello.worker,
                step=step,
            )
        return message

    def _receive(self, rank: int, kind: type[_Answer], step: int) -> _Answer:
        timeout = self._deadlines.reply
        try:
            message = self._links[rank].receive(timeout, f"a {kind.__name__}")
        except DeadlineError as error:
            raise self._lost(rank, f"has not answered for {timeout:g} s", step) from error
        except (RemoteProtocolError, OSError) as error:
            raise self._lost(rank, f"is lost: {error}", step) from error
        if isinstance(message, EndOfStream):
            raise self._lost(rank, "is lost: it closed the connection", step)
        if not isinstance(message, kind) or message.step != step:  # type: ignore[attr-defined]  # both kinds have one
            raise RemoteProtocolError(
                f"worker {self.membership.places[rank][0]} must send a {kind.__name__} of step {step}. "
                f"Received: a {type(message).__name__} of step {getattr(message, 'step', None)}",
                worker=self._hello.worker,
                step=step,
            )
        return message

    def _send(self, rank: int, message: PeerVector | PeerLoss) -> None:
        try:
            self._links[rank].send(message)
        except DeadlineError as error:
            raise self._lost(rank, f"does not take what it is sent: {error.message}", message.step) from error
        except OSError as error:
            raise self._lost(rank, f"is lost: {error}", message.step) from error

    def _lost(self, rank: int, how: str, step: int) -> MemberLostError:
        worker = self.membership.places[rank][0]
        return MemberLostError(
            f"worker {worker}, with which worker {self._hello.worker} exchanges, {how}",
            worker=worker,
            step=step % self.membership.batches,
        )


def _packed(step: int, theta: Vector) -> PeerVector:
    """Return ``theta`` as bfloat16, each element rounded to the nearest."""
    return PeerVector(Purpose.PARAMETERS, step, np.empty(0, np.float32), packed=theta.astype(bfloat16).view(np.uint8))
