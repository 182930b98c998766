"""Tickets: the calls of a center that the sequencer has decided, in the order in which all shards repeat them.

A center is a deterministic state machine. So a shard that starts from its slice of the same state, and repeats the same
calls in the same order with its slice of each payload, has the slice of the result of one server, to the bit. A ticket
has what a call needs except for vectors and rows: these are in the parts that the workers send to the shards.

Tickets are numbered from 1. On the wire they are rows of numbers, float64, which hold integers below 2**53.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.messages import Commit


class Kind(enum.IntEnum):
    """The calls that shards repeat."""

    #: An attempt holds a lease: `Center.join`.
    JOIN = 1
    #: A lease has ended: `Center.leave`.
    LEAVE = 2
    #: A part of a lease is lent: `Leases.cut`.
    LEND = 3
    #: `Center.commit`, applied or refused.
    COMMIT = 4
    #: `Center.skip`.
    SKIP = 5
    #: A worker is sent the center, or the rule's view of it: `Center.release`.
    RELEASE = 6
    #: The driver, or a snapshot, reads the center.
    READ = 7
    #: A micro-batch begins: `begin_micro_batch`.
    MICRO_BATCH = 8
    #: The driver has set the server's learning rate.
    RATE = 9
    #: The shards save their elements.
    SAVE = 10
    #: The driver removes rows: `Center.remove_rows`.
    REMOVE = 11
    #: The driver reads the changes of tables: `Center.begin_changes`.
    CHANGES = 12


class Ticket(NamedTuple):
    """One call; the fields that a kind does not name are 0.

    Args:
        kind: the call.
        worker: number of the lease; -1 for the kinds without one.
        attempt: its holder.
        connection: that over which the holder has sent the part of a commit.
        sequence, epoch, first, last, epoch_end, wants_center, overlapped, learning_rate: those of a commit.
        clock: the center's, before the call.
        time: that of the call, seconds since the epoch.
        number: the partition of a loan, the number of a micro-batch, that by which a snapshot is saved, the clock since
            which changes are read, or the number of the request that says which rows are read or removed.
        value: the learning rate that was set.
        holder: the worker that trains a lease.
    """

    kind: Kind
    worker: int = -1
    attempt: int = 0
    connection: int = 0
    sequence: int = 0
    epoch: int = 0
    first: int = 0
    last: int = 0
    epoch_end: bool = False
    wants_center: bool = False
    overlapped: bool = False
    learning_rate: float = 0.0
    clock: int = 0
    time: float = 0.0
    number: int = 0
    value: float = 0.0
    holder: int = -1

    @classmethod
    def of(cls, kind: Kind, commit: Commit, *, connection: int, clock: int, time: float) -> Ticket:
        """Return the ticket for the call of ``kind`` with ``commit``."""
        return cls(
            kind,
            commit.worker,
            commit.attempt,
            connection,
            commit.sequence,
            commit.epoch,
            commit.first,
            commit.last,
            commit.epoch_end,
            commit.wants_center,
            commit.overlapped,
            commit.learning_rate,
            clock,
            time,
        )

    @property
    def part(self) -> PartKey:
        """What identifies the part of the commit."""
        return PartKey(self.worker, self.attempt, self.connection, self.sequence)


class PartKey(NamedTuple):
    """What identifies the vectors of a commit; a worker sends them to each shard once over each connection."""

    worker: int
    attempt: int
    connection: int
    sequence: int

    def __str__(self) -> str:
        worker, attempt, connection, sequence = self
        return f"commit {sequence} of worker {worker} (attempt {attempt}, connection {connection})"


#: The type of each field of a ticket.
_TYPES = (Kind, *(int,) * 7, *(bool,) * 3, float, int, float, int, float, int)
_INTEGERS = [place for place, kind in enumerate(_TYPES) if kind is not float]


def rows_of(tickets: Sequence[Ticket]) -> np.ndarray:
    """Return tickets as numbers, float64 ``(len(tickets), fields)``."""
    return np.array(tickets, np.float64).reshape(-1, len(_TYPES))


def tickets_of(rows: np.ndarray) -> list[Ticket]:
    """Return the tickets that `rows_of` encoded; raise a RemoteProtocolError for other numbers."""
    if rows.ndim != 2 or rows.shape[1] != len(_TYPES):
        raise RemoteProtocolError(f"tickets must be rows of {len(_TYPES)} numbers. Received: shape {rows.shape}")
    whole = rows[:, _INTEGERS]
    if not np.isfinite(rows).all() or (whole != np.floor(whole)).any():
        raise RemoteProtocolError(
            "the numbers of a ticket must be finite, and whole where they count. Received: others"
        )
    try:
        return [Ticket(*(kind(value) for kind, value in zip(_TYPES, row, strict=True))) for row in rows.tolist()]
    except ValueError as error:
        raise RemoteProtocolError(f"a ticket must be of a known kind. Received: {error}") from None


def require_exact(ticket: Ticket) -> None:
    """Raise a RemoteProtocolError if float64 cannot hold a number of ``ticket`` exactly."""
    for value in ticket:
        if not math.isfinite(value) or (isinstance(value, int) and int(float(value)) != value):
            raise RemoteProtocolError(f"a ticket must have finite numbers, integers below 2**53. Received: {ticket}")
