"""The center of a sequencer: it decides about every call, and has no element of the model.

Leases, ledger, rounds, counters, schedules and moving statistics are those of a `Center` whose vector is a single zero.
Each call that changes what shards compute is issued as a ticket, under the same lock, right after it has succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.driver_values import RATE, DriverValues
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.center.living_tables import LivingTable, make_table
from distkeras.ps.errors import LocalProtocolError
from distkeras.ps.protocol.driver_messages import SetValues
from distkeras.ps.protocol.messages import Commit
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape
from distkeras.ps.rules.base import Rule, Scalars, Vector
from distkeras.ps.shards.owned_tables import OwnedTable
from distkeras.ps.shards.tickets import Kind, Ticket, require_exact

#: Elements of a sequencer's vector: the arithmetic of a rule needs one.
ELEMENTS = 1


class TicketLog:
    """The tickets that some shard has not taken yet; its caller holds the lock of the center."""

    def __init__(self, shards: int) -> None:
        self._taken = [0] * shards
        self._tickets: list[Ticket] = []
        self._forgotten = 0

    @property
    def last(self) -> int:
        """The number of the latest ticket; 0: there is none."""
        return self._forgotten + len(self._tickets)

    def issue(self, ticket: Ticket) -> int:
        """Append ``ticket``, and return its number."""
        require_exact(ticket)
        self._tickets.append(ticket)
        return self.last

    def after(self, shard: int, number: int) -> list[Ticket]:
        """Return the tickets after ``number``, up to which ``shard`` has taken them; forget what all have taken."""
        if not self._forgotten <= number <= self.last or number < self._taken[shard]:
            raise LocalProtocolError(
                f"shard {shard} must continue after a ticket from {max(self._forgotten, self._taken[shard])} to "
                f"{self.last}. Received: {number}"
            )
        self._taken[shard] = number
        due = min(self._taken) - self._forgotten
        del self._tickets[:due]
        self._forgotten += due
        return self._tickets[number - self._forgotten :]


class _SequencedValues(DriverValues):
    """The driver's values; a new learning rate is a ticket."""

    def __init__(self, center: SequencingCenter) -> None:
        super().__init__()
        self._center = center

    def set(self, request: SetValues, clock: int) -> bool:
        before = self._latest()
        changed = super().set(request, clock)
        rate = self._latest()
        if rate != before:
            assert rate is not None
            self._center.issue(Ticket(Kind.RATE, clock=clock, value=rate))
        return changed

    def _latest(self) -> float | None:
        return dict(self.current.rows.tolist()).get(RATE)


class SequencingCenter(Center):
    """A `Center` whose elements are at ``shards`` shards; its vector is a zero of the dtype of ``vector``.

    The mean scale factor of a commit is NaN under a rule that scales each element by itself (`Rule.scales_elements`),
    or by a norm over all of them (`Rule.reduces`): only the shards know the factors. ``shapes`` are the tables of the
    shards.
    """

    def __init__(
        self, rule: Rule, vector: Vector, *, shards: int, shapes: Sequence[TableShape] = (), **options: Any
    ) -> None:
        super().__init__(rule, np.zeros(ELEMENTS, vector.dtype), **options)
        self.log_of_tickets = TicketLog(shards)
        # They have no rows, but their shapes are saved, and the moments since which the driver reads changes.
        tables = [make_table(shape) if shape.partial else OwnedTable(shape, NO_IDS) for shape in shapes]
        self.living = tuple(table for table in tables if isinstance(table, LivingTable))
        self.saved_tables = (*tables, *(table.marks for table in self.living))
        #: The number of the connection over which each lease is held, by the number of the lease.
        self.connections: dict[int, int] = {}
        #: Whether a shard has failed within a ticket, such as by arithmetic that is not finite.
        self.shard_failed = False
        #: Is called after each ticket, under the lock: shards wait for it.
        self.issued: Callable[[], None] = lambda: None
        self.values = _SequencedValues(self)

    @property
    def corrupt(self) -> bool:
        return self.shard_failed or super().corrupt

    def issue(self, ticket: Ticket) -> int:
        """Issue a ticket for a call that has just succeeded; return its number."""
        number = self.log_of_tickets.issue(ticket)
        self.issued()
        return number

    def join(self, worker: int, attempt: int, *, expired: bool = False) -> PartitionLease | None:
        lease = super().join(worker, attempt, expired=expired)
        if lease is not None and not lease.finished:
            self.issue(Ticket(Kind.JOIN, worker, attempt, clock=self.clock, time=self._now(), holder=lease.holder))
        return lease

    def leave(self, worker: int, attempt: int) -> None:
        super().leave(worker, attempt)
        self.issue(Ticket(Kind.LEAVE, worker, attempt, clock=self.clock, time=self._now()))

    def commit(
        self,
        commit: Commit,
        parts: Sequence[Buffer],
        arrived: float | None = None,
        companions: Sequence[Commit] = (),
    ) -> bool:
        known, before, clock = set(self.leases), self._sequence(commit), self.clock
        applied = super().commit(commit, parts, arrived, companions)
        if self._sequence(commit) != before:  # it is applied, or refused, and not sent again
            self._issue_commit(Kind.COMMIT, commit, clock)
        for number in self.leases.keys() - known:
            self._issue_loan(number)
        return applied

    def skip(self, commit: Commit) -> bool:
        clock = self.clock
        skipped = super().skip(commit)
        if skipped:
            self._issue_commit(Kind.SKIP, commit, clock)
        return skipped

    def release(
        self, worker: int, attempt: int, wants: Sequence[Ids] = (), outs: Sequence[Vector | None] = ()
    ) -> Released:
        released = super().release(worker, attempt, wants, outs)
        connection = self.connections.get(worker, 0)
        ticket = self.issue(Ticket(Kind.RELEASE, worker, attempt, connection, clock=self.clock))
        return released._replace(ticket=ticket)

    def inspect(self, moved: Sequence[Ids] = (), request: int = 0) -> Released:
        """See `Center`; the shards know which rows ``request`` asks for."""
        released = super().inspect(moved)
        return released._replace(ticket=self.issue(Ticket(Kind.READ, clock=self.clock, number=request)))

    def begin_changes(self, since: int) -> bool:
        known = super().begin_changes(since)
        self.issue(Ticket(Kind.CHANGES, clock=self.clock, number=since))
        return known

    def remove_requested(self, request: int) -> None:
        """Remove the rows that ``request`` has named to the shards."""
        self.edits += 1
        self.issue(Ticket(Kind.REMOVE, clock=self.clock, number=request))

    def _apply(
        self, lease: PartitionLease, parts: Sequence[Buffer], scalars: Scalars, ahead: tuple[int, Scalars] | None
    ) -> float | None:
        total = super()._apply(lease, parts, scalars, ahead)
        return math.nan if self.rule.scales_elements or self.rule.reduces else total

    def _sequence(self, commit: Commit) -> int:
        lease = self.leases.get(commit.worker)
        return -1 if lease is None else lease.sequence

    def _issue_commit(self, kind: Kind, commit: Commit, clock: int) -> None:
        connection = self.connections.get(commit.worker, 0)
        self.issue(Ticket.of(kind, commit, connection=connection, clock=clock, time=self._now()))

    def _issue_loan(self, number: int) -> None:
        lease = self.leases[number]
        ticket = Ticket(Kind.LEND, number, epoch=lease.epoch, first=lease.batch, clock=self.clock)
        self.issue(ticket._replace(number=lease.partition, holder=lease.holder))
