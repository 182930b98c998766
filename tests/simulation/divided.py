"""A center that is divided among shards, in a run: its vectors on one server, with which each shard is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from support.present import present

from distkeras.ps.center.center import Center
from distkeras.ps.center.living_tables import make_table
from distkeras.ps.center.tables import Rows, Table
from distkeras.ps.checkpoint.ownership import Claim, parsed
from distkeras.ps.checkpoint.parts import PartFile, vectors_of
from distkeras.ps.checkpoint.row_files import RowFiles
from distkeras.ps.checkpoint.snapshots import Saved
from distkeras.ps.checkpoint.state import State, capture, restore
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.protocol import compression
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.shard_messages import DividedInspect, DividedRemoval
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import Rule
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards import processes, sequencer, shard_server
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.saving import PartsOfShards
from distkeras.ps.shards.sequencer import TicketLog
from distkeras.ps.shards.sequencer_server import SequencerDispatcher
from distkeras.ps.shards.shard import CommitPart, Shard
from distkeras.ps.shards.tickets import Kind, Ticket
from distkeras.ps.world.world import World
from simulation.disk import StillWorld
from simulation.reference import Sent
from simulation.scheduler import Finding
from simulation.table_records import TableRecord, record_tables, saved_rows
from simulation.world import Surroundings, VirtualChild, VirtualWorld

#: The directory of the snapshots.
DIRECTORY = "/job"
#: Elements of a block in runs with shards, so that small vectors are cut.
BLOCK = 2
#: The vectors and rows of saved states, by the claim and the number of their snapshot.
SavedStates = dict[tuple[Claim, int], State]


class Record(NamedTuple):
    """What a shard has after a ticket, and what it sends at the ticket.

    Args:
        clock, vectors: the clock and the vectors; those that are sent are among them.
        tables: the rows of each table.
        sent: numbers and rows, by table, that are sent at the ticket.
    """

    clock: int
    vectors: dict[str, np.ndarray]
    tables: tuple[TableRecord, ...] = ()
    sent: tuple[Rows, ...] = ()


class RecordingLog(TicketLog):
    """Tickets of a sequencer, which keeps all of them: the shards may have taken some before the first check."""

    def __init__(self, shards: int) -> None:
        super().__init__(shards)
        self.issued: list[Ticket] = []

    def issue(self, ticket: Ticket) -> int:
        """See `TicketLog`."""
        self.issued.append(ticket)
        return super().issue(ticket)


class RecordingShard(Shard):
    """A shard that records its vectors and rows after each ticket."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.records = {0: self._record({}, record_tables(self.center))}

    def apply(self, ticket: Ticket) -> None:
        """See `Shard`."""
        before = self.records[self.applied].tables
        wants = self._wants.get((ticket.worker, ticket.attempt, ticket.connection), ())
        super().apply(ticket)
        vectors, sent = {}, tuple[Rows, ...]()
        if ticket.kind is Kind.RELEASE:
            released = self._released[ticket.worker].released
            vectors["what is sent"], sent = released.buffer.array, _of_tables(self.center, wants, released.rows)
        elif ticket.kind is Kind.READ:
            read = self._reads[self.applied]
            vectors["what is read"], sent = read.buffer.array, _of_tables(self.center, read.moved, read.rows)
        moved = ticket.kind in (Kind.COMMIT, Kind.REMOVE)
        tables = record_tables(self.center) if moved else before
        self.records[self.applied] = self._record(vectors, tables, sent)

    def _record(
        self, sent: Mapping[str, np.ndarray], tables: tuple[TableRecord, ...], rows: tuple[Rows, ...] = ()
    ) -> Record:
        center, total = self.center, self.center.round.total
        vectors = {"the center": center.current.array, **sent}
        vectors |= {f"vector {number} of the rule": vector for number, vector in enumerate(center.model)}
        for worker, lease in center.leases.items():
            for number, vector in enumerate(lease.vectors):
                vectors[f"vector {number} of lease {worker}"] = vector
        if total is not None:
            vectors["the round"] = total.array
        return Record(center.clock, {name: vector.copy() for name, vector in vectors.items()}, tables, rows)


def _of_tables(center: Center, several: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> tuple[Rows, ...]:
    pairs = zip(center.tables, several, rows, strict=True) if several else ()
    return tuple([(ids, flat.reshape(-1, table.shape.width).copy()) for table, ids, flat in pairs])


def difference_of(whole: Record, own: Record, stretch: slice, owns: Callable[[np.ndarray], np.ndarray]) -> str:
    """Describe the first difference between a shard and its share of the whole; "" if there is none.

    ``stretch`` are its elements, and ``owns`` returns for each row number whether the row is its own.
    """
    if own.clock != whole.clock:
        return f"Its clock must be {whole.clock}. Received: {own.clock}"
    if own.vectors.keys() != whole.vectors.keys():
        return f"It must have {sorted(whole.vectors)}. Received: {sorted(own.vectors)}"
    for name, vector in whole.vectors.items():
        if not np.array_equal(vector[stretch], own.vectors[name]):
            return f"Of {name}, it must have {vector[stretch].tolist()}. Received: {own.vectors[name].tolist()}"
    for number, (all_rows, rows) in enumerate(zip(whole.tables, own.tables, strict=True)):
        text = all_rows.difference(rows, owns)
        if text:
            return f"Of table {number}, it must have {text}"
    for number, (ids, sent) in enumerate(own.sent):
        expected = whole.tables[number].gather(ids)
        if not (owns(ids).all() and np.array_equal(expected, sent)):
            text = f"its own rows of {ids.tolist()}, which are {expected.tolist()}. Received: {sent.tolist()}"
            return f"Of table {number}, it must send {text}"
    return ""


class Mirror:
    """The vectors and rows of a divided center on one server: a single shard, which makes all calls at once.

    Args:
        settings, world: settings of the server, and its world.
        incarnation: that of the server.
        vector, tables: the initial center and rows.
        restored: its restored state, with whole vectors and tables, and options of `restore`; None: the center is new.
        save: called with the number of a snapshot and its state.
        removed: returns the rows that a request of the driver's removes, by its number.
    """

    def __init__(
        self,
        settings: ServerSettings,
        world: World,
        incarnation: int,
        vector: np.ndarray,
        tables: Sequence[Table],
        restored: tuple[State, dict[str, Any]] | None,
        save: Callable[[int, State], None],
        removed: Callable[[int], DividedRemoval],
    ) -> None:
        self._removed = removed

        def make_center(now: Callable[[], float]) -> Center:
            def make(rule: Rule, vector: np.ndarray, **options: Any) -> Center:
                return Center(rule, vector, **options | {"now": now})

            center = settings.make_center(vector, NO_FLOATS, incarnation, world, tables, make=make)
            if restored is not None:
                state, options = restored
                restore(center, state, **options)
            return center

        def keep(number: int) -> None:
            state = capture(self.center)
            vectors = {name: array.copy() for name, array in vectors_of(state).items()}
            save(number, State(state.header, vectors, tables=saved_rows(self.center)))
            state.drop()

        self._shard = RecordingShard(make_center, settings.make_scheduler, keep)

    @property
    def center(self) -> Center:
        """Return the center, which has the vectors and the rows, and no moving statistics."""
        return self._shard.center

    def at(self, ticket: int) -> Record:
        """Return the record after a ticket."""
        record = self._shard.records.get(ticket)
        if record is None:
            raise Finding("shard", f"ticket {ticket} must be applied after it is issued. Received: before")
        return record

    def follow(self, center: Any, sent: Callable[[int, int, int], Sent]) -> None:
        """Make the calls that the sequencer has decided; ``sent`` returns a commit as it was sent.

        Its arguments are worker, attempt and number of the commit.
        """
        for ticket in center.log_of_tickets.issued[self._shard.applied :]:
            if ticket.kind in (Kind.COMMIT, Kind.SKIP):
                self._put(ticket, sent(ticket.worker, ticket.attempt, ticket.sequence))
            elif ticket.kind is Kind.READ and ticket.number:
                self._shard.ask(DividedInspect(request=ticket.number))  # the rows that it sends are not compared
            elif ticket.kind is Kind.REMOVE:
                request = self._removed(ticket.number)
                self.center.remove_rows(request.table, request.ids)  # by itself; to do it again changes nothing
                self._shard.ask(request)
            self._shard.apply(ticket)

    def _put(self, ticket: Ticket, sent: Sent) -> None:
        buffers = [self.center.pool.take() for _ in sent.parts]
        for buffer, vector in zip(buffers, sent.parts, strict=True):
            buffer.array[...] = vector
        moved = tuple([rows.copy() for rows in sent.moved])
        self._shard.put(CommitPart(ticket.part, buffers, sent.touched, moved))


def mirror_for(
    child: VirtualChild, size: int, saved: SavedStates, start: Sequence[tuple[TableShape, np.ndarray]]
) -> Mirror | None:
    """Return the mirror of a server whose center is divided, before its first ticket; None for another one.

    ``saved`` has the states of all snapshots that mirrors have seen, and receives those of this one; ``start`` are the
    initial rows of the tables of which all rows exist.
    """
    dispatcher = child.server.dispatcher
    if not isinstance(dispatcher, SequencerDispatcher):
        return None
    assert child.request is not None
    role, mode, settings = dispatcher.role, child.request.mode, child.request.settings
    owner = parsed(f"owner-{role.claim}")
    restored = None
    if role.snapshot:
        own = dispatcher.restored_own
        options = {"same_attempts": own or mode.same_attempts, "epochs": None if own else mode.epochs}
        restored = _whole(child.surroundings, child.surroundings.saved[child.process], saved), options

    def save(number: int, state: State) -> None:
        assert owner is not None
        saved[owner.claim, number] = state

    def removed(request: int) -> DividedRemoval:
        table, ids = child.surroundings.removals[request]
        return DividedRemoval(table, np.array(sorted(ids), np.int64), request=request)

    vector, tables = np.zeros(size, np.float32), [make_table(shape) for shape in settings.tables]
    for table, (_, rows) in zip(tables, start, strict=False):  # partial tables follow
        table.array[...] = rows
    return Mirror(settings, child.world, role.incarnation, vector, tables, restored, save, removed)


def _whole(surroundings: Surroundings, snapshot: tuple[Saved, tuple[Rows, ...]], saved: SavedStates) -> State:
    """Return the state of a snapshot with the vectors and rows that it must have."""
    (found, tables), numbers = snapshot, surroundings.snapshots_of_parts
    state, names = found.state, [part.name for part in found.parts]
    nothing = {name: NO_FLOATS for name in state.arrays if name.endswith("moving_statistics")}
    if not names:
        return State(state.header, state.arrays | nothing, tables=tables)
    keys = {(present(parsed(name)).claim, numbers[name]) for name in names}
    known = saved.get(next(iter(keys)))
    if len(keys) != 1 or known is None:
        raise Finding("parts", f"the parts must be of one snapshot that was taken. Received: {names}")
    living = {"living": known.header.get("living", ())}
    tables = tuple([(ids.copy(), rows.copy()) for ids, rows in known.tables])  # tables take them over
    return State(state.header | living, state.arrays | nothing | known.arrays, tables=tables)


def _rows_in(surroundings: Surroundings, saved: Saved) -> tuple[Rows, ...]:
    """Return the rows in the files of a snapshot that one server has written."""
    store = Store(DIRECTORY, StillWorld(surroundings.disk), create=False)
    return RowFiles.of(saved.state.header, [vars(file) for file in saved.row_files]).tables(
        lambda name: store.load(name)[1]
    )


@contextmanager
def patched(surroundings: Surroundings) -> Iterator[None]:
    """Cut small vectors, record what shards have, and which snapshots their servers restore."""
    make_center = processes.Divided.make_center  # it sees the snapshot with its vectors
    files, ask = PartsOfShards.files, Shard.ask

    def make(self: Any, settings: ServerSettings, saved: Saved, incarnation: int, world: World) -> Center:
        assert isinstance(world, VirtualWorld)
        surroundings.saved[world.process] = saved, _rows_in(surroundings, saved)
        return make_center(self, settings, saved, incarnation, world)

    def files_of(self: PartsOfShards, marker: int) -> Sequence[PartFile]:
        parts = files(self, marker)
        surroundings.snapshots_of_parts |= dict.fromkeys([part.name for part in parts], marker)
        return parts

    def ask_and_note(self: Shard, request: Any) -> None:
        ask(self, request)
        if isinstance(request, DividedRemoval):
            _, ids = surroundings.removals.setdefault(request.request, (request.table, set()))
            ids.update(request.ids.tolist())

    with ExitStack() as stack:
        for owner, name, replacement in (
            (Shard, "ask", ask_and_note),
            (Cut.__init__, "__defaults__", (BLOCK,)),
            (compression, "BLOCK", BLOCK),
            (shard_server, "Shard", RecordingShard),
            (sequencer, "TicketLog", RecordingLog),
            (processes.Divided, "make_center", make),
            (PartsOfShards, "files", files_of),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
