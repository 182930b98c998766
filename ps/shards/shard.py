"""A shard: the center's elements of one slice, which repeats the calls that the sequencer has decided.

Rules:

1. A part is stored before its ticket is issued, because a worker sends its commit to the sequencer only when all shards
   have confirmed their parts. So a ticket never waits for a part, and a commit is applied by all shards or by none.
2. Tickets are applied strictly in their order, each once.
3. What a worker is sent is held from its ticket until the worker asks for it, once. After a lost connection, the worker
   pulls again, which is another ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.leases import NO_ATTEMPT, LeaseState
from distkeras.ps.center.micro_batches import begin_micro_batch
from distkeras.ps.center.schedulers import Scheduler
from distkeras.ps.errors import LocalProtocolError
from distkeras.ps.protocol.driver_messages import SetValues
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.protocol.shard_messages import DividedInspect, DividedRemoval
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.rules.base import Vector
from distkeras.ps.server.table_requests import rows_to_inspect
from distkeras.ps.shards.tickets import Kind, PartKey, Ticket

#: How many reads of the driver are held until it asks for them; it may have died before.
_READS = 16
#: For how many other attempts at a worker's partition rows are held; those that have died do not pull.
_ASKED = 8
#: How many of the driver's requests are held until their tickets come; it may have died before.
_REQUESTS = 256

#: What a ticket of the driver's refers to by its number.
Request = DividedInspect | DividedRemoval


@dataclass
class CommitPart:
    """The shard's elements of a commit's payload, and its rows; the shard owns the buffers."""

    key: PartKey
    buffers: Sequence[Buffer]
    touched: tuple[Ids, ...] = ()
    moved: tuple[Vector, ...] = ()
    wants: tuple[Ids, ...] = ()

    def drop(self) -> None:
        """Return the memory to the pool."""
        for buffer in self.buffers:
            buffer.drop()


class _Kept(NamedTuple):
    ticket: int
    released: Released


class Shard:
    """One shard's state, without threads; its caller holds one lock around every call.

    Args:
        center: of the shard's elements and rows; its clock ``now`` is `time`.
        make_scheduler: returns the scheduler of a further micro-batch.
        save: begins to write the present state of the center, for the snapshot of this number.
    """

    def __init__(
        self,
        make_center: Callable[[Callable[[], float]], Center],
        make_scheduler: Callable[[], Scheduler],
        save: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._time = 0.0
        self.center = make_center(lambda: self._time)
        self._make_scheduler = make_scheduler
        #: The number of the latest ticket that was applied.
        self.applied = 0
        self._parts: dict[PartKey, CommitPart] = {}
        #: The rows that a worker asks for with its next pull, by worker, attempt and connection.
        self._wants: dict[tuple[int, int, int], tuple[Ids, ...]] = {}
        self._released: dict[int, _Kept] = {}
        self._reads: dict[int, Released] = {}
        self._requests: dict[int, Request] = {}
        self._calls: dict[Kind, Callable[[Ticket], object]] = {
            Kind.JOIN: self._join,
            Kind.LEAVE: self._leave,
            Kind.LEND: self._lend,
            Kind.COMMIT: self._commit,
            Kind.SKIP: self._skip,
            Kind.RELEASE: self._release,
            Kind.READ: self._read,
            Kind.MICRO_BATCH: self._begin_micro_batch,
            Kind.RATE: self._set_rate,
            Kind.SAVE: lambda ticket: save(ticket.number),
            Kind.REMOVE: self._remove,
            Kind.CHANGES: lambda ticket: self.center.begin_changes(ticket.number),
        }

    def put(self, part: CommitPart) -> bool:
        """Store a part; return False, and drop it, if the worker has sent the same commit over a later connection."""
        key = part.key
        same = [other for other in self._parts if (*other[:2], other.sequence) == (*key[:2], key.sequence)]
        # A worker sends a commit again only once the sequencer has refused everything over the earlier connection.
        if any(other.connection > key.connection for other in same):
            part.drop()
            return False
        self._forget(same)
        self._parts[key] = part
        return True

    def _forget(self, keys: Iterable[PartKey]) -> None:
        for key in [*keys]:
            self._parts.pop(key).drop()

    def want(self, key: PartKey, wants: tuple[Ids, ...]) -> None:
        """Note the rows that the next pull over a connection is sent."""
        for part in self._parts.values():
            if part.key[:3] == key[:3]:  # a pull replaces the reply to a commit whose ticket may still come
                part.wants = ()
        self._set_wants(key, wants)

    def _set_wants(self, key: PartKey, wants: tuple[Ids, ...]) -> None:
        own = [other for other in self._wants if other[0] == key.worker]
        same = [other for other in own if other[1] == key.attempt]
        if any(other[2] > key.connection for other in same):
            return  # the request has come late, over a connection that the worker has replaced
        for replaced in {*same, *own[:-_ASKED]}:
            del self._wants[replaced]
        self._wants[key[:3]] = wants

    def ask(self, request: Request) -> None:
        """Store the driver's request, which is checked, until its ticket comes."""
        self._requests[request.request] = request
        if len(self._requests) > _REQUESTS:
            self._requests.pop(next(iter(self._requests)))

    def apply(self, ticket: Ticket) -> None:
        """Repeat the next call.

        Raises:
            NonFiniteError: the arithmetic has produced a NaN or infinity; the center is corrupt.
            LocalProtocolError: the shard has not the state of the sequencer.
        """
        if ticket.clock != self.center.clock:
            raise LocalProtocolError(
                f"a shard must have the clock of its sequencer at ticket {self.applied + 1}, which is {ticket.clock}. "
                f"Received: {self.center.clock}"
            )
        self._time = ticket.time
        self.applied += 1
        self._calls[ticket.kind](ticket)

    def fetch(self, worker: int, ticket: int) -> Released | None:
        """Return what ``worker``, or the driver (-1), is sent at an applied ticket; None if a later one replaced it.

        The caller drops the buffer.
        """
        if worker < 0:
            return self._reads.pop(ticket, None)
        sent = self._released.get(worker)
        if sent is None or sent.ticket != ticket:
            return None
        del self._released[worker]
        return sent.released

    def _join(self, ticket: Ticket) -> None:
        leases, worker = self.center.leases, ticket.worker
        if worker >= self.center.workers:
            leases.lend(worker, ticket.holder, ticket.attempt, 0.0)
        self.center.join(worker, ticket.attempt, expired=True)
        # No commit of another attempt can have a ticket any more.
        self._forget(key for key in self._parts if key.worker == worker and key.attempt != ticket.attempt)

    def _leave(self, ticket: Ticket) -> None:
        lease = self.center.leases.get(ticket.worker)
        if lease is not None and not lease.finished and ticket.worker >= self.center.workers:
            lease.attempt = ticket.attempt  # the loan was promised to an attempt that has not joined
        self.center.leave(ticket.worker, ticket.attempt)
        self._forget(key for key in self._parts if key.worker == ticket.worker)
        self._drop_sent(ticket.worker)

    def _drop_sent(self, worker: int) -> None:
        sent = self._released.pop(worker, None)
        if sent is not None:
            sent.released.buffer.drop()

    def _lend(self, ticket: Ticket) -> None:
        loan = self.center.leases.add(ticket.worker, NO_ATTEMPT)
        loan.state, loan.partition, loan.holder = LeaseState.FREE, ticket.number, ticket.holder
        loan.epoch, loan.batch = ticket.epoch, ticket.first

    def _commit(self, ticket: Ticket) -> None:
        part = self._take(ticket)
        commit = _commit_of(ticket, self.center, part)
        if not self.center.commit(commit, part.buffers):
            part.drop()

    def _skip(self, ticket: Ticket) -> None:
        part = self._take(ticket)
        self.center.skip(_commit_of(ticket, self.center, part))
        part.drop()

    def _take(self, ticket: Ticket) -> CommitPart:
        part = self._parts.pop(ticket.part, None)
        if part is None:
            raise LocalProtocolError(
                f"a shard must have the part of {ticket.part} before its ticket. "
                f"Received: {', '.join(map(str, self._parts)) or 'no part'}",
                worker=ticket.worker,
                step=ticket.first,
            )
        if part.wants:
            self._set_wants(part.key, part.wants)
        return part

    def _release(self, ticket: Ticket) -> None:
        wants = self._wants.pop((ticket.worker, ticket.attempt, ticket.connection), ())
        released = self.center.release(ticket.worker, ticket.attempt, wants)
        self._drop_sent(ticket.worker)
        self._released[ticket.worker] = _Kept(self.applied, released)

    def _read(self, ticket: Ticket) -> None:
        moved: tuple[Ids, ...] = ()
        if ticket.number:
            request = self._requested(ticket)
            assert isinstance(request, DividedInspect)
            moved = rows_to_inspect(self.center.tables, request)
        released = self.center.inspect(moved)
        if self.center.traits.view:  # the center changes in place
            copy = self.center.pool.take()
            np.copyto(copy.array, released.buffer.array)
            released.buffer.drop()
            released = released._replace(buffer=copy)
        self._reads[self.applied] = released
        if len(self._reads) > _READS:
            self._reads.pop(min(self._reads)).buffer.drop()

    def _requested(self, ticket: Ticket) -> Request:
        request = self._requests.pop(ticket.number, None)
        if request is None:
            raise LocalProtocolError(
                f"a shard must have request {ticket.number} before its ticket. Received: {[*self._requests]}"
            )
        return request

    def _remove(self, ticket: Ticket) -> None:
        request = self._requested(ticket)
        assert isinstance(request, DividedRemoval)
        self.center.remove_rows(request.table, request.ids)

    def _begin_micro_batch(self, ticket: Ticket) -> None:
        present = self.center.micro_batch
        stream = "" if present is None else present.stream
        begin_micro_batch(self.center, stream, ticket.number, self._make_scheduler())

    def _set_rate(self, ticket: Ticket) -> None:
        request = SetValues(np.array([[0.0, ticket.value]]), self.applied)
        self.center.values.set(request, ticket.clock)


def _commit_of(ticket: Ticket, center: Center, part: CommitPart) -> Commit:
    """Return the commit of ``ticket``, with the shard's part of it."""
    return Commit(
        epoch=ticket.epoch,
        first=ticket.first,
        last=ticket.last,
        epoch_end=ticket.epoch_end,
        wants_center=ticket.wants_center,
        learning_rate=ticket.learning_rate,
        scale=1.0,
        parts=tuple(buffer.array for buffer in part.buffers),
        overlapped=ticket.overlapped,
        touched=part.touched,
        moved=part.moved,
        wants=part.wants,
        worker=ticket.worker,
        attempt=ticket.attempt,
        incarnation=center.incarnation,
        sequence=ticket.sequence,
    )
