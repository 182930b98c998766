"""The messages of a center that is divided among shards: see `shards.tickets`.

A worker or driver sends the elements of a slice to the shard that holds it, and everything else to the sequencer.
"""

from __future__ import annotations

from dataclasses import field

from distkeras.ps.protocol.driver_messages import Inspect, InspectRows, RemoveRows
from distkeras.ps.protocol.loop import NO_BYTES, NO_ROWS, Bytes, Floats, Rows
from distkeras.ps.protocol.messages import CenterReply, Commit, Fault, Message
from distkeras.ps.protocol.tables import Ids


class DividedCommit(Commit, kw_only=True):
    """Worker → sequencer: a commit whose vectors and rows are stored at all shards, with their sizes.

    ``problem`` is not empty if a number of them is not finite: see `PartStored`.
    """

    problem: str = ""
    sent_bytes: int
    sent_row_bytes: int = 0
    sent_rows: int = 0
    asked_rows: int = 0

    @property
    def payload_bytes(self) -> int:
        return self.sent_bytes

    @property
    def row_bytes(self) -> int:
        return self.sent_row_bytes

    @property
    def rows_moved(self) -> int:
        return self.sent_rows

    @property
    def rows_wanted(self) -> int:
        return self.asked_rows


class DividedReply(CenterReply, kw_only=True):
    """Sequencer → worker or driver: a reply without the center, whose slices the shards have at ``ticket``."""

    ticket: int


class PublishSize(Message):
    """Driver → sequencer: the elements of the whole center, before `Publish`, whose center has a single zero."""

    size: int


class PublishSlice(Message):
    """Driver → shard: the initial elements of its slice of ``size`` elements; idempotent.

    ``moving_statistics`` are the elements of the whole model's, at the sequencer. For ``names`` see `Publish`.
    """

    size: int
    center: Floats
    moving_statistics: int
    names: Bytes = field(default_factory=lambda: NO_BYTES)


class Greet(Message):
    """Worker → shard: the first message over a connection to shard number ``shard``; for the fields see `Hello`."""

    shard: int
    worker: int
    attempt: int
    connection: int
    incarnation: int
    wire_format: str = "float32"


class SendPart(Message):
    """Worker → shard: the shard's elements and rows of the next commit over this connection; see `Commit`."""

    sequence: int
    epoch: int
    first: int
    last: int
    parts: tuple[Floats, ...]
    packed: tuple[Bytes, ...] = ()
    touched: tuple[Ids, ...] = ()
    moved: tuple[Floats, ...] = ()
    wants: tuple[Ids, ...] = ()


class PartStored(Message):
    """Shard → worker: the part is stored. ``problem`` names its first number that is not finite; empty: all are."""

    problem: str = ""


class AskRows(Message):
    """Worker → shard: the rows of each table that the next pull over this connection is sent."""

    wants: tuple[Ids, ...]


class FetchSlice(Message):
    """Worker or driver → shard: send the slice at ``ticket``, as a `CenterReply`; ``whole``: not as a change."""

    ticket: int
    whole: bool = True


class RegisterShard(Message):
    """Shard → sequencer: shard number ``shard`` of its ``incarnation`` listens at ``host`` and ``port``.

    ``process``: see `AskRole`; 0 if the sequencer has started the process of the shard.
    """

    shard: int
    host: str
    port: int
    incarnation: int
    process: int = 0


class ListShards(Message):
    """Worker or driver → sequencer: where are the shards? Answered once all have registered."""


class Shards(Message):
    """Sequencer → worker or driver: a line "host port" for each shard, and the elements of the whole center."""

    places: str
    size: int


class TakeTickets(Message):
    """Shard → sequencer: send the tickets after number ``after``, or none if there is none in ``patience`` seconds.

    ``counts`` are those of the shard's rows: see `Status.tables`. ``incarnation`` is that of the sequencer that has
    started the shard. ``process``: see `RegisterShard`.
    """

    shard: int
    after: int
    patience: float
    incarnation: int
    counts: Rows = field(default_factory=lambda: NO_ROWS)
    process: int = 0


class Tickets(Message):
    """Sequencer → shard: tickets, as `tickets.rows_of` encodes them."""

    rows: Rows = field(default_factory=lambda: NO_ROWS)


class AddUp(Message):
    """Shard → sequencer: the shares of its blocks in a sum over the whole vector, float64 ``(1, blocks)``.

    They are those of the commit at ``ticket``. The answer, a `Total`, is sent once all shards have sent theirs.
    """

    shard: int
    ticket: int
    shares: Rows


class Total(Message):
    """Sequencer → shard: the sum of all shares."""

    value: float


class PartSaved(Message):
    """Shard → sequencer: it has written its elements, from ``start`` to ``stop``, of snapshot ``number`` to a file.

    ``problem`` is not empty if it could not. ``rows`` are the names of the files with its rows, a line each.
    """

    shard: int
    number: int
    name: str
    start: int
    stop: int
    problem: str = ""
    rows: Bytes = field(default_factory=lambda: NO_BYTES)


class ShardFault(Fault):
    """Shard → sequencer: the job must end with this error.

    ``within_ticket``: it has occurred while a ticket was applied, and the shard applies no further ones.
    """

    within_ticket: bool = False


class DividedInspect(Inspect, kw_only=True):
    """Driver → shards, then sequencer: what to send at the `READ` ticket with this number ``request``; 0: no rows.

    A shard is sent the ids of its own rows, and answers with an `Ack`; the sequencer is sent no ids.
    """

    request: int = 0


class DividedRemoval(RemoveRows, kw_only=True):
    """Driver → shards, then sequencer: the rows to remove at the `REMOVE` ticket with this number ``request``.

    A shard is sent the ids of its own rows, and the sequencer none.
    """

    request: int


class AskTicket(Message):
    """Driver → sequencer: which ticket is the latest one?"""


class LatestTicket(Message):
    """Sequencer → driver: number ``ticket`` is the latest one; 0: there is none."""

    ticket: int


class ReadRows(InspectRows, kw_only=True):
    """Driver → shard: send rows as they are at ``ticket`` or later; the places are those among the shard's rows.

    The answer has the ids of the rows also for a table that is kept whole.
    """

    ticket: int


class AskRole(Message):
    """Process → sequencer: may it be shard number ``shard``? It may while this connection lasts, unless another one is.

    ``process`` is a random number of this connection. ``leaving``: it must end soon, after a last snapshot. The answer
    is a `Role`, or an `Ack` while another process has it.
    """

    shard: int
    process: int
    leaving: bool = False


class Role(Message):
    """Sequencer → process: it is the shard; for the fields see `ShardRole`. ``epochs`` -1: None."""

    incarnation: int
    claim: str
    snapshot: str
    same_attempts: bool
    epochs: int
